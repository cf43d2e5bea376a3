"""What callers hand to an `EnergyModel`, checked before any work: models, ids, masks, and what else a model reads.

Beside its tokens a masked language model may read encoder states and further inputs, such as languages.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from inspect import Parameter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from hf_ebm.checks import as_ids, as_mask, as_whole_numbers, shown
from hf_ebm.model_facts import has_token_logits, is_causal, limit_of, needed_inputs
from hf_ebm.model_modes import state_kept
from hf_ebm.scoring.rows import Context, Sequences, attended_mask, attended_spans

if TYPE_CHECKING:
    from hf_ebm.models.energy.modeling_energy import EnergyModel

# Arguments of a forward that say nothing of the sequences, or are given by other names here.
_NO_INPUTS = {
    "self", "args", "kwargs", "input_ids", "inputs", "attention_mask", "inputs_embeds", "labels", "entity_labels",
    "encoder_hidden_states", "encoder_attention_mask", "encoder_outputs", "decoder_input_ids", "decoder_attention_mask",
    "decoder_inputs_embeds", "cache", "past_key_values", "use_cache", "output_attentions", "output_hidden_states",
    "return_dict", "logits_to_keep", "lengths", "num_hashes",
}  # fmt: skip
# Of other inputs there is a value for each token.
_OF_SEQUENCES = {"lang_ids", "entity_ids", "entity_attention_mask", "entity_token_type_ids", "entity_position_ids"}
_UNSUPPORTED = {
    "pixel_values": "images are no part of a sequence's energy here",
    "pixel_attention_mask": "images are no part of a sequence's energy here",
    "image_hidden_states": "images are no part of a sequence's energy here",
    "input_shape_ids": "a token's shape gives the masked token away",
    "input_pronunciation_ids": "a token's pronunciation gives the masked token away",
}
# Where a configuration says how many values an input has.
_SIZES = {
    "token_type_ids": "type_vocab_size", "langs": "n_langs", "position_ids": "max_position_embeddings",
    "bbox": "max_2d_position_embeddings", "task_type_ids": "task_type_vocab_size", "entity_ids": "entity_vocab_size",
    "entity_position_ids": "max_position_embeddings", "entity_token_type_ids": "type_vocab_size",
}  # fmt: skip


def input_names(mlm: PreTrainedModel) -> set[str]:
    """What a model's forward takes by name beside tokens and their mask."""
    named = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(mlm.forward).parameters.items()
    return {name for name, parameter in parameters if parameter.kind in named} - _NO_INPUTS


def is_model_input(mlm: PreTrainedModel, name: str) -> bool:
    """Whether an argument is an input of this model, or of others, rather than a setting."""
    return name in input_names(mlm) | _OF_SEQUENCES | _UNSUPPORTED.keys() | _SIZES.keys()


