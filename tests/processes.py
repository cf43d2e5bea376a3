"""Processes that have imported everything and run nothing: forks of a server that each worker of the tests starts once.

What `python -m hf_ebm` and `torchrun` themselves do is tested where these are started: by lines of the documentation.
"""

import gc
import multiprocessing
import os
import socket
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
IMPORTED = [
    "tests.conftest", "hf_ebm.cli.main", "hf_ebm.cli.train", "hf_ebm.cli.sample", "hf_ebm.cli.continuations",
    "hf_ebm.trainers", "hf_ebm.pipelines", "datasets", "transformers.models.gpt2", "transformers.models.bert",
]  # fmt: skip


class Finished(NamedTuple):
    """A process that ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


@cache
def _context() -> multiprocessing.context.BaseContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        forkserver.ensure_running()
    return context


def _inside(function: Callable, arguments: tuple, variables: dict[str, str], outputs: list[Path]) -> None:
    for number, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.update(variables, CUDA_VISIBLE_DEVICES="")
    gc.freeze()  # every training begins with a collection, which what is imported makes a long one
    function(*arguments)


def fresh(folder: Path, function: Callable, *arguments, count: int = 1) -> list[Finished]:
    """Runs a function of a module in one process, or in several with the variables of torchrun; none may fail.

    Args:
        folder: for what the processes write.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = []
    for rank in range(count):
        variables = {} if count == 1 else {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        outputs = [Path(folder, f"{name}-{rank}") for name in ("stdout", "stderr")]
        process = _context().Process(target=_inside, args=(function, arguments, variables, outputs), daemon=True)
        process.start()
        started.append((process, outputs))
    found = []
    for process, outputs in started:
        process.join(timeout=300)
        found.append(Finished(process.exitcode, *(path.read_text(encoding="utf-8") for path in outputs)))
        process.kill()
    assert all(one.returncode == 0 for one in found), "\n".join(one.stderr[-3000:] for one in found)
    return found
