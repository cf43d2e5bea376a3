"""Scores of tokens in contexts, for likelihoods: all contexts of an enumerable space, or the true conditionals of rows.

The true conditional of the random field, `softmax_w(-E(y with y_t := w))`, is not the masked conditional (thesis
section 6.2.1): changing a token changes the terms of all other positions too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_ebm.scoring.energies import energy_terms, token_energy, token_scores
from hf_ebm.scoring.masked_batches import MaskedBatchRunner
from hf_ebm.scoring.rows import Index, MaskedRows, Sequences

# Masked rows of `conditional_log_probs` that are laid out at a time: their ids and numbers take some 50 MB.
_ROWS_AT_ONCE = 2**18


def num_context_rows(length: int, count: int) -> int:
    """Masked rows that `scores_in_contexts` runs for `length` free positions of `count` tokens.

    Example:
        >>> num_context_rows(3, 5)  # of each position its 25 contexts
        75
    """
    return length * count ** (length - 1)


def num_conditional_rows(length: int, count: int, reads_own_token: bool = True) -> int:
    """Rows that `conditional_log_probs` runs for a sequence of `length` scored positions of `count` tokens.

    Example:
        >>> num_conditional_rows(3, 5)
        33
    """
    return length * (1 + count * (length - 1 if reads_own_token else min(1, length - 1)))


def scores_in_contexts(
    runner: MaskedBatchRunner, before: Tensor, behind: Tensor, tokens: Tensor, length: int, energy: str
) -> list[Tensor]:
    """Scores of `tokens` at each free position in all contexts of free tokens: one masked row each.

    Args:
        before, behind: ids that stand around the free positions.
        tokens: (V,) ids a free position may hold.
        length: T free positions.

    Returns:
        T tensors (V^(T-1), V), differentiable; contexts in lexicographic order of the other free positions.
    """
    count = len(tokens)
    base = count ** torch.arange(length - 2, -1, -1, device=tokens.device)
    contexts = tokens[torch.arange(count ** (length - 1), device=tokens.device)[:, None] // base % count]
    around = [part.expand(len(contexts), -1) for part in (before, behind)]
    rows, total = torch.arange(len(contexts), device=tokens.device), len(before) + length + len(behind)
    found = []
    for t in range(length):
        free = torch.cat([contexts[:, :t], tokens[:1].expand(len(contexts), 1), contexts[:, t:]], 1)
        ids = torch.cat([around[0], free, around[1]], 1)
        ends = torch.zeros(len(ids), dtype=torch.long), torch.full((len(ids),), total)
        position = torch.full((len(ids), 1), len(before) + t, device=tokens.device)
        masked = MaskedRows(rows, position, position)
        found.append(
            runner(Sequences(ids, *ends), masked, lambda logits, n: token_scores(logits[:, 0], tokens, energy))
        )
    return found


def conditional_log_probs(
    runner: MaskedBatchRunner, sequences: Sequences, scored: Tensor, tokens: Tensor, energy: str
) -> Tensor:
    """True conditionals `log p(y_t = w | the other tokens)` at each scored position, (N, V), in nats, differentiable.

    All T (1 + V (T - 1)) masked rows of a sequence of T scored positions are one pool: the term of a position itself is
    the same row whatever its token. Of a model whose logits don't depend on the token they stand at (`reads_own_token`
    is False) T (1 + V) rows are enough, with nothing masked.

    Args:
        scored: (B, T) bool; N positions in all, in the order of `scored.nonzero()`.
        tokens: (V,) ids a scored position may hold.
    """
    source, position = scored.nonzero(as_tuple=True)
    here = MaskedRows(source, position[:, None], position[:, None])
    own = runner(sequences, here, lambda logits, n: token_scores(logits[:, 0], tokens, energy))
    most = max(1, _ROWS_AT_ONCE // (len(tokens) * int(scored.sum(1).max())))
    energies = [
        _energies_of_variants(runner, sequences, scored, part, tokens, energy)
        for part in zip(source.split(most), position.split(most), strict=True)
    ]
    return (own - torch.cat(energies)).log_softmax(-1)


def reads_own_token(runner: MaskedBatchRunner) -> bool:
    """Whether the logits of a runner's model depend on the token they stand at, as those of most models do."""
    return getattr(getattr(runner.position_logits, "model", None), "reads_own_token", True)


def _energies_of_variants(
    runner: MaskedBatchRunner,
    sequences: Sequences,
    scored: Tensor,
    where: tuple[Tensor, Tensor],
    tokens: Tensor,
    energy: str,
) -> Tensor:
    """Energies at the other scored positions of the sequences (n,) with each of `tokens` at a position (n,), (n, V)."""
    (source, position), count = where, len(tokens)
    which = torch.arange(len(source), device=source.device).repeat_interleave(count)
    changed = sequences.ids[source[which]].scatter(1, position[which, None], tokens.repeat(len(source))[:, None])
    variants = Sequences(changed, sequences.start[source[which].cpu()], sequences.stop[source[which].cpu()])
    others = scored[source[which]].scatter(1, position[which, None], False)
    if not bool(others.any()):
        return torch.zeros(len(source), count, device=source.device)
    sums = _sums_of_masked_rows if reads_own_token(runner) else _sums_of_whole_rows
    return sums(runner, variants, others, energy).view(len(source), count)


def _sums_of_masked_rows(runner: MaskedBatchRunner, sequences: Sequences, scored: Tensor, energy: str) -> Tensor:
    """Sums of energy terms over scored positions, (B,), each position masked in a row of its own."""
    source, position = scored.nonzero(as_tuple=True)
    terms = energy_terms(runner, sequences, source, position, energy)
    return terms.new_zeros(len(scored)).index_add(0, source, terms)


def _sums_of_whole_rows(runner: MaskedBatchRunner, sequences: Sequences, scored: Tensor, energy: str) -> Tensor:
    """The same from one row a sequence, for a model that doesn't read the token it predicts."""
    longest = int(scored.sum(1).max())
    read = scored.int().argsort(dim=1, descending=True, stable=True)[:, :longest]
    kept, tokens = scored.gather(1, read), sequences.ids.gather(1, read)
    source = torch.arange(len(scored), device=scored.device)
    rows = MaskedRows(source, source.new_empty(len(source), 0), torch.where(kept, read, read[:, :1]))

    def total(logits: Tensor, numbers: Index) -> Tensor:
        terms = token_energy(logits, tokens[numbers], energy)
        return terms.masked_fill(~kept[numbers], 0).sum(1)

    return runner(sequences, rows, total)
