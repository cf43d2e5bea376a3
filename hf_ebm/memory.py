"""What is to be kept, against the memory there is: what cannot fit is refused before any work."""

from __future__ import annotations

import os
import sys
from decimal import Decimal
from pathlib import Path

_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")


def check_fits(needed: int, what: str) -> None:
    """Raises `ValueError`, which begins with `what`, if `needed` bytes are more than the machine's memory."""
    there = machine_memory()
    if needed > there:
        raise ValueError(f"{what}, {_gib(needed)} GiB or more, which is more than this machine's {_gib(there)} GiB")


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
