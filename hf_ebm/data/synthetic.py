"""Synthetic languages whose true probabilities are known (thesis section 6.2.3): palindromes and hidden Markov models.

Sequences are of symbols 0 to V - 1; `rows_of` makes ids of them. All is seeded, and computed in float64.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from datasets import Dataset

# Ids of the small models that are trained on these languages; symbol s has the id FIRST_SYMBOL + s.
PAD, START, END, MASK, FIRST_SYMBOL = range(5)
ENTROPIES = {"low": 0.15, "high": 0.3}  # concentration of the Dirichlet distributions that HMMs are drawn from


@dataclass(frozen=True)
class Language:
    """A distribution over all sequences of one length.

    Attributes:
        sequences: (V^T, T) all of them, in lexicographic order.
        log_probs: (V^T,) their true log probabilities in nats.
    """

    sequences: np.ndarray
    log_probs: np.ndarray

    @property
    def entropy(self) -> float:
        """In nats a sequence: the negative log-likelihood that no model falls below."""
        kept = self.log_probs[np.isfinite(self.log_probs)]
        return float(-(np.exp(kept) * kept).sum())

    def sample(self, count: int, seed: int) -> Dataset:
        """`count` independent sequences: rows of `symbols`, and `true_log_prob`."""
        generator = np.random.default_rng(seed)
        chosen = generator.choice(len(self.log_probs), count, p=np.exp(self.log_probs))
        return Dataset.from_dict(
            {"symbols": self.sequences[chosen].tolist(), "true_log_prob": self.log_probs[chosen].tolist()}
        )


def palindromes(num_symbols: int = 5, length: int = 5, share: float = 0.8) -> Language:
    """A palindrome with probability `share`, any of them alike, else any other sequence.

    Example:
        >>> language = palindromes(num_symbols=2, length=3, share=0.8)
        >>> language.sequences[1].tolist(), round(float(np.exp(language.log_probs[1])), 2)  # one of four others
        ([0, 0, 1], 0.05)
    """
    sequences = all_sequences(num_symbols, length)
    symmetric = (sequences == sequences[:, ::-1]).all(1)
    each = np.where(symmetric, share / symmetric.sum(), (1 - share) / (~symmetric).sum())
    return Language(sequences, np.log(each))


@dataclass(frozen=True)
class HiddenMarkovModel:
    """Log probabilities of the first state (K,), of transitions (K, K), and of symbols (K, V)."""

    start: np.ndarray
    transition: np.ndarray
    emission: np.ndarray

    @classmethod
    def draw(cls, seed: int, entropy: str = "low", num_states: int = 4, num_symbols: int = 5) -> HiddenMarkovModel:
        """One with random parameters, from Dirichlet distributions: `"low"` ones are peaked.

        Raises:
            ValueError: for another `entropy`.
        """
        if entropy not in ENTROPIES:
            raise ValueError(f"entropy must be one of {', '.join(ENTROPIES)}, got {entropy!r}")
        generator = np.random.default_rng(seed)

        def rows(count: int, size: int) -> np.ndarray:
            return np.log(generator.dirichlet(np.full(size, ENTROPIES[entropy]), count).clip(1e-12))

        start, transition = rows(1, num_states)[0], rows(num_states, num_states)
        return cls(*map(_normalized, (start, transition, rows(num_states, num_symbols))))

    def log_probs(self, sequences: np.ndarray) -> np.ndarray:
        """(N,) log probabilities of sequences (N, T), by the forward algorithm."""
        alpha = self.start + self.emission[:, sequences[:, 0]].T
        for t in range(1, sequences.shape[1]):
            alpha = np.logaddexp.reduce(alpha[:, :, None] + self.transition, axis=1)
            alpha = alpha + self.emission[:, sequences[:, t]].T
        return np.logaddexp.reduce(alpha, axis=1)

    def language(self, length: int = 5) -> Language:
        """The distribution over all sequences of that length."""
        sequences = all_sequences(self.emission.shape[1], length)
        return Language(sequences, _normalized(self.log_probs(sequences)))


def all_sequences(num_symbols: int, length: int) -> np.ndarray:
    """(V^T, T), in lexicographic order.

    Example:
        >>> all_sequences(2, 2).tolist()
        [[0, 0], [0, 1], [1, 0], [1, 1]]
    """
    return np.array(list(itertools.product(range(num_symbols), repeat=length)))


def rows_of(dataset: Dataset) -> list[dict[str, list[int]]]:
    """Rows of `input_ids` for a model with the ids above.

    Example:
        >>> rows_of(Dataset.from_dict({"symbols": [[0, 2]]}))
        [{'input_ids': [1, 4, 6, 2]}]
    """
    return [{"input_ids": [START, *(FIRST_SYMBOL + s for s in symbols), END]} for symbols in dataset["symbols"]]


def _normalized(log_probs: np.ndarray) -> np.ndarray:
    return log_probs - np.logaddexp.reduce(log_probs, axis=-1, keepdims=True)
