"""Runs of chains in files, from which they go on."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_ebm.files import put_in_place
from hf_ebm.models.fingerprints import checksum
from hf_ebm.plain_values import as_path
from hf_ebm.sampling.run import ChainRun

_FORMAT = 3
_FILE = "run.safetensors"
# What earlier versions wrote: a header, which names a file of tensors.
_HEADER_OF_BEFORE, _FORMAT_OF_BEFORE, _TENSORS_OF_BEFORE = "state.json", 2, "chains-*.safetensors"


class SavedRun(ChainRun):
    """A run that can be saved in a folder: one safetensors file, with what is no tensor as JSON in its metadata."""

    def save(self, path: str | os.PathLike) -> None:
        """Writes the run to folder `path`; a kill at any time leaves the last complete state.

        Raises:
            ValueError: for a folder that can't be written.
        """
        folder = as_path("save_state_to", path)
        tensors, values = self.parts()
        text = json.dumps({"format": _FORMAT, **values})
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with put_in_place(folder / _FILE) as file:
                save_file(tensors, file, {"run": text, "sha256": _digest(tensors, text)})
            for old in (folder / _HEADER_OF_BEFORE, *folder.glob(_TENSORS_OF_BEFORE)):
                old.unlink(missing_ok=True)
        except (OSError, UnicodeError, SafetensorError) as error:
            raise ValueError(f"save_state_to: cannot write the chains' state to {folder}: {error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Reads a run that `save` wrote, or that of an earlier version.

        Raises:
            ValueError: for a missing, unreadable or half-written state.
        """
        folder = as_path("resume_from", path)
        try:
            return cls.of_parts(*(_read(folder / _FILE) if (folder / _FILE).exists() else _read_of_before(folder)))
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise ValueError(f"resume_from: {folder} holds no complete state of chains: {error!r}") from error


def holds_run(folder: Path) -> bool:
    """Whether there is a run in a folder."""
    return any((folder / name).exists() for name in (_FILE, _HEADER_OF_BEFORE))


def _digest(tensors: dict[str, Tensor], text: str) -> str:
    digest = checksum(sorted(tensors.items()))
    digest.update(text.encode())
    return digest.hexdigest()


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  it is no dictionary
    if metadata["sha256"] != _digest(tensors, metadata["run"]):
        raise ValueError(f"{path.name} is not what was written")
    return tensors, _checked(json.loads(metadata["run"]), _FORMAT)


def _read_of_before(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    values = json.loads((folder / _HEADER_OF_BEFORE).read_text(encoding="utf-8"))
    written = values.pop("header_sha256")
    if hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest() != written:
        raise ValueError(f"{_HEADER_OF_BEFORE} is not what was written")
    path = folder / values["tensors"]
    if hashlib.sha256(path.read_bytes()).hexdigest() != values["sha256"]:
        raise ValueError(f"{path.name} is not what was written")
    return load_file(path), _checked(values, _FORMAT_OF_BEFORE)


def _checked(values: dict[str, Any], readable: int) -> dict[str, Any]:
    if values["format"] != readable:
        raise ValueError(f"format {values['format']}, this version reads {readable}")
    return values
