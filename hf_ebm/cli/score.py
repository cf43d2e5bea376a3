"""`hf-ebm score`: energies and pseudo-perplexities of texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow

from hf_ebm.cli.common import ModelArguments, load_model, parse
from hf_ebm.cli.tables import Output, check_writable, read_records

_ADDED = {
    "energy": pyarrow.float64(), "num_tokens": pyarrow.int64(), "num_unknown": pyarrow.int64(),
    "pseudo_perplexity": pyarrow.float64(),
}  # fmt: skip
_DETAILS = {
    "tokens": pyarrow.list_(pyarrow.string()), "token_energies": pyarrow.list_(pyarrow.float64()),
    "words": pyarrow.list_(pyarrow.string()), "word_energies": pyarrow.list_(pyarrow.float64()),
}  # fmt: skip


@dataclass
class ScoreArguments:
    """What is scored and how."""

    input: str = field(
        default="-", metadata={"help": "Records: .jsonl, .parquet, .txt (a text a line), '-' for stdin."}
    )
    output: str = field(default="-", metadata={"help": "Where to: .jsonl, .parquet, '-' for standard output."})
    text_column: str = field(default="text", metadata={"help": "Field that holds the text."})
    prefix_column: str | None = field(default=None, metadata={"help": "Field with left context; it is not scored."})
    suffix_column: str | None = field(default=None, metadata={"help": "Field with right context; it is not scored."})
    variant: str | None = field(
        default=None, metadata={"help": "exact, within_word_l2r, or the approximations stride and unmasked."}
    )
    stride: int = field(default=8, metadata={"help": "Masked rows per text with --variant stride."})
    details: bool = field(default=False, metadata={"help": "Also write the energies of tokens and words."})


def options() -> list[type]:
    """What the command's options are declared in."""
    return [ScoreArguments, ModelArguments]


def run(argv: list[str]) -> None:
    """Scores every record and writes it back with its energy, counts of tokens and pseudo-perplexity added."""
    arguments, which = parse(options(), argv, "score", __doc__)
    further = which.inputs_by_name()
    check_writable(arguments.output)
    records = read_records(arguments.input, arguments.text_column)
    columns = {"prefixes": arguments.prefix_column, "suffixes": arguments.suffix_column}
    contexts: dict[str, Any] = {name: records.texts(column) for name, column in columns.items() if column}
    texts = records.texts(arguments.text_column)
    output = Output(arguments.output, records, _ADDED | (_DETAILS if arguments.details else {}))
    model, tokenizer = load_model(which)
    result = model.score(
        texts,
        tokenizer,
        variant=arguments.variant,
        stride=arguments.stride,
        token_budget=which.token_budget,
        further_inputs=further,
        unknown_tokens=which.unknown_tokens,
        **contexts,
    )
    found = []
    for row in range(len(records)):
        counts = {name: int(getattr(result, name)[row]) for name in ("num_tokens", "num_unknown")}
        record: dict[str, Any] = {"energy": float(result.energy[row]), **counts}
        if result.pseudo_perplexity is not None:
            record["pseudo_perplexity"] = float(result.pseudo_perplexity[row]) if record["num_tokens"] > 0 else None
        if arguments.details:
            record |= {"tokens": result.tokens[row], "token_energies": result.token_energies[row]}
            if result.words is not None and result.word_energies is not None:
                record |= {"words": result.words[row], "word_energies": result.word_energies[row]}
        found.append(record)
    output.write(found)
