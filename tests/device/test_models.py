"""Joint samples, recurrent nets, encoder-decoders, pipelines, `evaluate` modules and commands on a card."""

import json
import threading

import pytest
import torch

from hf_ebm import EnergyModel, enumerate_distribution
from hf_ebm.cli.train import OBJECTIVES
from hf_ebm.data.symbols import symbol_tokenizer
from hf_ebm.demo.components import read_prompt
from hf_ebm.demo.sampling import read_settings, watch_chains
from hf_ebm.models.energy.configuration_energy import token_roles
from hf_ebm.models.energy.fill_energy import METHODS, READINGS
from hf_ebm.models.energy.partition_energy import METHODS as PARTITION_METHODS
from hf_ebm.pipelines import (
    EnergyRerankingPipeline,
    EnergySamplingPipeline,
    EnergyScoringPipeline,
    JointFillMaskPipeline,
    JointSamplingPipeline,
)
from hf_ebm.random_state import seeded
from hf_ebm.scoring.mutations import SCHEMES
from tests.cli.conftest import model_folder, run
from tests.conftest import tiny_energy_model
from tests.device.conftest import agree
from tests.evaluate_modules.conftest import INPUTS, load, own_caches, scorer
from tests.models import test_conditional_generation as conditional
from tests.models import test_mutations as mutations
from tests.models.families import tiny_family_model
from tests.models.lstm_models import tiny_batch, tiny_lstm
from tests.models.residual_models import PREFIX, toy_residual
from tests.pipelines.models_for_pipelines import PROMPTS, TEXTS, energy_model, residual_model, tokenizer
from tests.trainers import test_half_precision as half_precision

__all__ = ["model_folder", "own_caches"]  # fixtures


def states():
    return [torch.get_rng_state(), *(torch.vgpu.get_rng_state(card) for card in range(2))]


def test_joint_samples_leave_the_random_state_of_all_cards_as_it_was():
    model, before = toy_residual().to("vgpu:1"), states()
    model.generate([PREFIX.tolist()] * 2, num_candidates=4, max_new_tokens=3, seed=1)
    assert all(map(torch.equal, states(), before))


def test_a_seed_gives_the_numbers_that_a_global_seed_does():
    torch.manual_seed(5)
    expected = torch.rand(3), torch.rand(3, device="vgpu")
    with seeded(5, torch.device("vgpu:0")):
        found = torch.rand(3), torch.rand(3, device="vgpu")
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    "settings", [{"method": "stepwise"}, {"num_candidates": 5, "num_samples": 3, "top_k": 4}], ids=str
)
def test_joint_samples(settings):
    def of(device):
        out = toy_residual().to(device).generate([PREFIX.tolist()] * 2, max_new_tokens=3, seed=1, **settings)
        return [out.sequences, out.energies]

    agree(of)


@pytest.mark.parametrize("attention", ["additive", "fixed"])
def test_recurrent_encoder_decoders(attention):
    def of(device):
        model = tiny_lstm(attention).to(device)
        source, mask, labels = (part.to(device) for part in tiny_batch())
        out = model(input_ids=source, attention_mask=mask, labels=labels)
        out.loss.backward()
        found = [model.generate(source, attention_mask=mask, max_length=6, num_beams=beams) for beams in (1, 3)]
        return out.loss, out.logits, [parameter.grad for parameter in model.parameters()], found

    agree(of)


@pytest.mark.parametrize("kind", ["masked", "encoder-decoder"])
def test_targets_of_sources(kind):
    own = symbol_tokenizer(["X Y Z"], ["a b"], model_max_length=24, masks=True)

    def of(device):
        model = conditional.model_for(own, kind).to(device)
        out = model.generate_from_sources(conditional.SOURCES, own, lengths=[3, 2], num_chains=2, num_epochs=2, seed=0)
        return [out.texts, out.energies]

    agree(of)


def test_enumeration():
    def of(device):
        model = tiny_energy_model().to(device)
        return vars(enumerate_distribution(lambda ids: model.score_ids(ids).sum(1), range(5, 9), 2, device=device))

    agree(of)


@pytest.mark.parametrize(
    ("reading", "method"), [*((one, "auto") for one in READINGS), *(("joint", one) for one in METHODS)]
)
def test_fills(reading, method):
    def of(device):
        model = energy_model().to(device)
        words = None if method == "chains" else ["the", "cat", "dog", "sat"]
        found = model.fill(FILLED, tokenizer(), 3, reading=reading, method=method, words=words, row_limit=300)
        return [(fill.energy, fill.probability, fill.sequence) for fills in found.fills for fill in fills]

    agree(of)


