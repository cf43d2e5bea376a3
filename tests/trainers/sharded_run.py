"""One update of the trainers whose weights can be sharded, by FSDP over two processes, for `test_distributed`."""

import os
from pathlib import Path
from unittest.mock import patch

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

from hf_ebm.trainers import ResidualNCETrainer
from tests.models.residual_models import toy_residual
from tests.seq2seq_families import tiny_seq2seq
from tests.trainers import test_residual_nce
from tests.trainers.test_trainers import rows, trainer_of

KINDS = ("cross-entropy", "self-normalized", "residual")
# Without units of their own for layers: accelerate would make them of a BERT's embeddings twice.
SHARDED = {"fsdp": True, "fsdp_config": {"state_dict_type": "FULL_STATE_DICT", "auto_wrap_policy": "NO_WRAP"}}


def run_all(folder: Path) -> None:
    """Sharded where there are two processes; accelerate knows of FSDP on GPUs alone, PyTorch on CPUs, too."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    start = PartialState.__init__

    def as_of_gpus(self, *arguments, **given) -> None:
        start(self, *arguments, **given)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    with patch.object(PartialState, "__init__", as_of_gpus):
        for kind in KINDS:
            sharding = SHARDED if processes > 1 else {}
            if kind == "residual":
                args = test_residual_nce.arguments(folder, per_device_train_batch_size=6 // processes, **sharding)
                trainer = ResidualNCETrainer(toy_residual(), args, train_dataset=test_residual_nce.ROWS)
            else:  # a model whose embeddings are not shared, which FSDP needs
                model, own = tiny_seq2seq("marian, two vocabularies"), {"per_device_train_batch_size": 8 // processes}
                trainer = trainer_of(kind, folder, model, rows(), **own, **sharding)
            trainer.train()
            assert trainer.is_fsdp_enabled == (processes > 1)
            state = trainer.accelerator.get_state_dict(trainer.model_wrapped)  # of all processes, for the first one
            if trainer.is_world_process_zero():
                torch.save({name: value.clone() for name, value in state.items()}, folder / f"{kind}-{processes}.pt")
