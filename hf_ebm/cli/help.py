"""Which commands there are, and what `--help` shows, without what they run with, which takes seconds to import.

Their options are read from `help.json`, which `python -m hf_ebm.cli.help` (`make help`) writes from their parsers.
"""

from __future__ import annotations

import json
import re
from argparse import SUPPRESS, Action, ArgumentParser, HelpFormatter
from importlib import import_module
from pathlib import Path
from typing import Any

# What each is for, and the module of this package that it is a function of.
COMMANDS = {
    "sample": ("draw sequences from a masked language model, or fill the masks of texts", "sample"),
    "fill": ("the likeliest fills of all masks of a text together, with their probabilities", "filling"),
    "score": ("energies and pseudo-perplexities of texts", "scoring"),
    "rerank": ("rerank n-best lists", "scoring"),
    "variants": ("score variants of a sequence, such as a protein's, by the schemes of the field", "scoring"),
    "negatives": ("sample continuations of prefixes, to train a residual model against", "continuations"),
    "perplexity": ("perplexity of a causal, a residual or a masked model, between bounds", "perplexity"),
    "demo": ("a page in the browser that samples, fills, scores texts and variants", "demo"),
    "train": (
        "train a sequence model for search or for a cost of what it decodes, or an energy, alone or residual",
        "train",
    ),
}
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


def help_of_command(command: str) -> str:
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
    return f"usage: hf-ebm train OBJECTIVE [options]   (hf-ebm train OBJECTIVE --help lists them)\n\n{listed}\n"


def command_of(name: str) -> Any:
    """A command, to be called with its arguments."""
    return getattr(import_module(f"hf_ebm.cli.{COMMANDS[name][1]}"), name)


def stored_help() -> dict[str, Any]:
    """What `help.json` is to hold, from the commands' own parsers."""
    objectives = import_module(f"hf_ebm.cli.{COMMANDS['train'][1]}").descriptions()
    parsers = {name: command_of(name).parser() for name in COMMANDS if name != "train"}
    return {name: _stored(parser) for name, parser in parsers.items()} | {"train": objectives}


def _stored(parser: ArgumentParser) -> dict[str, Any]:
    options = []
    for action in parser._actions[1:]:  # the first is --help itself
        named = ("dest", "default", "required", "choices", "help", "nargs")
        option = {name: value for name in named if (value := getattr(action, name)) is not None}
        if option.get("nargs") == 0:
            option |= {"action": "store_false"}
            del option["nargs"]
        options.append({"names": action.option_strings, **option})
    return {"description": parser.description, "options": options}


if __name__ == "__main__":
    STORED.write_text(json.dumps(stored_help(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
