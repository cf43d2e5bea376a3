"""A small model folder for the command line, and ways to run it."""

import json
import os
import subprocess
import sys

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


def command(*arguments: str, launcher: list[str] | None = None, **options) -> subprocess.CompletedProcess:
    """The command in a process of its own."""
    start = launcher or [sys.executable]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*start, "-m", "hf_ebm", *map(str, arguments)], capture_output=True, text=True, env=environment, **options
    )


def read(path) -> list[dict]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]
