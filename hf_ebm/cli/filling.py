"""`hf-ebm fill`: joint fills of the blanks of texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow

from hf_ebm.checks import shown, wholes
from hf_ebm.cli.commands import ModelArguments, check_shared, command, divided, load_model
from hf_ebm.cli.tables import LineRecords, Output, Records, check_writable, read_records
from hf_ebm.models.energy.fill_energy import METHODS, READINGS, Fill, Word
from hf_ebm.runtime import joined

_WORD = {
    "score": pyarrow.float64(), "token": pyarrow.list_(pyarrow.int64()), "token_str": pyarrow.string(),
    "error": pyarrow.float64(),
}  # fmt: skip
_FILL = {
    "score": pyarrow.float64(), "energy": pyarrow.float64(), "token": pyarrow.list_(pyarrow.list_(pyarrow.int64())),
    "token_str": pyarrow.list_(pyarrow.string()), "sequence": pyarrow.string(), "error": pyarrow.float64(),
}  # fmt: skip
_ADDED = {
    "fills": pyarrow.list_(pyarrow.struct(list(_FILL.items()))),
    "marginals": pyarrow.list_(pyarrow.list_(pyarrow.struct(list(_WORD.items())))),
    "method": pyarrow.string(), "log_partition": pyarrow.float64(), "left_out": pyarrow.float64(),
    "left_out_error": pyarrow.float64(), "r_hat": pyarrow.float64(),
}  # fmt: skip


@dataclass
class FillArguments:
    """What is filled and how."""

    input: str | None = field(
        default=None, metadata={"help": "Texts with masks: .jsonl, .parquet, .txt (a text a line), '-' for stdin."}
    )
    text: str | None = field(default=None, metadata={"help": "A single text."})
    output: str = field(default="-", metadata={"help": "Where to: .jsonl, .parquet, '-' for standard output."})
    text_column: str = field(default="text", metadata={"help": "Field that holds the text."})
    top_k: int = field(default=10, metadata={"help": "Fills that are written, and words of each blank."})
    reading: str = field(
        default="joint",
        metadata={
            "help": f"{', '.join(READINGS)}: fills by exp(-E/temperature); the product of what the model says of each "
            "blank while all are masked; or blanks filled from left to right."
        },
    )
    method: str = field(
        default="auto",
        metadata={
            "help": f"{', '.join(METHODS)}: lists all fills, or those of the likeliest words, or runs chains; auto "
            "takes the first that --row_limit allows."
        },
    )
    temperature: float = field(default=1.0, metadata={"help": "Temperature of the joint reading."})
    words: list[str] | None = field(default=None, metadata={"help": "Words that may fill the blanks."})
    words_file: str | None = field(default=None, metadata={"help": "A .txt with such words, one a line."})
    pieces: list[str] | None = field(
        default=None,
        metadata={
            "help": "Tokens of a blank, which is a word then: a number, or the least and the most; or for each blank "
            "one of 2, 1-3 and any."
        },
    )
    equal: list[str] | None = field(
        default=None, metadata={"help": "Blanks that hold the same word, counted from 0: 0,1; or several groups."}
    )
    different: list[str] | None = field(default=None, metadata={"help": "Blanks that hold different words: 0,1."})
    pattern: str | None = field(default=None, metadata={"help": "A regular expression that is found in the result."})
    row_limit: int = field(default=16_384, metadata={"help": "Masked rows of a text."})
    seed: int = field(default=0, metadata={"help": "Seed of draws and chains."})


@command(lambda: [FillArguments, ModelArguments])
def fill(arguments: FillArguments, which: ModelArguments) -> None:
    """`hf-ebm fill`: the likeliest fills of all masks of a text together, with their probabilities."""
    further = which.inputs_by_name()
    check_writable(arguments.output)
    state = joined(which.device)
    check_shared(arguments.input, state.num_processes)
    records = _records(arguments)
    texts = records.texts(arguments.text_column)
    output = Output(arguments.output, records, _ADDED)
    words = _words(arguments)
    pieces = _pieces(arguments.pieces)
    model, tokenizer = load_model(which, state.local_process_index)

    def filled(share: slice) -> list[dict[str, Any]]:
        found = model.fill(
            texts[share],
            tokenizer,
            arguments.top_k,
            reading=arguments.reading,
            method=arguments.method,
            temperature=arguments.temperature,
            words=words,
            pieces=pieces,
            equal=_groups("equal", arguments.equal),
            different=_groups("different", arguments.different),
            pattern=arguments.pattern,
            row_limit=arguments.row_limit,
            seed=arguments.seed,
            token_budget=which.token_budget,
            further_inputs=further,
            unknown_tokens=which.unknown_tokens,
        )
        numbers = ("log_partition", "left_out", "left_out_error", "r_hat")
        return [
            {
                "fills": [as_record(one, _FILL) for one in found.fills[row]],
                "marginals": [[as_record(word, _WORD) for word in words] for words in found.marginals[row]],
                "method": found.method[row],
                **{name: float(getattr(found, name)[row]) for name in numbers},
            }
            for row in range(len(found.fills))
        ]

    found = divided(state, len(records), filled)
    if state.is_main_process:
        output.write(found)


def as_record(found: Fill | Word, fields: dict[str, pyarrow.DataType]) -> dict:
    """A fill or a word by the names that `fill-mask` has for them."""
    renamed = {"score": "probability", "token": "tokens", "token_str": "token_strs"}
    return {
        name: getattr(found, name, None) if hasattr(found, name) else getattr(found, renamed[name]) for name in fields
    }


def _records(arguments: FillArguments) -> Records:
    if (arguments.input is None) == (arguments.text is None):
        raise ValueError("there is nothing to fill: give texts, as --input or --text, and one of them")
    if arguments.text is not None:
        return LineRecords("text", [{arguments.text_column: arguments.text}])
    return read_records(str(arguments.input), arguments.text_column)


def _words(arguments: FillArguments) -> list[str] | None:
    if arguments.words_file is None:
        return arguments.words
    if arguments.words is not None:
        raise ValueError("words and words_file were both given; give one of them")
    words = [word for word in read_records(arguments.words_file, "word").texts("word") if word]
    if not words:
        raise ValueError(f"words_file: {arguments.words_file} holds no word")
    return words


def _pieces(given: list[str] | None) -> Any:
    """One or two numbers are of all blanks; else there is a range for each, which `fill` looks at."""
    if given is None:
        return None
    if len(given) <= 2 and all(part.isdecimal() for part in given):
        numbers = [int(part) for part in given]
        return (numbers[0], numbers[-1])
    return [_range(part) for part in given]


def _range(part: str) -> int | tuple[int, int] | None:
    least, dash, most = part.partition("-")
    if part != "any" and not (least.isdecimal() and (most.isdecimal() or not dash)):
        raise ValueError(f"pieces must be like 2, 1-3 or any, for each blank, got {shown(part)}")
    if part == "any":
        return None
    return (int(least), int(most)) if dash else int(least)


def _groups(name: str, groups: list[str] | None) -> list[list[int]] | None:
    """Groups of blanks, each given as 0,1."""
    found = []
    for group in groups or []:
        numbers = wholes([int(part) if part.isdecimal() else part for part in group.split(",")])
        if numbers is None:
            raise ValueError(f"{name} must be numbers of blanks with commas between them, 0,1, got {shown(group)}")
        found.append(numbers)
    return found or None
