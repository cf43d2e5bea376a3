"""Transition kernels: functions `(state, block, …) -> (state, info)` over C chains, in BlackJAX's shape.

`KERNELS` is the table of them: a new kernel is a function and an entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hf_ebm.sampling.proposals import BlockProposal, Proposed
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
    state: ChainState, block: StepBlock, target: Target, proposal: BlockProposal, temperature: float = 1.0
) -> tuple[ChainState, StepInfo]:
    """Accepts every proposal, whatever the temperature of the target.

    Masked conditionals need not belong to any joint distribution, so what it samples is not stated (Wang & Cho 2019;
    thesis section 6.6). The energies of the state returned are those of the state given (stale).
    """
    chains = (block.size > 0).nonzero()[:, 0]
    proposed = _propose(state, block, chains, target, proposal)
    ids = state.ids.index_put((chains,), proposed.ids)
    accepted = torch.zeros_like(block.size, dtype=torch.bool).index_fill(0, chains, True)
    info = StepInfo(accepted, (ids != state.ids).sum(1), torch.zeros_like(accepted))
    return state._replace(ids=ids), info


def metropolis_hastings(
    state: ChainState,
    block: StepBlock,
    target: Target,
    proposal: BlockProposal,
    temperature: float = 1.0,
    delayed_acceptance: int | None = None,
    saving: WorkSaving = WorkSaving(),
) -> tuple[ChainState, StepInfo]:
    """One block Metropolis–Hastings step (thesis alg. 4, with the energies exponentiated).

    Accepts y' with probability `min(1, exp(-(E(y') - E(y)) / τ) q(y'→y) / q(y→y'))`.

    Args:
        temperature: τ of the target.
        delayed_acceptance: with a radius w in positions, delayed acceptance (Christen & Fox 2005): a first stage
            decides on the extra energies and the terms within w positions of the block, a second one on the remaining
            terms; only proposals that pass the first pay for the second. The target stays the same.
    """
    chains = (block.size > 0).nonzero()[:, 0]
    proposed = _propose(state, block, chains, target, proposal)
    before = state.ids[chains]
    possible = proposed.log_reverse > -torch.inf
    moved = (proposed.ids != before).any(1)
    pending = (possible & moved if saving.skip_no_ops else possible).nonzero()[:, 0]

    accepted = possible & ~moved
    new_state = state
    if len(pending):
        passed, token_energies, extra = _decide(
            state, chains[pending], _take(proposed, pending), block, target, temperature, delayed_acceptance, saving
        )
        accepted[pending] = passed
        winners = chains[pending[passed]]
        new_state = ChainState(
            state.ids.index_put((winners,), proposed.ids[pending[passed]]),
            state.token_energies.index_put((winners,), token_energies[passed]),
            state.extra_energy.index_put((winners,), extra[passed]),
        )
    everyone = torch.zeros_like(block.size, dtype=torch.bool)
    info = StepInfo(
        everyone.index_put((chains,), accepted),
        (new_state.ids != state.ids).sum(1),
        everyone.index_put((chains,), ~possible),
    )
    return new_state, info


def _propose(state: ChainState, block: StepBlock, chains: Tensor, target: Target, proposal: BlockProposal) -> Proposed:
    return proposal(state.ids[chains], chains, block.positions[chains], block.size[chains], block.fill[chains], target)


def _take(proposed: Proposed, index: Tensor) -> Proposed:
    return Proposed(*(field[index] for field in proposed))


def _decide(
    state: ChainState,
    chains: Tensor,
    proposed: Proposed,
    block: StepBlock,
    target: Target,
    temperature: float,
    window: int | None,
    saving: WorkSaving,
) -> tuple[Tensor, Tensor, Tensor]:
    """Accepts or rejects; returns `(accepted (n,), token energies (n, T), extra energies (n,))` of the proposals."""
    free = target.free[chains]
    known = proposed.known if saving.share_terms else torch.zeros_like(proposed.known)
    old_terms, old_extra = state.token_energies[chains], state.extra_energy[chains]
    extra = target.extra_energy(proposed.ids)
    length = free.shape[1]
    near = free if window is None else free & _within(min(window, length), block.positions[chains], length)
    first = target.terms(proposed.ids, chains, near & ~known)
    terms = torch.where(known, proposed.known_terms, first)
    difference = ((terms - old_terms) * near).sum(1) + _extra_difference(old_extra, extra)
    log_ratio = -difference / temperature + proposed.log_reverse - proposed.log_forward
    accepted = block.accept[chains, 0].log() < log_ratio
    if window is not None and bool(accepted.any()):
        alive = accepted.nonzero()[:, 0]
        far = free[alive] & ~near[alive]
        rest = target.terms(proposed.ids[alive], chains[alive], far & ~known[alive])
        terms = terms.index_put((alive,), terms[alive] + rest)
        difference = ((terms[alive] - old_terms[alive]) * far).sum(1)
        accepted[alive] = block.accept[chains[alive], 1].log() < -difference / temperature
    return accepted, terms, extra


def _within(window: int, positions: Tensor, length: int) -> Tensor:
    """(n, T) bool: columns at most `window` away from one of `positions` (n, b)."""
    columns = torch.arange(length, device=positions.device)
    return ((columns[None, None] - positions[..., None]).abs() <= window).any(1)


def _extra_difference(old: Tensor, new: Tensor) -> Tensor:
    """`new - old`; a state that violates a hard constraint moves freely until it satisfies it, then never leaves."""
    both = old.isinf() & new.isinf()
    return torch.where(both, torch.zeros_like(new), new - old)


class Kernel(NamedTuple):
    """A transition kernel, and what is known about it.

    Attributes:
        step: `(state, block, target, proposal, temperature) -> (state, info)`, with `arguments` by name.
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
        return (*self.arguments, *self.reads)


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
