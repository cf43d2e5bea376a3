"""Estimates from energies of a language model's own samples: log Z, weights, effective sample size.

Z is the mean of `exp(-E(x))` over samples of the language model (Deng et al. 2020, section 3.2). Everything is computed
in log space and float64, along the last dimension.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class LogPartitionBounds(NamedTuple):
    """Two estimates of log Z in nats, float64, of the leading shape of the energies.

    In expectation, and for enough samples, `lower <= log Z <= upper`; a single pair need not enclose it.
    """

    lower: Tensor
    upper: Tensor


def log_partition_bounds(energies: Tensor) -> LogPartitionBounds:
    """`T_n` and `(2n - 1) T_n - 2 (n - 1) T̄_{n-1}`, with `T_n = log mean exp(-E)` and T̄ its leave-one-out mean.

    Deng et al. 2020, theorem 2 (which prints Z for log Z); Nowozin 2018. `lower` is never above `upper`. An energy of
    infinity is a sample of weight 0.

    Args:
        energies: (…, n) energies of samples, n >= 2.

    Raises:
        ValueError: for fewer than two samples, and for NaN or minus infinity.

    Example:
        >>> bounds = log_partition_bounds(torch.tensor([0.0, 1.0, 0.5]))
        >>> bool(bounds.lower < bounds.upper)
        True
        >>> log_partition_bounds(torch.zeros(4)).lower  # all energies 0: log Z is 0
        tensor(0., dtype=torch.float64)
    """
    check_energies(energies)
    count = energies.shape[-1]
    if count < 2:
        raise ValueError(f"energies: the bounds need at least 2 samples, got {count}")
    log_weights = -energies.double()
    total = log_weights.logsumexp(-1, keepdim=True)
    lower = total[..., 0] - math.log(count)
    # total - log of the sum of the others is -log1p(-share), which is inaccurate for the one sample that can have
    # more than half of the weight; for that one the others are summed.
    shares = (log_weights - total).exp()
    largest = log_weights.argmax(-1, keepdim=True)
    others = log_weights.scatter(-1, largest, -math.inf).logsumexp(-1, keepdim=True)
    gaps = -torch.log1p(-shares.scatter(-1, largest, 0.0))
    gaps = gaps.scatter(-1, largest, total - others)
    upper = lower + 2 * (count - 1) * (gaps.mean(-1) + math.log1p(-1 / count))
    nothing = lower == -math.inf
    return LogPartitionBounds(lower, torch.where(nothing, lower, torch.maximum(upper, lower)))


def log_importance_weights(energies: Tensor) -> Tensor:
    """Normalized log weights `log softmax(-E)` of samples, (…, n) float64.

    Raises:
        ValueError: for NaN or minus infinity, and for rows that are all infinite.

    Example:
        >>> log_importance_weights(torch.tensor([0.0, torch.inf])).exp()
        tensor([1., 0.], dtype=torch.float64)
    """
    check_energies(energies)
    if bool(energies.isinf().all(-1).any()):
        raise ValueError("energies: all samples of a row have infinite energy, so none can be chosen")
    return (-energies.double()).log_softmax(-1)


def effective_sample_size(log_weights: Tensor) -> Tensor:
    """`(Σ w)² / Σ w²` of log weights (…, n), from 1 to n.

    Example:
        >>> effective_sample_size(torch.tensor([[0.0, 0.0], [0.0, -torch.inf]]))
        tensor([2., 1.])
    """
    return (2 * log_weights.logsumexp(-1) - (2 * log_weights).logsumexp(-1)).exp()


def check_energies(energies: Tensor) -> None:
    """Raises `ValueError` for NaN or minus infinity among energies, naming the place of the first.

    Example:
        >>> check_energies(torch.tensor([0.0, torch.nan]))
        Traceback (most recent call last):
            ...
        ValueError: energies: row 1 has the energy nan
    """
    wrong = energies.isnan() | (energies == -math.inf)
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        value = float(energies[tuple(place)])
        raise ValueError(f"energies: row {', '.join(map(str, place))} has the energy {value}")
