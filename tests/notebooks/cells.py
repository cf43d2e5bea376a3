"""Runs a notebook's cells in a clean namespace of a process forked from one that has imported the libraries alone.

A kernel of its own would take longer to start than most notebooks run with smaller sizes.
"""

import multiprocessing
import os
import traceback
from pathlib import Path

from papermill.iorw import load_notebook_node
from papermill.parameterize import parameterize_notebook

_SERVED = multiprocessing.get_context("forkserver")
_SERVED.set_forkserver_preload(["tests.notebooks.libraries"])


def run(path: Path, parameters: dict, folder: Path) -> str:
    """What went wrong, or nothing. The cell of parameters is followed by one that sets these."""
    notebook = parameterize_notebook(
        load_notebook_node(str(path)), parameters, kernel_name="python3", language="python"
    )
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    ours, theirs = _SERVED.Pipe(duplex=False)
    process = _SERVED.Process(target=_run_cells, args=(cells, folder, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        return "the process ended without a word"
    finally:
        process.join()


def _run_cells(cells: list[str], folder: Path, answer) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    os.chdir(folder)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    shell = InteractiveShell.instance()
    for number, cell in enumerate(cells):
        result = shell.run_cell(cell, store_history=True)
        error = result.error_before_exec or result.error_in_exec
        if error is not None:
            answer.send(f"cell {number}:\n{cell}\n{''.join(traceback.format_exception(error))}")
            return
    answer.send("")
