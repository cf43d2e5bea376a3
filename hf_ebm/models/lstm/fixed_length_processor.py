"""Lengths in generation with fixed attention: a row ends where its source ends."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor

# A score no token of a model has. Finite, unlike that of forbidden tokens: beam search carries on from candidates that
# did not end, and sampling among those needs one of them to be possible.
_LAST_RESORT = -1e9


class FixedLengthLogitsProcessor(LogitsProcessor):
    """Forbids the end token before a row's last source position, demands it there, and padding after it.

    The allowed tokens keep their scores, the end token too, so that a beam's score stays the model's log probability.

    Args:
        source_lengths: (B,) number of source positions of each row of scores.
        eos_token_id, pad_token_id: ids of the end token and of padding.
        other_special_ids: further ids that are no output symbols.
    """

    def __init__(self, source_lengths: Tensor, eos_token_id: int, pad_token_id: int, other_special_ids: set[int]):
        self.source_lengths = source_lengths
        self.eos_token_id, self.pad_token_id = eos_token_id, pad_token_id
        self.special_ids = sorted(other_special_ids | {eos_token_id, pad_token_id})

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, t + 1) decoder ids with the start token, (B, V) scores of output t; returns (B, V) scores."""
        position = input_ids.shape[1] - 1
        before_end = scores.index_fill(1, torch.tensor(self.special_ids, device=scores.device), -torch.inf)
        at_end = torch.full_like(scores, -torch.inf)
        at_end[:, self.pad_token_id] = _LAST_RESORT
        at_end[:, self.eos_token_id] = scores[:, self.eos_token_id]
        after_end = torch.full_like(scores, -torch.inf)
        after_end[:, self.pad_token_id] = 0.0
        last = self.source_lengths.to(scores.device)[:, None] - 1
        return torch.where(last.gt(position), before_end, torch.where(last.eq(position), at_end, after_end))
