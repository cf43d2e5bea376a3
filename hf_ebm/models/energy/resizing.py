"""Another number of token ids: what is checked before it, and the roles of the ids after it."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ebm.model_facts import num_embeddings
from hf_ebm.model_modes import evaluation_mode
from hf_ebm.models.energy.configuration_energy import EnergyConfig
from hf_ebm.models.energy.context import zero_inputs
from hf_ebm.models.energy.token_roles import token_roles, tokenizer_of
from hf_ebm.plain_values import as_whole

if TYPE_CHECKING:
    from transformers import ProcessorMixin


def resized_number(present: int, new_num_tokens: int | None, pad_to_multiple_of: int | None) -> int:
    """How many ids there will be, as Transformers counts them.

    Raises:
        ValueError: for what is no whole number from 1 up.
    """
    number = present if new_num_tokens is None else as_whole("new_num_tokens", new_num_tokens, 1)
    multiple = 1 if pad_to_multiple_of is None else as_whole("pad_to_multiple_of", pad_to_multiple_of, 1)
    return -(-number // multiple) * multiple


def resized_roles(
    config: EnergyConfig,
    present: int,
    number: int,
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None,
) -> dict[str, Any]:
    """Token fields of `EnergyConfig` for another number of ids: a tokenizer's, or those there are.

    Without a tokenizer new ids have no token, so they are never proposed, and special and excluded ids that are no more
    are dropped.

    Raises:
        ValueError: for a tokenizer with more tokens than there will be ids, and where the mask token, the pad token or
            those around a text would be no more.
    """
    if processing_class is not None:
        count = len(tokenizer_of(processing_class))
        if count > number:
            raise ValueError(f"processing_class has {count} tokens, the model would have {number} ids")
        return token_roles(processing_class, number)
    needed: dict[str, list[int | None]] = {
        "mask_token_id": [config.mask_token_id],
        "pad_token_id": [config.pad_token_id],
        "prefix_token_ids": [*(config.prefix_token_ids or [])],
        "suffix_token_ids": [*(config.suffix_token_ids or [])],
    }
    for name, ids in needed.items():
        gone = [i for i in ids if i is not None and i >= number]
        if gone:
            raise ValueError(f"new_num_tokens: of {number} ids none would be {gone[0]}, which is in {name}")
    excluded = [i for i in config.excluded_token_ids or [] if i < number] + list(range(present, number))
    special = config.special_token_ids
    return {
        "special_token_ids": None if special is None else [i for i in special if i < number],
        "excluded_token_ids": sorted(set(excluded)) or None,
    }


def rehearse(mlm: PreTrainedModel, number: int, arguments: dict[str, Any]) -> None:
    """Resizes a copy that shares the weights, and runs it on five tokens: not every family's head follows.

    Raises:
        ValueError: for a model that can't be resized, or whose logits are of another number then.
    """
    shared: dict[int, Any] = {id(value): nn.Parameter(value.data, value.requires_grad) for value in mlm.parameters()}
    twin = copy.deepcopy(mlm, shared)
    ids = torch.arange(2, 7, device=mlm.device)[None] % number
    inputs = {"input_ids": ids, **zero_inputs(mlm, ids)} | (
        {"decoder_input_ids": ids} if mlm.config.is_encoder_decoder else {}
    )
    try:
        with torch.random.fork_rng(devices=[mlm.device] if mlm.device.type == "cuda" else []), torch.no_grad():
            twin.resize_token_embeddings(**arguments)
            with evaluation_mode(twin):
                width = twin(**inputs).logits.shape[-1]
        sizes = {num_embeddings(twin), width}
    except Exception as error:  # whatever the model's own code raises on sizes it doesn't expect
        raise ValueError(f"resize_token_embeddings: {type(mlm).__name__} can't be resized: {error}") from error
    if sizes != {number}:
        raise ValueError(
            f"resize_token_embeddings: {type(mlm).__name__} can't be resized: of {number} ids it would have logits for "
            f"{width}"
        )
