"""Texts as prefixes and continuations of a causal language model's tokens."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from hf_ebm.checks import as_whole


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
    that a residual model is a distribution over. Texts with nothing but their end behind the prefix are left out.

    `number` counts all texts from 0.

    Args:
        end_ids: the language model's end tokens; the first is put behind a text.
        prefix_tokens: tokens of the prefix, those that the tokenizer puts before a text among them.
        ends: whether a text is whole; the end of a fragment is not marked, and it must fill `max_new_tokens`.

    Raises:
        ValueError: for sizes below 1, and a text that holds the end token.
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
