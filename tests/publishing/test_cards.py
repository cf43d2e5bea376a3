"""Cards: what they state, what they leave open, and what they refuse."""

import math
import re
import sys
from importlib import import_module
from types import ModuleType

import pytest
import torch
from huggingface_hub import ModelCard
from transformers.dynamic_module_utils import get_relative_imports

from hf_ebm.publishing.cards import Sampling, model_card
from hf_ebm.publishing.remote_code import auto_classes, write_remote_code
from hf_ebm.sampling.configuration import ChainGenerationConfig
from hf_ebm.sampling.convergence import energy_diagnostics
from hf_ebm.trainers import EnergyTrainer, EnergyTrainingConfig, MGSTrainer
from tests.causal_families import completion_rows, tiny_causal
from tests.conftest import tiny_energy_model, tiny_mlm
from tests.models.residual_models import toy_residual
from tests.models.tokenizers_for_tests import small_model, small_tokenizer
from tests.seq2seq_families import tiny_seq2seq
from tests.trainers import test_mgs


def test_what_nobody_stated_is_not_made_up():
    text = str(model_card(tiny_energy_model(), name="bare"))
    for sentence in ("is not stated", "None are stated", "No sampling recipe was measured"):
        assert sentence in text
    data = ModelCard(text).data
    assert data.license is None and data.eval_results is None and data.base_model is None
    assert "energy: local" not in text.lower().split("limits")[1]


def test_both_energies_are_defined_as_they_are():
    local, raw = (str(model_card(tiny_energy_model(energy), name="m")) for energy in ("local", "raw"))
    assert "log softmax(z_t)[y_t]" in local and "log softmax" not in raw and "sum of the logits" in raw


def test_what_a_card_runs_goes_with_the_settings_of_the_model(monkeypatch):
    """It asks for no epochs: burn_in may be above what it asks for."""
    model = tiny_energy_model()
    monkeypatch.setattr(model, "generation_config", ChainGenerationConfig(num_epochs=50, burn_in=40))
    (line,) = re.findall(r"^out = (model\.generate\(.*\))$", str(model_card(model, name="m")), re.MULTILINE)
    assert eval(line, {"model": model}).samples.shape[:2] == (4, 10)


def test_measured_sampling_is_that_of_the_chains():
    tokenizer = small_tokenizer("wordpiece")
    model = small_model(tokenizer)
    out = model.generate(lengths=[3, 4], num_chains=3, num_epochs=8, burn_in=2, seed=0)
    found = Sampling.measured(out, tokenizer)
    each = [energy_diagnostics(out.energies[out.prompt_indices == prompt]) for prompt in (0, 1)]
    assert found.r_hat == max(one.r_hat for one in each) and found.ess_bulk == min(one.ess_bulk for one in each)
    assert found.acceptance == pytest.approx(float(out.trace.acceptance_rate.mean()))
    assert found.settings["burn_in"] == 2 and found.chains == 6
    assert found.samples[5] == (
        float(out.energies[5, -1]),
        tokenizer.decode(out.sequences[5], skip_special_tokens=True),
    )
    settings = dict(lengths=3, num_epochs=6, seed=0)
    thinned, whole = (model.generate(**settings, **more) for more in ({"thinning": 4}, {}))
    assert (
        Sampling.measured(thinned, tokenizer).samples == Sampling.measured(whole, tokenizer).samples
    )  # the last state
    text = str(model_card(model, name="m", sampling=found))
    assert ("had not converged" in text) == (found.r_hat > 1.1)
    short = Sampling.measured(model.generate(lengths=3, num_epochs=2, seed=0), tokenizer)
    assert short.r_hat is None and "R-hat was not computed" in str(model_card(model, name="m", sampling=short))


def test_metrics_are_numbers_and_go_into_the_metadata():
    card = model_card(
        tiny_mlm(), name="m", metrics={"accuracy": 0.5, "loss": math.nan}, dataset="some/data", limits="None."
    )
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_type) == ("accuracy", 0.5, "some/data")
    assert card.data.datasets == "some/data" and "| loss | nan |" in str(card) and result.task_type == "fill-mask"
    with pytest.raises(ValueError, match="metrics: accuracy must be a number, got 'high'"):
        model_card(tiny_mlm(), name="m", metrics={"accuracy": "high"})
    with pytest.raises(ValueError, match="name must be a text"):
        model_card(tiny_mlm(), name="")


def test_classes_are_named_as_they_are_loaded():
    assert auto_classes(type(tiny_seq2seq("bart")))[0] == "AutoModelForSeq2SeqLM"
    assert auto_classes(type(tiny_mlm())) == ["AutoModelForMaskedLM"]
    assert auto_classes(type(toy_residual())) == ["AutoModel"]
    assert auto_classes(torch.nn.Linear, required=False) == []


