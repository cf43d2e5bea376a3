"""What a command is, and what all share: how options are read, models by name, work divided over processes."""

from __future__ import annotations

import difflib
import inspect
import json
import re
from argparse import Action
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, make_dataclass
from typing import Any, NoReturn

from accelerate import PartialState
from accelerate.utils import gather_object
from transformers import HfArgumentParser, PreTrainedTokenizerBase

from hf_ebm.checks import shown
from hf_ebm.cli.help import of_parser
from hf_ebm.generation_settings import GenerationSettings, help_of_setting, option_type
from hf_ebm.loading import EMBEDDED, load_energy_model
from hf_ebm.models.energy import EnergyModel
from hf_ebm.scoring.energies import ENERGIES


class Command:
    """A command: a function whose arguments are of the dataclasses that its options are declared in.

    Args:
        function: is called as the command is; its docstring is the help.
        options: gives the dataclasses.
    """

    def __init__(self, function: Callable[..., None], options: Callable[[], list[type]]):
        self.name, self.function, self.options = function.__name__, function, options
        self.about = inspect.getdoc(function) or ""

    def parser(self) -> OptionParser:
        """What reads its options."""
        return OptionParser(self.options(), self.name, self.about)

    def __call__(self, argv: list[str]) -> None:
        self.function(*parse(self.options(), argv, self.name, self.about))


def command(options: Callable[[], list[type]]) -> Callable[[Callable[..., None]], Command]:
    """Makes a command of a function."""
    return lambda function: Command(function, options)


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
        told = help_of_setting(own).replace("`", "").replace("%", "%%")
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


def check_shared(path: str | None, num_processes: int) -> None:
    """Raises `ValueError` for an input that several processes can't all read."""
    if path == "-" and num_processes > 1:
        raise ValueError("input: several processes cannot share standard input; give a file")


def divided(state: PartialState, count: int, run: Callable[[slice], list]) -> list:
    """What a function makes of all rows, in their order; each process gives it neighbours, its share of them.

    Raises:
        ValueError: as the function; of several processes it tells where the share begins that its rows are counted in.
    """
    start, stop = (count * number // state.num_processes for number in (state.process_index, state.process_index + 1))
    try:
        found = run(slice(start, stop)) if start < stop or state.num_processes == 1 else []
    except ValueError as error:
        raise ValueError(
            f"{error} (counted from row {start})" if start and "row " in str(error) else str(error)
        ) from error
    return [one for share in gather_object([found]) for one in share]


def check_positive(**values: int | None) -> None:
    """Raises `ValueError` for a value below 1, naming its argument."""
    for name, value in values.items():
        if value is not None and value < 1:
            raise ValueError(f"{name} must be 1 or more, got {value}")
