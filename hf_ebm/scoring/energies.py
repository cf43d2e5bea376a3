"""Energies of a masked language model (methods: thesis ch. 6, eq. for E_raw and E_local).

With `z_t` the logits at position t of the sequence in which only t is masked, and S the scored positions::

    E_raw(y)   = - sum_{t in S} z_t[y_t]
    E_local(y) = - sum_{t in S} log_softmax(z_t)[y_t]        (minus the pseudo-log-likelihood)
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_ebm.scoring.rows import MaskedRows, RowRunner, Sequences

ENERGIES = ("raw", "local")


def token_energy(logits: Tensor, tokens: Tensor, energy: str) -> Tensor:
    """Energy term in nats of `tokens` (...) under `logits` (..., V): `-z[y]` (raw) or `-log_softmax(z)[y]` (local)."""
    chosen = logits.gather(-1, tokens[..., None])[..., 0]
    if energy == "raw":
        return -chosen
    return logits.logsumexp(-1) - chosen


def energy_terms(runner: RowRunner, sequences: Sequences, source: Tensor, position: Tensor, energy: str) -> Tensor:
    """Energy term of the token at `position[n]` of sequence `source[n]`, that position alone masked: (N,)."""
    tokens = sequences.ids[source, position]
    rows = MaskedRows(source, position[:, None], position[:, None])
    return runner(sequences, rows, lambda logits, n, ids: token_energy(logits[:, 0], tokens[n], energy))


def token_energies(runner: RowRunner, sequences: Sequences, scored: Tensor, energy: str) -> Tensor:
    """Energy terms (B, T) at the scored positions (`scored`: (B, T) bool), 0 elsewhere.

    Differentiable with respect to the model's parameters. One masked row per scored position.
    """
    source, position = scored.nonzero(as_tuple=True)
    if len(source) == 0:
        return torch.zeros(scored.shape, device=scored.device)
    terms = energy_terms(runner, sequences, source, position, energy)
    return terms.new_zeros(scored.shape).index_put((source, position), terms)
