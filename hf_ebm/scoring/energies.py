"""Energies of a masked language model (methods: thesis ch. 6, eq. for E_raw and E_local).

With `z_t` the logits at position t of the sequence in which only t is masked, and S the scored positions::

    E_raw(y)   = - sum_{t in S} z_t[y_t]
    E_local(y) = - sum_{t in S} log_softmax(z_t)[y_t]        (minus the pseudo-log-likelihood)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hf_ebm.scoring.rows import Index, MaskedRows, Runner, Sequences, to_device


class Energy(NamedTuple):
    """An energy of sequences: a sum of terms, one for each scored position, that position alone masked.

    Attributes:
        term: of tokens (…, K) under the logits (…, V) at their position, (…, K) in nats, differentiable.
        about: what it is, for help texts and cards.
        is_surprisal: whether the terms are minus log probabilities: exp of their mean is then a pseudo-perplexity.
    """

    term: Callable[[Tensor, Tensor], Tensor]
    about: str
    is_surprisal: bool


def raw_term(logits: Tensor, tokens: Tensor) -> Tensor:
    """`-z[y]`.

    Example:
        >>> raw_term(torch.tensor([2.0, -1.0]), torch.tensor([0]))
        tensor([-2.])
    """
    return -logits.gather(-1, tokens)


def local_term(logits: Tensor, tokens: Tensor) -> Tensor:
    """`-log_softmax(z)[y]`.

    Example:
        >>> local_term(torch.tensor([0.0, 0.0]), torch.tensor([0]))  # log 2
        tensor([0.6931])
    """
    return logits.logsumexp(-1, keepdim=True) - logits.gather(-1, tokens)


# Every energy there is. An entry is all that a new one needs.
ENERGIES: dict[str, Energy] = {
    "raw": Energy(
        raw_term,
        "minus the sum of the logits of the tokens, each masked alone, `E(y) = -Σ_t z_t[y_t]`. Its zero has no "
        "meaning, and it is no likelihood",
        is_surprisal=False,
    ),
    "local": Energy(
        local_term,
        "minus the sum of the log probabilities of the tokens, each masked alone, `E(y) = -Σ_t log softmax(z_t)[y_t]`, "
        "in nats (minus the pseudo-log-likelihood)",
        is_surprisal=True,
    ),
}


def token_energy(logits: Tensor, tokens: Tensor, energy: str) -> Tensor:
    """Energy term in nats of `tokens` (...) under `logits` (..., V).

    Example:
        >>> token_energy(torch.zeros(2, 2), torch.tensor([1, 0]), "local")
        tensor([0.6931, 0.6931])
    """
    return ENERGIES[energy].term(logits, tokens[..., None])[..., 0]


def token_scores(logits: Tensor, tokens: Tensor, energy: str) -> Tensor:
    """Minus the energy terms of each of `tokens` (K,) under `logits` (..., V): (..., K).

    Example:
        >>> token_scores(torch.tensor([[3.0, 0.0, 1.0]]), torch.tensor([0, 2]), "raw")
        tensor([[3., 1.]])
    """
    return -ENERGIES[energy].term(logits, tokens.expand(*logits.shape[:-1], -1))


def energy_terms(runner: Runner, sequences: Sequences, source: Tensor, position: Tensor, energy: str) -> Tensor:
    """Energy term of the token at `position[n]` of sequence `source[n]`, that position alone masked: (N,)."""
    tokens = sequences.ids[source, position]
    rows = MaskedRows(source, position[:, None], position[:, None])

    def term(logits: Tensor, n: Index) -> Tensor:
        return token_energy(logits[:, 0], to_device(tokens[n], logits.device), energy)

    return runner(sequences, rows, term)


def token_energies(runner: Runner, sequences: Sequences, scored: Tensor, energy: str) -> Tensor:
    """Energy terms (B, T) at the scored positions (`scored`: (B, T) bool), 0 elsewhere.

    Differentiable with respect to the model's parameters. One masked row per scored position.
    """
    source, position = scored.nonzero(as_tuple=True)
    if len(source) == 0:
        return torch.zeros(scored.shape, device=scored.device)
    terms = energy_terms(runner, sequences, source, position, energy)
    return terms.new_zeros(scored.shape).index_put((source, position), terms)
