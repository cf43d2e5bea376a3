"""How often a step of chains makes the host wait for the card, and how many kernels it launches beside the model's."""

import pytest

from hf_ebm.models.energy import generation_energy
from hf_ebm.sampling.sampler import run_epoch
from tests.conftest import tiny_energy_model
from tests.device import virtual_device

PAIRS = {"block_size": 2, "block_fill": "sequential", "block_layout": "contiguous", "delayed_acceptance": 1}
# Settings, then the most waits and launches of a step.
LIMITS = {
    "single site": ({}, 2, 60),
    "single site, delayed": ({"delayed_acceptance": 1}, 3, 100),
    "single site, exclude_current": ({"exclude_current": True}, 2, 100),
    "single site, delayed, exclude_current": ({"delayed_acceptance": 1, "exclude_current": True}, 3, 100),
    "two lengths, exclude_current": ({"lengths": [8, 6], "exclude_current": True}, 2, 150),
    "pairs": (PAIRS, 5, 150),
    "pairs in parallel": ({"block_size": 2}, 2, 60),
    "gibbs": ({"kernel": "gibbs"}, 2, 60),
    "top-p": ({"proposal_top_p": 0.9}, 2, 80),
}


@pytest.mark.parametrize("name", LIMITS)
def test_a_step_waits_for_what_it_draws_and_decides_on_alone(name, monkeypatch):
    settings, most_waits, most_launches = LIMITS[name]
    model = tiny_energy_model().to("vgpu")
    steps, waits, launches = 0, 0, 0

    def counted(run, *others):
        nonlocal steps, waits, launches
        with virtual_device.counted() as events:
            for after in run_epoch(run, *others):
                steps += 1
                yield after
        waits += sum(count for (event, *_), count in events.items() if event == "wait")
        launches += sum(count for (event, _, line), count in events.items() if event == "launch" and ours(line))

    monkeypatch.setattr(generation_energy, "run_epoch", counted)
    model.generate(**{"lengths": 8, **settings}, num_chains=8, num_epochs=4, seed=0)
    assert 0 < waits <= most_waits * steps and launches <= most_launches * steps


def ours(line: str) -> bool:
    """Whether kernels that a line launches are none of the model's."""
    return not line.startswith("hf_ebm/scoring/head.py")
