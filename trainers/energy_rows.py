"""Rows of a data set that an energy can't be trained on, found before training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import Subset
from transformers import PreTrainedTokenizerBase
from transformers.trainer_utils import has_length
from transformers.utils import logging

logger = logging.get_logger(__name__)


def ids_by_row(data: Any) -> Iterator[list[int]]:
    """`input_ids` of each row of a data set, none of a row without them, and no rows of a data set without a length."""
    rows: Any = data if has_length(data) else ()
    for row in rows:
        ids = row.get("input_ids") if isinstance(row, Mapping) else None
        yield [] if ids is None else torch.as_tensor(ids).tolist()


def usable_rows(
    name: str, data: Any, unusable: Mapping[int, str], skip: bool, tokenizer: PreTrainedTokenizerBase | None
) -> Any:
    """A data set without the rows that hold a token which can't be trained on.

    Args:
        name: what the data set is called.
        unusable: tokens, and for each why.
        skip: leave such rows out and log how many; else the first is an error.
        tokenizer: names tokens.

    Raises:
        ValueError: naming the first such row, its position and token, and where no row is left.
    """
    kept, first = [], ""
    for number, ids in enumerate(ids_by_row(data)):
        position = next((place for place, token in enumerate(ids) if token in unusable), None)
        if position is None:
            kept.append(number)
        elif not first:
            token = ids[position]
            called = token_name(token, tokenizer)
            first = f"{name}: row {number} holds {called} at position {position}, {unusable[token]}"
            if not skip:
                raise ValueError(f"{first}; skip_unusable_rows leaves such rows out")
    if not first:
        return data
    if not kept:
        raise ValueError(f"{first}; no row is left, as it is so with each")
    logger.warning(f"{first}; {len(data) - len(kept)} of {len(data)} rows are left out for such tokens.")
    return data.select(kept) if hasattr(data, "select") else Subset(data, kept)


def token_name(token: int, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """How an error calls a token."""
    return f"the token {token}" if tokenizer is None else f"{tokenizer.convert_ids_to_tokens(token)} (token {token})"
