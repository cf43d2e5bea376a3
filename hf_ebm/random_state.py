"""Seeds of random streams, and the global random state, which dropout and Transformers' `generate` draw from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """The state started from a seed inside; afterwards it is as it was."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        if device.type == "cpu":  # for accelerators that aren't in use yet PyTorch would keep a stack trace each time
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        yield


def generator_of(seed: int, *key: int) -> np.random.Generator:
    """A counter-based (Philox) generator for one use of a run's seed: no two keys share numbers."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy=seed, spawn_key=key)))


def batch_seed(seed: int, *key: int) -> int:
    """A seed for one batch of a training run, by Python's hash of whole numbers, which is the same in every process."""
    return hash((seed, *key)) % 2**63


def stream_seed(seed: int, *key: int) -> int:
    """A seed for one use of a run's seed."""
    return int(np.random.SeedSequence([seed, *(number + 1 for number in key)]).generate_state(1, np.uint64)[0] >> 1)
