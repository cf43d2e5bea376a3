"""Texts as callers give them, and any tokenizer: ids of texts and words, prompts, unknown tokens; extra energies."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import BatchEncoding, PreTrainedTokenizerBase
from transformers.utils import logging

from hf_ebm.checks import (
    as_callable,
    as_path,
    as_string,
    check_choice,
    check_methods,
    check_tokenizer,
    name_of,
    row_numbers,
    shown,
)

if TYPE_CHECKING:
    from hf_ebm.models.energy.modeling_energy import EnergyModel


logger = logging.get_logger(__name__)

Rows = list[list[int]]
UNKNOWN_TOKENS = ("warn", "error", "ignore")
_ROWS_TOLD = 5
# What WordPiece marks pieces with that go on, and byte-level BPE and SentencePiece those that begin.
_MARKS = ("##", "Ġ", "▁")


def as_texts(name: str, texts: Iterable[str] | str | os.PathLike) -> list[str]:
    """One string per row from a list, a generator, a column of a data set, an open file, or the path of a file.

    Raises:
        ValueError: for a row that is no string of whole characters, naming it; another kind of container; a file that
            can't be read.

    Example:
        >>> as_texts("texts", (text.lower() for text in ["And", "God"])), as_texts("texts", "And God")
        (['and', 'god'], ['And God'])
    """
    if isinstance(texts, str):
        return [as_string(name, texts)]
    if isinstance(texts, os.PathLike):
        try:
            with open(as_path(name, texts), encoding="utf-8-sig", newline="\n") as file:
                return as_texts(name, file)
        except (OSError, UnicodeError) as error:
            raise ValueError(f"{name}: cannot read {texts}: {error}") from error
    # Of a mapping or a table these would be the keys, and a set has no order.
    wrong = isinstance(texts, (bytes, bytearray, Mapping, Set)) or getattr(texts, "ndim", 1) != 1
    if wrong or not isinstance(texts, Iterable):
        raise ValueError(f"{name} must be strings (a list, a generator, a file, …), got {shown(texts)}")
    from_file = hasattr(texts, "readline")
    rows = []
    for number, text in enumerate(texts):
        whole = as_string(f"{name}: row {number}", text)
        rows.append(whole.rstrip("\r\n") if from_file else whole)
    return rows


def tokenized(tokenizer: PreTrainedTokenizerBase, name: str, row: int, text: str, **options: Any) -> BatchEncoding:
    """What the tokenizer makes of a text; `ValueError` naming the row where it can't take it."""
    try:
        return tokenizer(text, verbose=False, **options)
    except Exception as error:  # tokenizers raise what they like on text they can't take
        raise ValueError(f"{name}: row {row} cannot be tokenized: {error}") from error


def plain_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Rows:
    """Ids of texts without special tokens around them. Raises `ValueError` for texts that can't be tokenized.

    Example:
        >>> from hf_ebm.assets import load_embedded
        >>> _, tokenizer = load_embedded()
        >>> plain_ids(tokenizer, ["the king"])
        [[68, 193]]
    """
    try:
        return tokenizer(texts, add_special_tokens=False, padding=False, truncation=False)["input_ids"]
    except Exception as error:  # tokenizers raise what they like on text they can't take
        raise ValueError(f"texts cannot be tokenized: {error}") from error


def prompt_encoder(tokenizer: PreTrainedTokenizerBase, end_id: int) -> Callable[[list[str]], Rows]:
    """What makes prompts of texts: with the tokenizer's own special tokens around them, but no end after them."""
    before, after = _framing(tokenizer)
    while after and after[-1] in {end_id, tokenizer.eos_token_id, tokenizer.sep_token_id}:
        after.pop()
    return lambda texts: [[*before, *ids, *after] for ids in plain_ids(tokenizer, texts)]


