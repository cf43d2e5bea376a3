"""Energies of all fills of several blanks against one masked position at a time, and what is reduced of them."""

import weakref

import pytest
import torch

from hf_ebm.scoring.joint_fills import (
    FillSpace,
    Slot,
    independent_log_probs,
    independent_tables,
    joint_tables,
    num_joint_rows,
    sequential_tables,
    summarized,
)
from tests.conftest import plain_token_energies, tiny_energy_model

WORDS = torch.arange(5, 9)
ONE, TWO = (Slot(torch.tensor([position]), WORDS[:, None]) for position in (1, 3))
FEW = Slot(torch.tensor([4]), torch.tensor([[8], [5]]))
EQUAL = Slot(torch.tensor([2, 4]), torch.stack([WORDS, WORDS], 1))  # one choice for two positions
PAIRS = Slot(torch.tensor([1, 5]), torch.tensor([[5, 5], [5, 6], [7, 6], [8, 8]]))  # some of all pairs
SPACES = [(ONE,), (ONE, TWO), (ONE, TWO, FEW), (ONE, EQUAL), (PAIRS, TWO), (PAIRS, EQUAL, TWO)]
ROWS = [1, 4 + 4, 8 + 8 + 16, 4 + 2 * 16, 3 * 4 + 3 * 4 + 4, 3 * 16 + 3 * 16 + 2 * 64 + 16]


def space_of(slots) -> FillSpace:
    ids = torch.tensor([1, 6, 7, 5, 6, 8, 2])
    ids[torch.cat([slot.positions for slot in slots])] = 3
    return FillSpace(ids, slots)


def fills_of(space) -> torch.Tensor:
    """All fills, the last slot's candidates running fastest."""
    choices = torch.cartesian_prod(*map(torch.arange, space.sizes)).view(-1, len(space.slots))
    return space.filled(choices)


def plain_energies(model, space) -> torch.Tensor:
    free = sorted(int(position) for slot in space.slots for position in slot.positions)
    terms = [plain_token_energies(model, ids, free) for ids in fills_of(space)]
    return torch.tensor(terms, dtype=torch.float64).sum(1)


@pytest.mark.parametrize("entries", [2**26, 20])
@pytest.mark.parametrize("slots,rows", list(zip(SPACES, ROWS, strict=True)))
def test_tables_hold_the_energies_of_all_fills_from_few_rows(slots, rows, entries, energy):
    model, space = tiny_energy_model(energy), space_of(slots)
    runner = model.masked_batch_runner()
    with torch.no_grad():
        tables = list(joint_tables(runner, space, energy, entries=entries))
    assert torch.cat(tables).flatten().double().sub(plain_energies(model, space)).abs().max() < 1e-5
    assert num_joint_rows(space) == rows
    assert runner.num_rows == rows if len(tables) == 1 else runner.num_rows > rows
    assert all(table.numel() <= max(entries, table[0].numel()) for table in tables)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("slots", SPACES)
def test_sums_over_tables_are_those_over_all_fills(slots, temperature):
    model, space = tiny_energy_model("local"), space_of(slots)
    penalty = lambda ids: torch.where(ids[:, 1] == ids[:, 3], torch.inf, ids.sum(1).double() / 9)  # noqa: E731
    energies = plain_energies(model, space) + penalty(fills_of(space))
    expected = (-energies / temperature).softmax(0).view(space.sizes)
    groups = [[number] for number in range(len(slots))] + [list(range(len(slots)))[::-1]]
    with torch.no_grad():
        tables = joint_tables(model.masked_batch_runner(), space, "local", entries=1)
        found = summarized(tables, space, temperature, 5, groups, penalty)
    assert float(found.log_partition) == pytest.approx(float((-energies / temperature).logsumexp(0)), abs=1e-5)
    best = energies[energies.isfinite()].sort().values[:5]
    assert torch.allclose(found.energies, best, atol=1e-5)
    assert torch.allclose(plain_of(fills_of(space), energies, space.filled(found.choices)), best, atol=1e-5)
    for group, own in zip(groups, found.marginals, strict=True):
        others = [axis for axis in range(len(slots)) if axis not in group]
        marginal = expected.sum(others) if others else expected.permute(group)
        assert (own - marginal).abs().sum() / 2 < 1e-5


