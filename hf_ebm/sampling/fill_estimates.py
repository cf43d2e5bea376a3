"""What samples tell of fills that are too many to list: what candidate sets leave out, and marginals of chains."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_ebm.scoring.energies import energy_terms, token_scores
from hf_ebm.scoring.joint_fills import FillSpace, fill_energies, parallel_log_probs
from hf_ebm.scoring.rows import Index, MaskedRows, Runner

Further = Callable[[Tensor], Tensor]


class Draws(NamedTuple):
    """Fills drawn slot by slot, given those already drawn.

    Attributes:
        choices: (N, m) numbers of candidates.
        log_probs: (N,) of drawing them.
        means: of each slot, (K,) the mean of the probabilities it was drawn from.
    """

    choices: Tensor
    log_probs: Tensor
    means: list[Tensor]


def drawn_fills(runner: Runner, space: FillSpace, uniforms: Tensor, order: Sequence[int]) -> Draws:
    """Draws fills, one for each row of numbers in [0, 1) (N, m), slots filled in an order, the others masked."""
    ids = space.ids.repeat(len(uniforms), 1)
    choices = torch.zeros(uniforms.shape, dtype=torch.long, device=ids.device)
    log_probs = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
    means = [torch.empty(0)] * len(space.slots)
    for place, number in enumerate(order):
        different, which = ids.unique(dim=0, return_inverse=True)
        found = parallel_log_probs(runner, space, different, number, order[place:])[which]
        cumulative = found.exp().cumsum(1)
        drawn = (cumulative < uniforms[:, number, None] * cumulative[:, -1:]).sum(1).clamp_max(found.shape[1] - 1)
        choices[:, number] = drawn
        log_probs += found.gather(1, drawn[:, None])[:, 0]
        means[number] = found.exp().mean(0)
        ids[:, space.slots[number].positions] = space.slots[number].candidates[drawn]
    return Draws(choices, log_probs, means)


def log_weights(
    runner: Runner, space: FillSpace, draws: Draws, energy: str, temperature: float, further: Further | None
) -> Tensor:
    """(N,) logarithms of `exp(-E/τ) / q` of draws: the mean of the weights is an unbiased estimate of Z."""
    ids = space.filled(draws.choices)
    energies = fill_energies(runner, space, ids, energy)
    if further is not None:
        energies = energies + further(ids)
    return -energies / temperature - draws.log_probs


class LogPartition(NamedTuple):
    """log Z, or estimates of it, and their standard errors: float64 tensors of one shape."""

    value: Tensor
    error: Tensor


def estimated_log_partition(logs: Tensor) -> LogPartition:
    """Estimates log Z from the log weights (N,) of independent draws, see `log_weights`: numbers without dimensions.

    The error is NaN of a single draw, and of weights that are all 0.

    Example:
        >>> found = estimated_log_partition(torch.tensor([1.0, 3.0], dtype=torch.float64).log())
        >>> found.value, found.error  # log 2, and the error of the mean 2, which is 1, by 2
        (tensor(0.6931, dtype=torch.float64), tensor(0.5000, dtype=torch.float64))
    """
    value = logs.double().logsumexp(0) - math.log(len(logs))
    weights = (logs.double() - value).exp()
    spread = weights.std() if len(logs) > 1 else weights.new_tensor(torch.nan)
    return LogPartition(value, spread / len(logs) ** 0.5)


class LeftOut(NamedTuple):
    """Mass that candidate sets leave out, by that of the fills they hold: an estimate and its standard error."""

    ratio: float
    error: float


def left_out(logs: Tensor, inside: Tensor, log_partition: Tensor) -> LeftOut:
    """Estimates the mass outside of candidate sets from draws of the whole space.

    Args:
        logs: (N,) log weights of the draws, see `log_weights`.
        inside: (N,) bool, whether candidate sets hold a draw.
        log_partition: of the fills within the sets.

    Returns:
        The ratio's error is no less than what one more draw outside, of the greatest weight, would add: that none was
        seen doesn't say that there is none.

    Example:
        >>> found = left_out(torch.zeros(4), torch.tensor([True, True, True, False]), torch.tensor(0.75).log())
        >>> round(found.ratio, 4)  # a quarter of the draws, of weight 1, is outside: 0.25 beside 0.75
        0.3333
    """
    weights = (logs.double() - log_partition).exp()
    outside = weights.masked_fill(inside, 0)
    error = outside.std() / len(outside) ** 0.5 if len(outside) > 1 else outside.new_tensor(torch.inf)
    return LeftOut(float(outside.mean()), float(torch.maximum(error, weights.max() / len(weights))))


class SlotConditionals(NamedTuple):
    """Of N samples of chains the conditional distribution of one slot, given the other ones, on few fills.

    Attributes:
        ids: (N, c + 1, T) the fills, the last of them the sample itself.
        weights: (N, c + 1) their conditional probabilities, float64.
    """

    ids: Tensor
    weights: Tensor


def slot_conditionals(
    runner: Runner,
    space: FillSpace,
    number: int,
    samples: Tensor,
    energy: str,
    temperature: float,
    count: int,
    further: Further | None = None,
) -> SlotConditionals:
    """Rao–Blackwellises samples (N, T) over one slot of one position.

    Given the other slots, the candidates are divided into the `count` likeliest by the masked row, and the rest. That
    division doesn't depend on the slot's own token, so a sample whose token is among the first may be replaced by the
    target's distribution over these, given the others, and other samples stay: the means of both are those of the
    samples, with less variance.

    Each different context takes one row, and `count (m - 1)` for the terms at the m - 1 other positions.
    """
    slot = space.slots[number]
    column, tokens = slot.positions[0], slot.candidates[:, 0]
    contexts, which = samples.index_fill(1, slot.positions, runner.mask_id).unique(dim=0, return_inverse=True)
    count = min(count, len(tokens))
    source = torch.arange(len(contexts), device=samples.device)
    here = column.expand(len(contexts), 1)

    def likeliest(logits: Tensor, n: Index) -> Tensor:
        best = token_scores(logits[:, 0].double(), tokens, energy).topk(count)
        return torch.stack([best.values, tokens[best.indices].double()], -1)

    found = runner(space.sequences(contexts), MaskedRows(source, here, here), likeliest)
    own, words = -found[..., 0], found[..., 1].long()
    ids = contexts.repeat_interleave(count, 0)
    ids[:, column] = words.flatten()
    energies = own.flatten()
    others = torch.cat(
        [other.positions for place, other in enumerate(space.slots) if place != number] or [slot.positions[:0]]
    )
    if len(others):
        rows = torch.arange(len(ids), device=ids.device).repeat_interleave(len(others))
        terms = energy_terms(runner, space.sequences(ids), rows, others.repeat(len(ids)), energy)
        energies = energies + terms.double().view(len(ids), -1).sum(1)
    if further is not None:
        energies = energies + further(ids)
    conditional = (-energies.view(-1, count) / temperature).softmax(1)[which]
    member = (words[which] == samples[:, column, None]).any(1, keepdim=True)
    weights = torch.cat([torch.where(member, conditional, 0.0), (~member).double()], 1)
    return SlotConditionals(torch.cat([ids.view(-1, count, ids.shape[1])[which], samples[:, None]], 1), weights)


class ChainEstimate(NamedTuple):
    """Probabilities of fills, or of tokens of a slot, by samples of independent chains.

    Attributes:
        ids: (n, …) what they are of, the likeliest first.
        probabilities: (n,).
        errors: (n,) their standard errors, by the spread between the chains, and no less than for independent samples.
            What some samples say nothing of could be in one more of them: its error is no less than that.
    """

    ids: Tensor
    probabilities: Tensor
    errors: Tensor

    def first(self, count: int) -> ChainEstimate:
        """The likeliest so many, less those of probability 0."""
        return ChainEstimate(*(own[: min(count, int((self.probabilities > 0).sum()))] for own in self))


def chain_estimate(ids: Tensor, weights: Tensor, chains: Tensor) -> ChainEstimate:
    """Sums weights of equal things over each chain's samples, and compares the chains.

    Args:
        ids: (N, n, W) what samples say.
        weights: (N, n), which sum to 1 for a sample.
        chains: (N,) of which chain each is, all numbers from 0 on in use.

    Example:
        >>> ids = torch.tensor([[[7]], [[7]], [[8]], [[7]]])  # two samples of each of two chains
        >>> found = chain_estimate(ids, torch.ones(4, 1), torch.tensor([0, 0, 1, 1]))
        >>> found.ids[:, 0].tolist(), found.probabilities.tolist(), found.errors.tolist()
        ([7, 8], [0.75, 0.25], [0.25, 0.25])
    """
    different, which = ids.flatten(0, 1).unique(dim=0, return_inverse=True)
    number = int(chains.max()) + 1
    sums = torch.zeros(number, len(different), dtype=torch.float64, device=ids.device)
    sums.index_put_((chains.repeat_interleave(ids.shape[1]), which), weights.flatten().double(), accumulate=True)
    means = sums / chains.bincount(minlength=number)[:, None]
    probabilities = means.mean(0)
    # What one sample says of a thing in several places is one number.
    sample = torch.arange(len(ids), device=ids.device).repeat_interleave(ids.shape[1])
    pairs, place = (sample * len(different) + which).unique(return_inverse=True)
    said = torch.zeros(len(pairs), dtype=torch.float64, device=ids.device).index_add(
        0, place, weights.flatten().double()
    )
    of = pairs % len(different)
    squares = torch.zeros_like(probabilities).index_add(0, of, said.square()) / len(chains)
    independent = (squares - probabilities.square()).clamp_min(0).sqrt() / len(chains) ** 0.5
    told = torch.zeros_like(probabilities).index_add(0, of, (said > 0).double())
    independent = torch.maximum(independent, (told < len(chains)).double() / len(chains))
    errors = means.std(0) / number**0.5 if number > 1 else torch.full_like(probabilities, torch.nan)
    order = probabilities.argsort(descending=True, stable=True)
    return ChainEstimate(different[order], probabilities[order], torch.maximum(errors, independent)[order])
