"""The loop over epochs and blocks: random streams, schedules and kernels put together.

Every chain has its own counter-based (Philox) streams, keyed by seed, prompt, chain, purpose and epoch. A chain's draws
therefore depend neither on the chains run beside it, nor on the batch, the process or a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers.utils import logging

from hf_ebm.checks import shown
from hf_ebm.random_state import generator_of, uniforms_of
from hf_ebm.runtime import check_fits
from hf_ebm.sampling.blocks import LAYOUTS, ORDERS, epoch_blocks
from hf_ebm.sampling.convergence import r_hats_of
from hf_ebm.sampling.kernels import KERNELS, Kernel, StepBlock, StepInfo
from hf_ebm.sampling.proposals import BlockProposal
from hf_ebm.sampling.run import ChainRun, Tally, Trace
from hf_ebm.sampling.target import Target
from hf_ebm.sampling.warm_start import DECODERS, WARM_STARTS

if TYPE_CHECKING:
    from hf_ebm.sampling.configuration import ResolvedChainConfig

logger = logging.get_logger(__name__)

Run = TypeVar("Run", bound=ChainRun)


# Fills of a start until it keeps the constraints.
_FILLS_TRIED = 100

# What a stream is for; part of its key, so that no two uses share numbers.
EPOCH, WARM_START, LENGTH, SWAP, RESAMPLING = range(5)


class ChainKey(NamedTuple):
    """Names a chain, and with the seed its random streams: number of the prompt, number of the chain."""

    prompt: int
    chain: int


def row_keys(keys: list[ChainKey], replicas: int) -> list[tuple[int, ...]]:
    """What the streams of the rows of some chains are keyed by: each replica has streams of its own.

    Example:
        >>> row_keys([ChainKey(0, 3), ChainKey(0, 4)], 2)
        [(0, 3, 0), (0, 4, 0), (0, 3, 1), (0, 4, 1)]
    """
    return [(*key, replica) for replica in range(replicas) for key in keys] or list(keys)


def chain_generator(seed: int, prompt: int, chain: int, purpose: int, epoch: int = 0) -> np.random.Generator:
    """The generator of one chain for one purpose in one epoch."""
    return generator_of(seed, prompt, chain, purpose, epoch)


def block_size_at(epoch: int, num_epochs: int, block_size: int | list[int], final_block_size: int | None) -> int:
    """Block size of an epoch (numbered from 0).

    A list is cycled through; with `final_block_size` the size goes linearly from the one to the other over the epochs,
    rounded to the nearest integer (thesis ch. 6, block annealing); otherwise it is constant.

    Example:
        >>> [block_size_at(epoch, 5, 4, final_block_size=1) for epoch in range(5)]
        [4, 3, 2, 2, 1]
        >>> [block_size_at(epoch, 5, [1, 3], None) for epoch in range(5)]
        [1, 3, 1, 3, 1]
    """
    if isinstance(block_size, list):
        return block_size[epoch % len(block_size)]
    if final_block_size is None or num_epochs == 1:
        return block_size
    return round(block_size + (final_block_size - block_size) * epoch / (num_epochs - 1))


def temperature_at(epoch: int, start: float, decay: float, floor: float) -> float:
    """Target temperature of an epoch: decreases by `decay` an epoch, not below `floor` (thesis ch. 6).

    Example:
        >>> [temperature_at(epoch, 1.0, decay=0.25, floor=0.5) for epoch in range(4)]
        [1.0, 0.75, 0.5, 0.5]
    """
    return max(start - decay * epoch, min(floor, start))


def kept_samples(epochs: int, burn_in: int, thinning: int) -> int:
    """How many samples a run of so many epochs keeps.

    Example:
        >>> kept_samples(12, burn_in=4, thinning=3)
        3
    """
    return max(0, -(-(epochs - burn_in) // thinning))


def check_run_fits(config: ResolvedChainConfig, chains: int, length: int) -> None:
    """Raises `ValueError` for more chains of rows of `length` tokens than there is memory to keep the samples of."""
    epochs, samples = config.num_epochs, kept_samples(config.num_epochs, config.burn_in, config.thinning)
    if config.decoder is not None:
        epochs = samples = 1
    needed = 8 * chains * (samples * (length + 1) + (len(Trace._fields) + 2 * config.num_replicas) * epochs)
    check_fits(
        needed,
        f"num_chains, num_epochs, thinning and lengths: {shown(chains)} chains of {shown(length)} tokens keep "
        f"{shown(samples)} samples each of {shown(epochs)} epochs",
    )


def started(
    run: Run, config: ResolvedChainConfig, keys: list[ChainKey], target: Target, proposal: BlockProposal
) -> Run:
    """A run whose chains are where they start: what they cannot hold is filled, and energies are evaluated.

    Raises:
        ValueError: for a chain whose fills all break a constraint.
    """
    ids = run.state.ids
    masked = target.free & ~target.holdable(ids)
    for attempt in range(_FILLS_TRIED if bool(masked.any()) else 0):
        ids = ids.masked_fill(masked, target.runner.mask_id)
        rows = row_keys(keys, config.num_replicas)
        generators = [generator_of(config.seed, *key, WARM_START, attempt) for key in rows]
        ids = WARM_STARTS[config.warm_start].fill(ids, masked, generators, target, proposal)
        if not target.is_constrained:
            break
        masked &= ~target.allows(ids)[:, None]  # chains whose fill is right keep it
        if not bool(masked.any()):
            break
    else:
        if bool(masked.any()):
            key = keys[int(masked.any(1).nonzero()[0]) % len(keys)]
            raise ValueError(
                f"avoid: none of {_FILLS_TRIED} fills by warm_start={config.warm_start!r} takes prompt {key.prompt}, "
                f"chain {key.chain} far enough away from all of its sequences; give a start as input_ids"
            )
    state = target.state(ids)
    asked = run.num_rows_asked + target.runner.num_asked
    num_rows = run.num_masked_rows + target.runner.num_rows
    return replace(run, state=state, num_masked_rows=num_rows, num_rows_asked=asked)


def decoded(run: Run, decoder: str, iterations: int, target: Target) -> tuple[Run, Tensor]:
    """A run that holds what a decoder makes of all free positions, and its mean log probabilities (C,)."""
    ids = run.state.ids.masked_fill(target.free, target.runner.mask_id)
    ids, mean_log_probabilities = DECODERS[decoder].decode(ids, target.free, iterations, target)
    state = target.state(ids)
    run = run.with_room(1, 1)
    run.trace.energy[:, 0] = run.sample_energies[:, 0] = state.energy
    run.samples[:, 0] = ids
    run = replace(run, state=state, epoch=1, kept=1, num_masked_rows=target.runner.num_rows)
    return run, mean_log_probabilities


def run_epoch(
    run: Run,
    config: ResolvedChainConfig,
    keys: list[ChainKey],
    target: Target,
    proposal: BlockProposal,
    on_step: Callable[[Tensor], None] | None = None,
) -> Iterator[Run]:
    """Runs one epoch of all chains, or what is left of one, and yields the run after each of its steps.

    Each is a whole run, which an interruption of the next step leaves as it was; the last is at the epoch's end.

    Args:
        config: complete settings (`ChainGenerationConfig.resolved`).
        keys: one per chain.
        on_step: called with the ids (C, T) after every step, and every swap of replicas, that changed some.
    """
    epoch, kernel = run.epoch, kernel_at(run.epoch, config)
    arguments = {name: getattr(config, name) for name in kernel.arguments}
    size = block_size_at(epoch, config.num_epochs, config.block_size, config.final_block_size)
    size = min(size, target.free.shape[1])  # a schedule may go further
    temperature = temperature_at(
        epoch, config.energy_temperature, config.energy_temperature_decay, config.min_energy_temperature
    )
    own = temperature if run.replicas is None else run.replicas.temperatures(temperature)
    blocks = epoch_steps(target.free, row_keys(keys, config.num_replicas), config, size, epoch)
    for step in range(run.step, len(blocks)):
        before, block, state = (target.runner.num_rows, target.runner.num_asked), blocks[step], run.state
        state, info = kernel.step(state, block, target, proposal, own, **arguments)
        if not target.is_constrained:
            _warn_if_outside(info, config)
        changed = info.tokens_changed.numpy()
        counts = info.accepted.numpy(), changed > 0, changed, block.size.numpy() > 0
        tally = Tally(*(torch.from_numpy(own.numpy() + count) for own, count in zip(run.tally, counts, strict=True)))
        if on_step is not None and bool(info.tokens_changed[run.cold_rows].any()):
            on_step(state.ids[run.cold_rows])
        is_last = step + 1 == len(blocks)
        if is_last and not kernel.leaves_invariant:
            state = target.state(state.ids)
        rows = run.num_masked_rows + target.runner.num_rows - before[0]
        # A visit counts as a row at least: an energy without a model is asked nothing of what changes nothing.
        asked = run.num_rows_asked + max(target.runner.num_asked - before[1], int(counts[3].sum()))
        run = replace(run, state=state, step=step + 1, tally=tally, num_masked_rows=rows, num_rows_asked=asked)
        if not is_last:
            yield run
    last = _with_epoch(run, config, keys, target.free.sum(1).clamp(max=size), temperature)
    if on_step is not None and not torch.equal(last.cold.ids, run.cold.ids):
        on_step(last.cold.ids)
    yield last


def is_over(run: ChainRun, config: ResolvedChainConfig, prompts: Tensor) -> bool:
    """Whether a run has all its epochs.

    With `target_rhat` it has after a round, `num_epochs` epochs, at whose end R-hat is met in all prompts, (C,) of the
    chains, that have something to mix, or `max_rows` are reached.
    """
    if config.target_rhat is None or config.max_rows is None:
        return run.epoch >= config.num_epochs
    if not run.epoch or run.step or run.epoch % config.num_epochs:
        return False
    if run.num_rows_asked >= config.max_rows:
        return True
    accepted = run.trace.acceptance_rate[:, config.burn_in : run.epoch : config.thinning]
    found = r_hats_of(run.samples[:, : run.kept], run.sample_energies[:, : run.kept], accepted, prompts)
    return not any(own > config.target_rhat for own in found.values())


def kernel_at(epoch: int, config: ResolvedChainConfig) -> Kernel:
    """The kernel of an epoch."""
    return KERNELS["gibbs" if epoch < config.accept_all_epochs else config.kernel]


def _with_epoch(run: Run, config: ResolvedChainConfig, keys: list[ChainKey], sizes: Tensor, temperature: float) -> Run:
    """A run whose steps of the epoch are done with its swaps, the epoch in its trace, and its sample if one is kept."""
    epoch, rows, replicas = run.epoch, run.cold_rows, run.replicas
    tally, sizes = Tally(*(own[rows] for own in run.tally)), sizes[rows]
    if replicas is not None and kernel_at(epoch, config).leaves_invariant:
        uniforms = uniforms_of(
            config.seed, np.array([(*key, SWAP, epoch) for key in keys]), replicas.level.shape[1] - 1
        )
        replicas = replicas.swapped(run.state, temperature, torch.from_numpy(uniforms), epoch)
    moved = replace(run, replicas=replicas)
    state = moved.cold
    rates = tally.accepted / tally.proposed, tally.novel / tally.proposed
    # Written where `run` has room but no epoch yet, so an interruption leaves it as it was.
    for values, value in zip(run.trace, (state.energy, *rates, tally.tokens_changed, sizes, temperature), strict=True):
        values[:, epoch] = torch.as_tensor(value, dtype=torch.float64)
    if replicas is not None:
        fit_to = config.burn_in if isinstance(config.replica_temperatures, int) else 0
        replicas = replicas.after_epoch(run.state, run.trace.temperature, epoch, config.accept_all_epochs, fit_to)
    kept = kept_samples(epoch + 1, config.burn_in, config.thinning)
    if kept > run.kept:
        run.samples[:, run.kept], run.sample_energies[:, run.kept] = state.ids, state.energy
    tally = Tally.zeros(len(run.state.ids))
    return replace(run, epoch=epoch + 1, step=0, tally=tally, kept=kept, replicas=replicas)


def epoch_steps(
    free: Tensor, keys: Sequence[tuple[int, ...]], config: ResolvedChainConfig, size: int, epoch: int
) -> list[StepBlock]:
    """The blocks of one epoch with their random numbers. A row's part depends on nothing but its key and settings."""
    columns = free.numpy()
    counts = columns.sum(1)
    draws = uniforms_of(config.seed, np.array([(*key, EPOCH, epoch) for key in keys]), 5 * int(counts.max()) + 1)
    # Five numbers for each free position of a chain, kind by kind, and one more for the chain.
    chain, column = columns.nonzero()
    place = columns.cumsum(1)[chain, column] - 1
    table = draws[chain, np.arange(5)[:, None] * counts[chain] + place]
    offsets = draws[np.arange(len(keys)), 5 * counts]
    layout, order = LAYOUTS[config.block_layout], ORDERS[config.order]
    blocks = epoch_blocks(columns, size, layout, order, table[:2], offsets)
    # A chain takes its numbers for tokens in the order of its visits, those for acceptance in the order of its steps.
    counted = np.arange(blocks.visit.shape[2]) < blocks.size[..., None]
    fill = np.where(counted, table[2][blocks.visit], 0.0)
    step = np.minimum(np.arange(len(fill))[:, None], counts - 1) + counts.cumsum() - counts
    accept = np.where(blocks.size[..., None] > 0, table[3:].T[step], 0.0)
    parts = (torch.from_numpy(part) for part in (blocks.positions, blocks.size, fill, accept))
    return [StepBlock(*own) for own in zip(*parts, strict=True)]


def _warn_if_outside(info: StepInfo, config: ResolvedChainConfig) -> None:
    if config.proposal_epsilon == 0 and bool(info.outside_support.any()):
        logger.warning_once(
            "A chain holds a token that its truncated proposal cannot propose, so it cannot move there. Raise "
            "proposal_epsilon above 0 to let it."
        )
