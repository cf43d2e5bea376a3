"""Updates of every trainer, for `test_distributed`: run by torchrun with two processes, and alone with one.

One start for all: it takes longer than what runs.
"""

import sys
from pathlib import Path

import torch

from tests.trainers import energy_run, search_run, task_loss_run

if __name__ == "__main__":
    torch.set_num_threads(1)
    for name, run in (("search", search_run), ("task_losses", task_loss_run), ("energies", energy_run)):
        folder = Path(sys.argv[1]) / name
        folder.mkdir(exist_ok=True)
        run.run_all(folder)
