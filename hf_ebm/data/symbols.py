"""Tokenizers for texts of space-separated symbols, and sequence pairs as inputs and labels of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from datasets import Column, Dataset, DatasetDict
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_ebm.checks import as_whole
from hf_ebm.objectives.losses import IGNORED
from hf_ebm.texts import Rows, plain_ids, prompt_encoder

PAD, BOS, EOS, UNK = SPECIAL_SYMBOLS = ("<pad>", "<s>", "</s>", "<unk>")
MASK = "<mask>"


def symbol_tokenizer(
    targets: Iterable[str], sources: Iterable[str], model_max_length: int = 512, masks: bool = False
) -> PreTrainedTokenizerFast:
    """A tokenizer with one id for each symbol of texts whose symbols are separated by spaces.

    Ids: `<pad>` 0, `<s>` 1, `</s>` 2, `<unk>` 3, with `masks` `<mask>` 4, then the symbols of the targets in sorted
    order, then those of the sources that no target has, in sorted order. So a decoder needs the first `num_target_ids`
    ids alone. Every encoded text, as `text` or `text_target`, ends with `</s>`; decoding with
    `skip_special_tokens=True` gives the text back.

    Args:
        targets, sources: texts, for example the columns of a training split.
        model_max_length: the most tokens of a text, with `</s>`.
        masks: for a masked language model. A pair of texts is encoded as the one, `</s>`, the other, `</s>`.

    Raises `ValueError` for a single text in place of a list, no target symbol, a symbol that contains a special token
    (it could not be told from it), and `model_max_length` below 1.

    Example:
        >>> tokenizer = symbol_tokenizer(targets=["K AE T"], sources=["c a t"])
        >>> tokenizer("c a t").input_ids, tokenizer(text_target="K AE T").input_ids
        ([8, 7, 9, 2], [5, 4, 6, 2])
    """
    model_max_length = as_whole("model_max_length", model_max_length, 1)
    target_symbols = _symbols(targets, "targets")
    if not target_symbols:
        raise ValueError("targets must hold one symbol or more, got none")
    source_symbols = _symbols(sources, "sources") - target_symbols
    special = [*SPECIAL_SYMBOLS, MASK] if masks else [*SPECIAL_SYMBOLS]
    vocabulary = [*special, *sorted(target_symbols), *sorted(source_symbols)]
    backend = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(vocabulary)}, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, SPECIAL_SYMBOLS.index(EOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNK, padding_side="right",
        **({"mask_token": MASK} if masks else {}),
        clean_up_tokenization_spaces=False, model_max_length=model_max_length,
        # Not an option of Transformers: kept in tokenizer_config.json with the others.
        num_target_ids=len(special) + len(target_symbols),
    )  # fmt: skip


def num_target_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """How many of the first ids of a `symbol_tokenizer` are special or occur in targets: a decoder's vocabulary.

    Raises `ValueError` for another tokenizer.

    Example:
        >>> num_target_ids(symbol_tokenizer(targets=["K AE T"], sources=["c a t"]))  # four are special
        7
    """
    number = tokenizer.init_kwargs.get("num_target_ids")
    if number is None:
        raise ValueError(
            "tokenizer must come from symbol_tokenizer, got one without num_target_ids in its configuration"
        )
    return number


def encode_pairs(
    dataset: Dataset | DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    max_source_length: int | None = None,
    max_target_length: int | None = None,
) -> Dataset | DatasetDict:
    """`dataset` with `input_ids`, `attention_mask` and `labels` in place of all its columns, not padded.

    Args:
        dataset: has the text columns `source` and `target`.
        tokenizer: a `symbol_tokenizer` or any other; targets are encoded as its `text_target`.
        max_source_length, max_target_length: the most tokens, special ones counted; default the tokenizer's
            `model_max_length`.

    Nothing is cut. Raises `ValueError` that names the row for a text that is too long, for a special token that stands
    in a text and would be read as padding, start or end, and for a target with a symbol that the tokenizer does not
    know or that no target had when the `symbol_tokenizer` was made. Also for a dataset without rows or these columns.

    Example:
        >>> pairs = Dataset.from_dict({"source": ["c a t"], "target": ["K AE T"]})
        >>> row = encode_pairs(pairs, symbol_tokenizer(pairs["target"], pairs["source"]))[0]
        >>> row["input_ids"], row["labels"]
        ([8, 7, 9, 2], [5, 4, 6, 2])
    """
    limits = length_limits(tokenizer, max_source_length, max_target_length)

    def tokenize(sources: list[str], targets: list[str]) -> tuple[Rows, Rows]:
        settings = {"padding": False, "truncation": False}
        inputs = tokenizer(text=sources, **settings)["input_ids"]
        return inputs, tokenizer(text_target=targets, **settings)["input_ids"]

    def columns(sources: Rows, targets: Rows, places: list[str]) -> dict[str, Rows]:
        return {"input_ids": sources, "attention_mask": [[1] * len(ids) for ids in sources], "labels": targets}

    return encode_splits(dataset, tokenizer, limits, tokenize, columns)


def encode_completions(
    dataset: Dataset | DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    end_id: int,
    max_source_length: int | None = None,
    max_target_length: int | None = None,
    max_length: int | None = None,
) -> Dataset | DatasetDict:
    """Rows of a causal model: like `encode_pairs`, but each source is the prompt that its target continues.

    `input_ids` are prompt, target and end token; `labels` are -100 on the prompt. The two are tokenized apart. A prompt
    has the special tokens that the tokenizer puts around a text, without end or separator tokens after it; a target
    has none but its end. With a byte-level tokenizer (GPT-2) nothing stands between them: a target that is to begin
    with a new word must begin with its space.

    Args:
        dataset: has the text columns `source` and `target`.
        tokenizer: any.
        end_id: the token that ends a target.
        max_source_length, max_target_length: the most tokens of a prompt, of a target with its end; default the
            tokenizer's `model_max_length`.
        max_length: the most tokens of both, for example the model's positions; the default is the same.

    Nothing is cut. Raises `ValueError` as `encode_pairs` does, and for a row whose prompt has no token, a row that is
    too long as a whole, and a target that holds the end token.

    Example:
        >>> pairs = Dataset.from_dict({"source": ["c a t"], "target": ["K AE T"]})
        >>> tokenizer = symbol_tokenizer(pairs["target"], pairs["source"])
        >>> row = encode_completions(pairs, tokenizer, tokenizer.eos_token_id)[0]
        >>> row["input_ids"], row["labels"]
        ([8, 7, 9, 5, 4, 6, 2], [-100, -100, -100, 5, 4, 6, 2])
    """
    limits = length_limits(tokenizer, max_source_length, max_target_length)
    most = tokenizer.model_max_length if max_length is None else as_whole("max_length", max_length, 1)
    prompt_ids = prompt_encoder(tokenizer, end_id)

    def tokenize(sources: list[str], targets: list[str]) -> tuple[Rows, Rows]:
        return prompt_ids(sources), [[*ids, end_id] for ids in plain_ids(tokenizer, targets)]

    def columns(sources: Rows, targets: Rows, places: list[str]) -> dict[str, Rows]:
        for prompt, target, place in zip(sources, targets, places, strict=True):
            if not prompt:
                raise ValueError(f"source of {place} has no token; a causal model needs one before what it predicts")
            if end_id in target[:-1]:
                token = tokenizer.convert_ids_to_tokens(end_id)
                raise ValueError(f"target of {place} holds {token!r}, which would end it")
            if len(prompt) + len(target) > most:
                raise ValueError(
                    f"{place} has {len(prompt)} source and {len(target)} target tokens, together more than the {most} "
                    "allowed"
                )
        whole = [prompt + target for prompt, target in zip(sources, targets, strict=True)]
        labels = [[IGNORED] * len(prompt) + target for prompt, target in zip(sources, targets, strict=True)]
        return {"input_ids": whole, "attention_mask": [[1] * len(ids) for ids in whole], "labels": labels}

    return encode_splits(dataset, tokenizer, limits, tokenize, columns)


def length_limits(
    tokenizer: PreTrainedTokenizerBase, max_source_length: int | None, max_target_length: int | None
) -> dict[str, int]:
    """The most tokens of a `source` and of a `target`: what is given, else the tokenizer's own limit."""
    given = {"source": max_source_length, "target": max_target_length}
    return {
        name: tokenizer.model_max_length if limit is None else as_whole(f"max_{name}_length", limit, 1)
        for name, limit in given.items()
    }


