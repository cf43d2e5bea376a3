"""What is to be kept, against the memory there is: what cannot fit is refused before any work."""

from __future__ import annotations

import os
import sys
from decimal import Decimal
from pathlib import Path

import torch

BYTES_PER_LOGIT = 12  # in float32, its softmax and its gradient

_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def check_fits(needed: int, what: str, device: torch.device | None = None) -> None:
    """Raises `ValueError`, which begins with `what`, if `needed` bytes are more than the memory of machine or GPU."""
    on_gpu = device is not None and device.type == "cuda"
    there = torch.cuda.get_device_properties(device).total_memory if on_gpu else machine_memory()
    if needed > there:
        where = "GPU" if on_gpu else "machine"
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