def _framing(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text, seen around the first token that is a text by itself.

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


def word_starts(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Tensor | None:
    """(V,) bool: the tokens that begin a word, where WordPiece, byte-level BPE or SentencePiece marks them.

    Example:
        >>> from hf_ebm.assets import load_embedded
        >>> _, tokenizer = load_embedded()
        >>> starts = word_starts(tokenizer, len(tokenizer))
        >>> starts[tokenizer.convert_tokens_to_ids(["king", "##s"])]
        tensor([ True, False])
    """
    tokens = [str(token) for token in tokenizer.convert_ids_to_tokens(list(range(min(vocab_size, len(tokenizer)))))]
    tokens += [""] * (vocab_size - len(tokens))
    if any(token.startswith(_MARKS[0]) for token in tokens):
        return torch.tensor([not token.startswith(_MARKS[0]) for token in tokens])
    marked = torch.tensor([token.startswith(_MARKS[1:]) for token in tokens])
    return marked if bool(marked.any()) else None


def word_ids(
    tokenizer: PreTrainedTokenizerBase,
    row: int,
    word: str,
    texts: tuple[str, ...] | None,
    ids: tuple[list[int], list[int]],
) -> list[int]:
    """Ids of a word that stands between two texts; of the word alone, where it is a token or changes what is around.

    Args:
        texts: before and after it; `None` where they aren't known.
        ids: those of the row before and after it.
    """
    vocabulary, (before, after) = tokenizer.get_vocab(), ids
    if word in vocabulary and word.startswith(_MARKS):
        return [vocabulary[word]]
    if texts is not None:
        whole = list(tokenized(tokenizer, "texts", row, word.join(texts))["input_ids"])
        stop = len(whole) - len(after)
        if whole[: len(before)] == before and stop > len(before) and whole[stop:] == after:
            return whole[len(before) : stop]
    if word in vocabulary:
        return [vocabulary[word]]
    return list(tokenized(tokenizer, "words", row, word, add_special_tokens=False)["input_ids"])


class Unknown(NamedTuple):
    """Unknown tokens of a text.

    Attributes:
        parts: what each stands for, as it was written; the token itself where the tokenizer doesn't tell.
        tokens: of the text, special ones left out.
        characters: that they stand for, `None` where the tokenizer doesn't tell.
    """

    parts: list[str]
    tokens: int
    characters: int | None


def unknown_of(tokenizer: PreTrainedTokenizerBase, text: str) -> Unknown:
    """The unknown tokens of a text. One that is written out in it is none, nor one that is a special token as well.

    Example:
        >>> from hf_ebm.assets import load_embedded
        >>> _, tokenizer = load_embedded()
        >>> unknown_of(tokenizer, "the 王 came")
        Unknown(parts=['王'], tokens=3, characters=1)
    """
    batch = tokenizer(text, verbose=False, return_offsets_mapping=tokenizer.is_fast)
    ids, unknown, token = batch["input_ids"], tokenizer.unk_token_id, tokenizer.unk_token
    special = set(tokenizer.all_special_ids) - {unknown}
    count = sum(i not in special for i in ids)
    if unknown is None or unknown not in ids or _has_another_role(tokenizer):
        return Unknown([], count, 0)
    if not tokenizer.is_fast:
        pieces = [piece for piece in tokenizer.tokenize(text) if tokenizer.convert_tokens_to_ids(piece) == unknown]
        named = [piece for piece in pieces if piece != token]
        nameless = [token] * (len(pieces) - len(named) - text.count(token))
        return Unknown([*named, *nameless], count, None if nameless else sum(map(len, named)))
    spans = [span for span, i in zip(batch["offset_mapping"], ids, strict=True) if i == unknown]
    parts = [text[start:end] for start, end in spans if text[start:end].strip() != token]
    return Unknown(parts, count, sum(map(len, parts)))


def report_unknown(tokenizer: PreTrainedTokenizerBase, name: str, texts: Sequence[str], how: str) -> bool:
    """Looks for unknown tokens in texts: whether a warning was logged, one for all of them.

    Args:
        name: what the texts are called.
        how: one of `UNKNOWN_TOKENS`.

    Raises:
        ValueError: for another `how`; for unknown tokens with `"error"`, naming the rows.
    """
    check_choice("unknown_tokens", how, UNKNOWN_TOKENS)
    if how == "ignore" or tokenizer.unk_token_id is None:
        return False
    found = [(row, unknown_of(tokenizer, text), text) for row, text in enumerate(texts)]
    told = [_row(row, unknown, text) for row, unknown, text in found if unknown.parts]
    if not told:
        return False
    rest = f"; and {len(told) - _ROWS_TOLD} more" if len(told) > _ROWS_TOLD else ""
    message = (
        f"{name}: the tokenizer has no token for something in {len(told)} of {len(found)} rows: "
        f"{'; '.join(told[:_ROWS_TOLD])}{rest}"
    )
    if how == "error":
        raise ValueError(f"{message}; unknown_tokens='warn' lets them pass")
    logger.warning(
        f"{message}. What stands there is not told apart, and energies say little about it; unknown_tokens='error' "
        "refuses such rows, 'ignore' is silent."
    )
    return True


def _row(row: int, unknown: Unknown, text: str) -> str:
    told = f"row {row} has {len(unknown.parts)} unknown of {unknown.tokens} tokens"
    if unknown.characters is None:
        return told
    parts = list(dict.fromkeys(unknown.parts))
    named = ", ".join(repr(part if len(part) <= 20 else f"{part[:20]}…") for part in parts[:3])
    return f"{told}, {unknown.characters} of {len(text)} characters ({named}{', …' if len(parts) > 3 else ''})"


def _has_another_role(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the unknown token is also the start, end or padding, as in GPT-2, whose bytes know everything."""
    roles = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id)
    return tokenizer.unk_token_id in roles


class TextEnergy:
    """Adaptor: a function of texts as an extra energy, for classifiers with a tokenizer of their own.

    Args:
        function: list of n texts → n energies in nats.
        tokenizer: decodes the sampler's ids; special tokens are left out of the text.

    Example:
        >>> from hf_ebm.assets import load_embedded
        >>> model, tokenizer = load_embedded()
        >>> no_king = TextEnergy(lambda texts: [float("king" not in text.split()) for text in texts], tokenizer)
        >>> no_king(tokenizer(["the king came", "the lord came"], return_tensors="pt").input_ids).tolist()
        [0.0, 1.0]
    """

    def __init__(self, function: Callable[[list[str]], Sequence[float]], tokenizer: PreTrainedTokenizerBase):
        check_methods("tokenizer", tokenizer, "batch_decode")
        self.function, self.tokenizer = as_callable("function", function), tokenizer

    def __call__(self, ids: Tensor) -> Tensor:
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return row_numbers(f"TextEnergy: {name_of(self.function)}", self.function(texts), len(texts), ids.device)


class ExpertEnergy:
    """Adaptor: the energy of a further model as an extra energy, for a product of experts `exp(-(E + Σ w_k E_k))`.

    Args:
        model: the further model, an expert.
        own_tokenizer, tokenizer: its tokenizer and that of the model that samples, where their vocabularies differ.
            They meet in the text, special tokens left out; one that the expert's tokenizer has no tokens for has
            infinite energy. Without them both models read the same ids.
        token_budget: tokens per forward pass of the expert; by default from free memory.

    Raises:
        ValueError: for what is no energy model, one tokenizer of the two, and none of them where the model doesn't know
            what padding is; when called for what `EnergyModel.score` refuses.

    Example:
        >>> from hf_ebm.assets import load_embedded
        >>> model, tokenizer = load_embedded()
        >>> ids = tokenizer(["let there be light"], return_tensors="pt").input_ids
        >>> same, through_text = ExpertEnergy(model), ExpertEnergy(model, tokenizer, tokenizer)
        >>> torch.allclose(same(ids), model(ids).energy.double()), torch.allclose(same(ids), through_text(ids))
        (True, True)
        >>> start = tokenizer("and the king said unto him", return_tensors="pt")
        >>> out = model.generate(**start, max_changes=2, extra_energies=[(0.5, same)], num_epochs=2, seed=0)
    """

    def __init__(
        self,
        model: EnergyModel,
        own_tokenizer: PreTrainedTokenizerBase | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        token_budget: int | None = None,
    ):
        check_methods("model", model, "score", "score_ids")
        if (own_tokenizer is None) != (tokenizer is None):
            raise ValueError("own_tokenizer and tokenizer go together: give both, or none where ids are the same")
        for name, given in (("own_tokenizer", own_tokenizer), ("tokenizer", tokenizer)):
            if given is not None:
                check_tokenizer(name, given)
        if tokenizer is None and model.config.pad_token_id is None:
            raise ValueError(
                "model: pad_token_id is not set, so padding would count as tokens; load it with its tokenizer beside "
                "it, or pass pad_token_id= to EnergyModel"
            )
        self.model, self.token_budget = model, token_budget
        self.own_tokenizer, self.tokenizer = own_tokenizer, tokenizer

    def __call__(self, ids: Tensor) -> Tensor:
        """(n,) energies in nats, float64, of token ids (n, T) of the model that samples."""
        if self.own_tokenizer is None or self.tokenizer is None:
            attended = ids.ne(torch.tensor(self.model.config.pad_token_id)).long()
            return self.model.score_ids(ids, attended, token_budget=self.token_budget).cpu().double().sum(1)
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        found = self.model.score(texts, self.own_tokenizer, token_budget=self.token_budget, unknown_tokens="ignore")
        return found.energy.masked_fill(found.num_unknown > 0, torch.inf)