def zero_inputs(mlm: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """Zeros for what a model needs beside `ids` (B, T), to try it."""
    shapes = {"lang_ids": ids.shape[:1], "bbox": (*ids.shape, 4)}
    return {name: ids.new_zeros(shapes.get(name, ids.shape)) for name in needed_inputs(mlm.config)}


def context_of(
    model: EnergyModel,
    sequences: Sequences,
    encoder_ids: Tensor | None,
    encoder_mask: Tensor | None,
    given: Mapping[str, object],
    one_source: bool = False,
) -> Context | None:
    """What sequences are conditioned on beside their tokens; `None` if there is nothing.

    Args:
        encoder_ids, encoder_mask: (B, S) of an encoder-decoder model, a row for each sequence.
        given: further inputs by name: numbers, or tensors and lists of shape (B, T, …) or (B,).
        one_source: `encoder_ids` has one row, that of all sequences.

    Raises:
        ValueError: for an input that the model doesn't take, or needs and doesn't have; for other shapes and values.
    """
    by_token, by_sequence = _checked_inputs(model, sequences, given)
    states, lengths = _encoder_states(model, encoder_ids, encoder_mask, 1 if one_source else len(sequences.ids))
    if states is not None and lengths is not None and one_source:
        states, lengths = states.expand(len(sequences.ids), -1, -1), lengths.expand(len(sequences.ids))
    if not by_token and not by_sequence and states is None:
        return None
    return Context(by_token, by_sequence, states, lengths)


def by_row(further_inputs: Mapping[str, object], rows: int, of: str) -> dict[str, Tensor]:
    """One number for all, or one for each row, as (N,). Raises `ValueError`, calling rows `of`, for anything else."""
    found = {}
    for name, value in further_inputs.items():
        if value is None:
            continue
        numbers = as_whole_numbers(name, value)
        if tuple(numbers.shape) not in ((), (rows,)):
            raise ValueError(f"{name} must be one number, or one for each of the {rows} {of}, got {shown(value)}")
        found[name] = numbers.expand(rows)
    return found


def _checked_inputs(
    model: EnergyModel, sequences: Sequences, given: Mapping[str, object]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs by token and by sequence. Segments that are all 0 are left out where a model has none."""
    found: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
    mlm = model.mlm
    names, name_of_class = input_names(mlm), type(mlm).__name__
    for name, value in given.items():
        if value is None:
            continue
        if name in _UNSUPPORTED:
            raise ValueError(f"{name}: {name_of_class} cannot be given it, {_UNSUPPORTED[name]}")
        values = as_whole_numbers(name, value)
        if name not in names:
            if name == "token_type_ids" and not bool(values.any()):
                continue  # tokenizers return them for every model
            takes = ", ".join(sorted(names - set(_UNSUPPORTED))) or "none"
            raise ValueError(f"{name}: {name_of_class} takes no such input; beside tokens and mask it takes {takes}")
        whole = name in _OF_SEQUENCES
        values = _broadcast(name, values, sequences, mlm.config, whole)
        _check_values(name, values if whole else values[_attended(sequences)], mlm.config)
        found[whole][name] = values.to(model.input_device)
    _check_entities(found[1], sequences)
    for name, reason in needed_inputs(mlm.config).items():
        if name in names and name not in found[0] and name not in found[1]:
            raise ValueError(f"{name}: {name_of_class} needs it: {reason}")
    return found


def _attended(sequences: Sequences) -> Tensor:
    """(B, T) bool, on the CPU: what isn't padding."""
    return attended_mask(sequences.start, sequences.stop, sequences.ids.shape[1])


def _broadcast(name: str, values: Tensor, sequences: Sequences, config: PreTrainedConfig, whole: bool) -> Tensor:
    """One value for all, or one a sequence, as one for each token."""
    rows, columns = sequences.ids.shape
    widths = {"bbox": 4, "token_type_ids": len(getattr(config, "type_vocab_sizes", ()))}
    inner = [widths[name]] if widths.get(name) else []
    if not whole and values.dim() == 0:
        return values.expand(rows, columns, *inner)
    if not whole and tuple(values.shape) == (rows,):
        return values[(..., *[None] * (1 + len(inner)))].expand(rows, columns, *inner)
    if name == "lang_ids" and values.dim() == 0:
        return values.expand(rows)
    dimensions = {"lang_ids": 1, "entity_position_ids": 3}.get(name, 2)
    if whole and values.dim() == dimensions and len(values) == rows:
        return values
    if not whole and tuple(values.shape) == (rows, columns, *inner):
        return values
    of_whole = ", ".join([str(rows), *["…"] * (dimensions - 1)])
    shape = f"({of_whole})" if whole else f"({rows},) or {(rows, columns, *inner)}"
    raise ValueError(f"{name} must be one number for all, or of shape {shape}, got shape {tuple(values.shape)}")


def _check_values(name: str, values: Tensor, config: PreTrainedConfig) -> None:
    least = -1 if name == "entity_position_ids" else 0  # -1 is padding there
    sizes = getattr(config, _SIZES.get(name, ""), None)
    if name == "token_type_ids":  # of TAPAS for each of seven kinds; XLM adds embeddings of tokens
        sizes = getattr(config, "type_vocab_sizes", config.vocab_size if sizes is None else sizes)
    if name == "lang_ids":
        sizes = len(config.languages)
    most = None if not sizes else torch.tensor(sizes) - 1
    wrong = (values < least) | (values > (values.max() if most is None else most))
    if bool(wrong.any()):
        allowed = f"from {least} up" if most is None else f"from {least} to {most.tolist()}"
        raise ValueError(f"{name} must hold numbers {allowed}, got {int(values[wrong][0])}")
    if name == "bbox" and bool((values[..., :2] > values[..., 2:]).any()):
        raise ValueError("bbox must hold boxes (left, top, right, bottom), of which left <= right and top <= bottom")


def _check_entities(found: dict[str, Tensor], sequences: Sequences) -> None:
    """Raises `ValueError` unless entities are given with their places, as many of each."""
    own = {name: value for name, value in found.items() if name.startswith("entity_")}
    if not own:
        return
    missing = [name for name in ("entity_ids", "entity_position_ids") if name not in own]
    if missing or len({value.shape[1] for value in own.values()}) > 1:
        what = f"without {missing[0]}" if missing else "of different numbers of entities"
        raise ValueError(f"entity_ids must be given with entity_position_ids, as many of each, got some {what}")
    if bool(sequences.start.any()):
        raise ValueError("entity_position_ids count from a row's first token: pad on the right")


def _encoder_states(
    model: EnergyModel, ids: Tensor | None, attention_mask: Tensor | None, batch: int
) -> tuple[Tensor | None, Tensor | None]:
    """Encoder states (B, S, d) of an encoder-decoder model and their lengths (B,); `None` for other models."""
    if not model.mlm.config.is_encoder_decoder:
        if ids is not None:
            raise ValueError(f"encoder_input_ids: {type(model.mlm).__name__} has no encoder of its own to condition on")
        return None, None
    if ids is None:
        raise ValueError(
            f"encoder_input_ids: {type(model.mlm).__name__} is an encoder-decoder, its energy is conditional on an "
            "encoder input; none was given"
        )
    ids = as_ids("encoder_input_ids", ids)
    if len(ids) != batch:
        raise ValueError(f"encoder_input_ids has {len(ids)} rows, input_ids has {batch}; they must be equal")
    mask = as_mask("encoder_attention_mask", attention_mask, ids)
    check_range("encoder_input_ids", ids, mask, model.vocab_size)
    start, stop = attended_spans(mask)
    ids, lengths = ids.to(model.input_device), stop - start
    limit = limit_of(model.mlm, model.config.max_sequence_length)
    if limit is not None:
        limit.check(int(lengths.max()), f"encoder_input_ids: row {int(lengths.argmax())}")
    # One row at a time: as in masked rows, no value may depend on padding. Candidates of one source share its states.
    sources = [tuple(ids[row, start[row] : stop[row]].tolist()) for row in range(batch)]
    encoded = {source: _encoded(model.mlm, ids.new_tensor([source])) for source in dict.fromkeys(sources)}
    rows = [encoded[source] for source in sources]
    longest = int(lengths.max())
    states = torch.stack([nn.functional.pad(row, (0, 0, 0, longest - len(row))) for row in rows])
    return states.to(model.input_device), lengths


def _encoded(mlm: PreTrainedModel, ids: Tensor) -> Tensor:
    with state_kept(mlm):
        return mlm.get_encoder()(input_ids=ids).last_hidden_state[0]


def check_range(name: str, ids: Tensor, mask: Tensor, vocab_size: int) -> None:
    """Raises `ValueError` for an attended id outside the vocabulary, naming its place."""
    bad = ((ids < 0) | (ids >= vocab_size)) & mask
    if bool(bad.any()):
        row, position = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: row {row}, position {position} holds id {int(ids[row, position])}; "
            f"the model's vocabulary has ids 0 to {vocab_size - 1}"
        )


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
    model: EnergyModel, input_ids: Tensor, attention_mask: Tensor | None = None, free_mask: Tensor | None = None
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
        mask_id = -1 if model.config.mask_token_id is None else model.config.mask_token_id
        scored &= ~torch.isin(ids.to(device), special) | (ids.to(device) == mask_id)
    return EnergyInputs(Sequences(ids.to(device), start, stop), scored)


def check_energy_inputs(
    model: EnergyModel,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    free_mask: Tensor | None,
    encoder_input_ids: Tensor | None,
    encoder_attention_mask: Tensor | None,
    further_inputs: Mapping[str, object],
) -> EnergyInputs:
    """`check_inputs` for an energy: the mask token must be known and stand at no scored position; with the context."""
    mask_id = mask_id_of(model)
    sequences, scored = check_inputs(model, input_ids, attention_mask, free_mask)
    masked = scored & (sequences.ids == mask_id)
    if bool(masked.any()):
        row, position = masked.nonzero()[0].tolist()
        raise ValueError(f"input_ids: row {row} holds a mask token at scored position {position}; it has no energy")
    context = context_of(model, sequences, encoder_input_ids, encoder_attention_mask, further_inputs)
    return EnergyInputs(replace(sequences, context=context), scored)


def mask_id_of(model: EnergyModel) -> int:
    """The mask token's id. Raises `ValueError` where the model doesn't know it."""
    if model.config.mask_token_id is None:
        raise ValueError(
            "mask_token_id is not set; load the model with its tokenizer beside it, or pass processing_class= to "
            "from_pretrained or mask_token_id= to EnergyModel"
        )
    return model.config.mask_token_id


def padding_id(model: EnergyModel) -> int:
    """What is written beyond the end of a sequence: the pad token, else some special token."""
    candidates = [model.config.pad_token_id, *(model.config.special_token_ids or []), 0]
    return next(i for i in candidates if i is not None)
