"""Transition kernels: functions `(state, block, …) -> (state, info)` over C chains, in BlackJAX's shape.

`KERNELS` is the table of them: a new kernel is a function and an entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_ebm.sampling.proposals import BlockProposal
from hf_ebm.sampling.target import ChainState, Target


class StepBlock(NamedTuple):
    """One block per chain with the random numbers of the step.

    Attributes:
        positions: (C, b) columns in filling order, padded by repeating the last.
        size: (C,) how many count; 0 leaves the chain alone.
        fill: (C, b) uniforms for the tokens, float64.
        accept: (C, 2) uniforms for the two stages of acceptance, float64.
    """

    positions: Tensor
    size: Tensor
    fill: Tensor
    accept: Tensor


class StepInfo(NamedTuple):
    """What happened in one step: (C,) each; chains that were left alone hold False and 0.

    Attributes:
        accepted: the proposal was accepted (a proposal equal to the state always is).
        tokens_changed: how many tokens differ from before.
        outside_support: the reverse move was impossible, so the proposal had to be rejected.
    """

    accepted: Tensor
    tokens_changed: Tensor
    outside_support: Tensor


@dataclass(frozen=True)
class WorkSaving:
    """Devices that save masked rows without changing the law of the chain; all on but in tests and benchmarks.

    Attributes:
        skip_no_ops: a proposal equal to the state needs no energy.
        share_terms: energy terms known from the proposal's rows are not run again.
    """

    skip_no_ops: bool = True
    share_terms: bool = True


def gibbs(
    state: ChainState, block: StepBlock, target: Target, proposal: BlockProposal, temperature: float | Tensor = 1.0
) -> tuple[ChainState, StepInfo]:
    """Accepts every proposal, whatever the temperature of the target.

    Masked conditionals need not belong to any joint distribution, so what it samples is not stated (Wang & Cho 2019;
    thesis section 6.6). The energies of the state returned are those of the state given (stale).
    """
    ids = proposal(state.ids, block.positions, block.size, block.fill, target).ids
    visited = block.size > 0
    return state._replace(ids=ids), StepInfo(visited, (ids != state.ids).sum(1), torch.zeros_like(visited))


def metropolis_hastings(
    state: ChainState,
    block: StepBlock,
    target: Target,
    proposal: BlockProposal,
    temperature: float | Tensor = 1.0,
    delayed_acceptance: int | None = None,
    saving: WorkSaving = WorkSaving(),
) -> tuple[ChainState, StepInfo]:
    """One block Metropolis–Hastings step (thesis alg. 4, with the energies exponentiated).

    Accepts y' with probability `min(1, exp(-(E(y') - E(y)) / τ) q(y'→y) / q(y→y'))`.

    Args:
        temperature: τ of the target, one for all or (C,), float64.
        delayed_acceptance: with a radius w in positions, delayed acceptance (Christen & Fox 2005): a first stage
            decides on the extra energies and the terms within w positions of the block, a second one on the remaining
            terms; only proposals that pass the first pay for the second. The target stays the same.
    """
    proposed = proposal(state.ids, block.positions, block.size, block.fill, target)
    # Tens of small steps on the host, which take NumPy a tenth of the time.
    ids, log_forward, log_reverse, known, known_terms = (part.numpy() for part in proposed)
    changed = ids != state.ids.numpy()
    visited, moved = block.size.numpy() > 0, changed.any(1)
    possible = visited & (log_reverse > -np.inf)
    tried = possible & moved if saving.skip_no_ops else possible
    if not saving.share_terms:
        known = np.zeros_like(known)

    first = rest = target.free.numpy() & tried[:, None]
    if delayed_acceptance is not None:
        first = first & _within(delayed_acceptance, block.positions.numpy(), first.shape[1])
    extra = target.extra_energy(proposed.ids, torch.from_numpy(tried))
    terms = np.where(known, known_terms, _terms(target, proposed.ids, first & ~known))
    gained, uniform, tau = terms - state.token_energies.numpy(), block.accept.log().numpy(), np.asarray(temperature)
    difference = (gained * first).sum(1) + extra_difference(state.extra_energy, extra).numpy()
    with np.errstate(invalid="ignore"):  # of chains that aren't tried
        passed = tried & (uniform[:, 0] < -difference / tau + log_reverse - log_forward)
    if delayed_acceptance is not None:
        rest = rest & ~first & passed[:, None]
        terms += _terms(target, proposed.ids, rest & ~known)
        difference = ((terms - state.token_energies.numpy()) * rest).sum(1)
        passed = passed & (uniform[:, 1] < -difference / tau)

    own, which = torch.from_numpy(passed), torch.from_numpy(passed[:, None])
    new_state = ChainState(
        torch.where(which, proposed.ids, state.ids),
        torch.where(which, torch.from_numpy(terms), state.token_energies),
        torch.where(own, extra, state.extra_energy),
    )
    info = passed | (possible & ~moved), changed.sum(1) * passed, visited & ~possible
    return new_state, StepInfo(*map(torch.from_numpy, info))


def _terms(target: Target, ids: Tensor, wanted: NDArray) -> NDArray:
    return target.terms(ids, torch.from_numpy(wanted)).numpy()


def _within(window: int, positions: NDArray, length: int) -> NDArray:
    """(C, T) bool: columns at most `window` away from one of `positions` (C, b)."""
    return (abs(np.arange(length) - positions[..., None]) <= min(window, length)).any(1)


def extra_difference(old: Tensor, new: Tensor) -> Tensor:
    """`new - old`; a state that violates a hard constraint moves freely until it satisfies it, then never leaves.

    Example:
        >>> extra_difference(torch.tensor([1.0, torch.inf]), torch.tensor([3.0, torch.inf]))
        tensor([2., 0.])
    """
    return (new - old).nan_to_num(0.0, torch.inf, -torch.inf)  # NaN where both are infinite


class Kernel(NamedTuple):
    """A transition kernel, and what is known about it.

    Attributes:
        step: `(state, block, target, proposal, temperature) -> (state, info)`, with `arguments` by name. The
            temperature is one for all chains or a tensor (C,), float64.
        about: what it does, for help texts, the guide and cards.
        leaves_invariant: whether `exp(-E/τ)` stays as it is under a step. Of other kernels energies are evaluated at
            the end of an epoch alone, and extra energies, temperatures and their schedules mean nothing.
        arguments: settings of `ChainGenerationConfig` that a step takes.
        reads: further settings that mean something with it. What no
            kernel in use reads and another does may only have its default.
    """

    step: Callable[..., tuple[ChainState, StepInfo]]
    about: str
    leaves_invariant: bool
    arguments: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()

    @property
    def settings(self) -> tuple[str, ...]:
        """The settings that mean something with this kernel and not with every one."""
        return (*self.arguments, *self.reads, *(["replica_temperatures"] if self.leaves_invariant else []))


# Every kernel there is, the default first. An entry is all that a new one needs.
KERNELS: dict[str, Kernel] = {
    "metropolis_hastings": Kernel(
        metropolis_hastings,
        "samples the stated target",
        leaves_invariant=True,
        arguments=("delayed_acceptance",),
        reads=("energy_temperature", "energy_temperature_decay", "exclude_current", "accept_all_epochs"),
    ),
    "gibbs": Kernel(
        gibbs, "accepts every proposal and samples no stated target (Wang & Cho 2019)", leaves_invariant=False
    ),
}


def targets_energy(sampler: str) -> bool:
    """Whether a kernel's chains sample `exp(-E/τ)`. A decoder makes no chains.

    Example:
        >>> targets_energy("metropolis_hastings"), targets_energy("gibbs")
        (True, False)
    """
    return sampler in KERNELS and KERNELS[sampler].leaves_invariant
