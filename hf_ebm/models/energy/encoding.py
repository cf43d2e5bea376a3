"""Texts to ids: tokenized once, with what is context, what is scored, and which pieces form a word.

Also rows of a source and a target, whose place a placeholder, one mask, holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from hf_ebm.model_facts import Limit, limit_of
from hf_ebm.models.energy.inputs import mask_id_of
from hf_ebm.texts import tokenized

if TYPE_CHECKING:
    from hf_ebm.models.energy.modeling_energy import EnergyModel


@dataclass
class EncodedText:
    """One text, tokenized.

    Attributes:
        ids: token ids, special tokens included.
        scored: for each, whether it belongs to the text and is no special token.
        words: number of the word each token belongs to (the tokenizer's own), -1 where there is none.
        spans: character spans in the text, `None` for tokenizers that don't know them.
        text: the text itself, without its context.
    """

    ids: list[int]
    scored: list[bool]
    words: list[int]
    spans: list[tuple[int, int]] | None
    text: str

    def word_pieces(self) -> list[list[int]]:
        """Positions of the scored tokens of each word, in order."""
        groups: list[list[int]] = []
        previous = None
        for position, (scored, word) in enumerate(zip(self.scored, self.words, strict=True)):
            if scored and groups and word == previous:
                groups[-1].append(position)
            elif scored:
                groups.append([position])
            previous = word if scored else None
        return groups

    def word_text(self, pieces: list[int]) -> str:
        """The characters a word's tokens stand for."""
        if self.spans is None:
            raise ValueError("the tokenizer knows no character spans, so a word has no text")
        return self.text[self.spans[pieces[0]][0] : self.spans[pieces[-1]][1]]


def encode_texts(
    model: EnergyModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    prefixes: list[str] | None,
    suffixes: list[str] | None,
    separator: str,
) -> list[EncodedText]:
    """Tokenizes every text together with its context, once.

    Without context every token that is no special one is part of the text. With context a token is part of the text if
    it covers at least one of its characters.

    Raises:
        ValueError: naming the row, for a text that cannot be encoded, holds the mask token, is too long, or has tokens
            the model doesn't know; for a tokenizer with another mask token than the model's.
    """
    check_same_mask(tokenizer, mask_id_of(model))
    special = set(model.config.special_token_ids or [])
    limit = limit_of(model.mlm, model.config.max_sequence_length, tokenizer)
    encoded = []
    for row, text in enumerate(texts):
        before = prefixes[row] + separator if prefixes and prefixes[row] else ""
        after = separator + suffixes[row] if suffixes and suffixes[row] else ""
        encoded.append(_encode(tokenizer, row, before, text, after, special))
        check_encoded(model, limit, "texts", row, encoded[-1].ids)
    return encoded


def encode_plain(
    model: EnergyModel, tokenizer: PreTrainedTokenizerBase, name: str, texts: list[str]
) -> list[list[int]]:
    """Ids of prompts, or of the inputs of an encoder; `name` is the argument that errors name."""
    encoded, limit = [], limit_of(model.mlm, model.config.max_sequence_length, tokenizer)
    for row, text in enumerate(texts):
        encoded.append(list(tokenized(tokenizer, name, row, text)["input_ids"]))
        check_encoded(model, limit, name, row, encoded[-1])
    return encoded


def check_encoded(model: EnergyModel, limit: Limit | None, name: str, row: int, ids: list[int]) -> None:
    """Raises `ValueError` for ids outside the model's vocabulary and for more ids than its `limit`."""
    if limit is not None:
        limit.check(len(ids), f"{name}: row {row}")
    if max(ids, default=0) >= model.vocab_size:
        raise ValueError(
            f"{name}: row {row} has a token of id {max(ids)}, the model's vocabulary has ids 0 to "
            f"{model.vocab_size - 1}; is it the model's tokenizer?"
        )


def _encode(
    tokenizer: PreTrainedTokenizerBase, row: int, before: str, text: str, after: str, special: set[int]
) -> EncodedText:
    fast, context = tokenizer.is_fast, bool(before or after)
    if context and not fast:
        raise ValueError(
            f"prefixes/suffixes: {type(tokenizer).__name__} knows no character offsets, so context cannot be told "
            "from text; use a fast tokenizer, or score_ids with a free_mask"
        )
    batch = tokenized(tokenizer, "texts", row, before + text + after, return_offsets_mapping=fast)
    ids = list(batch["input_ids"])
    first, last = len(before), len(before) + len(text)
    offsets = _with_trimmed_spaces(batch["offset_mapping"]) if fast else [(0, 0)] * len(ids)
    inside = [not context or max(start, first) < min(end, last) for start, end in offsets]
    if any(within and i == tokenizer.mask_token_id for within, i in zip(inside, ids, strict=True)):
        raise ValueError(
            f"texts: row {row} holds the mask token {tokenizer.mask_token!r}; generate() and hf-ebm sample fill it"
        )
    scored = [within and i not in special for within, i in zip(inside, ids, strict=True)]
    if not fast:
        return EncodedText(ids, scored, list(range(len(ids))), None, text)
    words = [-1 if word is None else word for word in batch.word_ids(0)]
    spans = [(max(start, first) - first, min(end, last) - first) for start, end in offsets]
    return EncodedText(ids, scored, words, spans, text)


def _with_trimmed_spaces(offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Byte-level tokenizers trim spaces off their spans; a token of spaces alone gets back what it stands for."""
    widened, end_before = [], 0
    for start, end in offsets:
        if start == end and end > 0:
            start = min(end_before, end - 1)
        widened.append((start, end))
        end_before = max(end_before, end)
    return widened


def check_mask_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises `ValueError` for a tokenizer without a mask token."""
    if tokenizer.mask_token_id is None:
        raise ValueError(f"tokenizer must have a mask token, got {type(tokenizer).__name__} without one")


def check_same_mask(tokenizer: PreTrainedTokenizerBase, mask_token_id: int | None) -> None:
    """Raises `ValueError` for a tokenizer whose mask token isn't the model's."""
    check_mask_token(tokenizer)
    if tokenizer.mask_token_id != mask_token_id:
        raise ValueError(f"tokenizer: its mask token has id {tokenizer.mask_token_id}, the model's is {mask_token_id}")


def rows_with_placeholder(tokenizer: PreTrainedTokenizerBase, sources: Sequence[str]) -> list[list[int]]:
    """Each source as the first of a pair whose second is one mask."""
    pair = {"text_pair": tokenizer.mask_token}
    return [
        list(tokenized(tokenizer, "sources", row, source, **pair)["input_ids"]) for row, source in enumerate(sources)
    ]


def target_placeholder(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """One mask as the target of an encoder-decoder."""
    return tokenizer(text_target=tokenizer.mask_token, padding=False, truncation=False)["input_ids"]


def fill_placeholder(
    tokenizer: PreTrainedTokenizerBase, row: list[int], target: list[int]
) -> tuple[list[int], list[bool]]:
    """The row with its last mask replaced by the target's tokens, and which ones these are."""
    at = len(row) - 1 - row[::-1].index(tokenizer.mask_token_id)
    behind = row[at + 1 :]
    return [*row[:at], *target, *behind], [False] * at + [True] * len(target) + [False] * len(behind)
