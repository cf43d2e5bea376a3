"""Numbers of many generators at once are those of NumPy's own, one generator at a time."""

import numpy as np
import pytest

from hf_ebm.random_state import uniforms_of

KEYS = [(0, 0), (0, 1), (3, 2**31), (2**32 - 1, 5)]


def of_numpy(seed, key, count):
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=key))).random(count)


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**64 + 3, 2**127 + 9, 2**150 + 11])
@pytest.mark.parametrize("count", [1, 4, 61])
@pytest.mark.parametrize("further", [(0, 0), (0, 999), (1, 3)])
def test_numbers_are_those_of_each_generator(seed, count, further):
    keys = [(*key, *further) for key in KEYS]
    expected = np.stack([of_numpy(seed, key, count) for key in keys])
    np.testing.assert_array_equal(uniforms_of(seed, np.array(keys), count), expected)


def test_keys_of_more_than_32_bits():
    keys = [(2**40, 1, 0, 0), (5, 2**62, 0, 3)]
    expected = np.stack([of_numpy(9, key, 7) for key in keys])
    np.testing.assert_array_equal(uniforms_of(9, np.array(keys), 7), expected)