def test_joints_of_pairs_and_fills_by_further_energies():
    def of(device):
        differ = lambda ids: (ids[:, 2] == ids[:, 5]).double()  # noqa: E731
        model = energy_model().to(device)
        found = model.pair_joints(FILLED[0], tokenizer(), words=["the", "cat", "dog"], extra_energies=differ)
        filled = model.fill(
            FILLED[0], tokenizer(), words=["the", "cat", "dog"], different=[0, 1], extra_energies=differ
        )
        return [found.joints, found.divergences, filled.log_partition]

    agree(of)


@pytest.mark.parametrize("method", PARTITION_METHODS)
def test_log_partition(method):
    def of(device):
        model = tiny_energy_model().to(device)
        settings = dict(lengths=[2, 3], allowed_tokens={1: [5, 8]}, seed=0)
        settings |= {} if method == "exact" else dict(num_particles=4, num_runs=2, num_chains=2, num_epochs=4)
        found = model.log_partition(method=method, **settings)
        return [found.log_partition, found.upper]

    agree(of)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scores_of_variants(scheme):
    def of(device):
        own = mutations.letter_tokenizer()
        mlm = tiny_family_model("bert", vocab_size=len(own))
        model = EnergyModel(mlm, **token_roles(own, len(own))).eval().to(device)
        return model.score_variants(mutations.REFERENCE, ["K2R", "K2R:T3A"], own, scheme=scheme).scores

    agree(of)


def test_chains_that_the_demo_watches():
    def of(device):
        model = energy_model().to(device)
        prompt = read_prompt(model, tokenizer(), "the ___ sat on ___", 0)
        settings = read_settings(prompt, "metropolis_hastings", 4, 1, 1.0, 0) | {"num_chains": 2}
        *_, last = watch_chains(model, prompt, settings, threading.Event())
        return [last.ids, last.energies]

    agree(of)


FILLED = ["the [MASK] sat on [MASK]", "[MASK] dog"]
LISTS = [{"candidates": ["the cat sat", "sat the"]}, {"candidates": ["god"]}]
PIPELINES = {
    "filling": (JointFillMaskPipeline, energy_model, FILLED, {"words": ["the", "cat", "dog"]}),
    "scoring": (EnergyScoringPipeline, energy_model, TEXTS[:3], {"batch_size": 2}),
    "sampling": (EnergySamplingPipeline, energy_model, PROMPTS[:3], {"num_epochs": 2, "seed": 1, "batch_size": 2}),
    "reranking": (EnergyRerankingPipeline, energy_model, LISTS, {}),
    "residual reranking": (EnergyRerankingPipeline, residual_model, LISTS, {}),
    "joint sampling": (JointSamplingPipeline, residual_model, ["the cat", ""], {"num_candidates": 4, "seed": 2}),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines(name):
    made, model, inputs, settings = PIPELINES[name]
    agree(lambda device: made(model=model(), tokenizer=tokenizer(), device=device)(inputs, **settings))


@pytest.mark.parametrize("name", [name for name, (_, needed) in INPUTS.items() if needed is scorer])
def test_evaluate_modules(name):
    def of(device):
        scored = scorer()
        scored["model"].to(device)
        return load(name).compute(**INPUTS[name][0], **scored)

    agree(of)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_training_commands(objective, tmp_path, capsys):
    rows = [{"source": "a b c", "target": "X Y"}, {"source": "b a", "target": "Y"}, {"source": "c", "target": "X"}]
    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def of(device):
        run(
            "train", objective, "--task", tmp_path, "--model_name_or_path", "lstm", "--hidden_size", 8,
            "--embedding_dim", 6, "--use_cpu", "--max_steps", 2, "--do_eval", "--report_to", "none", "--output_dir",
            tmp_path / device,
        )  # fmt: skip
        found = json.loads(capsys.readouterr().out)
        return {name: value for name, value in found.items() if "runtime" not in name and "second" not in name}

    agree(of)


@pytest.mark.parametrize(
    "kind", ["residual", "bert, mlm, enumerated", "bilstm, mle, enumerated", "cross-entropy", "minimum risk", "mgs"]
)
def test_half_precision_of_trainers(kind, tmp_path):
    """Autocast lowers other operations on a card than on the CPU, so losses are close and no more."""

    def of(device):
        trainer = half_precision.trainer_of(kind, tmp_path / device, bf16=True, max_steps=1)
        return trainer.train().training_loss

    agree(of, 0.1)
