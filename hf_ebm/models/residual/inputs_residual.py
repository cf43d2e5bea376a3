"""Checks of what callers hand to a residual model, done before any work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_ebm.checks import advice_on_ids, as_list, as_mask, is_dense, shown
from hf_ebm.model_facts import limit_of, num_embeddings

if TYPE_CHECKING:
    from hf_ebm.models.residual.modeling_residual import ResidualEnergyModel


def lm_of(model: ResidualEnergyModel) -> PreTrainedModel:
    """The language model. Raises `ValueError` where it is not loaded."""
    if model.lm is None:
        raise ValueError(
            f"lm: the language model is kept by reference ({model.config.lm_reference}); load the model with "
            "from_pretrained"
        )
    return model.lm


def check_parts(model: ResidualEnergyModel) -> PreTrainedModel:
    """The language model; raises `ValueError` unless it and the encoder are there and on one device."""
    lm = lm_of(model)
    if lm.device != model.encoder.device or model.head.weight.device != model.encoder.device:
        raise ValueError(
            f"lm and encoder must be on one device, got {lm.device}, {model.encoder.device} and, for the head, "
            f"{model.head.weight.device}"
        )
    return lm


def check_prefixes(
    model: ResidualEnergyModel, prefixes: Sequence[Tensor | Sequence[int]], max_new_tokens: int, name: str = "prefixes"
) -> list[Tensor]:
    """Prefixes, which errors call `name`, as tensors on the language model's device; an empty one is its start token.

    Raises:
        ValueError: for none at all, ids outside the vocabulary, an empty one without a start token, and one that leaves
            language model or encoder no positions for `max_new_tokens`.
    """
    lm, rows = check_parts(model), as_id_rows(name, prefixes)
    size, device = num_embeddings(lm), lm.device  # looked up once: it is found among all parameters
    # The encoder's own tokens for the same text are counted when there are some.
    parts = [("language model", lm)] + ([] if model.config.retokenize else [("encoder", model.encoder)])
    limits = [limit_of(part, model.config.max_sequence_length, name=called) for called, part in parts]
    found = []
    for row, prefix in enumerate(rows):
        ids = prefix.to(device)
        if not len(ids):
            if model.config.start_token_id is None:
                raise ValueError(
                    f"{name}: row {row} is empty, and the language model has no bos_token_id to start from"
                )
            ids = torch.tensor([model.config.start_token_id], device=device)
        for limit in limits:
            if limit is not None and len(ids) + max_new_tokens > limit.tokens:
                raise ValueError(
                    f"{name}: row {row} has {len(ids)} tokens, with max_new_tokens {len(ids) + max_new_tokens}; "
                    f"{limit.reason}"
                )
        found.append(ids)
    _check_ids(name, found, size)
    return found


def check_continuations(
    model: ResidualEnergyModel, continuations: Sequence, max_new_tokens: int, count: int
) -> list[Tensor]:
    """Continuations as tensors on the language model's device.

    Raises:
        ValueError: unless each ends with an end token or has `max_new_tokens` tokens, with no end token inside.
    """
    rows = as_id_rows("continuations", continuations)
    if len(rows) != count:
        raise ValueError(f"continuations must be as many as prefixes, got {len(rows)} and {count}")
    lm, ends = lm_of(model), set(model.end_ids)
    size, device = num_embeddings(lm), lm.device
    found = []
    for row, continuation in enumerate(rows):
        ids = continuation.to(device)
        own = ids.tolist()
        if not own or len(own) > max_new_tokens:
            raise ValueError(f"continuations: row {row} has {len(own)} tokens, must have 1 to {max_new_tokens}")
        if ends & set(own[:-1]) or (len(own) < max_new_tokens and own[-1] not in ends):
            raise ValueError(
                f"continuations: row {row} must end with an end token ({', '.join(map(str, sorted(ends)))}) and hold "
                f"none before, or be stopped at {max_new_tokens} tokens; it has {len(own)}"
            )
        found.append(ids)
    _check_ids("continuations", found, size)
    return found


def as_id_rows(name: str, rows: object) -> list[Tensor]:
    """Rows of ids as tensors, where they are. Raises `ValueError`, naming the row, for anything else, and for none."""
    found = [_as_ids(ids, f"{name}: row {row}") for row, ids in enumerate(as_list(name, rows, "rows of ids"))]
    if not found:
        raise ValueError(f"{name} must be one or more, got none")
    return found


def _as_ids(values: Any, place: str) -> Tensor:
    try:
        ids = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        ids = None
    empty = ids is not None and ids.numel() == 0
    if not is_dense(ids) or ids.dim() != 1 or not (empty or ids.dtype in (torch.int64, torch.int32, torch.int16)):
        raise ValueError(f"{place} must be a list of ids, got {shown(values)}")
    return ids.long()


def _check_ids(name: str, rows: list[Tensor], size: int) -> None:
    """Raises `ValueError` for ids that the model has no embedding for."""
    least, most = torch.cat(rows).aminmax()
    if not 0 <= int(least) <= int(most) < size:
        row, wrong = next((row, i) for row, ids in enumerate(rows) for i in ids.tolist() if not 0 <= i < size)
        raise ValueError(f"{name}: row {row} holds the id {wrong}; the language model has ids 0 to {size - 1}")


def unpadded(input_ids: Tensor, attention_mask: Tensor | None) -> list[Tensor]:
    """Rows of a batch without their padding, on whichever side it is."""
    if not is_dense(input_ids) or input_ids.dim() != 2:
        raise ValueError(f"input_ids must be a tensor of ids (B, P), got {shown(input_ids)}{advice_on_ids(input_ids)}")
    mask = as_mask("attention_mask", attention_mask, input_ids)
    return [ids[own] for ids, own in zip(input_ids, mask, strict=True)]
