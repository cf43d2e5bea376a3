"""What the benchmarks compare with: the loops carry the energies of their own states, and the measure of mixing."""

import math

import pytest
import torch

from benchmarks.loops import CarefulLoop, PlainLoop
from benchmarks.sampling import tokens_kept
from tests.conftest import plain_token_energies, tiny_energy_model


@pytest.mark.parametrize("loop", [PlainLoop, CarefulLoop])
def test_a_loop_returns_states_with_their_energies(loop):
    model = tiny_energy_model()
    support = torch.arange(9) > 4
    start = torch.tensor([[1, 5, 5, 5, 2]]).repeat(4, 1)
    program = loop(model.mlm, model.config.mask_token_id, 3, support, seed=0)
    energies, states, changed = program.run(start, row_budget=4 * 3 * 7 * 5)
    assert energies.shape == states.shape[:2] and states.shape[0] == 4
    assert changed >= int((states[:, 1:] != states[:, :-1]).sum()) > 0
    for chain, epoch in ((0, 0), (1, 2), (3, -1)):
        expected = sum(plain_token_energies(model, states[chain, epoch], [1, 2, 3]))
        assert float(energies[chain, epoch]) == pytest.approx(expected, abs=1e-4)


def test_tokens_kept():
    generator = torch.Generator().manual_seed(0)
    fresh = torch.randint(50, (8, 400, 6), generator=generator)
    frozen = fresh[:, :1].expand(-1, 400, -1)
    assert tokens_kept(frozen, 3) == 1
    assert abs(tokens_kept(fresh, 3)) < 0.01
    half = torch.cat([frozen[..., :3], fresh[..., 3:]], -1)
    assert tokens_kept(half, 3) == pytest.approx(0.5, abs=0.03)
    assert math.isnan(tokens_kept(fresh, 400))
