"""From what a caller of `generate` hands over to the chains to run."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_ebm.models.energy.inputs import check_inputs, max_length
from hf_ebm.sampling.configuration import ChainGenerationConfig
from hf_ebm.sampling.sampler import ChainKey
from hf_ebm.sampling.streams import LENGTH, chain_generator
from hf_ebm.scoring.rows import EncoderContext


class Chains(NamedTuple):
    """Chains to run, C in all.

    Attributes:
        keys: prompt and chain numbers.
        ids: (C, T) starting tokens, with masks where something is to be filled.
        start, stop: (C,) bounds of the sequences, on the CPU.
        free: (C, T) bool, the positions to sample.
        context: encoder states per chain, for encoder-decoder models.
    """

    keys: list[ChainKey]
    ids: Tensor
    start: Tensor
    stop: Tensor
    free: Tensor
    context: EncoderContext | None


def proposal_support(model, suppress_tokens: list[int] | None) -> Tensor:
    """(V,) bool: the tokens a free position may hold.

    Raises:
        ValueError: if the model doesn't know its token roles, or nothing is left.
    """
    config = model.config
    if config.mask_token_id is None or config.special_token_ids is None:
        raise ValueError(
            "sampling needs mask_token_id and special_token_ids, so that special tokens are never proposed; load the "
            "model with its tokenizer beside it, or pass processing_class= to from_pretrained or the ids to EnergyModel"
        )
    never = [config.mask_token_id, *config.special_token_ids, *(config.excluded_token_ids or [])]
    outside = [i for i in suppress_tokens or [] if i >= model.vocab_size]
    if outside:
        raise ValueError(f"suppress_tokens: {outside} are not ids of the vocabulary (0 to {model.vocab_size - 1})")
    support = torch.ones(model.vocab_size, dtype=torch.bool)
    support[torch.tensor([*never, *(suppress_tokens or [])], dtype=torch.long)] = False
    if not bool(support.any()):
        raise ValueError("suppress_tokens: no token is left to propose")
    return support.to(model.input_device)


def build_chains(
    model, config: ChainGenerationConfig, numbers: list[int], inputs: dict[str, Tensor | None]
) -> Chains:
    """The chains for prompts given as inputs, or for `config.lengths` without any.

    Args:
        numbers: numbers of the chains to run for each prompt.
        inputs: `input_ids`, `attention_mask`, `free_mask`, `encoder_input_ids`, `encoder_attention_mask`.
    """
    if inputs["input_ids"] is not None:
        repeats = {k: v.repeat_interleave(len(numbers), 0) if v is not None else None for k, v in inputs.items()}
        count = len(inputs["input_ids"])
        keys = [ChainKey(prompt, chain) for prompt in range(count) for chain in numbers]
    else:
        keys, repeats = _unconditional(model, config, numbers, inputs)
    checked = check_inputs(model, **repeats)
    ids, free = checked.sequences.ids, checked.scored
    masks = ids == model.config.mask_token_id
    if inputs["free_mask"] is None:
        masks_here = masks & free
        free = torch.where(masks_here.any(1, keepdim=True), masks_here, free)
    _check_free(free, masks, config, keys)
    sequences = checked.sequences
    return Chains(keys, ids, sequences.start, sequences.stop, free, sequences.context)


def _check_free(free: Tensor, masks: Tensor, config: ChainGenerationConfig, keys: list[ChainKey]) -> None:
    for row, (key, count) in enumerate(zip(keys, free.sum(1).tolist(), strict=True)):
        if count == 0:
            raise ValueError(f"input_ids: prompt {key.prompt} has no free position; there is nothing to sample")
        fixed_masks = (masks[row] & ~free[row]).nonzero()[:, 0].tolist()
        if fixed_masks:
            raise ValueError(f"free_mask: prompt {key.prompt} holds a mask token at fixed position {fixed_masks[0]}")
        sizes = config.block_size if isinstance(config.block_size, list) else [config.block_size]
        if config.final_block_size is None and max(sizes) > count:
            raise ValueError(
                f"block_size {max(sizes)} is above the {count} free positions of prompt {key.prompt}; only a schedule "
                "(final_block_size) is clamped to them"
            )


def _unconditional(model, config: ChainGenerationConfig, numbers: list[int], inputs: dict) -> tuple[list, dict]:
    given = [name for name in ("attention_mask", "free_mask") if inputs[name] is not None]
    if given:
        raise ValueError(f"{given[0]} was given without input_ids")
    if config.lengths is None:
        raise ValueError("neither input_ids nor lengths was given; there is nothing to say what to sample")
    prefix, suffix = model.config.prefix_token_ids or [], model.config.suffix_token_ids or []
    keys, lengths = [], []
    for prompt, length in enumerate(config.lengths if isinstance(config.lengths, list) else [config.lengths]):
        for chain in numbers:
            keys.append(ChainKey(prompt, chain))
            lengths.append(_draw_length(length, config.seed, keys[-1]))
    limit = max_length(model.mlm)
    longest = max(config.lengths) if not isinstance(config.lengths, int) else config.lengths
    if limit is not None and longest + len(prefix) + len(suffix) > limit:
        raise ValueError(
            f"lengths: {longest} free tokens and {len(prefix) + len(suffix)} special ones are more than the "
            f"{limit} positions of the model"
        )
    ids = torch.full((len(keys), len(prefix) + max(lengths) + len(suffix)), _pad_id(model), dtype=torch.long)
    attention_mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        text = [*prefix, *[model.config.mask_token_id] * length, *suffix]
        ids[row, : len(text)] = torch.tensor(text)
        attention_mask[row, : len(text)] = 1
    contexts = {name: inputs[name] for name in ("encoder_input_ids", "encoder_attention_mask")}
    contexts = {name: _per_chain(name, value, len(keys)) for name, value in contexts.items()}
    return keys, {"input_ids": ids, "attention_mask": attention_mask, "free_mask": None, **contexts}


def _per_chain(name: str, value: Tensor | None, chains: int) -> Tensor | None:
    if value is None:
        return None
    if len(value) != 1:
        raise ValueError(f"{name}: with lengths and no input_ids it must have one row, shared by all chains")
    return value.expand(chains, -1)


def _draw_length(length: int | dict[int, float], seed: int, key: ChainKey) -> int:
    if isinstance(length, int):
        return length
    choices, weights = list(length), list(length.values())
    shares = [weight / sum(weights) for weight in weights]
    return int(chain_generator(seed, *key, LENGTH).choice(choices, p=shares))


def _pad_id(model) -> int:
    return model.config.pad_token_id if model.config.pad_token_id is not None else model.config.mask_token_id
