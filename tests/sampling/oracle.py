"""Exact distributions of tiny energy models, and how far a sample may be from them."""

import numpy as np
import torch

from hf_ebm.exact import ExactDistribution, enumerate_distribution
from tests.conftest import plain_token_energies


def exact_target(model, words, length, template=None, temperature=1.0, extra=None) -> ExactDistribution:
    """The target over the free positions, from energies computed one masked position at a time.

    Args:
        template: ids with -1 at free positions; by default cls, `length` free positions, sep.
        extra: function of full sequences (n, T) → energies (n,) to add.
    """
    template = torch.tensor(template if template is not None else [1, *[-1] * length, 2])
    free = (template == -1).nonzero()[:, 0].tolist()

    def energy(words_at_free: torch.Tensor) -> torch.Tensor:
        full = template.repeat(len(words_at_free), 1)
        full[:, free] = words_at_free
        total = torch.tensor([sum(plain_token_energies(model, ids, free)) for ids in full], dtype=torch.float64)
        return total if extra is None else total + extra(full)

    return enumerate_distribution(energy, words, length, temperature=temperature)


def total_variation_limit(probabilities: torch.Tensor, count: int) -> float:
    """What the total variation of `count` exact draws stays below, 999 times of 1000 (by simulation)."""
    expected = probabilities.double().numpy()
    counts = np.random.default_rng(1).multinomial(count, expected / expected.sum(), size=1000)
    return 1.05 * float(np.quantile(np.abs(counts / count - expected).sum(1) / 2, 0.999))
