"""Tokenizers for texts of space-separated symbols, and sequence pairs as inputs and labels of a model."""

from __future__ import annotations

from collections.abc import Iterable

from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, BOS, EOS, UNK = SPECIAL_SYMBOLS = ("<pad>", "<s>", "</s>", "<unk>")


def symbol_tokenizer(
    targets: Iterable[str], sources: Iterable[str], model_max_length: int = 512
) -> PreTrainedTokenizerFast:
    """A tokenizer with one id for each symbol of texts whose symbols are separated by spaces.

    Ids: `<pad>` 0, `<s>` 1, `</s>` 2, `<unk>` 3, then the symbols of the targets in sorted order, then those of the
    sources that no target has, in sorted order. So a decoder needs the first `num_target_ids` ids alone. Every encoded
    text, as `text` or `text_target`, ends with `</s>`; decoding with `skip_special_tokens=True` gives the text back.

    Args:
        targets, sources: texts, for example the columns of a training split.
        model_max_length: the most tokens of a text, with `</s>`.

    Raises `ValueError` for a single text in place of a list, no target symbol, a symbol that contains a special token
    (it could not be told from it), and `model_max_length` below 1.
    """
    if isinstance(model_max_length, bool) or not isinstance(model_max_length, int) or model_max_length < 1:
        raise ValueError(f"model_max_length must be a whole number of 1 or more, got {model_max_length!r}")
    target_symbols = _symbols(targets, "targets")
    if not target_symbols:
        raise ValueError("targets must hold one symbol or more, got none")
    source_symbols = _symbols(sources, "sources") - target_symbols
    vocabulary = [*SPECIAL_SYMBOLS, *sorted(target_symbols), *sorted(source_symbols)]
    backend = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(vocabulary)}, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {EOS}", pair=f"$A {EOS} $B {EOS}", special_tokens=[(EOS, SPECIAL_SYMBOLS.index(EOS))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNK, padding_side="right",
        clean_up_tokenization_spaces=False, model_max_length=model_max_length,
        # Not an option of Transformers: kept in tokenizer_config.json with the others.
        num_target_ids=len(SPECIAL_SYMBOLS) + len(target_symbols),
    )  # fmt: skip


def num_target_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """How many of the first ids of a `symbol_tokenizer` are special or occur in targets: a decoder's vocabulary.

    Raises `ValueError` for another tokenizer.
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
    """
    for name, limit in (("max_source_length", max_source_length), ("max_target_length", max_target_length)):
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
            raise ValueError(f"{name} must be a whole number of 1 or more, or None, got {limit!r}")
    limits = {
        "source": tokenizer.model_max_length if max_source_length is None else max_source_length,
        "target": tokenizer.model_max_length if max_target_length is None else max_target_length,
    }
    if isinstance(dataset, DatasetDict):
        return DatasetDict(
            {split: _encode(rows, tokenizer, limits, f" of split {split!r}") for split, rows in dataset.items()}
        )
    return _encode(dataset, tokenizer, limits, "")


def _symbols(texts: Iterable[str], name: str) -> set[str]:
    if isinstance(texts, str):
        raise ValueError(f"{name} must be a list of texts, got one text, {texts!r}")
    symbols = {symbol for text in texts for symbol in text.split()}
    for symbol in sorted(symbols):
        if any(special in symbol for special in SPECIAL_SYMBOLS):
            raise ValueError(f"{name} must not hold {', '.join(SPECIAL_SYMBOLS)}, got the symbol {symbol!r}")
    return symbols


def _encode(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, limits: dict[str, int], place: str) -> Dataset:
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
        settings = {"padding": False, "truncation": False, "return_attention_mask": True}
        inputs = tokenizer(text=batch["source"], **settings)
        labels = tokenizer(text_target=batch["target"], **settings)["input_ids"]
        for column, encoded in (("source", inputs["input_ids"]), ("target", labels)):
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
        return {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"], "labels": labels}

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
