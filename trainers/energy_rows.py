"""Rows that an energy is trained on: how batches are made of them, which can't be, and how much work each is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.trainer_utils import has_length
from transformers.utils import logging

from hf_ebm.models.energy import EnergyModel
from hf_ebm.objectives.completions import pad_right
from hf_ebm.runtime import check_fits, enumeration_bytes
from hf_ebm.scoring.conditionals import num_conditional_rows, num_context_rows, reads_own_token

logger = logging.get_logger(__name__)

MUCH_WORK = 10_000  # masked rows for a row of the data, of which a warning is due


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


class EnergyCollator:
    """Pads rows of `input_ids` on the right."""

    def __init__(self, model: object):
        self.pad_id = getattr(getattr(model, "config", None), "pad_token_id", None) or 0

    def __call__(self, rows: list[dict]) -> dict[str, Tensor]:
        ids, mask = pad_right([torch.as_tensor(row["input_ids"]) for row in rows], self.pad_id)
        return {"input_ids": ids, "attention_mask": mask}


def unusable_tokens(config: PreTrainedConfig, objective: str) -> dict[int, str]:
    """Tokens that no row may hold where it is scored, and for each why.

    Args:
        config: of the energy model.
    """
    never = set(config.excluded_token_ids or []) - set(config.special_token_ids or [])
    reason = f"which is never proposed: objective {objective!r} has no value for it, 'mlm' has"
    found = dict.fromkeys([] if objective == "mlm" else sorted(never), reason)
    # The mask is there: a model without it has no tokens to propose.
    return found | {int(config.mask_token_id or 0): "the mask, which has no energy"}


def has_tables(model: EnergyModel) -> bool:
    """Whether the model gives its logits in all contexts without masked rows."""
    return hasattr(model.mlm, "context_logits")


def num_packed_rows(model: EnergyModel, length: int, count: int) -> int:
    """Masked rows of the true conditionals of one row of so many free tokens, over `count` tokens each."""
    return num_conditional_rows(length, count, reads_own_token(model.masked_batch_runner()))


def num_masked_rows(
    model: EnergyModel, objective: str, length: int, count: int, limits: tuple[int, int], place: str
) -> int:
    """Masked rows that an objective, other than `"mlm"`, runs for a row of the data.

    Args:
        length: its free tokens.
        count: the tokens that each may be.
        limits: the most sequences that are enumerated, and the most masked rows.
        place: how an error calls the row.

    Raises:
        ValueError: for a row beyond the limits.
    """
    enumeration_limit, masked_row_limit = limits
    enumerable = count**length <= enumeration_limit
    if objective == "mle" and not enumerable:
        raise ValueError(
            f"{place}: objective 'mle' enumerates {count} tokens at {length} positions, {count}^{length} "
            f"sequences, above enumeration_limit {enumeration_limit}; take shorter rows, or objective 'mlm'"
        )
    if enumerable and (objective == "mle" or has_tables(model)):
        what = f"{place}: enumeration_limit allows {count}^{length} sequences, which take"
        check_fits(enumeration_bytes(count**length, length), what, model.device)
    if length == 0 or (enumerable and has_tables(model)):
        return 0
    contexts, packed = num_context_rows(length, count), num_packed_rows(model, length, count)
    rows = contexts if objective == "mle" else min(contexts, packed) if enumerable else packed
    if rows > masked_row_limit:
        raise ValueError(
            f"{place}: objective {objective!r} runs {rows} masked rows for {length} positions of {count} "
            f"tokens each, above masked_row_limit {masked_row_limit}; take objective 'mlm' ({length} of "
            "them), shorter rows, a model with more excluded_token_ids, or a higher limit"
        )
    return rows


def warn_of_much_work(objective: str, work: Sequence[int]) -> None:
    """Warns where one of the rows takes many masked rows, by those of each."""
    if max(work, default=0) > MUCH_WORK:
        logger.warning(
            f"objective {objective!r} runs {sum(work) // len(work)} masked rows for a row of the data on "
            f"average, and {max(work)} for one, where 'mlm' runs one for a token."
        )


def check_teacher(model: EnergyModel, teacher: EnergyModel) -> None:
    """Raises `ValueError` for a teacher of another kind or with other tokens."""
    if not isinstance(teacher, EnergyModel):
        raise ValueError(f"teacher must be an EnergyModel, got {type(teacher).__name__}")
    for name in ("mask_token_id", "special_token_ids", "excluded_token_ids"):
        own, theirs = (getattr(one.config, name) for one in (model, teacher))
        if own != theirs:
            raise ValueError(f"teacher must have the model's {name}, {own}, got {theirs}")
    if model.vocab_size != teacher.vocab_size:
        raise ValueError(f"teacher must have the model's {model.vocab_size} ids, got {teacher.vocab_size}")
