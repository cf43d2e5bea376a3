"""What a run has around it: memory for what is kept, the processes of a launcher, whole files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import PartialState
from transformers.utils import logging

logger = logging.get_logger(__name__)

# Types of devices that have no float64.
WITHOUT_FLOAT64 = {"mps"}

BYTES_PER_LOGIT = 12  # in float32, its softmax and its gradient

_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
# Where launchers say how many processes there are, as accelerate reads them.
_COUNTS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def where_float64_is(device: torch.device) -> torch.device:
    """The device itself, or the CPU if it has no float64: whatever is reckoned in float64 is reckoned there.

    Example:
        >>> where_float64_is(torch.device("mps")), where_float64_is(torch.device("cuda"))
        (device(type='cpu'), device(type='cuda'))
    """
    return torch.device("cpu") if device.type in WITHOUT_FLOAT64 else device


class DeviceMemory(NamedTuple):
    """Bytes of a device's own memory."""

    free: int
    total: int


def device_memory(device: torch.device) -> DeviceMemory | None:
    """The memory of an accelerator that tells of its own; `None` of others, which are taken for the CPU.

    Example:
        >>> device_memory(torch.device("cpu")) is None
        True
    """
    tell = None if device.type == "cpu" else getattr(torch.get_device_module(device), "mem_get_info", None)
    return None if tell is None else DeviceMemory(*tell(device))


def check_fits(needed: int, what: str, device: torch.device | None = None) -> None:
    """Raises `ValueError`, which begins with `what`, if `needed` bytes are more than the memory of machine or GPU."""
    own = None if device is None else device_memory(device)
    there = machine_memory() if own is None else own.total
    if needed > there:
        where = "machine" if own is None else "GPU"
        raise ValueError(f"{what}, {_gib(needed)} GiB or more, which is more than this {where}'s {_gib(there)} GiB")


def logit_bytes(sequences: int, tokens: int, vocab_size: int) -> int:
    """Of the logits of every token of some sequences, with their gradient."""
    return sequences * tokens * vocab_size * BYTES_PER_LOGIT


def enumeration_bytes(count: int, length: int) -> int:
    """Of `count` enumerated sequences, while their ids are made, and of their energies."""
    return count * (3 * length + 3) * 8


def machine_memory() -> int:
    """Bytes of memory of this machine, or of the container it is; the largest number where it doesn't tell."""
    try:
        found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        found = sys.maxsize
    try:
        limit = _CONTAINER_LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        return found
    return min(found, int(limit)) if limit.isdecimal() else found


def _gib(count: int) -> str:
    return f"{Decimal(count) / 2**30:.3g}"


def num_started() -> int:
    """How many processes there are by what the launcher of this one says; 1 without a launcher."""
    counts = [os.environ.get(name, "") for name in _COUNTS]
    return max([1, *(int(count) for count in counts if count.isdecimal())])


def joined(device: str | None) -> PartialState:
    """This process among those of its launcher, which wait for each other, for days if need be.

    Args:
        device: where models run; `None` is an accelerator if there is one.

    Raises:
        ValueError: as `check_joined`.
    """
    patience = {"timeout": timedelta(days=30)} if num_started() > 1 else {}
    state = PartialState(cpu=device == "cpu" or not torch.accelerator.is_available(), **patience)
    check_joined(state.num_processes)
    return state


def leave_others() -> None:
    """Leaves the group of processes, if there is one: a process that ends with threads at work may be aborted."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def check_joined(found: int) -> None:
    """Raises `ValueError` if more processes were started than the `found` ones that know of each other."""
    if found < num_started():
        raise ValueError(
            f"{num_started()} processes were started and do not know of each other, so each would do all of the work "
            "and write the same output; start them by torchrun, and on CPUs train with use_cpu=True"
        )


def warn_of_fewer() -> None:
    """Warns where `accelerate launch` was asked for several processes and started this one alone."""
    # Of accelerate's launchers the one for a single process sets the first, and the second if asked for more.
    if num_started() == 1 and {"ACCELERATE_USE_CPU", "MASTER_PORT"} <= os.environ.keys():
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
    if num_started() > 1 and command not in divided:
        raise ValueError(
            f"{command} runs in one process, and {num_started()} were started; {', '.join(divided)} divide their work"
        )
    if num_started() > 1 and not torch.accelerator.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"  # or Transformers' arguments take each for the only one
    if command in divided and command != "train":
        warn_of_fewer()


@contextmanager
def put_in_place(path: Path) -> Iterator[Path]:
    """A name beside `path` to write a file under, which then takes the place of `path` by one rename.

    A kill at any time leaves the file that was there, or the new one. After an error the new one is dropped.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
