"""What `--help` shows, without what the commands run with, which takes seconds to import.

The options of the commands are read from `help.json`, which `store_help` writes from their parsers.
"""

from __future__ import annotations

import json
import re
from argparse import SUPPRESS, Action, ArgumentParser, HelpFormatter
from pathlib import Path
from typing import Any

FLAGS = {"-h", "--help"}
STORED = Path(__file__).with_name("help.json")


class OptionHelp(HelpFormatter):
    """Tells the default of an option that has one, unless its text does, and the text of a pair of options once."""

    def _get_help_string(self, action: Action) -> str:
        text = action.help or ""
        if action.nargs == 0 and action.dest != "help":
            return f"The opposite of --{action.dest}."
        told = re.search(r"\bdefaults?( to\b|:|\))|\bby default\b", text, re.IGNORECASE)
        if told or action.required or action.default in (None, SUPPRESS, ""):
            return text
        return f"{text} (default: %(default)s)"


def of_parser(command: str, description: str) -> dict[str, Any]:
    """How a command's parser is made, without its options."""
    prog = f"hf-ebm {command}"
    # The options one by one would hide the message below them.
    return {
        "prog": prog, "usage": f"{prog} [options]", "description": description, "formatter_class": OptionHelp,
        "allow_abbrev": False,
    }  # fmt: skip


def asked(command: str, options: list[str]) -> bool:
    """Whether a command is asked for help that is stored; that of an objective has Transformers' own options."""
    if command == "train":
        return not options or options[0] in FLAGS
    return not FLAGS.isdisjoint(options)


def help_of(command: str) -> str:
    """The help of a command, from what is stored."""
    stored = json.loads(STORED.read_text(encoding="utf-8"))[command]
    if command == "train":
        return help_of_train(stored)
    parser = ArgumentParser(**of_parser(command, stored["description"]))
    for option in stored["options"]:
        parser.add_argument(*option.pop("names"), **option)
    return parser.format_help()


def help_of_train(objectives: dict[str, str]) -> str:
    """The help of `hf-ebm train`, which has a command for each objective."""
    listed = "\n".join(f"  {name:18} {description}" for name, description in objectives.items())
    return (
        "usage: hf-ebm train OBJECTIVE [options]   (hf-ebm train OBJECTIVE --help lists them)\n\n"
        f"{listed}\n\n"
        "mgs, minimum-risk and policy-gradient train sequence-to-sequence and causal models, those before them\n"
        "sequence-to-sequence models alone.\n"
    )
