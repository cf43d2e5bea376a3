"""Which positions a chain updates together, and in which order, during one epoch.

An epoch visits every free position of a chain exactly once. Blocks are chosen from random numbers alone, never from
tokens: that is what makes the same block's reverse move available.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class EpochBlocks(NamedTuple):
    """Blocks of one epoch for C chains with F free positions in all.

    Attributes:
        positions: (S, C, b) columns updated in step s, in the order in which they are filled; short blocks repeat
            their last column.
        size: (S, C) how many of them count; 0 where a chain has no step s.
        visit: (S, C, b) which of the F visits each is: a chain's own are numbered in order, chains one after another.
    """

    positions: np.ndarray
    size: np.ndarray
    visit: np.ndarray


def epoch_blocks(
    free: np.ndarray, block_size: int, layout: str, order: str, uniforms: np.ndarray, offsets: np.ndarray
) -> EpochBlocks:
    """Blocks of all chains for one epoch. A chain's blocks depend on its own row and numbers alone.

    Args:
        free: (C, T) bool, which columns are free: n of a chain, at least one; F of all.
        block_size: at least 1; a chain with fewer free positions has one block of them all.
        layout: `"contiguous"`: runs of neighbouring free positions; with random order, where the first run ends is
            drawn anew each epoch. `"scattered"`: with random order a random subset, with sequential order every m-th
            free position, m the number of blocks.
        order: `"sequential"` visits blocks from left to right, `"random"` in random order.
        uniforms: (2, F) numbers in [0, 1) for the order of the blocks and the order of filling within them, n of each
            chain after those of the chain before.
        offsets: (C,) numbers in [0, 1) for where the first contiguous run ends.
    """
    chain, column = free.nonzero()
    counts = free.sum(1)
    before = counts.cumsum() - counts
    width = np.minimum(block_size, counts)
    place = np.arange(len(chain)) - before[chain]
    if layout == "contiguous":
        first = (offsets * width).astype(np.int64) + 1 if order == "random" else width
        # Floor division: what lies before the end of the first run is in run 0.
        step = (place - first[chain]) // width[chain] + 1
        if order == "random":
            runs = step[before + counts - 1] + 1
            drawn = np.where(place < runs[chain], uniforms[0], np.inf)
            step = _ranks(chain, before, drawn)[before[chain] + step]
    elif order == "random":
        step = _ranks(chain, before, uniforms[0]) // width[chain]
    else:
        step = place % -(-counts // width)[chain]
    # The filling order within a block is random whatever the order of the blocks.
    visits = np.lexsort((uniforms[1], step, chain))
    return _stacked(chain, step, column[visits], len(free))


def _ranks(chain: np.ndarray, before: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The rank of each value among its chain's, from 0; (F,)."""
    ranks = np.empty_like(chain)
    ranks[np.lexsort((values, chain))] = np.arange(len(chain)) - before[chain]
    return ranks


def _stacked(chain: np.ndarray, step: np.ndarray, columns: np.ndarray, chains: int) -> EpochBlocks:
    """Blocks padded to one array, from each position's chain and step and the columns in the order of their visits."""
    steps = int(step.max()) + 1
    size = np.bincount(chain * steps + step, minlength=chains * steps).reshape(chains, steps)
    start = (size.cumsum() - size.ravel()).reshape(chains, steps)
    within = np.minimum(np.arange(size.max()), np.maximum(size - 1, 0)[..., None])
    visit = np.where(size > 0, start, 0)[..., None] + within
    positions = np.where(size[..., None] > 0, columns[visit], 0)
    return EpochBlocks(*(np.ascontiguousarray(part.swapaxes(0, 1)) for part in (positions, size, visit)))
