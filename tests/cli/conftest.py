"""A small model folder for the command line, and ways to run it."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable

import pytest

from hf_ebm.cli.main import main
from tests.models.tokenizers_for_tests import small_model, small_tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = small_tokenizer("wordpiece")
    small_model(tokenizer).mlm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def run(*arguments: str) -> None:
    """The command in this process."""
    main([str(argument) for argument in arguments])


def killed(owner, name: str, at: int, last_words: Callable, *arguments: str) -> None:
    """The command in a copy of this process, which kills itself, as `kill -9` would, at the n-th call of a function.

    Args:
        owner, name, at: what the function belongs to, its name, and which call is the last.
        last_words: called with that call's arguments.
    """

    def copy() -> None:
        plain, calls = getattr(owner, name), []

        def dying(*given):
            calls.append(given)
            if len(calls) == at:
                last_words(*given)
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(*given)

        setattr(owner, name, dying)
        run(*arguments)

    # What is imported needn't be again; a daemon doesn't outlive the tests, should it not die.
    process = multiprocessing.get_context("fork").Process(target=copy, daemon=True)
    process.start()
    process.join(timeout=300)
    assert process.exitcode == -signal.SIGKILL


def read(path) -> list[dict]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]
