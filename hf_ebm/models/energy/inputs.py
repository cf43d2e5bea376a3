"""Checks of what callers hand to an `EnergyModel`, done before any work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from hf_ebm.checks import as_ids, as_mask
from hf_ebm.model_facts import limit_of
from hf_ebm.models.energy.context import check_range, context_of
from hf_ebm.models.probes import has_token_logits, is_causal
from hf_ebm.scoring.rows import Sequences, attended_spans

if TYPE_CHECKING:
    from hf_ebm.models.energy.energy_base import EnergyBase

# Members of the masked-LM mapping that cannot work here, with the reason the error gives.
UNSUPPORTED_MODEL_TYPES = {
    "modernvbert": "its inputs are images and text",
    "ultravbert": "its inputs are images and text",
    "yoso": "its attention runs only as a CUDA kernel and is random even in evaluation mode",
    "nystromformer": "its landmark attention takes only lengths that its number of landmarks divides",
    "reformer": "its hashing attention needs fixed padded lengths, so a value would depend on padding",
}


class EnergyInputs(NamedTuple):
    """Checked inputs: the sequences and the (B, T) mask of scored (or free) positions."""

    sequences: Sequences
    scored: Tensor


def check_masked_lm(mlm: PreTrainedModel) -> None:
    """Raises `ValueError` unless `mlm` is a model with a masked-LM head whose inputs are token ids."""
    names: set[str] = set()
    for entry in MODEL_FOR_MASKED_LM_MAPPING_NAMES.values():
        names.update([entry] if isinstance(entry, str) else entry)
    names.update(cls.__name__ for cls in MODEL_FOR_MASKED_LM_MAPPING._extra_content.values())
    known = any(cls.__name__ in names for cls in type(mlm).__mro__)
    # Classes of a checkpoint's or a user's own code may have any name.
    if not known and (type(mlm).__module__.startswith("transformers.") or not has_token_logits(mlm)):
        raise ValueError(
            f"mlm: {type(mlm).__name__} has no masked-language-model head; an energy needs a model of a class that "
            f"{AutoModelForMaskedLM.__name__} makes (BertForMaskedLM, ModernBertForMaskedLM, EsmForMaskedLM, …), "
            "because it masks a position and reads that position's logits given both sides"
        )
    check_masked_lm_config(mlm.config)
    if not known and is_causal(mlm):
        raise ValueError(f"mlm: {type(mlm).__name__} is causal; an energy needs a bidirectional masked language model")


def check_masked_lm_config(config: PreTrainedConfig) -> None:
    """Raises `ValueError` for configurations that cannot work as an energy model, saying why."""
    if config.model_type in UNSUPPORTED_MODEL_TYPES:
        raise ValueError(
            f"model type {config.model_type!r} cannot be used: {UNSUPPORTED_MODEL_TYPES[config.model_type]}"
        )
    if getattr(config, "enable_shape", False) or getattr(config, "enable_pronunciation", False):
        raise ValueError(
            f"model type {config.model_type!r} reads a shape and a pronunciation of every token, which would give the "
            "masked token away; it can be used with enable_shape=False and enable_pronunciation=False alone"
        )
    if (getattr(config, "is_decoder", False) and not config.is_encoder_decoder) or getattr(config, "causal", False):
        raise ValueError(
            f"model type {config.model_type!r} is configured as a decoder (is_decoder or causal): its positions see "
            "only their left context; an energy needs a bidirectional masked language model"
        )


def check_inputs(
    model: EnergyBase, input_ids: Tensor, attention_mask: Tensor | None = None, free_mask: Tensor | None = None
) -> EnergyInputs:
    """Checks shapes, ids and lengths and moves everything to the embedding's device.

    The scored positions are the attended ones that `free_mask` allows (all of them without it), less those that hold a
    special token.
    """
    ids = as_ids("input_ids", input_ids)
    mask = as_mask("attention_mask", attention_mask, ids)
    free = as_mask("free_mask", free_mask, ids)
    check_range("input_ids", ids, mask, model.vocab_size)
    start, stop = attended_spans(mask)
    limit = limit_of(model.mlm, model.config.max_sequence_length)
    if limit is not None:
        limit.check(int((stop - start).max()), f"input_ids: row {int((stop - start).argmax())}")
    device = model.input_device
    ids = ids.masked_fill(~mask, padding_id(model))  # what stands in the padding is nobody's business
    scored = (mask & free).to(device)
    if model.config.special_token_ids:
        special = torch.tensor(model.config.special_token_ids, device=device)
        scored &= ~torch.isin(ids.to(device), special) | (ids.to(device) == _or_minus_one(model.config.mask_token_id))
    return EnergyInputs(Sequences(ids.to(device), start, stop), scored)


def check_energy_inputs(
    model: EnergyBase,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    free_mask: Tensor | None,
    encoder_input_ids: Tensor | None,
    encoder_attention_mask: Tensor | None,
    further_inputs: Mapping[str, object],
) -> EnergyInputs:
    """`check_inputs` for an energy: the mask token must be known and stand at no scored position; with the context."""
    if model.config.mask_token_id is None:
        raise ValueError(
            "mask_token_id is not set; load the model with its tokenizer beside it, or pass processing_class= to "
            "from_pretrained or mask_token_id= to EnergyModel"
        )
    sequences, scored = check_inputs(model, input_ids, attention_mask, free_mask)
    masked = scored & (sequences.ids == model.config.mask_token_id)
    if bool(masked.any()):
        row, position = masked.nonzero()[0].tolist()
        raise ValueError(f"input_ids: row {row} holds a mask token at scored position {position}; it has no energy")
    context = context_of(model, sequences, encoder_input_ids, encoder_attention_mask, further_inputs)
    return EnergyInputs(sequences._replace(context=context), scored)


def padding_id(model: EnergyBase) -> int:
    """What is written beyond the end of a sequence: the pad token, else some special token."""
    candidates = [model.config.pad_token_id, *(model.config.special_token_ids or []), 0]
    return next(i for i in candidates if i is not None)


def _or_minus_one(token_id: int | None) -> int:
    return -1 if token_id is None else token_id
