"""Files that are whole or not there at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
