"""Prompts and what follows them, as rows of unequal length: splitting, padding, log probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hf_ebm.objectives.losses import IGNORED, at_least_float32


def split_completions(
    input_ids: torch.Tensor, labels: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Prompts and targets of a causal batch, padded on whichever side.

    Targets are the labels that aren't -100, except that of a row's first token, which nothing predicts; the prompt is
    what stands before them.

    Args:
        input_ids, labels: (B, T); a label is -100 or equals the token.
        attention_mask: (B, T), 0 at padding; without it nothing is padding.

    Returns:
        Two lists of B tensors of ids, (P_b,) and (T_b,). A row without a target is a prompt.

    Raises:
        ValueError: for a row without a token, with labels that aren't its tokens, or with a gap in or behind its
            targets.

    Example:
        >>> split_completions(torch.tensor([[5, 6, 7, 8]]), torch.tensor([[-100, -100, 7, 8]]))
        ([tensor([5, 6])], [tensor([7, 8])])
    """
    prompts, targets = [], []
    for row in range(len(input_ids)):
        kept = slice(None) if attention_mask is None else attention_mask[row].bool()
        ids, goal = input_ids[row][kept], labels[row][kept]
        if not len(ids):
            raise ValueError(f"input_ids: row {row} must have a token that isn't padding")
        scored = goal != IGNORED
        scored[:1] = False
        start = len(ids) - int(scored.sum())
        if not bool(scored[start:].all()):
            raise ValueError(
                f"labels: row {row} must have all its targets at its end, behind one prompt; {IGNORED} stands between "
                "or behind them"
            )
        if not torch.equal(ids[start:], goal[start:]):
            raise ValueError(f"labels: row {row} must equal input_ids where they aren't {IGNORED}")
        prompts.append(ids[:start])
        targets.append(ids[start:])
    return prompts, targets


def pad_left(rows: Sequence[torch.Tensor], value: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows padded on the left, (N, T), and their attention mask.

    Example:
        >>> pad_left([torch.tensor([5, 6]), torch.tensor([7])], 0)
        (tensor([[5, 6],
                [0, 7]]), tensor([[1, 1],
                [0, 1]]))
    """
    ids, mask = pad_right([row.flip(0) for row in rows], value)
    return ids.flip(1), mask.flip(1)


def pad_right(rows: Sequence[torch.Tensor], value: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows padded on the right, (N, T), and their attention mask.

    Example:
        >>> pad_right([torch.tensor([5, 6]), torch.tensor([7])], 0)
        (tensor([[5, 6],
                [7, 0]]), tensor([[1, 1],
                [1, 0]]))
    """
    ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)
    lengths = torch.tensor([len(row) for row in rows], device=ids.device)
    return ids, (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]).long()


def ends_at(ids: torch.Tensor, end_ids: Sequence[int]) -> list[torch.Tensor]:
    """Decoded rows (N, T), each up to its first end token, which stays.

    Example:
        >>> ends_at(torch.tensor([[5, 2, 2], [5, 6, 7]]), end_ids=[2])
        [tensor([5, 2]), tensor([5, 6, 7])]
    """
    ends = torch.isin(ids, torch.tensor(list(end_ids), dtype=ids.dtype, device=ids.device)).long()
    lengths = (ends.cumsum(1) == ends).sum(1)  # of what no end token precedes
    return [row[:length] for row, length in zip(ids, lengths.tolist(), strict=True)]


def token_log_probs(logits: torch.Tensor, labels: torch.Tensor, ruled_out: torch.Tensor | None = None) -> torch.Tensor:
    """Log probability of each label in nats: logits (N, T, V), labels (N, T) -> (N, T), 0 where a label is -100.

    Args:
        ruled_out: (n, V) bool, for each of the n labels that aren't -100, row after row, the tokens that could not have
            stood in its place: the probability is that of the label among the others.

    Example:
        >>> token_log_probs(torch.zeros(1, 2, 4), torch.tensor([[-100, 3]]))  # log 1/4
        tensor([[-0.0000, -1.3863]])
    """
    kept = labels != IGNORED
    # Only logits that are read are made float32: prompts can be far longer than what follows them.
    scores = at_least_float32(logits[kept])
    if ruled_out is not None:
        scores = scores.masked_fill(ruled_out, -torch.inf)
    nats = torch.nn.functional.cross_entropy(scores, labels[kept], reduction="none")
    return -nats.new_zeros(labels.shape).masked_scatter(kept, nats)


def sequence_log_probs(
    logits: torch.Tensor, labels: torch.Tensor, ruled_out: torch.Tensor | None = None
) -> torch.Tensor:
    """Log probability of each row's labels in nats, (N,); arguments as for `token_log_probs`.

    Example:
        >>> sequence_log_probs(torch.zeros(1, 3, 4), torch.tensor([[-100, 3, 1]]))
        tensor([-2.7726])
    """
    return token_log_probs(logits, labels, ruled_out).sum(1)


def completion_log_probs(
    model: Callable,
    prompts: Sequence[torch.Tensor],
    sequences: Sequence[torch.Tensor],
    pad_id: int,
    ruled_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """log p(sequence | prompt) of a causal model in nats, (N,): one forward pass, with its gradient.

    Args: as for `completion_token_log_probs`.

    Example:
        >>> from types import SimpleNamespace
        >>> even = lambda input_ids, **_: SimpleNamespace(logits=torch.zeros(*input_ids.shape, 4))
        >>> completion_log_probs(even, [torch.tensor([3])], [torch.tensor([1, 2])], pad_id=0)  # twice log 1/4
        tensor([-2.7726])
    """
    return completion_token_log_probs(model, prompts, sequences, pad_id, ruled_out).sum(1)


def completion_token_log_probs(
    model: Callable,
    prompts: Sequence[torch.Tensor],
    sequences: Sequence[torch.Tensor],
    pad_id: int,
    ruled_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log probability of each token behind a prompt, in nats: (N, T), 0 outside a row's sequence.

    T is the length of the longest row, less one: what stands at t is of token t + 1. Rows are padded on the right: no
    position is shifted, and no token sees what is padding.

    Args:
        model: takes `input_ids`, `attention_mask` and `use_cache`, and returns an output with `logits` (N, T, V).
        prompts, sequences: N tensors of ids each, the prompts of one token or more.
        ruled_out: as for `token_log_probs`, for the tokens of all sequences.

    Example:
        >>> from types import SimpleNamespace
        >>> even = lambda input_ids, **_: SimpleNamespace(logits=torch.zeros(*input_ids.shape, 4))
        >>> completion_token_log_probs(even, [torch.tensor([3])], [torch.tensor([1, 2])], pad_id=0)
        tensor([[-1.3863, -1.3863]])
    """
    rows = list(zip(prompts, sequences, strict=True))
    ids, mask = pad_right([torch.cat(row) for row in rows], pad_id)
    labels, _ = pad_right([torch.cat([torch.full_like(prompt, IGNORED), after]) for prompt, after in rows], IGNORED)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    return token_log_probs(logits[:, :-1], labels[:, 1:], ruled_out)
