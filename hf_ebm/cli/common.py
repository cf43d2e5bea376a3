"""What the commands share: how options are read, models by name, texts as prefixes and continuations."""

from __future__ import annotations

import difflib
import json
import re
from argparse import Action
from collections.abc import Iterable
from dataclasses import dataclass, field, make_dataclass
from typing import Any, NoReturn

import pyarrow
from transformers import HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase

from hf_ebm.checks import shown
from hf_ebm.cli.help import of_parser
from hf_ebm.cli.tables import Records, read_records
from hf_ebm.data.conditional import split_continuations
from hf_ebm.generation_settings import GenerationSettings, help_of, option_type
from hf_ebm.loading import EMBEDDED, is_residual, load_causal_model, load_energy_model, load_residual_model
from hf_ebm.model_facts import max_length, num_embeddings, special_ids
from hf_ebm.models.energy import EnergyModel
from hf_ebm.models.residual import ResidualEnergyModel
from hf_ebm.models.residual.inputs_residual import lm_of
from hf_ebm.scoring.energies import ENERGIES
from hf_ebm.texts import report_unknown


def parse(dataclasses: list, argv: list[str], command: str, description: str) -> tuple:
    """Arguments of a command as instances of its dataclasses.

    Raises:
        ValueError: for an option that isn't there, one that is missing, and a value of another kind.
    """
    parser = OptionParser(dataclasses, command, description)
    _, rest = parser.parse_known_args(argv)
    if rest:
        raise ValueError(_not_there(parser, rest, command))
    # Transformers would read further options from a file beside the program.
    return parser.parse_args_into_dataclasses(argv, look_for_args_file=False)


def setting_options(
    settings: type[GenerationSettings],
    title: str,
    names: Iterable[str] = (),
    helps: dict[str, str] | None = None,
    **defaults: Any,
) -> type:
    """Settings of a settings class as options; one that isn't given is `None`, so that others' settings hold.

    Args:
        title: of the dataclass that is made.
        names: of the settings; by default all.
        helps: help of options where the setting's isn't so on the command line.
        defaults: of options that have one of their own.
    """
    options = []
    for own in settings.declared():
        told = help_of(own).replace("`", "").replace("%", "%%")
        if own.default is not None and own.name not in defaults:
            told += f" Default: the model's own, or {own.default}."
        metadata = {"help": (helps or {}).get(own.name, told)}
        options.append((own.name, option_type(own) | None, field(default=defaults.get(own.name), metadata=metadata)))
    made = make_dataclass("Settings", [option for option in options if option[0] in (names or settings.defaults)])
    made.__doc__ = title
    return made


class OptionParser(HfArgumentParser):
    """A parser whose errors are `ValueError`s. The help of an option may be a function that gives it."""

    def __init__(self, dataclasses: list, command: str, description: str):
        super().__init__(dataclasses, **of_parser(command, description))
        # Before Python 3.14 it takes -1e-3 for an option.
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$", re.IGNORECASE)

    def add_argument(self, *names: Any, **how: Any) -> Action:
        told = how.get("help")
        return super().add_argument(*names, **{**how, "help": told() if callable(told) else told})

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def _not_there(parser: OptionParser, rest: list[str], command: str) -> str:
    unknown = [part.partition("=")[0] for part in rest if part.startswith("-")]
    help_lists = f"hf-ebm {command} --help lists the options"
    if not unknown:
        return f"{rest[0]!r} stands where an option was expected, which begins with --; {help_lists}"
    like = difflib.get_close_matches(unknown[0], parser._option_string_actions, 1, cutoff=0.75)
    meant = f", did you mean {like[0]}?" if like else ";"
    return f"hf-ebm {command} has no option {unknown[0]}{meant} {help_lists}"


UNKNOWN_HELP = "Where a text holds what the tokenizer has no token for: warn, error or ignore."
_IDS = pyarrow.list_(pyarrow.int64())
# What a row of a text has.
CONTINUATION_FIELDS = {"text": pyarrow.string(), "prefix_ids": _IDS, "continuation_ids": _IDS}


def energy_help() -> str:
    """What `--energy` may be; a function, as energies may be added once this module is imported."""
    return f"{' or '.join(ENERGIES)}; default: the model's own, or local."


@dataclass
class AnyModelArguments:
    """Which model, and where it runs."""

    model: str = field(default=EMBEDDED, metadata={"help": "Hub name, folder, or 'embedded' (the model shipped here)."})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of a Hub model."})
    device: str | None = field(default=None, metadata={"help": "cpu, cuda, cuda:1, …; default: cuda if there is one."})
    dtype: str = field(default="float32", metadata={"help": "float32, bfloat16, float16 or float64."})


@dataclass
class MaskedModelArguments(AnyModelArguments):
    """Which masked language model, and where it runs."""

    energy: str | None = field(default=None, metadata={"help": energy_help})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run the code that a checkpoint brings along."})
    max_sequence_length: int | None = field(
        default=None,
        metadata={"help": "Longest text in tokens, in place of what the model's configuration and tokenizer say."},
    )


@dataclass
class ModelArguments(MaskedModelArguments):
    """Which masked language model, and how it is run."""

    token_budget: int | None = field(default=None, metadata={"help": "Tokens per forward pass; default: from memory."})
    unknown_tokens: str = field(default="warn", metadata={"help": UNKNOWN_HELP})
    further_inputs: str | None = field(
        default=None, metadata={"help": 'What else the model reads, a number each as JSON: {"langs": 1}.'}
    )

    def inputs_by_name(self) -> dict[str, int]:
        """`further_inputs` as numbers by name. Raises `ValueError` for anything else."""
        try:
            found = json.loads(self.further_inputs or "{}")
        except (json.JSONDecodeError, RecursionError):
            found = None
        if not isinstance(found, dict) or not all(type(value) is int for value in found.values()):
            raise ValueError(
                f'further_inputs must be whole numbers by name, {{"langs": 1}}, got {shown(self.further_inputs)}'
            )
        return found


def load_model(arguments: MaskedModelArguments, local_rank: int = 0) -> tuple[EnergyModel, PreTrainedTokenizerBase]:
    """`(model, tokenizer)` on its device, in evaluation mode."""
    return load_energy_model(
        arguments.model,
        dtype=arguments.dtype,
        device=arguments.device,
        local_rank=local_rank,
        revision=arguments.revision,
        energy=arguments.energy,
        max_sequence_length=arguments.max_sequence_length,
        trust_remote_code=arguments.trust_remote_code,
    )


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


def check_shared(path: str | None, num_processes: int) -> None:
    """Raises `ValueError` for an input that several processes can't all read."""
    if path == "-" and num_processes > 1:
        raise ValueError("input: several processes cannot share standard input; give a file")


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
