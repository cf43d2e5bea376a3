"""Rows with blanks as callers give them, texts or ids with sources and further inputs, as spaces of fills."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_ebm.checks import as_ids, as_mask
from hf_ebm.model_facts import limit_of
from hf_ebm.models.energy.blanks import Layout, Rules, layouts_of
from hf_ebm.models.energy.chains import proposal_support
from hf_ebm.models.energy.encoding import check_encoded, encode_plain
from hf_ebm.models.energy.inputs import by_row, check_inputs, context_of
from hf_ebm.texts import as_texts, report_unknown

if TYPE_CHECKING:
    from hf_ebm.models.energy.modeling_energy import EnergyModel


class BlankRow(NamedTuple):
    """One row.

    Attributes:
        layouts: every way to lay out its blanks.
        source: (1, S) ids that an encoder-decoder model conditions on.
        further_inputs: what else the model reads, by name.
    """

    layouts: list[Layout]
    source: Tensor | None
    further_inputs: dict[str, int]


def blank_rows(
    model: EnergyModel,
    texts: Iterable[str] | str | os.PathLike | Tensor,
    tokenizer: PreTrainedTokenizerBase,
    rules: Rules,
    attention_mask: Tensor | None,
    encoder_texts: Iterable[str] | None,
    further_inputs: Mapping[str, Any] | None,
    unknown_tokens: str,
) -> list[BlankRow]:
    """Every row, checked. Arguments are those of `fill`, in evaluation mode."""
    rows, spelled = _rows(model, texts, tokenizer, attention_mask, unknown_tokens)
    sources = _sources(model, tokenizer, encoder_texts, len(rows), unknown_tokens)
    inputs = by_row(further_inputs or {}, len(rows), "texts")
    support = proposal_support(model, None)
    limit = limit_of(model.mlm, model.config.max_sequence_length, tokenizer)
    found = []
    for row, ids in enumerate(rows):
        text = None if spelled is None else spelled[row]
        layouts = layouts_of(model, tokenizer, row, ids, text, support, rules)
        for layout in layouts:
            check_encoded(model, limit, "texts", row, layout.space.ids.tolist())
        source = None if sources is None else torch.tensor([sources[row]])
        own = {name: int(values[row]) for name, values in inputs.items()}
        found.append(BlankRow([_with_context(model, layout, source, own) for layout in layouts], source, own))
    return found


def _rows(
    model: EnergyModel,
    texts: Iterable[str] | str | os.PathLike | Tensor,
    tokenizer: PreTrainedTokenizerBase,
    attention_mask: Tensor | None,
    unknown_tokens: str,
) -> tuple[list[list[int]], list[str] | None]:
    """Ids of every row, and the texts where these were given."""
    if isinstance(texts, Tensor):
        ids = as_ids("texts", texts)
        sequences = check_inputs(model, ids, as_mask("attention_mask", attention_mask, ids)).sequences
        ends = zip(sequences.start.tolist(), sequences.stop.tolist(), strict=True)
        return [ids[row, start:stop].tolist() for row, (start, stop) in enumerate(ends)], None
    if attention_mask is not None:
        raise ValueError("attention_mask was given with texts; it is for token ids")
    spelled = as_texts("texts", texts)
    rows = encode_plain(model, tokenizer, "texts", spelled)
    report_unknown(tokenizer, "texts", spelled, unknown_tokens)
    return rows, spelled


def _sources(
    model: EnergyModel,
    tokenizer: PreTrainedTokenizerBase,
    encoder_texts: Iterable[str] | None,
    count: int,
    unknown_tokens: str,
) -> list[list[int]] | None:
    conditional, given = model.mlm.config.is_encoder_decoder, encoder_texts is not None
    if conditional != given:
        role = "is an encoder-decoder, its energy is conditional on" if conditional else "has no encoder to take"
        raise ValueError(f"encoder_texts: {type(model.mlm).__name__} {role} an encoder input")
    if encoder_texts is None:
        return None
    sources = as_texts("encoder_texts", encoder_texts)
    if len(sources) != count:
        raise ValueError(f"encoder_texts has {len(sources)} rows, texts has {count}; they must be equal")
    report_unknown(tokenizer, "encoder_texts", sources, unknown_tokens)
    return encode_plain(model, tokenizer, "encoder_texts", sources)


def _with_context(model: EnergyModel, layout: Layout, source: Tensor | None, further: dict[str, Any]) -> Layout:
    sequences = check_inputs(model, layout.space.ids[None]).sequences
    return layout._replace(space=layout.space._replace(context=context_of(model, sequences, source, None, further)))
