"""Updates of every trainer, for `test_distributed`: run by two processes, and by the test's own."""

import json
import os
from pathlib import Path

from accelerate import PartialState

from tests.trainers import energy_run, search_run, task_loss_run


def run_all(folder: Path) -> None:
    for name, run in (("search", search_run), ("task_losses", task_loss_run), ("energies", energy_run)):
        (folder / name).mkdir(exist_ok=True)
        run.run_all(folder / name)
    state = PartialState()  # as the trainers found it
    (folder / f"process-{os.getpid()}.json").write_text(json.dumps([state.num_processes, state.process_index]))
