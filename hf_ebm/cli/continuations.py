"""`hf-ebm negatives`: continuations of prefixes, sampled; and texts as prefixes and continuations."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ebm.cli.commands import (
    UNKNOWN_HELP,
    AnyModelArguments,
    check_positive,
    check_shared,
    command,
    setting_options,
)
from hf_ebm.cli.run_records import RunRecords
from hf_ebm.cli.tables import Output, Records, check_writable, read_records
from hf_ebm.data.conditional import split_continuations
from hf_ebm.loading import is_residual, load_causal_model, load_residual_model
from hf_ebm.model_facts import max_length, num_embeddings, special_ids
from hf_ebm.models.fingerprints import model_fingerprints
from hf_ebm.models.residual import JointGenerationConfig, ResidualEnergyModel
from hf_ebm.models.residual.candidates import (
    SamplingParameters,
    check_batch_fits,
    check_continuations_fit,
    lm_of,
    sample_continuations,
)
from hf_ebm.random_state import stream_seed
from hf_ebm.runtime import joined
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
    unknown_tokens: str = field(default="warn", metadata={"help": UNKNOWN_HELP})
    max_rows: int | None = field(
        default=None,
        metadata={"help": "Texts that are read, the first of the input, whatever rows they take; default: all."},
    )


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


def special_tokens(model: PreTrainedModel) -> tuple[list[int], int]:
    """End tokens and padding of a causal or a residual model."""
    if isinstance(model, ResidualEnergyModel):
        return model.end_ids, model.config.lm_pad_token_id
    ends = special_ids("eos_token_id", model)
    return ends, next(iter([*special_ids("pad_token_id", model), *ends]), 0)


NEGATIVES_FIELDS = {
    "row": pyarrow.int64(), **CONTINUATION_FIELDS, "negatives": pyarrow.list_(pyarrow.list_(pyarrow.int64())),
}  # fmt: skip
_CHANGE_NOTHING = ("output", "device", "unknown_tokens", "input")


@dataclass
class NegativesArguments:
    """What is sampled, and where it goes."""

    output: str = field(metadata={"help": "Where to: .jsonl, .parquet."})
    num_negatives: int = field(default=1, metadata={"help": "Continuations of each prefix."})
    texts_at_once: int = field(default=64, metadata={"help": "Texts sampled for together; draws depend on it."})


_SAMPLING = setting_options(
    JointGenerationConfig, "How continuations are sampled.", ("temperature", "top_k", "top_p", "seed"),
    {"temperature": "Other than 1 the noise isn't the language model.", "seed": "Of the samples."},
    temperature=1.0, seed=0,
)  # fmt: skip


@command(lambda: [NegativesArguments, _SAMPLING, ContinuationArguments, AnyModelArguments])
def negatives(
    arguments: NegativesArguments, sampling: Any, data: ContinuationArguments, which: AnyModelArguments
) -> None:
    """`hf-ebm negatives`: continuations of prefixes, sampled from a causal language model.

    Writes a record for each text: `row`, `text`, `prefix_ids`, `continuation_ids` and `negatives`, as
    `hf_ebm.trainers.ResidualNCETrainer` reads them, and the text's other fields. A killed run goes on when the same
    command is given again; the processes of `torchrun --nproc_per_node N -m hf_ebm negatives …` divide the texts.
    Beside the output lies what the records were made with.
    """
    _check_negatives(arguments, data)
    JointGenerationConfig(**vars(sampling))  # which refuses what they may not be
    state = joined(which.device)
    check_shared(data.input, state.num_processes)
    texts = read_texts(data)
    output = Output(arguments.output, carried(texts, data), NEGATIVES_FIELDS)
    taken = [name for name, own in output.names.items() if own != name]
    if taken:
        raise ValueError(f"{data.input}: {', '.join(taken)}: trainers read fields of these names; rename the input's")
    lm, tokenizer = load_language_model(which, state.local_process_index)
    if isinstance(lm, ResidualEnergyModel):
        raise ValueError(f"model {which.model!r} is a residual model; negatives are of its language model")
    end_ids, _ = special_tokens(lm)
    rows, numbers = continuations(data, texts, tokenizer, lm)
    together = min(arguments.texts_at_once, len(rows)) * arguments.num_negatives
    check_continuations_fit("num_negatives, texts_at_once", together, data.max_new_tokens)
    check_batch_fits("num_negatives, texts_at_once", together, lm)
    records = RunRecords(output, ("row",), numbers)
    if state.is_main_process:
        given = {**asdict(arguments), **asdict(sampling), **asdict(data), **asdict(which)}
        settings = {name: value for name, value in given.items() if name not in _CHANGE_NOTHING}
        checksums = model_fingerprints(lm, tokenizer)
        records.open({"command": "negatives", **settings, "inputs": texts.digest(), "checksums": checksums})
    state.wait_for_everyone()
    known = {record["row"] for record in records.read()}
    state.wait_for_everyone()  # nobody appends before everybody has read what is missing
    parameters = SamplingParameters(
        data.max_new_tokens, tuple(end_ids), sampling.temperature, sampling.top_k, sampling.top_p
    )
    blocks = range(0, len(rows), arguments.texts_at_once)
    missing = [at for at in blocks if not known.issuperset(range(at, min(at + arguments.texts_at_once, len(rows))))]
    with records.filling():
        for at in missing[state.process_index :: state.num_processes]:
            block = rows[at : at + arguments.texts_at_once]
            prefixes = [torch.tensor(row["prefix_ids"]) for row in block]
            seed, together = stream_seed(sampling.seed, at), len(block) * arguments.num_negatives
            drawn = sample_continuations(lm, prefixes, arguments.num_negatives, parameters, seed, together)
            records.append(
                [
                    {"row": at + number, **row, "negatives": [ids.tolist() for ids in own]}
                    for number, (row, own) in enumerate(zip(block, drawn, strict=True))
                ]
            )
    state.wait_for_everyone()
    if state.is_main_process:
        records.finish()
        done = "" if missing else "already complete: "
        print(f"{done}{len(rows)} of {len(texts)} texts have a continuation; {arguments.output}")


def _check_negatives(arguments: NegativesArguments, data: ContinuationArguments) -> None:
    if arguments.output == "-":
        raise ValueError("output must be a file: a run on standard output could not go on after a kill")
    check_writable(arguments.output)
    check_positive(num_negatives=arguments.num_negatives, texts_at_once=arguments.texts_at_once, max_rows=data.max_rows)
