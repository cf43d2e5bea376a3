"""Likelihoods of an energy over a space that is enumerated, with their gradients (thesis sections 6.2.1 and 6.2.2).

Energies of all sequences are one tensor of shape (V,) * T: an axis for each position. Sequences (B, T) hold indices
into the V tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def energies_from_contexts(tables: Sequence[Tensor]) -> Tensor:
    """Energies of all sequences, (V,) * T, from the scores of each position's tokens in all its contexts.

    A position's scores don't depend on its own token, so T V^(T-1) rows of them give the energies of V^T sequences.

    Args:
        tables: T tensors (V^(T-1), V) of logits (raw energy) or log probabilities (local energy) of the tokens,
            contexts in lexicographic order of the other positions.
    """
    length, size = len(tables), tables[0].shape[-1]
    terms = (table.view((size,) * length).movedim(-1, t) for t, table in enumerate(tables))
    return -sum(terms, start=tables[0].new_zeros(()))


def log_partition(energies: Tensor) -> Tensor:
    """log Z, a scalar."""
    return (-energies.flatten()).logsumexp(0)


def negative_log_likelihoods(energies: Tensor, sequences: Tensor) -> Tensor:
    """Exact `-log p(y)` in nats, (B,)."""
    return energies[tuple(sequences.T)] + log_partition(energies)


def conditional_log_probs(energies: Tensor, sequences: Tensor) -> Tensor:
    """Exact `log p(y_t = w | the other tokens)` at each position, (B, T, V)."""
    found = []
    for t in range(sequences.shape[1]):
        others = energies.movedim(t, -1)[tuple([*sequences.T[:t], *sequences.T[t + 1 :]])]
        found.append(-others.expand(len(sequences), -1))  # with a single position there are no others to choose by
    return torch.stack(found, 1).log_softmax(-1)


def negative_pseudolikelihoods(conditionals: Tensor, sequences: Tensor) -> Tensor:
    """`-Σ_t log p(y_t | the other tokens)` of log conditionals (B, T, V), in nats, (B,)."""
    return -conditionals.gather(-1, sequences[..., None])[..., 0].sum(1)


def projection_divergences(teacher: Tensor, conditionals: Tensor) -> Tensor:
    """`Σ_t KL(teacher_t ‖ p(· | the other tokens))` of log probabilities (B, T, V) each, in nats, (B,)."""
    return (teacher.exp() * (teacher - conditionals)).sum((1, 2))
