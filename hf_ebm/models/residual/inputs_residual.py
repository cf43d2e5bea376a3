"""Checks of what callers hand to a residual model, done before any work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_ebm.generation_settings import is_whole
from hf_ebm.models.position_limits import max_length
from hf_ebm.vocabulary import num_embeddings

if TYPE_CHECKING:
    from hf_ebm.models.residual.residual_base import ResidualBase


def lm_of(model: ResidualBase) -> PreTrainedModel:
    """The language model. Raises `ValueError` where it is not loaded."""
    if model.lm is None:
        raise ValueError(
            f"lm: the language model is kept by reference ({model.config.lm_reference}); load the model with "
            "from_pretrained"
        )
    return model.lm


def check_parts(model: ResidualBase) -> PreTrainedModel:
    """The language model; raises `ValueError` unless it and the encoder are there and on one device."""
    lm = lm_of(model)
    if lm.device != model.encoder.device or model.head.weight.device != model.encoder.device:
        raise ValueError(
            f"lm and encoder must be on one device, got {lm.device}, {model.encoder.device} and, for the head, "
            f"{model.head.weight.device}"
        )
    return lm


def check_prefixes(
    model: ResidualBase, prefixes: Sequence[Tensor | Sequence[int]], max_new_tokens: int
) -> list[Tensor]:
    """Prefixes as tensors on the language model's device; an empty one becomes its start token.

    Raises:
        ValueError: for none at all, ids outside the vocabulary, an empty one without a start token, and one that leaves
            language model or encoder no positions for `max_new_tokens`.
    """
    lm = check_parts(model)
    if not len(prefixes):
        raise ValueError("prefixes must be one or more, got none")
    size, device = num_embeddings(lm), lm.device  # looked up once: it is found among all parameters
    # The encoder's own tokens for the same text are counted when there are some.
    parts = [("language model", lm)] + ([] if model.config.retokenize else [("encoder", model.encoder)])
    limits = [(name, max_length(part)) for name, part in parts]
    found = []
    for row, prefix in enumerate(prefixes):
        ids = _as_ids(prefix, f"prefixes: row {row}", device)
        if not len(ids):
            if model.config.start_token_id is None:
                raise ValueError(
                    f"prefixes: row {row} is empty, and the language model has no bos_token_id to start from"
                )
            ids = torch.tensor([model.config.start_token_id], device=device)
        for name, limit in limits:
            if limit is not None and len(ids) + max_new_tokens > limit:
                raise ValueError(
                    f"prefixes: row {row} has {len(ids)} tokens, with max_new_tokens {len(ids) + max_new_tokens}; the "
                    f"{name} has positions for {limit}"
                )
        found.append(ids)
    _check_ids("prefixes", found, size)
    return found


def check_continuations(model: ResidualBase, continuations: Sequence, max_new_tokens: int, count: int) -> list[Tensor]:
    """Continuations as tensors on the language model's device.

    Raises:
        ValueError: unless each ends with an end token or has `max_new_tokens` tokens, with no end token inside.
    """
    if len(continuations) != count:
        raise ValueError(f"continuations must be as many as prefixes, got {len(continuations)} and {count}")
    lm, ends = lm_of(model), set(model.end_ids)
    size, device = num_embeddings(lm), lm.device
    found = []
    for row, continuation in enumerate(continuations):
        ids = _as_ids(continuation, f"continuations: row {row}", device)
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


def check_whole(least: int, **values: object) -> None:
    """Raises `ValueError` for a value that is no whole number from `least` up, naming its argument."""
    for name, value in values.items():
        if not is_whole(value) or value < least:
            raise ValueError(f"{name} must be a whole number from {least} up, got {value!r}")


def _as_ids(values: Any, place: str, device: torch.device) -> Tensor:
    try:
        ids = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        ids = None
    empty = ids is not None and ids.numel() == 0
    if ids is None or ids.dim() != 1 or not (empty or ids.dtype in (torch.int64, torch.int32, torch.int16)):
        raise ValueError(f"{place} must be a list of ids, got {values!r}")
    return ids.to(device, torch.long)


def _check_ids(name: str, rows: list[Tensor], size: int) -> None:
    """Raises `ValueError` for ids that the model has no embedding for."""
    least, most = torch.cat(rows).aminmax()
    if not 0 <= int(least) <= int(most) < size:
        row, wrong = next((row, i) for row, ids in enumerate(rows) for i in ids.tolist() if not 0 <= i < size)
        raise ValueError(f"{name}: row {row} holds the id {wrong}; the language model has ids 0 to {size - 1}")


def unpadded(input_ids: Tensor, attention_mask: Tensor | None) -> list[Tensor]:
    """Rows of a batch without their padding, on whichever side it is."""
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
        shape = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ValueError(f"input_ids must be a tensor of ids (B, P), got {shape}")
    if attention_mask is None:
        return list(input_ids)
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask must have the shape of input_ids, {tuple(input_ids.shape)}, got "
            f"{tuple(attention_mask.shape)}"
        )
    return [ids[mask.bool()] for ids, mask in zip(input_ids, attention_mask, strict=True)]
