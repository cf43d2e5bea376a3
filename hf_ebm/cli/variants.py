"""`hf-ebm variants`: scores of variants of a sequence of letters."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow

from hf_ebm.checks import check_choice
from hf_ebm.cli.common import ModelArguments, command, load_model
from hf_ebm.cli.tables import Output, check_writable, read_table
from hf_ebm.scoring.mutations import SCHEMES


def _schemes_help() -> str:
    told = "; ".join(f"{name}: {scheme.about} (rows: {scheme.rows})" for name, scheme in SCHEMES.items())
    return f"One or more, a column each. {told}. Default: the first.".replace("`", "")


@dataclass
class VariantsArguments:
    """Which variants of what, and how they are scored."""

    reference: str = field(metadata={"help": "FASTA file with one sequence, the wild type."})
    mutations: str = field(
        metadata={"help": "Records with the variants: .csv, .jsonl, .parquet, .txt (a variant a line), '-'."}
    )
    output: str = field(default="-", metadata={"help": "Where to: .csv, .jsonl, .parquet, '-' for standard output."})
    mutation_column: str = field(
        default="mutant", metadata={"help": "Field that holds a variant: A24G, or several changes as A24G:K30R."}
    )
    schemes: list[str] = field(default_factory=lambda: [next(iter(SCHEMES))], metadata={"help": _schemes_help})
    offset: int = field(default=1, metadata={"help": "The number of the reference's first letter."})
    letters: str | None = field(
        default=None, metadata={"help": "What may stand at a site, for joint_log_prob; default: all tokens."}
    )


@command(lambda: [VariantsArguments, ModelArguments])
def variants(arguments: VariantsArguments, which: ModelArguments) -> None:
    """`hf-ebm variants`: scores of variants of a sequence of letters, in nats."""
    further = which.inputs_by_name()
    check_writable(arguments.output, ".csv")
    for scheme in arguments.schemes:
        check_choice("schemes", scheme, SCHEMES)
    reference = read_fasta(arguments.reference)
    records = read_table(arguments.mutations, arguments.mutation_column)
    texts = records.texts(arguments.mutation_column)
    output = Output(arguments.output, records, dict.fromkeys(arguments.schemes, pyarrow.float64()))
    model, tokenizer = load_model(which)
    found: list[dict[str, float]] = [{} for _ in texts]
    for scheme in dict.fromkeys(arguments.schemes):
        try:
            scores = model.score_variants(
                reference, texts, tokenizer, scheme=scheme, offset=arguments.offset, letters=arguments.letters,
                token_budget=which.token_budget, further_inputs=further,
            ).scores  # fmt: skip
        except ValueError as error:
            told = str(error).replace("variants: row", f"{arguments.mutations}: record", 1)
            raise ValueError(told.replace("reference:", f"{arguments.reference}:", 1)) from error
        for record, score in zip(found, scores.tolist(), strict=True):
            record[scheme] = score
    output.write(found)


def read_fasta(path: str) -> str:
    """The sequence of a FASTA file. Raises `ValueError` for none, several, or what is no text."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = [line.strip() for line in file if line.strip() and not line.startswith(";")]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not FASTA in UTF-8: {error}") from error
    headers = [number for number, line in enumerate(lines) if line.startswith(">")]
    sequence = "".join(line for line in lines if not line.startswith(">")).removesuffix("*")
    if len(headers) > 1 or headers not in ([], [0]):
        raise ValueError(f"{path} must hold one sequence, got {len(headers)}")
    if not sequence:
        raise ValueError(f"{path} holds no sequence")
    return sequence
