"""Rows of a language model's tokens as rows of another tokenizer's, through text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase


class Retokenizer:
    """Turns ids of a language model into ids of an encoder.

    A whole row, prefix and continuation, is decoded once and tokenized once, so that pieces may join across the border.
    What text cannot hold is treated so:

    - special tokens of the language model (start, padding, …) are left out; the encoder's own stand around the text;
    - the encoder's closing tokens stand only behind a row that ended with an end token, so that a finished row and one
      that was stopped differ; for a tokenizer without closing tokens it is its end token, if it has one;
    - a row without text is the encoder's start, end or padding token;
    - unknown tokens become the encoder's unknown token;
    - bytes that form no character become U+FFFD, as the language model's tokenizer decodes them.

    A text that spells a special token of the encoder is read as that token. Rows with the same text, and the same
    ending, have the same energy, however the language model spells them.

    Args:
        lm_tokenizer: of the language model.
        encoder_tokenizer: of the encoder.
        end_ids: the language model's end tokens.
    """

    def __init__(
        self,
        lm_tokenizer: PreTrainedTokenizerBase,
        encoder_tokenizer: PreTrainedTokenizerBase,
        end_ids: Sequence[int],
    ):
        self.lm_tokenizer, self.encoder_tokenizer = lm_tokenizer, encoder_tokenizer
        self.end_ids = set(end_ids)
        self._dropped = (set(lm_tokenizer.all_special_ids) - {lm_tokenizer.unk_token_id}) | self.end_ids
        self._closing = _closing_tokens(encoder_tokenizer)
        some = (encoder_tokenizer.bos_token_id, encoder_tokenizer.eos_token_id, encoder_tokenizer.pad_token_id)
        self._empty = next((token for token in some if token is not None), 0)

    def __call__(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rows of encoder ids, on the CPU, for rows of the language model's ids, each with at least one token."""
        ids = self.encoder_tokenizer([self.text(row.tolist()) for row in rows], verbose=False)["input_ids"]
        found = []
        for row, own in zip(rows, ids, strict=True):
            ended = len(row) > 0 and int(row[-1]) in self.end_ids
            if self._closing and not ended:
                own = own[: -self._closing]
            elif not self._closing and ended and self.encoder_tokenizer.eos_token_id is not None:
                own = [*own, self.encoder_tokenizer.eos_token_id]
            found.append(torch.tensor(own or [self._empty], dtype=torch.long))
        return found

    def text(self, ids: Sequence[int]) -> str:
        """The text of a row."""
        text = self.lm_tokenizer.decode(
            [i for i in ids if i not in self._dropped], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        theirs, own = self.lm_tokenizer.unk_token, self.encoder_tokenizer.unk_token
        if not isinstance(text, str):
            raise ValueError(f"ids must be those of one row, got {ids!r}")
        return text if theirs is None or theirs == own else text.replace(theirs, own or "\ufffd")


def same_vocabulary(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers have the same tokens under the same ids."""
    return first.get_vocab() == second.get_vocab()


def _closing_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """How many special tokens a tokenizer puts behind a text."""
    ids = tokenizer("a", verbose=False)["input_ids"]
    count = 0
    while count < len(ids) and ids[len(ids) - 1 - count] in tokenizer.all_special_ids:
        count += 1
    return min(count, len(ids) - 1)
