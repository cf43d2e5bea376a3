"""Seeds of random streams, and the global random state, which dropout and Transformers' `generate` draw from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from numpy.typing import NDArray


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """The state of the CPU and of a device started from a seed inside; afterwards it is as it was.

    Example:
        >>> with seeded(0, torch.device("cpu")):
        ...     first = torch.rand(1)
        >>> with seeded(0, torch.device("cpu")):
        ...     torch.equal(torch.rand(1), first)
        True
    """
    with random_state_kept(device):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed all other devices, too
        if device.type != "cpu":
            started = torch.Generator(device).manual_seed(seed).get_state()
            torch.get_device_module(device).set_rng_state(started, device)
        yield


def random_state_kept(device: torch.device) -> AbstractContextManager[None]:
    """Whatever is drawn inside on the CPU and on a device, afterwards their state is as it was."""
    return torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)


def generator_of(seed: int, *key: int) -> np.random.Generator:
    """A counter-based (Philox) generator for one use of a run's seed: no two keys share numbers.

    Example:
        >>> first, second = generator_of(7, 0).random(), generator_of(7, 1).random()
        >>> first == generator_of(7, 0).random(), first == second
        (True, False)
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy=seed, spawn_key=key)))


def uniforms_of(seed: int, keys: NDArray, count: int) -> NDArray:
    """The first `count` numbers in [0, 1) of many generators, one computation for all.

    Row i is `generator_of(seed, *keys[i]).random(count)`: its Philox key is mixed as NumPy's `SeedSequence` does
    (O'Neill 2014), and its numbers are Philox 4x64 (Salmon et al. 2011) of the counters from 1 on.

    Args:
        keys: (n, k) whole numbers from 0 up.

    Returns:
        (n, count), float64.

    Example:
        >>> keys = np.array([[0, 1], [0, 2]])
        >>> bool((uniforms_of(7, keys, 5)[1] == generator_of(7, 0, 2).random(5)).all())
        True
    """
    if keys.max() > _WORD:  # SeedSequence then takes two words for it
        return np.stack([generator_of(seed, *map(int, key)).random(count) for key in keys])
    entropy = [seed >> shift & _WORD for shift in range(0, max(seed.bit_length(), 128), 32)]
    counters = np.arange(1, -(-count // 4) + 1, dtype=np.uint64)
    words = _philox(counters, _philox_keys([*entropy, *keys.T.astype(np.uint64)]))
    return (words.reshape(len(keys), -1)[:, :count] >> np.uint64(11)) * 2.0**-53


_WORD = 0xFFFFFFFF
_PRODUCTS = np.array([0xD2E7470EE14C6C93, 0xCA5A826395121157], dtype=np.uint64)[:, None, None]
_KEY_STEPS = np.array([0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B], dtype=np.uint64)[:, None]


def _philox_keys(entropy: list) -> NDArray:
    """Both words of n keys, (2, n), from words of 32 bits: whole numbers, four at least, or one of each key (n,)."""

    def hashes(constant: int, factor: int) -> Callable:
        """A hash of words whose constant changes with every use."""

        def hashed(word: int | NDArray) -> int | NDArray:
            nonlocal constant
            word = word ^ constant
            constant = constant * factor & _WORD
            word = word * constant & _WORD
            return word ^ word >> 16

        return hashed

    def mixed(one: int | NDArray, other: int | NDArray) -> int | NDArray:
        word = (one * 0xCA01F9DD - other * 0x4973F715) & _WORD
        return word ^ word >> 16

    hashed = hashes(0x43B0D7E5, 0x931E8875)
    pool = [hashed(word) for word in entropy[:4]]
    for source in range(4):
        for target in range(4):
            if source != target:
                pool[target] = mixed(pool[target], hashed(pool[source]))
    for word in entropy[4:]:
        pool = [mixed(own, hashed(word)) for own in pool]
    hashed = hashes(0x8B51F9DD, 0x58F38DED)
    words = [hashed(word) for word in pool]
    return np.stack([words[0] | words[1] << 32, words[2] | words[3] << 32])


def _philox(counters: NDArray, keys: NDArray) -> NDArray:
    """Ten rounds of Philox 4x64 of counters (m,) below 2^64 under keys (2, n): (n, m, 4) words of 64 bits."""
    even = np.zeros((2, keys.shape[1], len(counters)), dtype=np.uint64)
    even[0], odd = counters, np.zeros_like(even)
    for _ in range(10):
        high, low = _product(even, _PRODUCTS)
        even, odd = high[::-1] ^ odd ^ keys[..., None], low[::-1]
        keys = keys + _KEY_STEPS
    return np.stack([even[0], odd[0], even[1], odd[1]], axis=-1)


def _product(one: NDArray, other: NDArray) -> tuple[NDArray, NDArray]:
    """The upper and lower 64 bits of a product."""
    high, low, other_high, other_low = one >> 32, one & _WORD, other >> 32, other & _WORD
    middle = high * other_low + (low * other_low >> 32)
    crossed = low * other_high + (middle & _WORD)
    return high * other_high + (middle >> 32) + (crossed >> 32), one * other


def batch_seed(seed: int, *key: int) -> int:
    """A seed for one batch of a training run, by Python's hash of whole numbers, which is the same in every process."""
    return hash((seed, *key)) % 2**63


def stream_seed(seed: int, *key: int) -> int:
    """A seed for one use of a run's seed.

    Example:
        >>> stream_seed(7, 0) == stream_seed(7, 0), stream_seed(7, 0) == stream_seed(7, 1)
        (True, False)
    """
    return int(np.random.SeedSequence([seed, *(number + 1 for number in key)]).generate_state(1, np.uint64)[0]) >> 1