def _symbols(texts: Iterable[str], name: str) -> set[str]:
    if isinstance(texts, str):
        raise ValueError(f"{name} must be a list of texts, got one text, {texts!r}")
    if isinstance(texts, Column):
        texts = texts[:]  # one by one takes ten times as long
    symbols = {symbol for text in texts for symbol in text.split()}
    for symbol in sorted(symbols):
        if any(special in symbol for special in (*SPECIAL_SYMBOLS, MASK)):
            raise ValueError(f"{name} must not hold {', '.join((*SPECIAL_SYMBOLS, MASK))}, got the symbol {symbol!r}")
    return symbols


def encode_splits(dataset: Dataset | DatasetDict, *how: Any) -> Dataset | DatasetDict:
    """Checks and encodes every split; `how` are the arguments of `_encode` after the place."""
    if isinstance(dataset, DatasetDict):
        return DatasetDict({split: _encode(rows, f" of split {split!r}", *how) for split, rows in dataset.items()})
    return _encode(dataset, "", *how)


def _encode(
    dataset: Dataset,
    place: str,
    tokenizer: PreTrainedTokenizerBase,
    limits: dict[str, int],
    tokenize: Callable[[list[str], list[str]], tuple[Rows, Rows]],
    columns: Callable[[Rows, Rows, list[str]], dict[str, Rows]],
) -> Dataset:
    """Checks texts, tokenizes them, checks ids, and makes columns of them."""
    if not len(dataset) or not {"source", "target"} <= set(dataset.column_names):
        raise ValueError(
            f"dataset must have rows with the columns source and target, got {len(dataset)} rows with "
            f"{dataset.column_names}{place}"
        )
    reserved = _reserved_tokens(tokenizer)

    def encode(batch: dict[str, list[str]], rows: list[int]) -> dict[str, list]:
        for column in ("source", "target"):
            for row, text in zip(rows, batch[column], strict=True):
                _check_text(text, reserved, f"{column} of row {row}{place}")
        inputs, labels = tokenize(batch["source"], batch["target"])
        for column, encoded in (("source", inputs), ("target", labels)):
            for row, ids in zip(rows, encoded, strict=True):
                if len(ids) > limits[column]:
                    raise ValueError(
                        f"{column} of row {row}{place} has {len(ids)} tokens, more than the {limits[column]} allowed"
                    )
        for row, target, ids in zip(rows, batch["target"], labels, strict=True):
            if _holds_unknown(ids, tokenizer):
                symbol = _first_unknown(target, tokenizer)
                raise ValueError(
                    f"target of row {row}{place} holds {symbol!r}, which is no target symbol of the tokenizer"
                )
        return columns(inputs, labels, [f"row {row}{place}" for row in rows])

    return dataset.map(encode, batched=True, with_indices=True, remove_columns=dataset.column_names)


def _reserved_tokens(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Tokens that structure a sequence; others, such as T5's sentinels, may stand in a text on purpose."""
    names = ("pad_token", "bos_token", "eos_token", "cls_token", "sep_token")
    return sorted({token for name in names if (token := getattr(tokenizer, name, None))})


def _check_text(text: str, reserved: list[str], place: str) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{place} must be a text, got {text!r}")
    for token in reserved:
        if token in text:
            raise ValueError(f"{place} holds {token!r}, which the tokenizer would read as its special token")


def _holds_unknown(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    unknown = tokenizer.unk_token_id
    # GPT-2 and its kin have one token for everything special, and no unknown one.
    is_own = unknown not in (None, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
    number = tokenizer.init_kwargs.get("num_target_ids")
    return (is_own and unknown in ids) or (number is not None and max(ids, default=0) >= number)


def _first_unknown(target: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The first word of `target` that is unknown by itself, or all of it when none is."""
    for symbol in target.split():
        if _holds_unknown(tokenizer(text_target=symbol, add_special_tokens=False)["input_ids"], tokenizer):
            return symbol
    return target
