"""What can't be kept is refused by name, before any work."""

import math
import re

import pytest
import torch

from hf_ebm import enumerate_distribution, runtime
from hf_ebm.models.residual.candidates import SamplingParameters, sample_continuations
from hf_ebm.models.residual.scoring_residual import position_log_probs, residual_perplexity
from hf_ebm.runtime import machine_memory
from hf_ebm.trainers import (
    EnergyTrainer,
    EnergyTrainingConfig,
    MGSConfig,
    MinimumRiskConfig,
    PolicyGradientConfig,
)
from tests.causal_families import completion_rows
from tests.conftest import tiny_energy_model
from tests.models.residual_models import LENGTH, PREFIX, toy_residual
from tests.models.tokenizers_for_tests import small_model, small_tokenizer
from tests.seq2seq_families import tiny_seq2seq
from tests.trainers import test_sampled_risk, test_trainers

ENDLESS = 10**20
REFUSED = "GiB or more, which is more than this machine's"


def test_memory_is_that_of_the_machine_or_its_container(tmp_path, monkeypatch):
    with open("/proc/meminfo") as file:
        found = re.search(r"MemTotal: +(\d+) kB", file.read())
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(runtime, "_CONTAINER_LIMIT", limit)
    assert machine_memory() == 1024 * int(found.group(1))
    for text, expected in (("max\n", machine_memory()), (f"{2**62}\n", machine_memory()), (f"{2**20}\n", 2**20)):
        limit.write_text(text)
        assert machine_memory() == expected


def test_the_estimate_is_what_a_run_keeps(monkeypatch, tmp_path):
    settings = {"lengths": [2, 3], "num_chains": 3, "num_epochs": 7, "burn_in": 1, "thinning": 2, "seed": 0}
    model = tiny_energy_model()
    out = model.generate(**settings, save_state_to=tmp_path)
    kept = sum(values.nbytes for values in (out.samples, out.energies, *out.trace))
    special = 8 * 2 * out.energies.numel()  # [CLS] and [SEP] of each sample
    monkeypatch.setattr(runtime, "machine_memory", lambda: kept - special)
    model.generate(**settings)
    monkeypatch.setattr(runtime, "machine_memory", lambda: kept - special - 1)
    with pytest.raises(ValueError, match=f"num_chains.*6 chains of 3 tokens keep 3 samples each.*{REFUSED}"):
        model.generate(**settings)
    with pytest.raises(ValueError, match=f"num_epochs.*keep 3 samples each of 7 epochs.*{REFUSED}"):
        model.generate(resume_from=tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_chains": ENDLESS},
        {"num_chains": 2**70, "decoder": "mask_predict"},
        {"num_chains": 10**2000},
        {"num_epochs": 10**11},
        {"num_epochs": ENDLESS, "thinning": ENDLESS},
        {"lengths": 10**13},
        {"lengths": {3: 1.0, ENDLESS: 0.0}},
        {"lengths": None, "input_ids": torch.tensor([[1, 5, 6, 2]]), "num_chains": ENDLESS},
        {"chain_keys": [(0, 1)], "num_epochs": ENDLESS},
    ],
)
def test_chains(settings):
    with pytest.raises(ValueError, match=f"num_chains, num_epochs, thinning and lengths: .*{REFUSED}"):
        tiny_energy_model().generate(**{"lengths": 3, **settings})


def test_targets_of_sources():
    tokenizer = small_tokenizer("wordpiece")
    model = small_model(tokenizer)
    with pytest.raises(ValueError, match=f"num_chains.*{REFUSED}"):
        model.generate_from_sources(["the cat"], tokenizer, lengths=[2], num_chains=ENDLESS)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_candidates": 2**70},
        {"num_samples": 2**70},
        {"num_rollouts": 2**70, "method": "stepwise"},
        {"num_samples": 2**70, "method": "stepwise"},
    ],
)
def test_continuations(settings):
    name = next(iter(settings))
    with pytest.raises(ValueError, match=f"{name}.* continuations of up to {LENGTH} tokens are kept.*{REFUSED}"):
        toy_residual("gpt2").generate([PREFIX.tolist()], max_new_tokens=LENGTH, **settings)


def test_continuations_that_are_sampled_together():
    sampling = SamplingParameters(LENGTH, (1,))
    with pytest.raises(ValueError, match=f"batch_size: .* are sampled together, with logits for 6 tokens.*{REFUSED}"):
        sample_continuations(toy_residual("gpt2").lm, [PREFIX], 10**12, sampling, 0, 10**12)


