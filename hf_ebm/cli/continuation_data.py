"""What `hf-ebm negatives` and `hf-ebm perplexity` share: texts as prefixes and continuations, models by name."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ebm.cli.common import AnyModelArguments
from hf_ebm.cli.tables import Records, read_records
from hf_ebm.data.continuations import split_continuations
from hf_ebm.loading import is_residual, load_causal_model, load_residual_model
from hf_ebm.model_facts import max_length, num_embeddings, special_ids
from hf_ebm.models.residual import ResidualEnergyModel
from hf_ebm.models.residual.inputs_residual import lm_of
from hf_ebm.texts import report_unknown

_IDS = pyarrow.list_(pyarrow.int64())
# What a row of a text has.
CONTINUATION_FIELDS = {"text": pyarrow.string(), "prefix_ids": _IDS, "continuation_ids": _IDS}


@dataclass
class ContinuationArguments:
    """Which texts are read, and how they are cut into prefix and continuation."""

    input: str = field(metadata={"help": "Records with texts: .jsonl, .parquet, .txt (a text a line), '-' for stdin."})
    text_column: str = field(default="text", metadata={"help": "Field that holds the text."})
    prefix_tokens: int = field(default=10, metadata={"help": "Tokens of the prefix, special ones before it included."})
    max_new_tokens: int = field(default=20, metadata={"help": "Length at which continuations are stopped."})
    fragments: bool = field(
        default=False,
        metadata={"help": "Texts are fragments: none ends, and those that don't fill the length are left out."},
    )
    unknown_tokens: str = field(
        default="warn",
        metadata={"help": "Where a text holds what the tokenizer has no token for: warn, error or ignore."},
    )
    max_rows: int | None = field(default=None, metadata={"help": "Read so many texts; default: all."})


def load_language_model(
    which: AnyModelArguments, local_rank: int = 0
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal or a residual model in evaluation mode on its device, and the tokenizer of its language model."""
    load = load_residual_model if is_residual(which.model, which.revision) else load_causal_model
    return load(which.model, dtype=which.dtype, device=which.device, local_rank=local_rank, revision=which.revision)


def read_texts(arguments: ContinuationArguments) -> Records:
    """The records whose texts are read. Raises `ValueError` for one without a text."""
    records = read_records(arguments.input, arguments.text_column).first(arguments.max_rows)
    records.texts(arguments.text_column)
    return records


def carried(records: Records, arguments: ContinuationArguments) -> Records:
    """The records with what a row doesn't have already."""
    return records.without("text") if arguments.text_column == "text" else records


def continuations(
    arguments: ContinuationArguments, records: Records, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> tuple[list[dict], list[int]]:
    """Rows of `split_continuations` that the language model has ids and positions for, and their records' numbers."""
    end_ids, lm = special_tokens(model)[0], lm_of(model) if isinstance(model, ResidualEnergyModel) else model
    limit, size = max_length(lm, getattr(model.config, "max_sequence_length", None)), num_embeddings(lm)
    if limit is not None and arguments.prefix_tokens + arguments.max_new_tokens > limit:
        raise ValueError(
            f"prefix_tokens and max_new_tokens must be at most {limit} together, the model's positions, got "
            f"{arguments.prefix_tokens} and {arguments.max_new_tokens}"
        )
    texts = records.texts(arguments.text_column)
    if not arguments.fragments and not end_ids:
        raise ValueError("fragments must be given: the model has no end token")
    report_unknown(tokenizer, arguments.input, texts, arguments.unknown_tokens)
    rows = split_continuations(
        texts, tokenizer, end_ids, arguments.prefix_tokens, arguments.max_new_tokens, not arguments.fragments
    )
    if not rows:
        raise ValueError(
            f"{arguments.input}: none of {len(texts)} texts has a continuation behind {arguments.prefix_tokens} tokens"
        )
    for row in rows:
        largest = max(row["prefix_ids"] + row["continuation_ids"])
        if largest >= size:
            raise ValueError(f"model: its tokenizer has the id {largest}, the model has embeddings for {size}")
    return rows, [row.pop("number") for row in rows]


def check_positive(**values: int | None) -> None:
    """Raises `ValueError` for a value below 1, naming its argument."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be 1 or more, got {value}")


def special_tokens(model: PreTrainedModel) -> tuple[list[int], int]:
    """End tokens and padding of a causal or a residual model."""
    if isinstance(model, ResidualEnergyModel):
        return model.end_ids, model.config.lm_pad_token_id
    ends = special_ids("eos_token_id", model)
    return ends, next(iter([*special_ids("pad_token_id", model), *ends]), 0)
