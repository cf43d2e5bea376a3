"""Maskings: which positions are masked and read in each row of a score.

- `exact`: one row per scored position, it alone masked. The energy as defined.
- `within_word_l2r`: as `exact`, and the later pieces of the same word are masked too (Kauf & Ivanova 2023), which keeps
  a rare word of many pieces from being rewarded for its own pieces. A different energy, not an approximation.
- `stride`: an approximation with `stride` rows a text: every `stride`-th scored position is masked in one row.
- `unmasked`: an approximation with one row a text: nothing is masked, the tokens are read in place.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_ebm.renamed import renamed_attributes
from hf_ebm.scoring.energies import token_energies, token_energy
from hf_ebm.scoring.rows import MaskedRows, Reducer, Runner, Sequences

MASKINGS = ("exact", "within_word_l2r", "stride", "unmasked")


def masked_token_energies(
    runner: Runner,
    sequences: Sequences,
    scored: Tensor,
    energy: str,
    masking: str,
    words: Tensor | None = None,
    stride: int = 8,
) -> Tensor:
    """Energy terms (B, T) at the scored positions, read by a masking, 0 elsewhere.

    Args:
        scored: (B, T) bool.
        words: (B, T) word number of each position, for `within_word_l2r`.
        stride: how many rows `stride` runs a text; its masked positions are that many scored positions apart.
    """
    if masking == "exact" or not bool(scored.any()):
        return token_energies(runner, sequences, scored, energy)
    plan = {"within_word_l2r": _within_word, "stride": _strided, "unmasked": _unmasked}[masking]
    source, masked, read = plan(scored, words, stride)
    terms = runner(sequences, MaskedRows(source, masked, read), _reader(sequences, source, read, energy))
    return terms.new_zeros(scored.shape).index_put((source[:, None].expand_as(read), read), terms)


def _reader(sequences: Sequences, source: Tensor, read: Tensor, energy: str) -> Reducer:
    return lambda logits, n: token_energy(logits, sequences.ids[source[n]].gather(1, read[n]), energy)


def _within_word(scored: Tensor, words: Tensor | None, stride: int) -> tuple[Tensor, Tensor, Tensor]:
    if words is None:
        raise ValueError("words must be given for the masking within_word_l2r")
    source, position = scored.nonzero(as_tuple=True)
    columns = torch.arange(scored.shape[1], device=scored.device)
    later_pieces = (words[source] == words[source, position][:, None]) & (columns > position[:, None]) & scored[source]
    width = 1 + int(later_pieces.sum(1).max())
    later = _columns_of(later_pieces, width - 1, position)
    return source, torch.cat([position[:, None], later], 1), position[:, None]


def _strided(scored: Tensor, words: Tensor | None, stride: int) -> tuple[Tensor, Tensor, Tensor]:
    sources, columns = [], []
    for number, row in enumerate(scored):
        positions = row.nonzero()[:, 0]
        rows = min(stride, len(positions))
        for offset in range(rows):
            sources.append(number)
            columns.append(positions[offset::rows])
    width = max(map(len, columns))
    masked = torch.stack([torch.cat([c, c[-1:].expand(width - len(c))]) for c in columns])
    return torch.tensor(sources, device=scored.device), masked, masked


def _unmasked(scored: Tensor, words: Tensor | None, stride: int) -> tuple[Tensor, Tensor, Tensor]:
    source = scored.any(1).nonzero()[:, 0]
    some = scored[source]
    read = _columns_of(some, int(some.sum(1).max()), some.long().argmax(1))
    return source, read[:, :0], read


def _columns_of(mask: Tensor, width: int, filler: Tensor) -> Tensor:
    """Columns (N, width) where `mask` (N, T) is true, in order; the rest of a row repeats `filler` (N,)."""
    order = torch.sort((~mask).long(), dim=1, stable=True).indices[:, :width]
    return torch.where(mask.gather(1, order), order, filler[:, None])


__getattr__ = renamed_attributes(__name__, {"VARIANTS": "MASKINGS", "variant_token_energies": "masked_token_energies"})
