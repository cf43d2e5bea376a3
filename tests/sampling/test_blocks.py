"""Blocks and random numbers of all chains at once against one chain and one block at a time."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_ebm.sampling.sampler import EPOCH, ChainKey, chain_generator, epoch_steps

SETTINGS = list(itertools.product(["contiguous", "scattered"], ["random", "sequential"]))


def plain_blocks(n: int, size: int, layout: str, order: str, uniforms: np.ndarray, offset: float) -> list[list[int]]:
    """Blocks of one chain, as numbers of its free positions."""
    size = min(size, n)
    if layout == "contiguous":
        blocks = [[] for _ in range(n + 1)]
        first = int(offset * size) + 1 if order == "random" else size
        for place in range(n):
            blocks[0 if place < first else 1 + (place - first) // size].append(place)
        blocks = [block for block in blocks if block]
        if order == "random":
            blocks = [block for _, block in sorted(zip(uniforms[0], blocks, strict=False))]
    elif order == "random":
        shuffled = sorted(range(n), key=lambda place: uniforms[0][place])
        blocks = [shuffled[start : start + size] for start in range(0, n, size)]
    else:
        blocks = [list(range(start, n, -(-n // size))) for start in range(-(-n // size))]
    return [sorted(block, key=lambda place: uniforms[1][place]) for block in blocks]


def plain_steps(free: list[bool], key: ChainKey, seed: int, size: int, epoch: int, layout: str, order: str):
    """Of one chain: for each step its columns, its numbers for tokens and its two for acceptance."""
    columns = [column for column, is_free in enumerate(free) if is_free]
    draws = chain_generator(seed, *key, EPOCH, epoch).random(5 * len(columns) + 1)
    own = draws[:-1].reshape(5, len(columns))
    visited = 0
    for step, block in enumerate(plain_blocks(len(columns), size, layout, order, own[:2], draws[-1])):
        yield [columns[place] for place in block], own[2, visited : visited + len(block)], own[3:, step]
        visited += len(block)


@pytest.mark.parametrize(("layout", "order"), SETTINGS)
def test_chains_at_once_against_one_at_a_time(layout, order):
    draw = np.random.default_rng(0)
    config, seen = SimpleNamespace(seed=7, block_layout=layout, order=order), 0
    for epoch in range(60):
        chains, columns, size = draw.integers(1, 7), draw.integers(1, 14), int(draw.integers(1, 8))
        free = draw.random((chains, columns)) < draw.choice([0.2, 0.6, 1.0])
        free[np.arange(chains), draw.integers(0, columns, chains)] = True
        keys = [ChainKey(int(draw.integers(0, 3)), chain) for chain in range(chains)]
        steps = epoch_steps(torch.from_numpy(free), keys, config, size, epoch)
        rows = zip(free.tolist(), keys, strict=True)
        plain = [list(plain_steps(row, key, 7, size, epoch, layout, order)) for row, key in rows]
        assert len(steps) == max(map(len, plain))
        for (step, block), (chain, own) in itertools.product(enumerate(steps), enumerate(plain)):
            count = int(block.size[chain])
            if step >= len(own):
                assert count == 0 and not block.fill[chain].any() and not block.accept[chain].any()
                continue
            expected, fill, accept = own[step]
            assert block.positions[chain].tolist() == expected + expected[-1:] * (len(block.positions[chain]) - count)
            assert block.fill[chain].tolist() == [*fill, *[0.0] * (len(block.fill[chain]) - count)]
            assert block.accept[chain].tolist() == accept.tolist()
            seen += 1
    assert seen > 300


@pytest.mark.parametrize(("layout", "order"), SETTINGS)
def test_what_the_layouts_and_orders_say(layout, order):
    config, free = SimpleNamespace(seed=3, block_layout=layout, order=order), torch.ones(50, 10, dtype=torch.bool)
    steps = epoch_steps(free, [ChainKey(0, chain) for chain in range(50)], config, 3, 0)
    blocks = [
        [sorted(block.positions[chain, : block.size[chain]].tolist()) for block in steps if block.size[chain]]
        for chain in range(50)
    ]
    assert all(sorted(itertools.chain(*own)) == list(range(10)) for own in blocks)
    unbroken = [all(block[-1] - block[0] == len(block) - 1 for block in own) for own in blocks]
    assert all(unbroken) if layout == "contiguous" else not any(unbroken)
    if order == "sequential":
        runs, every_fourth = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]], [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
        assert blocks == [runs if layout == "contiguous" else every_fourth] * 50
    else:
        assert len({str(own) for own in blocks}) > 10
        assert {own[0][0] for own in blocks} > {0, 1, 2}
    filled = {str([block.positions[chain].tolist() for block in steps]) for chain in range(50)}
    assert len(filled) > 10
