"""Joint samples, recurrent nets, encoder-decoders, pipelines, `evaluate` modules and training commands on a card."""

import torch

from hf_ebm.random_state import seeded
from tests.models.residual_models import PREFIX, toy_residual


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
