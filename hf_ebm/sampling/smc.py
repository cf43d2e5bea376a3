"""Sequential Monte Carlo over inverse temperatures (Del Moral, Doucet & Jasra 2006): weighted samples, and log Z.

Particles are drawn by the sequential fill, whose probability q is known, weighted to `exp(-β E/τ)` of rising β,
resampled and moved by a kernel that leaves it invariant; at β = 1 it is the target. At any time the mean of the weights
is an estimate of Z at β, unbiased where the ladder of β is fixed before; it starts with `1/q`, whose mean is the number
of sequences, Z at β = 0. The same with falling β, from samples of the target to the fill, estimates 1/Z (bidirectional
Monte Carlo, Grosse, Ghahramani & Adams 2015).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_ebm.sampling.kernels import KERNELS
from hf_ebm.sampling.proposals import BlockProposal, ProposalDistribution
from hf_ebm.sampling.sampler import (
    RESAMPLING,
    WARM_START,
    ChainKey,
    block_size_at,
    chain_generator,
    epoch_steps,
)
from hf_ebm.sampling.target import ChainState, Target
from hf_ebm.sampling.warm_start import fill_sequentially, sequential_log_probs

if TYPE_CHECKING:
    from hf_ebm.sampling.configuration import ResolvedChainConfig

# Particles are resampled where their effective number is below this share.
RESAMPLED_BELOW = 0.5
# Where the first β is looked for, and halvings until the next one is found.
_FIRST, _HALVINGS = torch.logspace(-3, 0, 61, dtype=torch.float64), 50

# `(level, log weights (R, N), energies (R, N), β (R,)) -> (R,)`, the next β of each run.
Schedule = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def log_mean_weight(log_weights: Tensor) -> Tensor:
    """(R,) logarithms of the mean weights of runs, from log weights (R, N).

    Example:
        >>> log_mean_weight(torch.tensor([[1.0, 3.0]]).log()).exp()
        tensor([2.])
    """
    return log_weights.logsumexp(1) - math.log(log_weights.shape[1])


def conditional_ess(log_weights: Tensor, increments: Tensor) -> Tensor:
    """Conditional effective sample size of a reweighting, as a share of the particles (Zhou, Johansen & Aston 2016).

    It is `(Σ W u)² / Σ W u²` of normalized weights W and factors u: the usual effective sample size where weights are
    equal; 0 where none is left.

    Args:
        log_weights: (R, N) before.
        increments: (R, N) log u.

    Example:
        >>> conditional_ess(torch.zeros(1, 2), torch.tensor([[1.0, 3.0]]).log())
        tensor([0.8000])
    """
    own = log_weights + increments
    share = (2 * own.logsumexp(1) - (own + increments).logsumexp(1) - log_weights.logsumexp(1)).exp()
    return share.nan_to_num(0.0)


def reweighting(change: Tensor, energies: Tensor) -> Tensor:
    """(R, N) log factors of the weights when β of runs changes by `change` (R,); infinite energies weigh nothing.

    Example:
        >>> reweighting(torch.tensor([0.5]), torch.tensor([[2.0, torch.inf]]))
        tensor([[-1., -inf]])
    """
    return torch.where(energies < torch.inf, -change[:, None] * energies, -torch.inf)


def stepping_stones(ladder: Tensor, energies: Tensor) -> Tensor:
    """(R,) log Z at the last β of a ladder less that at the first, by the stepping-stone method (Xie et al. 2011).

    It is `Σ_k log mean exp(-(β_k+1 - β_k) E)`, each mean over samples at β_k.

    Args:
        ladder: (S,) rising β.
        energies: (R, n, S) energies of n samples at each, those at the last of which aren't needed.

    Example:
        >>> ladder, energies = torch.tensor([0.0, 0.5, 1.0]), torch.tensor([[[0.0, 2.0, 9.0], [0.0, 2.0, 9.0]]])
        >>> stepping_stones(ladder, energies)
        tensor([-1.])
    """
    steps = [
        log_mean_weight(reweighting(change.expand(len(energies)), energies[..., place]))
        for place, change in enumerate(ladder.diff())
    ]
    return torch.stack(steps).sum(0)


def systematic(log_weights: Tensor, uniforms: Tensor, number: int | None = None) -> Tensor:
    """(R, n) particles of each run, by systematic resampling (Kitagawa 1996): one number in [0, 1) a run decides.

    Args:
        log_weights: (R, N).
        number: n, by default N.

    Example:
        >>> systematic(torch.tensor([[1.0, 2.0, 1.0, 0.0]]).log(), torch.tensor([0.5]))
        tensor([[0, 1, 1, 2]])
    """
    cumulative = log_weights.double().softmax(1).cumsum(1)
    number = number or log_weights.shape[1]
    places = (torch.arange(number) + uniforms[:, None]) / number * cumulative[:, -1:]
    return torch.searchsorted(cumulative, places, right=True).clamp(max=log_weights.shape[1] - 1)


def adaptive(target_cess: float) -> Schedule:
    """Each next β has a conditional effective sample size of `target_cess`; the first at least that, or the largest.

    Example:
        >>> zeros = torch.zeros(1, 2).double()
        >>> round(float(adaptive(0.9)(1, zeros, torch.tensor([[0.0, 1.0]]).double(), zeros[:, 0])), 4)
        0.6931
    """

    def schedule(level: int, log_weights: Tensor, energies: Tensor, beta: Tensor) -> Tensor:
        if level == 0:
            return _first_inverse_temperature(log_weights, energies, target_cess)
        return next_inverse_temperature(log_weights, energies, beta, target_cess)

    return schedule


def fixed(ladders: Tensor) -> Schedule:
    """The β of each run are given: (R, S), shorter ones repeat their last.

    Example:
        >>> nothing = torch.empty(0)
        >>> [float(fixed(torch.tensor([[0.5, 1.0]]))(level, nothing, nothing, nothing)) for level in range(2)]
        [0.5, 1.0]
    """
    return lambda level, log_weights, energies, beta: ladders[:, min(level, ladders.shape[1] - 1)]


def falling(ladders: Tensor) -> Tensor:
    """Ladders (R, S) that rise to 1 as those that fall from 1, which they don't name, to 0: (R, S).

    Example:
        >>> falling(torch.tensor([[0.25, 0.5, 1.0]]))
        tensor([[0.5000, 0.2500, 0.0000]])
    """
    return torch.cat([ladders.flip(1)[:, 1:], torch.zeros_like(ladders[:, :1])], 1)


def _first_inverse_temperature(log_weights: Tensor, energies: Tensor, target_cess: float) -> Tensor:
    equal = torch.zeros_like(log_weights)
    shares = torch.stack(
        [conditional_ess(equal, log_weights + reweighting(own.expand(len(energies)), energies)) for own in _FIRST]
    )
    enough = (shares >= target_cess).long()
    last = len(_FIRST) - 1 - enough.flip(0).argmax(0)
    return _FIRST[torch.where(enough.any(0), last, shares.argmax(0))]


def next_inverse_temperature(log_weights: Tensor, energies: Tensor, beta: Tensor, target_cess: float) -> Tensor:
    """(R,) the β up to 1 at which the conditional effective sample size has fallen to `target_cess`, by bisection.

    Example:
        >>> energies = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
        >>> beta = next_inverse_temperature(torch.zeros(1, 2).double(), energies, torch.zeros(1).double(), 0.9)
        >>> round(float(beta), 4), round(float(conditional_ess(torch.zeros(1, 2), -beta * energies)), 4)
        (0.6931, 0.9)
    """

    def share(at: Tensor) -> Tensor:
        return conditional_ess(log_weights, reweighting(at - beta, energies))

    low, high = beta, torch.ones_like(beta)
    is_last = share(high) >= target_cess
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = share(middle) >= target_cess
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    return torch.where(is_last, 1.0, high)


@dataclass(frozen=True)
class Particles:
    """R runs of N particles, a run's one after the other.

    Attributes:
        state: of all of them.
        log_weights: (R, N) float64; the mean of the weights of a run estimates its Z.
        ancestors: (R, N) which of a run's first particles each comes from.
    """

    state: ChainState
    log_weights: Tensor
    ancestors: Tensor

    @classmethod
    def of(cls, state: ChainState, log_weights: Tensor) -> Particles:
        """Particles that have just begun; those of infinite energy weigh nothing."""
        log_weights = torch.where(state.energy.view_as(log_weights) < torch.inf, log_weights, -torch.inf)
        return cls(state, log_weights, torch.arange(log_weights.shape[1]).expand(log_weights.shape))

    @property
    def energies(self) -> Tensor:
        """(R, N)."""
        return self.state.energy.view_as(self.log_weights)

    def resampled(self, chosen: Tensor, which: Tensor) -> Particles:
        """With particles `chosen` (R, N) in the runs `which` (R,), all of the weight that was the mean."""
        chosen = torch.where(which[:, None], chosen, torch.arange(chosen.shape[1]))
        flat = (chosen + torch.arange(len(chosen))[:, None] * chosen.shape[1]).flatten()
        mean = log_mean_weight(self.log_weights)[:, None].expand_as(self.log_weights)
        return Particles(
            ChainState(*(own[flat] for own in self.state)),
            torch.where(which[:, None], mean, self.log_weights),
            self.ancestors.gather(1, chosen),
        )


class Levels(NamedTuple):
    """What happened at each of S levels, (R, S) each; NaN, or False, where a run was done.

    Attributes:
        beta: inverse temperatures.
        ess: effective sample sizes after reweighting, as shares of the particles.
        resampled: bool.
    """

    beta: Tensor
    ess: Tensor
    resampled: Tensor


@dataclass(frozen=True)
class Annealing:
    """How the particles of some runs are moved and resampled.

    Args:
        keys: prompt and number of each of R runs. A run's draws depend on its key, the seed, N and settings alone.
        num_particles: N, of each run.
        config: complete settings (`ChainGenerationConfig.resolved`).
        target: of all R N particles.
        proposal: of the kernel.
        num_moves: epochs of the kernel at each level.
    """

    keys: Sequence[ChainKey]
    num_particles: int
    config: ResolvedChainConfig
    target: Target
    proposal: BlockProposal
    num_moves: int

    @property
    def particle_keys(self) -> list[ChainKey]:
        """Those of the particles' random streams."""
        number = self.num_particles
        return [ChainKey(prompt, run * number + own) for prompt, run in self.keys for own in range(number)]

    @property
    def fill_proposal(self) -> BlockProposal:
        """What fills draw from: the model's conditionals as they are, which give every supported token."""
        return BlockProposal(ProposalDistribution((), self.target.support, 0.0, exclude_current=False))

    def filled(self, ids: Tensor) -> Particles:
        """Particles that fill all free positions of `ids` (R N, T), of weight 1/q; those that break a constraint, 0."""
        generators = [chain_generator(self.config.seed, *key, WARM_START) for key in self.particle_keys]
        masked = ids.masked_fill(self.target.free, self.target.runner.mask_id)
        fill = fill_sequentially(masked, self.target.free, generators, self.target, self.fill_proposal)
        return self._begun(fill.ids, -fill.log_probs)

    def started(self, ids: Tensor) -> Particles:
        """Particles at samples `ids` (R N, T) of the target, of weight 1."""
        return self._begun(ids, torch.zeros(len(ids), dtype=torch.float64))

    def _begun(self, ids: Tensor, log_weights: Tensor) -> Particles:
        log_weights = log_weights.masked_fill(~self.target.allows(ids), -torch.inf)
        return Particles.of(self.target.state(ids), log_weights.view(-1, self.num_particles))

    def back_to_fill(self, particles: Particles) -> Particles:
        """Particles at β = 0 weighted to the fill, each in an order of its own."""
        orders = []
        for free, key in zip(self.target.free.numpy(), self.particle_keys, strict=True):
            positions = free.nonzero()[0]
            draws = chain_generator(self.config.seed, *key, WARM_START).random(len(positions))
            orders.append(positions[np.argsort(draws, kind="stable")])
        log_probs = sequential_log_probs(particles.state.ids, orders, self.target, self.fill_proposal)
        return replace(particles, log_weights=particles.log_weights + log_probs.view_as(particles.log_weights))

    def annealed(self, particles: Particles, start: float, end: float, schedule: Schedule) -> tuple[Particles, Levels]:
        """Takes runs from β `start` to `end` (at 0 nothing is moved); those without any weight stay where they are."""
        beta = torch.full((len(self.keys),), start, dtype=torch.float64)
        levels = [Levels(*torch.empty(3, 0, len(self.keys), dtype=torch.float64))]
        for level in count():
            active = (beta != end) & (particles.log_weights > -torch.inf).any(1)
            if not bool(active.any()):
                break
            energies = particles.energies / self.config.energy_temperature
            new = torch.where(active, schedule(level, particles.log_weights, energies, beta), beta)
            weights = particles.log_weights + reweighting(new - beta, energies)
            particles = replace(particles, log_weights=torch.where(active[:, None], weights, particles.log_weights))
            share = conditional_ess(torch.zeros_like(weights), particles.log_weights)
            # At β = 0 the weights of the fill, which count as well, are still to come.
            poor = active & (new > 0) & (share < RESAMPLED_BELOW) & (share > 0)
            uniforms = [float(chain_generator(self.config.seed, *key, RESAMPLING, level).random()) for key in self.keys]
            chosen = systematic(particles.log_weights, torch.tensor(uniforms, dtype=torch.float64))
            particles = particles.resampled(chosen, poor)
            particles = replace(particles, state=self._moved(particles.state, new, active & (new > 0), level))
            told = (new.where(active, torch.nan), share.where(active, torch.nan), poor.double())
            levels.append(Levels(*(own[None] for own in told)))
            beta = new
        beta, ess, resampled = (torch.cat(own).T for own in zip(*levels, strict=True))
        return particles, Levels(beta, ess, resampled.bool())

    def _moved(self, state: ChainState, beta: Tensor, which: Tensor, level: int) -> ChainState:
        """The state after `num_moves` epochs of the kernel at β (R,) in the runs `which` (R,)."""
        config, target, kernel = self.config, self.target, KERNELS[self.config.kernel]
        arguments = {name: getattr(config, name) for name in kernel.arguments}
        # Runs that stay are left alone, at any temperature.
        temperature = (config.energy_temperature / beta.where(which, 1.0)).repeat_interleave(self.num_particles)
        moves, keys = which.repeat_interleave(self.num_particles), self.particle_keys
        if not bool(which.any()):
            return state
        for epoch in range(level * self.num_moves, (level + 1) * self.num_moves):
            size = block_size_at(epoch, 1, config.block_size, None)
            for block in epoch_steps(target.free, keys, config, min(size, target.free.shape[1]), epoch):
                block = block._replace(size=block.size * moves)
                state, _ = kernel.step(state, block, target, self.proposal, temperature, **arguments)
        return state
