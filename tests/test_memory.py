"""What can't be kept is refused by name, before any work."""

import re

import pytest
import torch

from hf_ebm import memory
from hf_ebm.memory import machine_memory
from hf_ebm.models.residual.perplexity import position_log_probs, residual_perplexity
from hf_ebm.trainers import MGSConfig, MinimumRiskConfig, PolicyGradientConfig
from tests.conftest import tiny_energy_model
from tests.models.residual_models import LENGTH, PREFIX, toy_residual
from tests.models.tokenizers_for_tests import small_model, small_tokenizer

ENDLESS = 10**20
REFUSED = "GiB or more, which is more than this machine's"


def test_memory_is_that_of_the_machine_or_its_container(tmp_path, monkeypatch):
    with open("/proc/meminfo") as file:
        found = re.search(r"MemTotal: +(\d+) kB", file.read())
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_CONTAINER_LIMIT", limit)
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
    monkeypatch.setattr(memory, "machine_memory", lambda: kept - special)
    model.generate(**settings)
    monkeypatch.setattr(memory, "machine_memory", lambda: kept - special - 1)
    with pytest.raises(ValueError, match=f"num_chains.*6 chains of 3 tokens keep 3 samples each.*{REFUSED}"):
        model.generate(**settings)
    with pytest.raises(ValueError, match=f"num_epochs.*keep 3 samples each of 7 epochs.*{REFUSED}"):
        model.generate(resume_from=tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_chains": ENDLESS},
        {"num_chains": 2**70, "kernel": "mask_predict"},
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
    beyond = model.score_ids(ids, mask, variant="stride", stride=2**70)
    torch.testing.assert_close(beyond, model.score_ids(ids, mask))  # each position in a row of its own
