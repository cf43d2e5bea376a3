"""One update of each search-aware trainer, for `distributed_runs`."""

import os
from pathlib import Path

import torch

from hf_ebm.trainers import Seq2SeqObjectiveTrainer
from tests.trainers.test_trainers import KINDS, rows, trainer_of


def run_all(folder: Path) -> None:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    # Sorted by length: the two processes decode another number of steps.
    dataset = sorted(rows(), key=lambda row: len(row["labels"]))
    for kind in KINDS:
        trainer: Seq2SeqObjectiveTrainer = trainer_of(
            kind, folder / "work", dataset=dataset, per_device_train_batch_size=8 // processes
        )
        trainer.train()
        logged = {name: value for name, value in trainer.state.log_history[0].items() if name != "grad_norm"}
        state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        torch.save((logged, state), folder / f"{kind}-{processes}-{os.environ.get('RANK', '0')}.pt")
        trainer.accelerator.wait_for_everyone()
