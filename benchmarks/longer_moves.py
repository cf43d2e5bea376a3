"""Longer moves of the same law that were measured and not kept (docs/decisions.md), as samplers of `benchmarks.mixing`.

`python -m benchmarks.longer_moves` takes the options of that, and has five samplers more. Nothing here knows
`exclude_current` or constraints of whole sequences.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks import mixing
from benchmarks.mixing_samplers import SAMPLERS, chains
from hf_ebm.sampling.kernels import KERNELS, Kernel, StepBlock, StepInfo, metropolis_hastings
from hf_ebm.sampling.proposals import FILLS, BlockProposal, Fill, ProposalDistribution, Proposed
from hf_ebm.sampling.target import ChainState, Target
from hf_ebm.scoring.energies import token_energy
from hf_ebm.scoring.rows import Index, MaskedRows

SHARE = 0.1  # of steps that shift


def by_confidence(
    ids: Tensor, positions: Tensor, size: Tensor, uniforms: Tensor, target: Target, q: ProposalDistribution
) -> Proposed:
    """Fills the position of the least entropy first, of those of the block that are still masked.

    The way back fills the old tokens in the order that it would have chosen. Until a token has changed its contexts are
    the forward ones.
    """
    columns, old = positions.numpy(), ids.numpy()
    still = np.arange(columns.shape[1]) < size.numpy()[:, None]
    behind, same = np.zeros_like(still), np.ones(len(old), dtype=bool)
    new, last = old.copy(), columns[:, 0].copy()
    log_forward, log_reverse, term = np.zeros((3, len(old)))
    for j in range(int(size.max())):
        rows = still.any(1).nonzero()[0]
        column, token, forward, back, term[rows] = _next(new, old, rows, columns, still, uniforms[:, j], target, q)
        new[rows, column], last[rows] = token, column
        log_forward[rows] += forward
        log_reverse[rows] += np.where(same[rows], back, 0.0)
        still[rows] &= columns[rows] != column[:, None]
        parted = rows[same[rows] & (token != old[rows, column])]
        behind[parted], same[parted] = still[parted], False
    while behind.any():
        rows = behind.any(1).nonzero()[0]
        column, _, _, back, _ = _next(old, old, rows, columns, behind, None, target, q)
        log_reverse[rows] += back
        behind[rows] &= columns[rows] != column[:, None]
    known, terms, filled = np.zeros(old.shape, dtype=bool), np.zeros(old.shape), (size.numpy() > 0).nonzero()[0]
    known[filled, last[filled]], terms[filled, last[filled]] = True, term[filled]
    return Proposed(*map(torch.from_numpy, (new, log_forward, log_reverse, known, terms)))


def _next(
    ids: NDArray, old: NDArray, source: NDArray, columns: NDArray, still: NDArray, uniforms: Tensor | None,
    target: Target, q: ProposalDistribution,
) -> list[NDArray]:  # fmt: skip
    """Of chains `source` what is filled next: column, token, its log probability and the old one's, its term.

    Args:
        still: (C, b) bool, which of the columns are masked.
        uniforms: (C,) for the token; without them it is the old one.
    """
    masked = np.where(still, columns, columns[np.arange(len(still)), still.argmax(1)][:, None])[source]
    if (masked == masked[:, :1]).all():
        masked = masked[:, :1]  # a row of one position may be known
    at = torch.from_numpy(masked)
    rows, shown = MaskedRows(torch.from_numpy(source), at, at), torch.from_numpy(ids)

    def reduce(logits: Tensor, n: Index) -> Tensor:
        forbidden = target.forbidden(rows, n, logits.device)
        flat = q.log_probabilities(logits.flatten(0, 1), lambda: target.shown(shown, rows.some(n)), forbidden)
        log_probabilities = flat.unflatten(0, logits.shape[:2])
        place = torch.special.entr(log_probabilities.exp()).sum(-1).argmin(1)
        each = torch.arange(len(place))
        column, chain, own = rows.read[n][each, place], rows.source[n], log_probabilities[each, place]
        current = torch.from_numpy(old)[chain, column]
        if uniforms is None:
            token, forward, back = current, *[q.log_back(own, current, current)] * 2
        else:
            token, forward, back = q.draw(own, current, uniforms[chain])
        term = token_energy(logits[each, place], token, target.energy)
        return torch.stack([column, token, forward, back, term], 1)

    found = target.runner(target.sequences(shown), rows, reduce).numpy().T
    return [found[0].astype(int), found[1].astype(int), *found[2:]]


def shift(
    state: ChainState,
    block: StepBlock,
    target: Target,
    proposal: BlockProposal,
    temperature: float | Tensor = 1.0,
    delayed_acceptance: int | None = None,
) -> tuple[ChainState, StepInfo]:
    """Deletes a token and inserts another at another place; those between move by one.

    Both places are uniform; the token is the model's own. With delayed acceptance the first stage decides on the
    tokens that have a new neighbour, whatever the radius.
    """
    ids, free = state.ids.numpy(), target.free.numpy()
    count, every = free.sum(1), np.arange(len(ids))[:, None]
    visited = (block.size.numpy() > 0) & (count > 1)
    if not visited.any():
        nothing = torch.zeros(len(ids), dtype=torch.bool)
        return state, StepInfo(nothing, nothing.long(), nothing)
    columns = np.argsort(~free, axis=1, kind="stable")  # the free ones first, from left to right
    drawn = block.fill[:, 0].numpy() * count
    from_, drawn = drawn.astype(int)[:, None], drawn % 1 * (count - 1)
    to = drawn.astype(int)[:, None]
    to, uniform = to + (to >= from_), torch.from_numpy(drawn % 1)
    place = np.arange(free.shape[1])
    origin = place + ((from_ <= place) & (place < to)) - ((to < place) & (place <= from_))
    origin = np.where(place == to, from_, origin)
    origins = np.empty_like(columns)
    origins[every, columns] = columns[every, origin]
    shifted = torch.from_numpy(ids[every, origins])
    out, into = columns[every, from_], columns[every, to]

    def row(of: Tensor, at: NDArray, token: Tensor | None) -> NDArray:
        """(3, C) a token, that given or one drawn, at columns (C, 1): itself, its log probability, its term."""
        source = torch.from_numpy(visited.nonzero()[0])
        rows = MaskedRows(source, *[torch.from_numpy(at)[source]] * 2)

        def reduce(logits: Tensor, n: Index) -> Tensor:
            of_row, logits = rows.source[n], logits[:, 0]
            forbidden = target.forbidden(rows, n, logits.device)
            own = proposal.distribution.log_probabilities(logits, lambda: target.shown(of, rows.some(n)), forbidden)
            if token is None:
                new, log, _ = proposal.distribution.draw(own, state.ids[of_row, 0], uniform[of_row])
            else:
                new, log = token[of_row], proposal.distribution.log_back(own, token[of_row], token[of_row])
            return torch.stack([new, log, token_energy(logits, new, target.energy)], 1)

        found = np.zeros((3, len(ids)))
        found[:, visited] = target.runner(target.sequences(of), rows, reduce).numpy().T
        return found

    # The way back deletes what was inserted: its row is one of the state itself.
    _, log_reverse, _ = row(state.ids, out, torch.from_numpy(ids[every, out][:, 0]))
    token, log_forward, term = row(shifted, into, None)
    new = shifted.numpy().copy()
    new[every, into] = token.astype(int)[:, None]
    new = np.where(visited[:, None], new, ids)
    known, terms = np.zeros(ids.shape, dtype=bool), np.zeros(ids.shape)
    known[every, into], terms[every, into] = visited[:, None], term[:, None]
    proposed = Proposed(*map(torch.from_numpy, (new, log_forward, log_reverse, known, terms)))
    # Terms of a token are compared where it stands now and where it stood.
    moved = state._replace(token_energies=torch.from_numpy(state.token_energies.numpy()[every, origins]))
    beside = np.where(from_ < to, from_ - 1, from_ + 1)
    near = np.concatenate([from_, beside, to - 1, to, to + 1], 1).clip(0, count[:, None] - 1)
    given = block._replace(positions=torch.from_numpy(columns[every, near]), size=torch.from_numpy(visited.astype(int)))
    window = None if delayed_acceptance is None else 0
    after, info = metropolis_hastings(moved, given, target, lambda *_: proposed, temperature, window)
    taken = (info.tokens_changed > 0)[:, None]
    return after._replace(token_energies=torch.where(taken, after.token_energies, state.token_energies)), info


def with_shifts(
    state: ChainState,
    block: StepBlock,
    target: Target,
    proposal: BlockProposal,
    temperature: float | Tensor = 1.0,
    delayed_acceptance: int | None = None,
) -> tuple[ChainState, StepInfo]:
    """A mixture by weight: `shift` in a share of the steps, `metropolis_hastings` in the others, by a step's number."""
    number = block.fill[:, 0]
    shifts = number < SHARE
    fill = block.fill.clone()
    fill[:, 0] = torch.where(shifts, number / SHARE, (number - SHARE) / (1 - SHARE))
    infos = []
    for step, which in ((shift, shifts), (metropolis_hastings, ~shifts)):
        own = block._replace(fill=fill, size=block.size * which)
        state, info = step(state, own, target, proposal, temperature, delayed_acceptance)
        infos.append(info)
    return state, StepInfo(*(one + other for one, other in zip(*infos, strict=True)))


def register() -> None:
    """Puts the moves into the library's tables, and samplers with them into those of the benchmark."""
    FILLS["by_confidence"] = Fill(by_confidence, "fills the position of the least entropy first", True)
    KERNELS["with_shifts"] = Kernel(
        with_shifts, "shifts at times", True, ("delayed_acceptance",), KERNELS["metropolis_hastings"].reads
    )
    pairs = {"block_size": 2, "block_fill": "sequential", "block_layout": "contiguous", "delayed_acceptance": 1}
    SAMPLERS["1 and 2"] = chains(**pairs | {"block_size": [1, 2]})
    SAMPLERS["2 and 3"] = chains(**pairs | {"block_size": [2, 3]})
    SAMPLERS["pairs, by confidence"] = chains(**pairs | {"block_fill": "by_confidence"})
    SAMPLERS["pairs and shifts"] = chains(kernel="with_shifts", **pairs)
    SAMPLERS["1 and 2 by confidence, and shifts"] = chains(
        kernel="with_shifts", **pairs | {"block_size": [1, 2], "block_fill": "by_confidence"}
    )


if __name__ == "__main__":
    register()
    mixing.main()
