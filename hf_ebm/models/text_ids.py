"""Ids of texts and prompts, with the special tokens that a tokenizer puts around them or without."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedTokenizerBase

Rows = list[list[int]]


def plain_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Rows:
    """Ids of texts without special tokens around them. Raises `ValueError` for texts that can't be tokenized."""
    try:
        return tokenizer(texts, add_special_tokens=False, padding=False, truncation=False)["input_ids"]
    except Exception as error:  # tokenizers raise what they like on text they can't take
        raise ValueError(f"texts cannot be tokenized: {error}") from error


def prompt_encoder(tokenizer: PreTrainedTokenizerBase, end_id: int) -> Callable[[list[str]], Rows]:
    """What makes prompts of texts: with the tokenizer's own special tokens around them, but no end behind them."""
    before, behind = _framing(tokenizer)
    while behind and behind[-1] in {end_id, tokenizer.eos_token_id, tokenizer.sep_token_id}:
        behind.pop()
    return lambda texts: [[*before, *ids, *behind] for ids in plain_ids(tokenizer, texts)]


def _framing(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and behind a text, seen around the first token that is a text by itself.

    An empty text would not do: where start and end are one token, as in GPT-2, they could not be told apart.
    """
    for token_id in range(len(tokenizer)):
        text = str(tokenizer.decode([token_id]))
        plain = plain_ids(tokenizer, [text])[0]
        if not plain or not set(plain).isdisjoint(tokenizer.all_special_ids):
            continue
        whole = tokenizer(text)["input_ids"]
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return whole[:start], whole[start + len(plain) :]
    raise ValueError("tokenizer must have a token that isn't special, got none")
