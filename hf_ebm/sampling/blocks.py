"""Which positions a chain updates together, and in which order, during one epoch.

An epoch visits every free position of a chain exactly once. Blocks are chosen from random numbers alone, never from
tokens: that is what makes the same block's reverse move available.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Visits:
    """The F free positions of C chains before they are put into blocks: a chain's own stand together, left to right.

    Attributes:
        chain: (F,) whose position it is.
        place: (F,) its number among that chain's, from 0.
        count: (C,) how many a chain has, at least one.
        width: (C,) the most that a block may hold.
        uniforms: (F,) numbers in [0, 1).
        offsets: (C,) one more a chain.
    """

    chain: np.ndarray
    place: np.ndarray
    count: np.ndarray
    width: np.ndarray
    uniforms: np.ndarray
    offsets: np.ndarray

    def ranks(self, values: np.ndarray) -> np.ndarray:
        """(F,) the rank of each value among its chain's, from 0."""
        found = np.empty_like(self.chain)
        found[np.lexsort((values, self.chain))] = self.place
        return found

    def ordered(self, blocks: np.ndarray, order: Order) -> np.ndarray:
        """(F,) the step at which each of these blocks is visited: (F,) numbers, from 0 and without gaps in a chain."""
        start = self.count.cumsum() - self.count
        last = np.maximum.reduceat(blocks, start)[self.chain]
        values = np.where(self.place <= last, order.key(self.place, self.uniforms), np.inf)
        return self.ranks(values)[start[self.chain] + blocks]


class Order(NamedTuple):
    """An order in which blocks are visited.

    Attributes:
        key: `(numbers (F,) of blocks from the left, uniforms (F,)) -> (F,)`, what they are sorted by.
        about: what it does, for help texts.
        is_random: whether layouts draw blocks anew for each epoch.
    """

    key: Callable[[np.ndarray, np.ndarray], np.ndarray]
    about: str
    is_random: bool


class Layout(NamedTuple):
    """A way to put a chain's free positions into blocks.

    Attributes:
        steps: `(visits, order) -> (F,)`, the step that updates each position, from 0.
        about: what it does, for help texts.
    """

    steps: Callable[[Visits, Order], np.ndarray]
    about: str


def scattered(visits: Visits, order: Order) -> np.ndarray:
    """Random subsets, or every m-th free position, m the number of blocks."""
    width = visits.width[visits.chain]
    if order.is_random:
        return visits.ranks(visits.uniforms) // width
    return visits.ordered(visits.place % -(-visits.count[visits.chain] // width), order)


def contiguous(visits: Visits, order: Order) -> np.ndarray:
    """Runs of neighbouring free positions. Where blocks are random, the end of the first run is drawn."""
    first = (visits.offsets * visits.width).astype(np.int64) + 1 if order.is_random else visits.width
    # Floor division: what lies before the end of the first run is in run 0.
    return visits.ordered((visits.place - first[visits.chain]) // visits.width[visits.chain] + 1, order)


# Every layout and every order there is, the default first. An entry is all that a new one needs.
LAYOUTS: dict[str, Layout] = {
    "scattered": Layout(
        scattered, "takes them from all over: at random, or with sequential order every m-th of m blocks"
    ),
    "contiguous": Layout(contiguous, "takes neighbours"),
}
ORDERS: dict[str, Order] = {
    "random": Order(lambda numbers, uniforms: uniforms, "draws it for each epoch", is_random=True),
    "sequential": Order(lambda numbers, uniforms: numbers, "goes from left to right", is_random=False),
}


def epoch_blocks(
    free: np.ndarray, block_size: int, layout: Layout, order: Order, uniforms: np.ndarray, offsets: np.ndarray
) -> EpochBlocks:
    """Blocks of all chains for one epoch. A chain's blocks depend on its own row and numbers alone.

    Args:
        free: (C, T) bool, which columns are free: n of a chain, at least one; F of all.
        block_size: at least 1; a chain with fewer free positions has one block of them all.
        layout, order: how positions make blocks, and how blocks follow each other.
        uniforms: (2, F) numbers in [0, 1) for the blocks and for the order of filling within them, n of each chain
            after those of the chain before.
        offsets: (C,) numbers in [0, 1) for where the first contiguous run ends.
    """
    chain, column = free.nonzero()
    count = free.sum(1)
    place = np.arange(len(chain)) - (count.cumsum() - count)[chain]
    visits = Visits(chain, place, count, np.minimum(block_size, count), uniforms[0], offsets)
    step = layout.steps(visits, order)
    # The filling order within a block is random whatever the order of the blocks.
    return _stacked(chain, step, column[np.lexsort((uniforms[1], step, chain))], len(free))


def _stacked(chain: np.ndarray, step: np.ndarray, columns: np.ndarray, chains: int) -> EpochBlocks:
    """Blocks padded to one array, from each position's chain and step and the columns in the order of their visits."""
    steps = int(step.max()) + 1
    size = np.bincount(chain * steps + step, minlength=chains * steps).reshape(chains, steps)
    start = (size.cumsum() - size.ravel()).reshape(chains, steps)
    within = np.minimum(np.arange(size.max()), np.maximum(size - 1, 0)[..., None])
    visit = np.where(size > 0, start, 0)[..., None] + within
    positions = np.where(size[..., None] > 0, columns[visit], 0)
    return EpochBlocks(*(np.ascontiguousarray(part.swapaxes(0, 1)) for part in (positions, size, visit)))
