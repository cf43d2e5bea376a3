"""The options of a command, and how they are read."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import field, make_dataclass
from typing import Any, NoReturn

from transformers import HfArgumentParser

from hf_ebm.cli.help import of_parser
from hf_ebm.generation_settings import GenerationSettings, help_of, option_type


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
    """A parser whose errors are `ValueError`s."""

    def __init__(self, dataclasses: list, command: str, description: str):
        super().__init__(dataclasses, **of_parser(command, description))
        # Before Python 3.14 it takes -1e-3 for an option.
        self._negative_number_matcher = re.compile(r"-(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$", re.IGNORECASE)

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
