"""Joint distributions of two positions out of a masked language model (Torroba Hennigen & Kim 2023).

The model says what stands at each of two positions given the other one, `log p(a | b)` and `log p(b | a)`. A joint
distribution that has both as its conditionals need not exist. Here are three that are made of them, and how far the
conditionals of each are from the model's. All tables are (K, L), logarithms in nats, float64: a row for each of K
tokens at the first position, a column for each of L at the second; minus infinity is a pair that can't be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class PairConditionals(NamedTuple):
    """What stands at each position given the other.

    Attributes:
        first: (K, L) `log p(a | b)`: each column is a distribution.
        second: (K, L) `log p(b | a)`: each row is.
    """

    first: Tensor
    second: Tensor


def conditionals_of(log_joint: Tensor) -> PairConditionals:
    """The conditionals that a joint distribution (K, L) has, normalized or not.

    Example:
        >>> conditionals_of(torch.tensor([[1.0, 1.0], [3.0, 1.0]]).log()).first.exp()
        tensor([[0.2500, 0.5000],
                [0.7500, 0.5000]])
    """
    return PairConditionals(log_joint.log_softmax(0), log_joint.log_softmax(1))


def random_field_joint(first_terms: Tensor, second_terms: Tensor) -> Tensor:
    """The Markov random field `exp(-E)` (section 2, MRF), which `generate` samples and `fill` lists.

    With local terms it is the product of both conditionals, normalized. Its own conditionals are others, unless the
    positions are independent.

    Args:
        first_terms, second_terms: (K, L) energy terms of each position, in nats.

    Example:
        >>> random_field_joint(torch.zeros(2, 2), torch.tensor([[0.0, 0.0], [3.0, 3.0]]).log1p()).exp()
        tensor([[0.4000, 0.4000],
                [0.1000, 0.1000]])
    """
    energies = first_terms + second_terms
    return -energies - (-energies).flatten().logsumexp(0)


def besag_joint(conditionals: PairConditionals, pivot: int) -> Tensor:
    """The joint of the Hammersley–Clifford–Besag theorem (section 2, HCB), `∝ p(a | b) / p(a' | b) p(b | a')`.

    It has the model's conditionals at the first position. Those at the second are the model's if the two are
    compatible, and then the pivot doesn't matter.

    Args:
        pivot: number of a', the token at the first position that `p(b)` is read at.

    Raises:
        ValueError: for a pivot that can't stand beside some b.

    Example:
        >>> joint = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
        >>> besag_joint(conditionals_of(joint.log()), pivot=1).exp()
        tensor([[0.1000, 0.2000],
                [0.3000, 0.4000]])
    """
    beside = conditionals.first[pivot]
    if not bool(beside.isfinite().all()):
        number = int((~beside.isfinite()).nonzero()[0])
        raise ValueError(f"pivot {pivot} has probability 0 given {number} at the second position; take another one")
    log_ratio = conditionals.first - beside
    joint = log_ratio + conditionals.second[pivot]
    return joint - joint.flatten().logsumexp(0)


class NearestJoint(NamedTuple):
    """What an iteration came to.

    Attributes:
        log_probs: (K, L).
        change: what one more step of Arnold & Gokhale would change a log marginal probability by, at the most.
        num_iterations: steps that were made.
    """

    log_probs: Tensor
    change: float
    num_iterations: int


def arnold_gokhale_joint(
    conditionals: PairConditionals, tolerance: float = 1e-8, max_iterations: int = 100
) -> NearestJoint:
    """The joint whose conditionals are nearest to the model's (section 2, AG; Arnold & Gokhale 1998).

    It has the least sum of `KL(p(· | b) || q(· | b))` over all b and `KL(p(· | a) || q(· | a))` over all a. There,
    `q = w / (exp(x_a) + exp(y_b))` with `w = p(a | b) + p(b | a)`, where x and y, minus the logarithms of its
    marginals, minimize the convex `Σ w log(exp(x_a) + exp(y_b)) - Σ x_a - Σ y_b`. Arnold & Gokhale set x and y to the
    marginals of the last q; improbable tokens take that tens of thousands of steps, and Newton's method tens.

    Args:
        tolerance: change of log marginals at which it is done.

    Example:
        >>> joint = torch.tensor([[0.1, 0.2], [0.3, 0.4]])
        >>> arnold_gokhale_joint(conditionals_of(joint.log())).log_probs.exp()
        tensor([[0.1000, 0.2000],
                [0.3000, 0.4000]], dtype=torch.float64)
    """
    first, second = conditionals.first.double().log_softmax(0), conditionals.second.double().log_softmax(1)
    log_weights = torch.logaddexp(first, second)
    weights = log_weights.exp()
    x, y = weights.new_zeros(len(weights), 1), weights.new_zeros(1, weights.shape[1])

    def objective(x: Tensor, y: Tensor) -> float:
        return float((weights * torch.logaddexp(x, y)).sum() - x.sum() - y.sum())

    value, step = objective(x, y), 0
    while True:
        share = torch.sigmoid(x - y)
        of_x, of_y = (weights * share).sum(1, keepdim=True) - 1, (weights * (1 - share)).sum(0, keepdim=True) - 1
        change = float(torch.cat([of_x.flatten(), of_y.flatten()]).abs().max())
        if not change > tolerance or step == max_iterations:
            break
        x, y, value = _newton_step(x, y, of_x, of_y, weights * share * (1 - share), value, objective)
        step += 1
    joint = log_weights - torch.logaddexp(x, y)
    return NearestJoint(joint - joint.flatten().logsumexp(0), change, step)


def _newton_step(
    x: Tensor, y: Tensor, of_x: Tensor, of_y: Tensor, bonds: Tensor, value: float, objective: Callable[..., float]
) -> tuple[Tensor, Tensor, float]:
    """x, y and the objective's value after a step, which is halved until that falls.

    Args:
        of_x, of_y: derivatives by x (K, 1) and y (1, L).
        bonds: (K, L) minus the mixed second ones, whose sums are the others.
    """
    if len(x) > y.shape[1]:  # the smaller of two systems is solved
        new_y, new_x, value = _newton_step(y.T, x.T, of_y.T, of_x.T, bonds.T, value, lambda y, x: objective(x.T, y.T))
        return new_x.T, new_y.T, value
    # All x and y together are free by a constant, hence a little more on the diagonal.
    rows, columns = (bonds.sum(axis, keepdim=True) * (1 + 1e-9) + 1e-14 for axis in (1, 0))
    shares = bonds / columns
    move_x = torch.linalg.solve(rows.flatten().diag() - shares @ bonds.T, -of_x - shares @ of_y.T)
    move_y = (bonds.T @ move_x - of_y.T).T / columns
    slope = float((of_x * move_x).sum() + (of_y * move_y).sum())
    length = min(1.0, 5 / float(torch.maximum(move_x.abs().max(), move_y.abs().max())))
    while True:
        new_value = objective(x + length * move_x, y + length * move_y)
        if new_value <= value + 1e-4 * length * slope + 1e-12 * abs(value) or length < 1e-6:
            return x + length * move_x, y + length * move_y, new_value
        length /= 2


class PairDivergence(NamedTuple):
    """How far the conditionals of a joint are from the model's, `KL(model || joint)` in nats.

    Attributes:
        mean: over all contexts, those of each position together: `arnold_gokhale_joint` has the least.
        expected: over contexts as the joint draws them, the mean of both positions.
    """

    mean: float
    expected: float


def pair_divergence(conditionals: PairConditionals, log_joint: Tensor) -> PairDivergence:
    """Kullback–Leibler divergences of a joint's conditionals from the model's.

    Example:
        >>> joint = torch.tensor([[0.1, 0.2], [0.3, 0.4]], dtype=torch.float64).log()
        >>> found = pair_divergence(conditionals_of(joint), joint)
        >>> abs(found.mean) < 1e-9, abs(found.expected) < 1e-9
        (True, True)
    """
    own = conditionals_of(log_joint)
    first, second = _divergences(conditionals.first, own.first, 0), _divergences(conditionals.second, own.second, 1)
    columns, rows = log_joint.logsumexp(0).exp(), log_joint.logsumexp(1).exp()
    expected = ((first * columns).sum() + (second * rows).sum()) / 2
    return PairDivergence(float(torch.cat([first, second]).mean()), float(expected))


def _divergences(model: Tensor, own: Tensor, axis: int) -> Tensor:
    """KL of distributions along an axis; what the model excludes counts nothing."""
    terms = model.exp() * (model - own)
    return terms.masked_fill(model == -torch.inf, 0.0).sum(axis)
