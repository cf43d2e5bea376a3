"""The processes that a launcher starts: whether they know of each other, and whether as many run as were asked for."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from accelerate import PartialState
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Where launchers say how many processes there are, as accelerate reads them.
_COUNTS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def started() -> int:
    """How many processes there are by what the launcher of this one says; 1 without a launcher."""
    counts = [os.environ.get(name, "") for name in _COUNTS]
    return max([1, *(int(count) for count in counts if count.isdecimal())])


def joined(device: str | None) -> PartialState:
    """This process among those of its launcher, which wait for each other, for days if need be.

    Args:
        device: where models run; `None` is a GPU if there is one.

    Raises:
        ValueError: as `check_joined`.
    """
    patience = {"timeout": timedelta(days=30)} if started() > 1 else {}
    state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available(), **patience)
    check_joined(state.num_processes)
    return state


def check_joined(found: int) -> None:
    """Raises `ValueError` if more processes were started than the `found` ones that know of each other."""
    if found < started():
        raise ValueError(
            f"{started()} processes were started and do not know of each other, so each would do all of the work and "
            "write the same output; start them by torchrun, and on CPUs train with use_cpu=True"
        )


def warn_of_fewer() -> None:
    """Warns where `accelerate launch` was asked for several processes and started this one alone."""
    # Of accelerate's launchers the one for a single process sets the first, and the second if asked for more.
    if started() == 1 and {"ACCELERATE_USE_CPU", "MASTER_PORT"} <= os.environ.keys():
        logger.warning(
            "accelerate launch was asked for several processes and started one, which does all of the work: without "
            "several GPUs or MPI (--mpirun_hostfile) it starts no more; accelerate launch --multi_gpu starts them, on "
            "CPUs as well, and so does torchrun --nproc_per_node"
        )


def check_launch(command: str, divided: tuple[str, ...]) -> None:
    """What the command line does about processes before a command runs.

    Those that train on CPUs are let know of each other, and there is a warning of fewer processes than were asked for;
    of those that train the trainer gives it.

    Args:
        divided: the commands that divide their work over processes.

    Raises:
        ValueError: if several processes were started for a command that doesn't.
    """
    if started() > 1 and command not in divided:
        raise ValueError(
            f"{command} runs in one process, and {started()} were started; {', '.join(divided)} divide their work"
        )
    if started() > 1 and not torch.accelerator.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"  # or Transformers' arguments take each for the only one
    if command in divided and command != "train":
        warn_of_fewer()
