"""Maximum-likelihood guided parameter search (MGS): candidates around the parameters, their densities and weights.

Welleck and Cho 2020, section 2. A candidate direction is `Δ = r g + σ ε`: `g` is the descent direction of the negative
log-likelihood, `r` is 1 with probability `1 - π` (the likelihood component) and else 0 (the zero component), ε is
standard normal, and σ is one scale a tensor (appendix A.4). Directions are weighted by
`exp(α (C(θ) - C(θ + Δ))) / q(Δ)`, and the update is their weighted mean (equation 3).

Nothing the size of the parameters is kept for a candidate: its noise is drawn again from its seed. Tensors stand in one
fixed order throughout, and are contiguous.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import torch

from hf_ebm.random_state import generator_of

_PART = 2**16  # numbers worked on at a time: what leaves the cache takes twice as long
_NEGLIGIBLE = 1e-9  # a weight that changes no digit of a sum in float32

Density = Literal["given_noise", "full"]


class Candidate(NamedTuple):
    """A candidate direction, as the little it is made again from."""

    from_likelihood: bool  # r
    seed: int  # of ε


class NoiseSums(NamedTuple):
    """What the densities of one candidate need; float64 scalars, over all tensors with a scale above 0."""

    square: torch.Tensor | None  # |ε|², which only the full density needs
    product: torch.Tensor  # ε · (g / σ)


class ProposalSums(NamedTuple):
    """What the densities need of a step; float64 scalars, over all tensors with a scale above 0."""

    shift_square: torch.Tensor  # |g / σ|²
    log_scale: torch.Tensor  # Σ log σ, over all parameters
    dimension: int


def draw_candidates(seed: int, count: int, mixture: float) -> list[Candidate]:
    """The candidates of a step: the same for the same seed, each whatever their number.

    Args:
        mixture: π, the probability of the zero component.

    Example:
        >>> [candidate.from_likelihood for candidate in draw_candidates(seed=2, count=3, mixture=0.5)]
        [True, True, False]
        >>> draw_candidates(seed=0, count=2, mixture=0.5) == draw_candidates(seed=0, count=4, mixture=0.5)[:2]
        True
    """
    candidates = []
    for k in range(count):
        draw = generator_of(seed, k)
        candidates.append(Candidate(bool(draw.random() >= mixture), int(draw.integers(2**63))))
    return candidates


def noise_scales(directions: Sequence[torch.Tensor], noise: float) -> list[float]:
    """σ of each tensor: `noise` times the mean absolute value of its direction (appendix A.4).

    Example:
        >>> noise_scales([torch.tensor([1.0, -3.0])], noise=0.5)
        [1.0]
    """
    sums = [sum(part.abs().sum().double() for part in g.view(-1).split(_PART)) for g in directions]
    return [noise * float(total) / g.numel() for total, g in zip(sums, directions, strict=True)]


def noise_of(candidate: Candidate, like: Sequence[torch.Tensor]) -> Iterator[tuple[int, slice, torch.Tensor]]:
    """ε of a candidate, for all tensors of `like`, in parts that stay in a processor's cache.

    Yields:
        The index of a tensor, a slice of it flattened, and the noise of that slice, in the tensor's dtype and on its
        device. All noises share one buffer: each lasts until the next one is asked for.

    Example:
        >>> like = [torch.zeros(2), torch.zeros(1, 3)]
        >>> [(index, part, len(noise)) for index, part, noise in noise_of(Candidate(True, seed=0), like)]
        [(0, slice(0, 2, None), 2), (1, slice(0, 3, None), 3)]
    """
    buffers: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
    generators: dict[torch.device, torch.Generator] = {}
    for index, tensor in enumerate(like):
        kind = tensor.dtype, tensor.device
        if kind not in buffers:
            buffers[kind] = torch.empty(_PART, dtype=tensor.dtype, device=tensor.device)
        if tensor.device not in generators:
            generators[tensor.device] = torch.Generator(tensor.device).manual_seed(candidate.seed)
        for start in range(0, tensor.numel(), _PART):
            part = slice(start, min(start + _PART, tensor.numel()))
            noise = buffers[kind][: part.stop - start]
            yield index, part, noise.normal_(generator=generators[tensor.device])


@torch.no_grad()
def proposal_sums(directions: Sequence[torch.Tensor], scales: Sequence[float]) -> ProposalSums:
    """The sums of a step's proposal.

    Example:
        >>> found = proposal_sums([torch.tensor([3.0, 4.0])], scales=[1.0])
        >>> float(found.shift_square), float(found.log_scale), found.dimension
        (25.0, 0.0, 2)
    """
    square, log_scale, dimension = torch.zeros((), dtype=torch.float64), 0.0, 0
    for direction, scale in zip(directions, scales, strict=True):
        if scale > 0:
            flat = direction.view(-1)
            square = square + _dot(flat, flat).cpu() / scale**2
            log_scale += direction.numel() * math.log(scale)
            dimension += direction.numel()
    return ProposalSums(square, torch.tensor(log_scale, dtype=torch.float64), dimension)


@torch.no_grad()
def perturb_(
    parameters: Sequence[torch.Tensor],
    originals: Sequence[torch.Tensor],
    directions: Sequence[torch.Tensor],
    scales: Sequence[float],
    candidate: Candidate,
    density: Density,
) -> NoiseSums:
    """Sets `parameters` to `originals + Δ` in place, and returns the sums of the noise that `density` needs.

    A tensor with a scale of 0 (one without a gradient) stays where it is.

    Example:
        >>> weights, direction = torch.zeros(2), torch.tensor([1.0, 2.0])
        >>> _ = perturb_([weights], [torch.zeros(2)], [direction], [1e-12], Candidate(True, seed=0), "given_noise")
        >>> weights  # of hardly any noise: the likelihood's step
        tensor([1., 2.])
    """
    square = product = torch.zeros((), dtype=torch.float64)
    flat = [[tensor.view(-1) for tensor in tensors] for tensors in (parameters, originals, directions)]
    for index, part, noise in noise_of(candidate, directions):
        parameter, original, direction = (tensors[index][part] for tensors in flat)
        if scales[index] == 0:
            parameter.copy_(original)
            continue
        if density == "full":  # in float64, at a quarter of the price of the noise itself
            square = square + _dot(noise, noise).cpu()
        product = product + torch.dot(noise, direction).double().cpu() / scales[index]
        torch.add(original, noise, alpha=scales[index], out=parameter)
        if candidate.from_likelihood:
            parameter.add_(direction)
    return NoiseSums(square if density == "full" else None, product)


def log_proposal_density(
    candidate: Candidate, noise: NoiseSums, proposal: ProposalSums, mixture: float, density: Density
) -> torch.Tensor:
    """Log density of a candidate under the mixture (equation 4), a float64 scalar.

    `"full"` is `log q(Δ)` as the paper prints it. It holds `-|ε|²/2`, which varies by about `sqrt(d/2)` nats from
    candidate to candidate: in high dimension it alone would decide. `"given_noise"` is `log q(Δ) / N(ε; 0, I)`, up to
    what all candidates of a step share: that term cancels, and what is left is the mixture.

    Example:
        >>> zero = torch.zeros((), dtype=torch.float64)  # no direction, so that both components are alike
        >>> noise, proposal = NoiseSums(None, zero), ProposalSums(zero, zero, dimension=1)
        >>> float(log_proposal_density(Candidate(True, seed=0), noise, proposal, mixture=0.5, density="given_noise"))
        0.0
    """
    # With Δ = r g + σ ε, ε is the noise as seen from its own component; seen from the other one it is ε ± g / σ.
    sign = 1.0 if candidate.from_likelihood else -1.0
    log_ratio = -sign * noise.product - proposal.shift_square / 2
    own, other = (1 - mixture, mixture) if candidate.from_likelihood else (mixture, 1 - mixture)
    log_own, log_other = (torch.tensor(math.log(p) if p > 0 else -math.inf, dtype=torch.float64) for p in (own, other))
    given_noise = torch.logaddexp(log_own, log_other + log_ratio)
    if density == "given_noise":
        return given_noise
    if noise.square is None:
        raise ValueError("noise must be of a full density, got the sums of given_noise")
    return given_noise - noise.square / 2 - proposal.log_scale - proposal.dimension / 2 * math.log(2 * math.pi)


def candidate_log_weights(
    costs: torch.Tensor, cost: torch.Tensor, alpha: float, log_densities: torch.Tensor
) -> torch.Tensor:
    """Normalized log weights of the candidates, (K,) float64 (equation 3).

    Args:
        costs: C(θ + Δ) of each candidate, (K,).
        cost: C(θ), ().
        alpha: α > 0.
        log_densities: (K,), of `log_proposal_density`.

    Example:
        >>> better, worse = torch.tensor([1.0, 2.0])
        >>> costs = torch.stack([better, worse])
        >>> candidate_log_weights(costs, worse, alpha=1.0, log_densities=torch.zeros(2)).exp()
        tensor([0.7311, 0.2689], dtype=torch.float64)
    """
    log_weights = alpha * (cost.double() - costs.double()) - log_densities
    return log_weights - log_weights.logsumexp(0)


@torch.no_grad()
def combine_(
    directions: Sequence[torch.Tensor],
    scales: Sequence[float],
    candidates: Sequence[Candidate],
    weights: Sequence[float],
) -> None:
    """Turns `directions` into the weighted mean of the candidates' directions, in place.

    Example:
        >>> directions = [torch.tensor([2.0])]
        >>> combine_(directions, [1e-12], [Candidate(True, seed=0), Candidate(False, seed=1)], weights=[0.25, 0.75])
        >>> directions  # of hardly any noise: a quarter of the likelihood's
        [tensor([0.5000])]
    """
    likelihood_weight = sum(w for w, candidate in zip(weights, candidates, strict=True) if candidate.from_likelihood)
    for direction, scale in zip(directions, scales, strict=True):
        if scale > 0:
            direction.mul_(likelihood_weight)
    for candidate, weight in zip(candidates, weights, strict=True):
        if weight < _NEGLIGIBLE:
            continue
        for index, part, noise in noise_of(candidate, directions):
            if scales[index] > 0:
                directions[index].view(-1)[part].add_(noise, alpha=weight * scales[index])


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Inner product of flat tensors in float64: |ε|² of 10^8 numbers is needed to a nat."""
    parts = zip(a.split(_PART), b.split(_PART), strict=True)
    return sum((torch.dot(x.double(), y.double()) for x, y in parts), start=a.new_zeros((), dtype=torch.float64))
