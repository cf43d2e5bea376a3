"""Losses of tokens given the logits of every step: cross entropy and self-normalization."""

from __future__ import annotations

from typing import NamedTuple

import torch

IGNORED = -100


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float32 if it is of half precision, itself otherwise."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """Cross entropy in nats, summed over tokens: logits (B, T, V), labels (B, T) with -100 where ignored -> ().

    Of `smoothing` ε the target is `(1 - ε)` times the label plus `ε` times the uniform distribution over all V ids.
    """
    return torch.nn.functional.cross_entropy(
        at_least_float32(logits).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum",
        label_smoothing=smoothing,
    )  # fmt: skip


def num_tokens(labels: torch.Tensor) -> torch.Tensor:
    """How many labels aren't -100, ()."""
    return (labels != IGNORED).sum()


class LogNormalizers(NamedTuple):
    """Sums over the scored tokens, from which mean and variance follow."""

    sum: torch.Tensor  # ()
    sum_of_squares: torch.Tensor  # ()


def log_normalizers(logits: torch.Tensor, labels: torch.Tensor) -> LogNormalizers:
    """Sums of the local log normalizer `log Z = logsumexp(logits)` and of its square, where labels aren't -100.

    `cross entropy + lambda * (log Z)^2`, summed over tokens, is the self-normalized objective (Goyal, Dyer and
    Berg-Kirkpatrick 2019, section 3.2.1): it makes unnormalized scores comparable with log-probabilities.
    """
    log_z = at_least_float32(logits).logsumexp(-1).masked_fill(labels == IGNORED, 0)
    return LogNormalizers(log_z.sum(), log_z.square().sum())
