"""Random streams of chains.

Every chain has its own counter-based (Philox) streams, keyed by seed, prompt, chain, purpose and epoch. A chain's draws
therefore depend neither on the chains run beside it, nor on the batch, the process or a restart.
"""

from __future__ import annotations

import numpy as np

# What a stream is for; part of its key, so that no two uses share numbers.
EPOCH, WARM_START, LENGTH = 0, 1, 2


def chain_generator(seed: int, prompt: int, chain: int, purpose: int, epoch: int = 0) -> np.random.Generator:
    """The generator of one chain for one purpose in one epoch."""
    key = np.random.SeedSequence(entropy=seed, spawn_key=(prompt, chain, purpose, epoch))
    return np.random.Generator(np.random.Philox(key))
