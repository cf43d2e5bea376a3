"""Exact quantities of energies over enumerable spaces: the oracle that samplers and trainers are tested against.

`ExactDistribution` is of any energy. Likelihoods with their gradients (thesis sections 6.2.1 and 6.2.2) are of the
energies of all sequences as one tensor of shape (V,) * T: an axis for each position. Sequences (B, T) hold indices into
the V tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_ebm.checks import (
    CONVERSION_ERRORS,
    as_callable,
    as_ids,
    as_number,
    as_whole,
    name_of,
    row_numbers,
    shown,
    wholes,
)
from hf_ebm.renamed import renamed_attributes
from hf_ebm.runtime import check_fits, enumeration_bytes

DEFAULT_LIMIT = 2_000_000


@dataclass(frozen=True)
class ExactDistribution:
    """`p(y) ∝ exp(-E(y)/τ)` over all sequences of given length and tokens.

    Attributes:
        sequences: (K, T) every sequence, in lexicographic order of `tokens`.
        energy: (K,) energies in nats, float64.
        log_partition: log Z, scalar float64.
        log_probabilities: (K,) float64.
        tokens: (V,) the tokens a position may hold.
    """

    sequences: Tensor
    energy: Tensor
    log_partition: Tensor
    log_probabilities: Tensor
    tokens: Tensor

    def marginals(self) -> Tensor:
        """(T, V) probability of each of `tokens` at each position, float64."""
        holds = self.sequences[..., None] == self.tokens
        return torch.einsum("k,ktv->tv", self.log_probabilities.exp(), holds.double())

    def sample(self, count: int, generator: torch.Generator | None = None) -> Tensor:
        """(count, T) independent draws."""
        count = as_whole("count", count, 1)
        if not isinstance(generator, torch.Generator | None):
            raise ValueError(f"generator must be a torch.Generator, got {shown(generator)}")
        index = torch.multinomial(self.log_probabilities.exp(), count, replacement=True, generator=generator)
        return self.sequences[index]

    def index(self, sequences: Tensor) -> Tensor:
        """(N,) number of each of `sequences` (N, T). Raises `ValueError` for others than those of the space."""
        sequences = as_ids("sequences", sequences)
        if sequences.shape[1] != self.sequences.shape[1]:
            raise ValueError(f"sequences must have {self.sequences.shape[1]} tokens, got {sequences.shape[1]}")
        place = torch.searchsorted(self.tokens, sequences.contiguous())
        place = place.clamp(max=len(self.tokens) - 1)
        if not torch.equal(self.tokens[place], sequences):
            raise ValueError("sequences: some hold tokens outside the space")
        base = len(self.tokens) ** torch.arange(sequences.shape[1] - 1, -1, -1)
        return (place * base).sum(1)

    def total_variation(self, sequences: Tensor) -> float:
        """Total-variation distance between the empirical distribution of `sequences` (N, T) and this one."""
        counts = torch.bincount(self.index(sequences), minlength=len(self.sequences))
        return float((counts / len(sequences) - self.log_probabilities.exp()).abs().sum() / 2)


def enumerate_distribution(
    energy: Callable[[Tensor], Tensor],
    tokens: Sequence[int],
    length: int,
    temperature: float = 1.0,
    chunk_size: int = 65_536,
    limit: int = DEFAULT_LIMIT,
    device: torch.device | str = "cpu",
) -> ExactDistribution:
    """Evaluates an energy on every sequence of `length` positions over `tokens`.

    Args:
        energy: token ids (n, T) on `device` → energies (n,) in nats.
        tokens: the different tokens a position may hold.
        chunk_size: sequences per call of `energy`.
        limit: the largest number of sequences that is enumerated.

    Raises:
        ValueError: if there are more than `limit` sequences; for numbers out of range, a device that
            can't be used, and energies that aren't one number for each sequence, NaN, or minus infinity.

    Example:
        >>> exact = enumerate_distribution(lambda ids: ids.sum(1).float(), tokens=[0, 1], length=2)
        >>> exact.sequences.tolist(), exact.energy.tolist()
        ([[0, 0], [0, 1], [1, 0], [1, 1]], [0.0, 1.0, 1.0, 2.0])
        >>> round(exact.log_partition.item(), 4), exact.marginals().sum(1).tolist()
        (0.6265, [1.0, 1.0])
        >>> round(exact.total_variation(torch.tensor([[0, 0], [0, 1]])), 4)
        0.3034
    """
    energy = as_callable("energy", energy)
    ids = wholes(tokens)
    if not ids:
        raise ValueError(f"tokens must be a list of one or more token ids, got {tokens!r}")
    length, chunk_size, limit = (
        as_whole(name, value, 1) for name, value in (("length", length), ("chunk_size", chunk_size), ("limit", limit))
    )
    temperature = as_number("temperature", temperature, above=0)
    values = torch.tensor(sorted(set(ids)))
    count = len(values) ** length
    if count > limit:
        raise ValueError(
            f"{len(values)} tokens at {length} positions are {len(values)}^{length} sequences, above the limit of "
            f"{limit}"
        )
    check_fits(enumeration_bytes(count, length), f"tokens, length: {len(values)}^{length} sequences take")
    base = len(values) ** torch.arange(length - 1, -1, -1)
    sequences = values[torch.arange(count)[:, None] // base % len(values)]
    try:
        on_device = sequences.to(device)
    except CONVERSION_ERRORS as error:
        raise ValueError(f"device {shown(device)} cannot be used: {error}") from error
    place, cpu = f"energy: {name_of(energy)}", torch.device("cpu")
    parts = on_device.split(min(chunk_size, count))
    with torch.no_grad():
        energies = torch.cat([row_numbers(place, energy(part), len(part), cpu) for part in parts])
    if bool((energies.isnan() | (energies == -torch.inf)).any()):
        raise ValueError(f"{place} returned NaN or minus infinity")
    log_partition = (-energies / temperature).logsumexp(0)
    return ExactDistribution(sequences, energies, log_partition, -energies / temperature - log_partition, values)


def energies_from_contexts(tables: Sequence[Tensor]) -> Tensor:
    """Energies of all sequences, (V,) * T, from the scores of each position's tokens in all its contexts.

    A position's scores don't depend on its own token, so T V^(T-1) rows of them give the energies of V^T sequences.

    Args:
        tables: T tensors (V^(T-1), V) of logits (raw energy) or log probabilities (local energy) of the tokens,
            contexts in lexicographic order of the other positions.

    Example:
        >>> first = torch.tensor([[2.0, 1.0], [2.0, 1.0]])  # likes token 0, whatever the second one is
        >>> energies_from_contexts([first, torch.zeros(2, 2)])
        tensor([[-2., -2.],
                [-1., -1.]])
    """
    length, size = len(tables), tables[0].shape[-1]
    terms = (table.view((size,) * length).movedim(-1, t) for t, table in enumerate(tables))
    return -sum(terms, start=tables[0].new_zeros(()))


def log_partition(energies: Tensor) -> Tensor:
    """log Z, a scalar.

    Example:
        >>> log_partition(torch.zeros(2, 2))  # four sequences: log 4
        tensor(1.3863)
    """
    return (-energies.flatten()).logsumexp(0)


def negative_log_likelihoods(energies: Tensor, sequences: Tensor) -> Tensor:
    """Exact `-log p(y)` in nats, (B,).

    Example:
        >>> negative_log_likelihoods(torch.zeros(2, 2), torch.tensor([[0, 1], [1, 1]]))
        tensor([1.3863, 1.3863])
    """
    return energies[tuple(sequences.T)] + log_partition(energies)


def log_conditionals(energies: Tensor, sequences: Tensor) -> Tensor:
    """Exact `log p(y_t = w | the other tokens)` at each position, (B, T, V).

    Example:
        >>> log_conditionals(torch.zeros(2, 2), torch.tensor([[0, 1]])).exp()
        tensor([[[0.5000, 0.5000],
                 [0.5000, 0.5000]]])
    """
    found = []
    for t in range(sequences.shape[1]):
        others = energies.movedim(t, -1)[tuple([*sequences.T[:t], *sequences.T[t + 1 :]])]
        found.append(-others.expand(len(sequences), -1))  # with a single position there are no others to choose by
    return torch.stack(found, 1).log_softmax(-1)


def negative_pseudolikelihoods(conditionals: Tensor, sequences: Tensor) -> Tensor:
    """`-Σ_t log p(y_t | the other tokens)` of log conditionals (B, T, V), in nats, (B,).

    Example:
        >>> negative_pseudolikelihoods(torch.full((1, 2, 2), 0.5).log(), torch.tensor([[0, 1]]))
        tensor([1.3863])
    """
    return -conditionals.gather(-1, sequences[..., None])[..., 0].sum(1)


def projection_divergences(teacher: Tensor, conditionals: Tensor) -> Tensor:
    """`Σ_t KL(teacher_t ‖ p(· | the other tokens))` of log probabilities (B, T, V) each, in nats, (B,).

    Example:
        >>> sure = torch.tensor([[[1.0, 0.0]]]).log().clamp_min(-99)
        >>> projection_divergences(sure, torch.tensor([[[0.5, 0.5]]]).log())
        tensor([0.6931])
    """
    return (teacher.exp() * (teacher - conditionals)).sum((1, 2))


__getattr__ = renamed_attributes(__name__, {"conditional_log_probs": "log_conditionals"})
