"""One update of each trainer, for `test_distributed`: run by torchrun with two processes, and alone with one."""

import os
import sys
from pathlib import Path

import torch

from hf_ebm.trainers import SearchAwareTrainer
from tests.trainers.test_trainers import KINDS, rows, trainer_of


def main(folder: str) -> None:
    torch.set_num_threads(1)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    # Sorted by length: the two processes decode another number of steps.
    dataset = sorted(rows(), key=lambda row: len(row["labels"]))
    for kind in KINDS:
        trainer: SearchAwareTrainer = trainer_of(
            kind, Path(folder) / "work", dataset=dataset, per_device_train_batch_size=8 // processes
        )
        trainer.train()
        logged = {name: value for name, value in trainer.state.log_history[0].items() if name != "grad_norm"}
        state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        torch.save((logged, state), Path(folder) / f"{kind}-{processes}-{os.environ.get('RANK', '0')}.pt")
        trainer.accelerator.wait_for_everyone()


if __name__ == "__main__":
    main(sys.argv[1])
