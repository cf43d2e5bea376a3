"""Pushes every kind of model and what every trainer made, for `hub_runs`; writes what each one computes as JSON."""

import gc
import json
from pathlib import Path

import torch
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq

from hf_ebm import EnergyModel, ProductLM, ResidualEnergyModel
from hf_ebm.data.symbols import symbol_tokenizer
from hf_ebm.publishing.cards import Sampling, model_card
from hf_ebm.trainers import (
    CrossEntropyConfig,
    CrossEntropyTrainer,
    EnergyTrainer,
    EnergyTrainingConfig,
    MGSConfig,
    MGSTrainer,
    MinimumRiskConfig,
    MinimumRiskTrainer,
    PolicyGradientConfig,
    PolicyGradientTrainer,
    ResidualNCEConfig,
    ResidualNCETrainer,
    ScheduledSamplingConfig,
    ScheduledSamplingTrainer,
    SelfNormalizedConfig,
    SelfNormalizedTrainer,
    SoftBeamConfig,
    SoftBeamTrainer,
)
from tests.conftest import tiny_energy_model
from tests.models.residual_models import toy_encoder, toy_lm
from tests.models.test_bilstm import ROLES, tiny_bilstm
from tests.models.tokenizers_for_tests import small_model, small_tokenizer
from tests.publishing.load_run import value
from tests.seq2seq_families import tiny_seq2seq

SEQ2SEQ = {
    "ce": (CrossEntropyTrainer, CrossEntropyConfig, {}),
    "scheduled": (ScheduledSamplingTrainer, ScheduledSamplingConfig, {}),
    "self-normalized": (SelfNormalizedTrainer, SelfNormalizedConfig, {"log_z_weight": 0.3}),
    "soft-beam": (SoftBeamTrainer, SoftBeamConfig, {"beam_size": 2}),
    "mgs": (MGSTrainer, MGSConfig, {"num_candidates": 2}),
    "minimum-risk": (MinimumRiskTrainer, MinimumRiskConfig, {"num_candidates": 2}),
    "policy-gradient": (PolicyGradientTrainer, PolicyGradientConfig, {}),
}
STEP = dict(max_steps=1, report_to=[], use_cpu=True, per_device_train_batch_size=2, save_strategy="no", seed=7)


def push_models(found: dict) -> None:
    tokenizer = small_tokenizer("wordpiece")
    model = small_model(tokenizer)
    out = model.generate(lengths=3, num_chains=2, num_epochs=6, seed=0)
    model.generation_config.lengths, model.generation_config.num_epochs = 3, 6
    card = model_card(model, name="energy", sampling=Sampling.measured(out, tokenizer), license="apache-2.0")
    model.push_to_hub("tester/energy", tokenizer=tokenizer, card=card)
    found["energy"] = ["AutoModel", value(model)]
    bilstm = EnergyModel(tiny_bilstm(), **ROLES)
    for name, auto, one in (
        ("energy-bilstm", "AutoModel", bilstm),
        ("bilstm", "AutoModelForMaskedLM", tiny_bilstm()),
        ("lstm", "AutoModelForSeq2SeqLM", tiny_seq2seq("lstm additive").float()),
        ("residual", "AutoModel", ResidualEnergyModel(toy_lm(dtype=torch.float32), toy_encoder(dtype=torch.float32))),
        (
            "product",
            "AutoModelForCausalLM",
            ProductLM(toy_lm(dtype=torch.float32), toy_lm(seed=3, dtype=torch.float32)),
        ),
    ):
        one.push_to_hub(f"tester/{name}", tags=["pushed"])
        found[name] = [auto, value(one)]


def push_trainers(found: dict, folder: Path) -> None:
    rows = Dataset.from_list([{"input_ids": [5, 6, 7], "labels": [4, 5, 2], "attention_mask": [1, 1, 1]}] * 4)
    tokenizer = symbol_tokenizer(["a b c"], ["d e"])
    for name, (trainer_class, config_class, own) in SEQ2SEQ.items():
        model = tiny_seq2seq("lstm additive").float()
        args = config_class(str(folder / name), hub_model_id=f"tester/{name}", **STEP, **own)
        collator = DataCollatorForSeq2Seq(tokenizer)
        trainer = trainer_class(
            model, args, train_dataset=rows, eval_dataset=rows, data_collator=collator, processing_class=tokenizer
        )
        trainer.train()
        trainer.evaluate()
        trainer.push_to_hub(dataset="made up", license="mit")
        found[name] = ["AutoModelForSeq2SeqLM", value(model)]
    model = tiny_energy_model("raw")
    repo = "tester/trained-energy"
    args = EnergyTrainingConfig(str(folder / "trained-energy"), objective="mle", hub_model_id=repo, **STEP)
    trainer = EnergyTrainer(model, args, train_dataset=[{"input_ids": [1, 5, 6, 2]}] * 4)
    trainer.train()
    trainer.push_to_hub()
    found["trained-energy"] = ["AutoModel", value(model)]
    model = ResidualEnergyModel(toy_lm(dtype=torch.float32), toy_encoder(dtype=torch.float32))
    args = ResidualNCEConfig(str(folder / "nce"), hub_model_id="tester/nce", max_new_tokens=3, **STEP)
    rows = [{"prefix_ids": [3, 4], "continuation_ids": [5, 1], "negatives": [[4, 1]]}] * 4
    trainer = ResidualNCETrainer(model, args, train_dataset=rows)
    trainer.train()
    trainer.push_to_hub()
    found["nce"] = ["AutoModel", value(model)]


def push_in_vain() -> dict:
    """What is told when uploads fail, and whether the checkpoint in `out` is the model all the same."""
    settings = dict(max_steps=1, report_to=[], use_cpu=True, hub_model_id="tester/broken")
    args = EnergyTrainingConfig("out", objective="mle", **settings)
    trainer = EnergyTrainer(tiny_energy_model("raw"), args, train_dataset=[{"input_ids": [1, 5, 6, 2]}] * 2)
    trainer.train()
    messages = []
    for push in (trainer.push_to_hub, lambda: trainer.model.push_to_hub("tester/broken")):
        try:
            push()
        except OSError as error:
            messages.append(str(error))
    again, weights = EnergyModel.from_pretrained("out").state_dict(), trainer.model.state_dict()
    return {"messages": messages, "same": all(torch.equal(value, again[name]) for name, value in weights.items())}


def main(folder: str) -> None:
    gc.freeze()  # what has been imported since
    found: dict = {}
    push_models(found)
    push_trainers(found, Path(folder))
    Path(folder, "found.json").write_text(json.dumps(found))
    Path(folder, "broken.json").write_text(json.dumps(push_in_vain()))