def plain_of(fills, energies, wanted) -> torch.Tensor:
    return torch.stack([energies[(fills == ids).all(1)][0] for ids in wanted])


def test_one_table_is_held_at_a_time(monkeypatch):
    model, space = tiny_energy_model("local"), space_of((ONE, TWO))
    made, held, zeros = [], [], torch.zeros

    def watched(*size, **kwargs):
        new = zeros(*size, **kwargs)
        if new.shape == (1, 4):
            held.append(sum(table() is not None for table in made))
            made.append(weakref.ref(new))
        return new

    with torch.no_grad():
        tables = joint_tables(model.masked_batch_runner(), space, "local", torch.float64, entries=4)
        monkeypatch.setattr(torch, "zeros", watched)
        summarized(tables, space, 1.0, 5, [[0], [1]])
    assert held == [0] * 4


def test_all_fills_may_be_forbidden():
    model, space = tiny_energy_model(), space_of((ONE, TWO))
    nothing = lambda ids: torch.full((len(ids),), torch.inf)  # noqa: E731
    with torch.no_grad():
        tables = joint_tables(model.masked_batch_runner(), space, "local")
        found = summarized(tables, space, 1.0, 3, [[0]], nothing)
    assert found.log_partition == -torch.inf and len(found.choices) == 0


def masked_log_probs(model, ids, masked, position) -> torch.Tensor:
    ids = ids.clone()
    ids[list(masked)] = 3
    with torch.no_grad():
        return model.mlm(input_ids=ids[None]).logits[0, position].double().log_softmax(-1)


def test_the_two_other_readings():
    """By the inner model alone: all blanks masked, and those to the right of the one that is read."""
    model, space = tiny_energy_model(), space_of((ONE, TWO, FEW))
    kept = [torch.tensor([3, 0]), torch.arange(4), torch.tensor([1])]
    independent, sequential = [], []
    for ids in fills_of(space.some(kept)):
        total = torch.zeros(2, dtype=torch.float64)
        for place, slot in enumerate(space.slots):
            position, own = int(slot.positions), slot.candidates[:, 0]
            for reading, first in enumerate((0, place)):
                masked = [int(other.positions) for other in space.slots[first:]]
                log_probs = masked_log_probs(model, ids, masked, position)
                total[reading] += log_probs[ids[position]] - log_probs[own].logsumexp(0)
        independent.append(total[0]), sequential.append(total[1])
    runner = model.masked_batch_runner()
    with torch.no_grad():
        found = list(independent_tables(independent_log_probs(runner, space), kept, entries=4))
        assert runner.num_rows == 3
        assert torch.allclose(-torch.cat(found).flatten(), torch.stack(independent), atol=1e-5)
        found = list(sequential_tables(runner, space, kept, entries=4))
        assert len(found) == 2 and runner.num_rows == 3 + 1 + 2 + 2 * 4
    assert torch.allclose(-torch.cat(found).flatten(), torch.stack(sequential), atol=1e-5)


def test_pieces_of_one_choice_are_read_from_left_to_right():
    """Those of several positions together: later pieces masked, and normalized over the choices."""
    model, space = tiny_energy_model(), space_of((PAIRS,))
    scores = torch.tensor(
        [
            masked_log_probs(model, ids, [1, 5], 1)[ids[1]] + masked_log_probs(model, ids, [5], 5)[ids[5]]
            for ids in fills_of(space)
        ]
    )
    with torch.no_grad():
        found = list(sequential_tables(model.masked_batch_runner(), space, [torch.arange(4)]))
    assert torch.allclose(-found[0], scores.log_softmax(0), atol=1e-5)
