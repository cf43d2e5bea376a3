"""Texts as what is to be filled in or continued, given the rest: a target given its source, a text given its prefix.

For a masked language model the target's tokens are the random variable (`free_mask`); the source is context, in the
same row or, for an encoder-decoder, in the encoder's. Columns are named as the arguments of `EnergyModel.forward` and
`generate`. For a causal language model a text is its first tokens, the prefix, and a continuation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from datasets import Dataset, DatasetDict
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ebm.checks import as_whole
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

    Example:
        >>> from hf_ebm.data.symbols import symbol_tokenizer
        >>> pairs = Dataset.from_dict({"source": ["c a t"], "target": ["K AE T"]})
        >>> row = encode_conditional(pairs, symbol_tokenizer(pairs["target"], pairs["source"], masks=True))[0]
        >>> row["input_ids"], row["free_mask"]
        ([9, 8, 10, 2, 6, 5, 7, 2], [False, False, False, False, True, True, True, False])
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
    """(B, T) bool: in each row 1 to n of the n positions of `free` (B, T), each number being as likely.

    Example:
        >>> free = torch.tensor([[False, True, True], [True, False, False]])
        >>> masked = draw_masked(free, torch.Generator().manual_seed(0))
        >>> bool((masked <= free).all()), masked.any(1).tolist()
        (True, [True, True])
    """
    count = free.sum(1, keepdim=True)
    number = 1 + (torch.rand(len(free), 1, generator=generator) * count).long().clamp(max=count - 1)
    lottery = torch.rand(free.shape, generator=generator).masked_fill(~free, 2.0)
    return (lottery.argsort(1).argsort(1) < number) & free


def split_continuations(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Sequence[int],
    prefix_tokens: int,
    max_new_tokens: int,
    ends: bool = True,
) -> list[dict]:
    """Rows of `number`, `text`, `prefix_ids` and `continuation_ids`: a text's first tokens, and what follows them.

    A continuation ends with the end token or is stopped at `max_new_tokens`, like one that is sampled: the sequences
    that a residual model is a distribution over. Texts with nothing but their end after the prefix are left out.

    `number` counts all texts from 0.

    Args:
        end_ids: the language model's end tokens; the first is put after a text.
        prefix_tokens: tokens of the prefix, those that the tokenizer puts before a text among them.
        ends: whether a text is whole; the end of a fragment is not marked, and it must fill `max_new_tokens`.

    Raises:
        ValueError: for sizes below 1, and a text that holds the end token.

    Example:
        >>> from hf_ebm.assets import load_embedded_causal
        >>> model, tokenizer = load_embedded_causal()
        >>> rows = split_continuations(["and god said"], tokenizer, [model.config.eos_token_id], 2, 5)
        >>> tokenizer.decode(rows[0]["prefix_ids"]), tokenizer.decode(rows[0]["continuation_ids"])
        ('[CLS] and', 'god said [SEP]')
    """
    prefix_tokens = as_whole("prefix_tokens", prefix_tokens, 1)
    max_new_tokens = as_whole("max_new_tokens", max_new_tokens, 1)
    if ends and not end_ids:
        raise ValueError("end_ids must hold an end token for texts that end, got none")
    rows = []
    encoded = tokenizer(list(texts), verbose=False)["input_ids"] if texts else []
    for number, (text, ids) in enumerate(zip(texts, encoded, strict=True)):
        while ids and ids[-1] in end_ids:
            ids = ids[:-1]
        body = ids[prefix_tokens:]
        for token in ids[1:]:  # the first may be a start token that is an end token as well
            if token in end_ids:
                raise ValueError(f"texts: row {number} holds {tokenizer.convert_ids_to_tokens(token)!r}, an end token")
        needed = 1 if ends else max_new_tokens
        if len(body) >= needed:
            continuation = [*body, end_ids[0]] if ends else body
            rows.append(
                {
                    "number": number, "text": text, "prefix_ids": ids[:prefix_tokens],
                    "continuation_ids": continuation[:max_new_tokens],
                }
            )  # fmt: skip
    return rows