@pytest.mark.parametrize("estimate", [residual_perplexity, position_log_probs])
def test_samples_of_perplexities(estimate):
    rows = [PREFIX.tolist()], [[3] * LENGTH]
    with pytest.raises(ValueError, match=f"num_samples.*{REFUSED}"):
        estimate(toy_residual("gpt2"), *rows, max_new_tokens=LENGTH, num_samples=2**70)


@pytest.mark.parametrize("config_class", [MGSConfig, MinimumRiskConfig, PolicyGradientConfig])
def test_candidates_of_trainers(config_class, tmp_path):
    with pytest.raises(ValueError, match=f"num_candidates: .*{REFUSED}"):
        config_class(str(tmp_path), use_cpu=True, report_to=[], num_candidates=2**70)


@pytest.mark.parametrize("name, length", [("delayed_acceptance", 3), ("final_block_size", 3), ("proposal_top_k", 9)])
def test_numbers_beyond_a_length_are_that_length(name, length):
    settings = {"lengths": 3, "num_chains": 2, "num_epochs": 2, "seed": 0}
    beyond, same = (tiny_energy_model().generate(**settings, **{name: value}) for value in (2**70, length))
    assert torch.equal(beyond.samples, same.samples)


def test_a_stride_beyond_a_length_is_that_length():
    ids = torch.tensor([[1, 5, 6, 2, 0], [1, 6, 5, 8, 2]])
    model, mask = tiny_energy_model(), ids != 0
    beyond = model.score_ids(ids, mask, masking="stride", stride=2**70)
    torch.testing.assert_close(beyond, model.score_ids(ids, mask))  # each position in a row of its own


def test_enumeration(tmp_path):
    exact = enumerate_distribution(lambda ids: ids.sum(1).double(), range(3), 4)
    assert runtime.enumeration_bytes(81, 4) == 3 * exact.sequences.nbytes + 3 * exact.energy.nbytes
    with pytest.raises(ValueError, match=rf"tokens, length: 10\^13 sequences take.*{REFUSED}"):
        enumerate_distribution(lambda ids: ids.sum(1), range(10), 13, limit=10**14)
    config = EnergyTrainingConfig(str(tmp_path), objective="mle", enumeration_limit=10**30, report_to=[], use_cpu=True)
    rows = [{"input_ids": [1, *[5] * 30, 2]}]
    with pytest.raises(ValueError, match=rf"train_dataset: row 0: enumeration_limit allows 4\^30 .*{REFUSED}"):
        EnergyTrainer(tiny_energy_model(), config, train_dataset=rows)


PAIRS, PROMPTS = test_trainers.rows(), completion_rows()[:8]
TARGETS = max(len(row["labels"]) for row in PAIRS)
COMPLETED = max(int((row["labels"] != -100).sum()) for row in PROMPTS)


@pytest.mark.parametrize(
    "kind, settings, sequences, tokens, named",
    [
        ("cross-entropy", {}, 8, TARGETS, "max_target_length"),
        ("soft beam", {"beam_size": 3}, 8 * 3, TARGETS, "beam_size"),
        ("soft beam", {"max_search_steps": 2}, 8 * 2, 2, "max_search_steps"),
        ("soft beam", {"checkpoint_steps": True}, 8 * 2, 1, "checkpoint_steps"),
        ("self-critical", {}, 8 * 3, None, "num_candidates, max_length_ratio"),
    ],
)
def test_logits_of_trainers(kind, settings, sequences, tokens, named, tmp_path, monkeypatch):
    if kind == "self-critical":
        trainer = test_sampled_risk.trainer_of(kind, tmp_path, dataset=PROMPTS, **settings)
        prompt = trainer.data_collator(PROMPTS)["labels"].shape[1] - COMPLETED
        tokens = prompt + math.ceil(1.3 * COMPLETED)
    else:
        trainer = test_trainers.trainer_of(kind, tmp_path, tiny_seq2seq("bart"), PAIRS, **settings)
    vocab_size = trainer.model.config.vocab_size
    needed = 3 * torch.zeros(sequences, tokens, vocab_size).nbytes
    monkeypatch.setattr(runtime, "machine_memory", lambda: needed - 1)
    kept = f"{sequences} sequences of {tokens} tokens for {vocab_size} ids"
    with pytest.raises(ValueError, match=f"per_device_train_batch_size, .*{named}.*: logits of {kept} .*{REFUSED}"):
        trainer.train()
    assert trainer.state.global_step == 0
    monkeypatch.setattr(runtime, "machine_memory", lambda: needed)
    trainer.train()
    assert trainer.state.global_step == 1
