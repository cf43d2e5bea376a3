"""Updates of every trainer, for `test_distributed`: run by torchrun with two processes, and by the test with one.

One start for all: it takes longer than what runs.
"""

import gc
import json
import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState

from tests.trainers import energy_run, search_run, task_loss_run


def run_all(folder: Path) -> None:
    for name, run in (("search", search_run), ("task_losses", task_loss_run), ("energies", energy_run)):
        (folder / name).mkdir(exist_ok=True)
        run.run_all(folder / name)
    state = PartialState()  # as the trainers found it
    (folder / f"process-{os.getpid()}.json").write_text(json.dumps([state.num_processes, state.process_index]))


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.freeze()  # every training begins with a collection, which what is imported makes a long one
    run_all(Path(sys.argv[1]))
