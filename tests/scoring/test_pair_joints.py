"""Joints of two positions: those of known joints, and the nearest one by a numerical optimiser."""

import pytest
import torch

from hf_ebm.scoring.joint_fills import FillSpace, Slot, slot_terms
from hf_ebm.scoring.pair_joints import (
    PairConditionals,
    arnold_gokhale_joint,
    besag_joint,
    conditionals_of,
    pair_divergence,
    random_field_joint,
)
from tests.conftest import plain_token_energies, tiny_energy_model


def table(seed: int) -> torch.Tensor:
    return 1.5 * torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def total_variation(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.exp() - other.exp()).abs().sum() / 2)


@pytest.fixture
def incompatible() -> PairConditionals:
    return PairConditionals(table(0).log_softmax(0), table(1).log_softmax(1))


@pytest.mark.parametrize("forbidden", [False, True])
def test_compatible_conditionals_give_the_joint_they_are_of(forbidden):
    joint = table(2)
    if forbidden:
        joint[2, 1] = joint[0, 3] = -torch.inf
    joint = joint - joint.flatten().logsumexp(0)
    conditionals = conditionals_of(joint)
    for pivot in (1, 3):
        assert total_variation(besag_joint(conditionals, pivot), joint) < 1e-12
    nearest = arnold_gokhale_joint(conditionals, tolerance=1e-11)
    assert total_variation(nearest.log_probs, joint) < 1e-8 and nearest.change <= 1e-11
    assert max(map(abs, pair_divergence(conditionals, nearest.log_probs))) < 1e-12


def test_the_random_field_has_the_conditionals_only_of_independent_positions():
    rows, columns = table(0)[:, :1].log_softmax(0), table(1)[:1].log_softmax(1)
    joint = rows + columns
    assert total_variation(random_field_joint(-rows.expand(4, 5), -columns.expand(4, 5)), joint) < 1e-12
    conditionals = conditionals_of(table(2))
    field = random_field_joint(-conditionals.first, -conditionals.second)
    assert pair_divergence(conditionals, field).mean > 0.05


def plain_divergence(conditionals, joint) -> tuple[float, float]:
    """Sums by loops, over all contexts and as the joint draws them."""
    p = joint.exp()
    total = expected = 0.0
    for b in range(5):
        q, own = conditionals.first[:, b].exp(), p[:, b] / p[:, b].sum()
        divergence = float((q * (q / own).log()).sum())
        total, expected = total + divergence, expected + divergence * float(p[:, b].sum()) / 2
    for a in range(4):
        q, own = conditionals.second[a].exp(), p[a] / p[a].sum()
        divergence = float((q * (q / own).log()).sum())
        total, expected = total + divergence, expected + divergence * float(p[a].sum()) / 2
    return total / 9, expected


def test_divergences_are_those_of_plain_loops(incompatible):
    joint = random_field_joint(table(3), table(4))
    assert tuple(pair_divergence(incompatible, joint)) == pytest.approx(plain_divergence(incompatible, joint))


def test_no_optimiser_finds_a_nearer_joint(incompatible):
    found = arnold_gokhale_joint(incompatible, tolerance=1e-10)
    free = torch.zeros(4, 5, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([free], max_iter=500, tolerance_grad=1e-10, tolerance_change=1e-14)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        own = free.log_softmax(0), free.log_softmax(1)
        loss = sum((model.exp() * (model - ours)).sum() for model, ours in zip(incompatible, own, strict=True))
        loss.backward()
        return loss

    optimizer.step(closure)
    best = free.detach().flatten().log_softmax(0).view(4, 5)
    least = plain_divergence(incompatible, best)[0]
    assert pair_divergence(incompatible, found.log_probs).mean == pytest.approx(least, abs=1e-9) and least > 0.05
    assert total_variation(found.log_probs, best) < 1e-5
    others = besag_joint(incompatible, 0), random_field_joint(-incompatible.first, -incompatible.second)
    assert all(pair_divergence(incompatible, other).mean > least + 0.01 for other in others)


@pytest.mark.parametrize("shape", [(12, 20), (20, 12), (1, 3)])
def test_words_that_are_improbable_everywhere_cost_few_steps(shape):
    """Logarithms of marginals that are tens apart, as of a vocabulary."""
    given = 8 * torch.randn(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    conditionals = PairConditionals((given[0] / 3 + given[0, :, :1]).log_softmax(0), given[1].log_softmax(1))
    found = arnold_gokhale_joint(conditionals)
    assert found.change <= 1e-8 and found.num_iterations < 50
    least, moves = pair_divergence(conditionals, found.log_probs).mean, torch.Generator().manual_seed(6)
    for scale in (0.1, 1.0) * 20:
        other = found.log_probs + scale * torch.randn(shape, dtype=torch.float64, generator=moves)
        assert pair_divergence(conditionals, other).mean > least - 1e-12
    rounded = PairConditionals(*(own.float() for own in conditionals))
    assert arnold_gokhale_joint(rounded).num_iterations < 50


def test_the_joint_of_besag_has_the_first_conditionals_and_depends_on_its_pivot(incompatible):
    one, other = besag_joint(incompatible, 0), besag_joint(incompatible, 1)
    assert torch.allclose(conditionals_of(one).first, incompatible.first)
    assert torch.allclose(one.exp().sum(), torch.ones((), dtype=torch.float64))
    assert total_variation(one, other) > 0.01


def test_a_pivot_that_cannot_stand_beside_every_word_is_refused():
    joint = table(2)
    joint[2, 1] = -torch.inf
    with pytest.raises(ValueError, match="pivot 2 has probability 0 given 1"):
        besag_joint(conditionals_of(joint), 2)


def test_an_iteration_that_was_cut_says_what_still_changed(incompatible):
    assert arnold_gokhale_joint(incompatible, max_iterations=2).num_iterations == 2
    changes = [arnold_gokhale_joint(incompatible, max_iterations=n).change for n in range(3)]
    assert changes == sorted(changes, reverse=True) and changes[-1] > 1e-8


def test_terms_of_one_slot_are_those_of_its_position_alone(energy):
    model = tiny_energy_model(energy)
    words = torch.arange(5, 9)[:, None]
    space = FillSpace(
        torch.tensor([1, 3, 7, 3, 2]), (Slot(torch.tensor([1]), words), Slot(torch.tensor([3]), words[:3]))
    )
    with torch.no_grad():
        found = [slot_terms(model.masked_batch_runner(), space, number, energy) for number in (0, 1)]
    for a in range(4):
        for b in range(3):
            expected = plain_token_energies(model, torch.tensor([1, 5 + a, 7, 5 + b, 2]), [1, 3])
            assert [float(own[a, b]) for own in found] == pytest.approx(expected, abs=1e-5)
