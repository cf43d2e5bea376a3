"""Writes `help.json`, which `--help` is read from, from the commands' own parsers: `make help`."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from typing import Any

from hf_ebm.cli.common import Command
from hf_ebm.cli.help import STORED
from hf_ebm.cli.main import COMMANDS, command_of
from hf_ebm.cli.train import descriptions


def stored_help() -> dict[str, Any]:
    """What `help.json` is to hold."""
    commands = {name: command_of(name) for name in COMMANDS if name != "train"}
    parsers = {name: command.parser() for name, command in commands.items() if isinstance(command, Command)}
    return {name: _stored(parser) for name, parser in parsers.items()} | {"train": descriptions()}


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