def test_a_card_of_a_causal_model_trained_for_a_cost(tmp_path):
    trainer = test_mgs.trainer_of(tmp_path, tiny_causal(), completion_rows())
    assert isinstance(trainer, MGSTrainer)
    trainer.train()
    trainer.create_model_card(model_name="short", license="mit")
    card = ModelCard.load(tmp_path / "README.md")
    assert "`MGSTrainer`" in card.text and "| num_candidates | 3 |" in card.text and "welleck2021" in card.text
    assert "AutoModelForCausalLM.from_pretrained" in card.text


def test_remote_code_is_of_own_models_saved_before(tmp_path):
    with pytest.raises(ValueError, match="model must be of a class of hf_ebm, got transformers"):
        write_remote_code(tmp_path, tiny_mlm())
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        write_remote_code(tmp_path, tiny_energy_model())


def test_code_is_what_is_imported_when_it_runs(tmp_path, monkeypatch):
    model = toy_residual()
    model.save_pretrained(tmp_path)
    written = {name.removesuffix(".py") for name in write_remote_code(tmp_path, model)}
    for name in written:  # Transformers looks for all files that are named, even those for type checkers alone
        assert set(get_relative_imports(tmp_path / f"{name}.py")) <= written, name
    package = ModuleType("published")
    package.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "published", package)
    import_module("published.modeling_hf_ebm")
    loaded = {name for name in sys.modules if name.startswith("published.")}
    for name in loaded:
        del sys.modules[name]
    assert {name.partition(".")[2] for name in loaded} == written


def test_chains_of_other_lengths_or_kernels_are_not_said_to_have_failed_to_converge():
    tokenizer = small_tokenizer("wordpiece")
    model = small_model(tokenizer)
    mixed = model.generate(lengths={2: 0.5, 9: 0.5}, num_chains=4, num_epochs=6, seed=0)
    assert len(set(mixed.attention_mask.sum(1).tolist())) == 2
    assert Sampling.measured(mixed, tokenizer).r_hat is None
    gibbs = Sampling.measured(model.generate(lengths=3, kernel="gibbs", num_epochs=2, seed=0), tokenizer)
    text = str(model_card(model, name="m", sampling=gibbs))
    assert "`gibbs` accepts every proposal and samples no stated target" in text and "the stated target" not in text
    with pytest.raises(ValueError, match=r"sampling is of .*EnergyModel, got a ResidualEnergyModel"):
        model_card(toy_residual(), name="m", sampling=gibbs)


def test_a_recipe_holds_no_lengths_that_were_not_used():
    tokenizer = small_tokenizer("wordpiece")
    model = small_model(tokenizer)
    model.generation_config.lengths = 7
    prompt = tokenizer("the [MASK] sat", return_tensors="pt").input_ids
    assert "lengths" not in Sampling.measured(model.generate(prompt, num_epochs=2, seed=0), tokenizer).settings


def test_cells_hold_what_would_break_a_table():
    text = str(model_card(tiny_mlm(), name="m", metrics={"a|b": 1.0}))
    assert "| a\\|b | 1 |" in text


def test_the_card_of_a_best_model_states_its_own_evaluation(tmp_path):
    model = tiny_energy_model("raw")
    args = EnergyTrainingConfig(
        str(tmp_path), objective="mle", max_steps=6, learning_rate=3.0, report_to=[], use_cpu=True, disable_tqdm=True,
        eval_strategy="steps", eval_steps=1, save_steps=1, load_best_model_at_end=True, metric_for_best_model="loss",
    )  # fmt: skip
    rows = [{"input_ids": [1, 5, 6, 2]}] * 4
    trainer = EnergyTrainer(model, args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    losses = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    assert min(losses) != losses[-1]
    assert trainer.training_facts().metrics["eval_loss"] == min(losses)
    again = trainer.evaluate()["eval_loss"]
    assert again == pytest.approx(min(losses), rel=1e-5) and trainer.training_facts().metrics["eval_loss"] == again
    assert "num_train_epochs" not in trainer.training_facts().hyperparameters


def test_a_duration_is_that_of_the_steps_it_is_of(tmp_path):
    """Of a run that went on from a checkpoint, the Trainer knows the last session's time alone."""

    def trainer():
        args = EnergyTrainingConfig(
            str(tmp_path), objective="mle", max_steps=4, report_to=[], use_cpu=True, disable_tqdm=True, save_steps=3
        )
        return EnergyTrainer(tiny_energy_model("raw"), args, train_dataset=[{"input_ids": [1, 5, 6, 2]}] * 4)

    whole, resumed = trainer(), trainer()
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for run, start in ((whole, 0), (resumed, 3)):
        assert run.training_facts().resumed_at == start and run.training_facts().steps == 4
        run.create_model_card()
        duration = re.search(r"\| duration \| (.*) \|", (tmp_path / "README.md").read_text())[1]
        assert duration.endswith(", from step 3 on") == bool(start)
    resumed.args.max_steps = 6
    resumed.train()  # another training of the same trainer begins anew
    assert resumed.training_facts().resumed_at == 0
