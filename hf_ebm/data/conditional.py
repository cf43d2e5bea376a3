"""Pairs of texts for a masked language model that fills in the second one, the target, given the first, the source.

The target's tokens are the random variable (`free_mask`); the source is context, in the same row or, for an
encoder-decoder, in the encoder's. Columns are named as the arguments of `EnergyModel.forward` and `generate`.
"""

from __future__ import annotations

import torch
from datasets import Dataset, DatasetDict
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ebm.data.symbols import encode_splits, length_limits
from hf_ebm.models.energy.encoding import (
    check_mask_token,
    fill_placeholder,
    rows_with_placeholder,
    target_placeholder,
)
from hf_ebm.objectives.completions import pad_right
from hf_ebm.objectives.losses import IGNORED
from hf_ebm.texts import plain_ids


def encode_conditional(
    dataset: Dataset | DatasetDict, tokenizer: PreTrainedTokenizerBase, encoder_decoder: bool = False
) -> Dataset | DatasetDict:
    """`dataset` with `input_ids` and `free_mask`, for an encoder-decoder `encoder_input_ids` too, not padded.

    Args:
        dataset: has the text columns `source` and `target`.
        tokenizer: has a mask token. A row is its pair of source and target, or, for an encoder-decoder, the target as
            its `text_target`.

    Nothing is cut. Raises `ValueError` as `hf_ebm.data.symbols.encode_pairs` does, and for a target without a token.
    """

    def tokenize(sources: list[str], targets: list[str]) -> tuple[list[list[int]], list[list[int]]]:
        for name, texts in (("source", sources), ("target", targets)):
            held = [text for text in texts if tokenizer.mask_token in text]
            if held:
                raise ValueError(f"{name} must not hold {tokenizer.mask_token}, got {held[0]!r}")
        if encoder_decoder:
            return tokenizer(text=sources, padding=False, truncation=False)["input_ids"], plain_ids(tokenizer, targets)
        return rows_with_placeholder(tokenizer, sources), plain_ids(tokenizer, targets)

    def columns(sources: list[list[int]], targets: list[list[int]], places: list[str]) -> dict[str, list]:
        for target, place in zip(targets, places, strict=True):
            if not target:
                raise ValueError(f"target of {place} has no token")
        frames = [target_placeholder(tokenizer)] * len(sources) if encoder_decoder else sources
        filled = [fill_placeholder(tokenizer, row, target) for row, target in zip(frames, targets, strict=True)]
        encoded: dict[str, list] = {"input_ids": [ids for ids, _ in filled], "free_mask": [free for _, free in filled]}
        for (ids, _), place in zip(filled, places, strict=True):
            if len(ids) > tokenizer.model_max_length:
                raise ValueError(f"{place} has {len(ids)} tokens, more than the {tokenizer.model_max_length} allowed")
        return {**encoded, "encoder_input_ids": sources} if encoder_decoder else encoded

    check_mask_token(tokenizer)
    return encode_splits(dataset, tokenizer, length_limits(tokenizer, None, None), tokenize, columns)


class MaskedTargetCollator:
    """Pads rows of `encode_conditional` and masks 1 to n of a target's n tokens, each number being as likely.

    That is how conditional masked language models are trained (Ghazvininejad et al. 2019, section 3.1). What comes out
    are the inputs of the masked language model itself (not of `EnergyModel`), for the stock `Trainer`: `input_ids`,
    `attention_mask`, `labels`, and for an encoder-decoder `decoder_input_ids`. Every chosen token becomes the mask.

    Args:
        tokenizer: of the rows.
        model: of an encoder-decoder, which shifts its decoder's input; not needed else.
        generator: of the masks; by default torch's global one, which `Trainer` seeds.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model: PreTrainedModel | None = None,
        generator: torch.Generator | None = None,
    ):
        check_mask_token(tokenizer)
        self.tokenizer, self.model, self.generator = tokenizer, model, generator

    def __call__(self, rows: list[dict]) -> dict[str, Tensor]:
        pad = self.tokenizer.pad_token_id
        ids, attention_mask = pad_right([torch.as_tensor(row["input_ids"]) for row in rows], pad)
        free, _ = pad_right([torch.as_tensor(row["free_mask"]).long() for row in rows], 0)
        masked = draw_masked(free.bool(), self.generator)
        labels = ids.masked_fill(~masked, IGNORED)
        ids = ids.masked_fill(masked, self.tokenizer.mask_token_id)
        if "encoder_input_ids" not in rows[0]:
            return {"input_ids": ids, "attention_mask": attention_mask, "labels": labels}
        shift = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
        if shift is None:
            raise ValueError("model must be given for rows with encoder_input_ids: it shifts its decoder's input")
        encoder_ids, encoder_mask = pad_right([torch.as_tensor(row["encoder_input_ids"]) for row in rows], pad)
        decoder_ids = shift(ids)
        return {
            "input_ids": encoder_ids,
            "attention_mask": encoder_mask,
            "decoder_input_ids": decoder_ids,
            "labels": labels,
        }


def draw_masked(free: Tensor, generator: torch.Generator | None) -> Tensor:
    """(B, T) bool: in each row 1 to n of the n positions of `free` (B, T), each number being as likely."""
    count = free.sum(1, keepdim=True)
    number = 1 + (torch.rand(len(free), 1, generator=generator) * count).long().clamp(max=count - 1)
    lottery = torch.rand(free.shape, generator=generator).masked_fill(~free, 2.0)
    return (lottery.argsort(1).argsort(1) < number) & free
