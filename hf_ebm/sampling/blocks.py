"""Which positions a chain updates together, and in which order, during one epoch.

An epoch visits every free position of a chain exactly once. Blocks are chosen from random numbers alone, never from
tokens: that is what makes the same block's reverse move available.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class EpochBlocks(NamedTuple):
    """Blocks of one epoch for C chains, on the model's device.

    Attributes:
        positions: (S, C, b) columns updated in step s, in the order in which they are filled; short blocks repeat
            their last column.
        size: (S, C) how many of them count; 0 where a chain has no step s.
    """

    positions: Tensor
    size: Tensor


def chain_blocks(
    free: np.ndarray, block_size: int, layout: str, order: str, uniforms: np.ndarray, offset: float
) -> list[np.ndarray]:
    """Blocks of one chain for one epoch.

    Args:
        free: the chain's free columns in ascending order, (n,).
        layout: `"contiguous"`: runs of neighbouring free positions; with random order, where the first run ends is
            drawn anew each epoch. `"scattered"`: with random order a random subset, with sequential order every m-th
            free position, m the number of blocks.
        order: `"sequential"` visits blocks from left to right, `"random"` in random order.
        uniforms: (2, n) numbers in [0, 1) for the order of the blocks and the order of filling within them.
        offset: number in [0, 1) for where the first contiguous run ends.
    """
    n = len(free)
    if layout == "contiguous":
        first = int(offset * block_size) + 1 if order == "random" else block_size
        cuts = list(range(first, n, block_size))
        blocks = [part for part in np.split(np.arange(n), cuts) if len(part)]
        if order == "random":
            blocks = [blocks[i] for i in np.argsort(uniforms[0, : len(blocks)], kind="stable")]
    elif order == "random":
        permuted = np.argsort(uniforms[0], kind="stable")
        blocks = [permuted[i : i + block_size] for i in range(0, n, block_size)]
    else:
        count = -(-n // block_size)
        blocks = [np.arange(i, n, count) for i in range(count)]
    # The filling order within a block is random whatever the order of the blocks.
    return [free[block[np.argsort(uniforms[1, block], kind="stable")]] for block in blocks]


def stack_blocks(per_chain: list[list[np.ndarray]], device: torch.device) -> EpochBlocks:
    """Pads the blocks of all chains to one array."""
    steps = max(map(len, per_chain))
    width = max((len(block) for blocks in per_chain for block in blocks), default=1)
    positions = np.zeros((steps, len(per_chain), width), dtype=np.int64)
    size = np.zeros((steps, len(per_chain)), dtype=np.int64)
    for chain, blocks in enumerate(per_chain):
        for step, block in enumerate(blocks):
            positions[step, chain, : len(block)] = block
            positions[step, chain, len(block) :] = block[-1]
            size[step, chain] = len(block)
    return EpochBlocks(torch.from_numpy(positions).to(device), torch.from_numpy(size).to(device))
