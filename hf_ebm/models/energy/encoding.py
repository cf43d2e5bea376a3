"""Texts to ids for scoring: tokenized once, with what is context, what is scored, and which pieces form a word."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


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
        return self.text[self.spans[pieces[0]][0] : self.spans[pieces[-1]][1]]


def as_texts(name: str, texts: Iterable[str] | str | Path) -> list[str]:
    """One string per row from a list, a generator, a column of a data set, an open file, or the path of a file.

    Raises:
        ValueError: for a row that is no string, naming it.
    """
    if isinstance(texts, str):
        return [texts]
    if isinstance(texts, Path):
        with open(texts, encoding="utf-8", newline="") as file:
            return as_texts(name, file)
    from_file = hasattr(texts, "readline")
    rows = []
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"{name}: row {number} must be a string, got {type(text).__name__}")
        rows.append(text.rstrip("\r\n") if from_file else text)
    return rows


def encode_texts(
    tokenizer,
    texts: list[str],
    prefixes: list[str] | None,
    suffixes: list[str] | None,
    separator: str,
    special: set[int],
    mask_token_id: int,
    limit: int | None,
) -> list[EncodedText]:
    """Tokenizes every text together with its context, once.

    A token counts as part of the text if it covers at least one of its characters.

    Raises:
        ValueError: naming the row, for a text that cannot be encoded, holds the mask token, or is too long.
    """
    encoded = []
    for row, text in enumerate(texts):
        before = prefixes[row] + separator if prefixes and prefixes[row] else ""
        after = separator + suffixes[row] if suffixes and suffixes[row] else ""
        encoded.append(_encode(tokenizer, row, before, text, after, special))
        ids = encoded[-1].ids
        if mask_token_id in ids:
            raise ValueError(f"texts: row {row} holds the mask token {tokenizer.mask_token!r}; fill it with generate()")
        if limit is not None and len(ids) > limit:
            raise ValueError(
                f"texts: row {row} has {len(ids)} tokens, the model has positions for {limit}; nothing is cut, so "
                "split or shorten it"
            )
    return encoded


def _encode(tokenizer, row: int, before: str, text: str, after: str, special: set[int]) -> EncodedText:
    fast = tokenizer.is_fast
    if (before or after) and not fast:
        raise ValueError(
            f"prefixes/suffixes: {type(tokenizer).__name__} knows no character offsets, so context cannot be told "
            "from text; use a fast tokenizer, or score_ids with a free_mask"
        )
    try:
        batch = tokenizer(before + text + after, return_offsets_mapping=fast, verbose=False)
    except Exception as error:  # tokenizers raise what they like on text they can't take (lone surrogates, say)
        raise ValueError(f"texts: row {row} cannot be tokenized: {error}") from error
    ids = list(batch["input_ids"])
    if not fast:
        return EncodedText(ids, [i not in special for i in ids], list(range(len(ids))), None, text)
    first, last = len(before), len(before) + len(text)
    offsets = batch["offset_mapping"]
    inside = [max(start, first) < min(end, last) for start, end in offsets]
    scored = [within and i not in special for within, i in zip(inside, ids, strict=True)]
    words = [-1 if word is None else word for word in batch.word_ids(0)]
    spans = [(max(start, first) - first, min(end, last) - first) for start, end in offsets]
    return EncodedText(ids, scored, words, spans, text)
