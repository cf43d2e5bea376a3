"""Entry point: picks the command and turns errors of the caller into messages."""

from __future__ import annotations

import atexit
import sys

from hf_ebm import __version__
from hf_ebm.cli.help import COMMANDS, asked, command_of, help_of_command

# Those that divide their work over processes.
DIVIDED = ("sample", "fill", "score", "rerank", "negatives", "perplexity", "train")


def main(argv: list[str] | None = None) -> None:
    """Runs `hf-ebm COMMAND …`. Exits with 2 for a caller's mistake and with 130 after Ctrl-C, each told in one line."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: hf-ebm COMMAND [options]   (hf-ebm COMMAND --help lists them)\n")
        print("\n".join(f"  {name:10} {description}" for name, (description, _) in COMMANDS.items()))
        print("\nhf-ebm --version tells the version")
        return
    if argv[0] == "--version":
        print(f"hf-ebm {__version__}")
        return
    if argv[0] not in COMMANDS:
        _stop(2, f"there is no command {argv[0]!r}; the commands are {', '.join(COMMANDS)}")
    if "torch" not in sys.modules and asked(argv[0], argv[1:]):
        print(help_of_command(argv[0]), end="")
        return
    try:
        from transformers.utils import logging

        from hf_ebm.runtime import check_launch, leave_others

        atexit.register(leave_others)
        if not sys.stderr.isatty():  # bars are for people
            logging.disable_progress_bar()
        check_launch(argv[0], DIVIDED)
        command_of(argv[0])(argv[1:])
    except (ValueError, OSError, ImportError) as error:  # what is missing to import is an extra of the package
        _stop(2, " ".join(str(error).split()))
    except KeyboardInterrupt as interrupt:  # which says how a run goes on that can
        _stop(130, "; ".join(["interrupted", *map(str, interrupt.args)]))


def _stop(code: int, message: str) -> None:
    print(f"hf-ebm: {message}", file=sys.stderr)
    raise SystemExit(code)
