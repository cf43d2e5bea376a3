"""One update of the trainers of energies, for `distributed_runs`."""

import os
from pathlib import Path

import torch

from hf_ebm.trainers import EnergyTrainer, ResidualNCETrainer
from tests.models.residual_models import toy_residual
from tests.trainers import test_energy, test_residual_nce

KINDS = ("residual", "mle", "pll", "mlm")


def trainer_of(kind: str, folder: Path, processes: int):
    """A trainer whose processes see the six rows of the test together."""
    size = 6 // processes
    if kind == "residual":
        args = test_residual_nce.arguments(folder, per_device_train_batch_size=size)
        return ResidualNCETrainer(toy_residual(), args, train_dataset=test_residual_nce.ROWS)
    args = test_energy.arguments(folder, kind, per_device_train_batch_size=size)
    rows = [{"input_ids": row} for row in test_energy.ROWS]
    return EnergyTrainer(test_energy.make("bert", "raw"), args, train_dataset=rows)


def run_all(folder: Path) -> None:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    for kind in KINDS:
        trainer = trainer_of(kind, folder / "work", processes)
        trainer.train()
        logged = {name: value for name, value in trainer.state.log_history[0].items() if name != "grad_norm"}
        state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        torch.save((logged, state), folder / f"{kind}-{processes}-{os.environ.get('RANK', '0')}.pt")
        trainer.accelerator.wait_for_everyone()
