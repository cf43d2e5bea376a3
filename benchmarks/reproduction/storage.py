"""What a working folder keeps: trained models and what was computed with them, under a digest of their settings.

A run that was stopped goes on where it was, one that another process is at is waited for, and what an older version of
the experiments kept is not mixed with today's.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.common import describe_machine

VERSION = 3  # of what is kept; to be raised when the same settings come to mean other models or data


class OutOfTime(Exception):
    """Raised before a computation that would start behind the time limit."""


class Deadline:
    """When the last computation may start, in seconds of `time.monotonic`."""

    at = float("inf")

    @classmethod
    def check(cls) -> None:
        """Raises `OutOfTime` behind the limit."""
        if time.monotonic() > cls.at:
            raise OutOfTime


class Record:
    """What runs showed, in a file beside the tables that outlasts the working folder: those aren't made again.

    JSON lines: `name`, `found`, `seconds` (of training, of each model in use), `machine`, `version`. Models aren't
    recorded: one that a new run starts from is trained again where the folder lacks it.
    """

    path: Path | None = None  # None records nothing

    @classmethod
    def get(cls, name: str) -> dict | None:
        """The line of a name, if there is one of this version."""
        lines = cls.path.read_text(encoding="utf-8").splitlines() if cls.path and cls.path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                said = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number} of {cls.path} is not whole ({error}): delete that line") from None
            if said["name"] == name and said["version"] == VERSION:
                return said
        return None

    @classmethod
    def add(cls, name: str, found: Any, seconds: dict[str, float]) -> dict:
        """A new line, appended where runs are recorded."""
        said = {"name": name, "found": found, "seconds": seconds, "machine": describe_machine(), "version": VERSION}
        if cls.path:
            with cls.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(said) + "\n")
        return said


def check_folder(folder: Path) -> None:
    """Marks a working folder as this version's; raises `ValueError` for one of another version."""
    mark = folder / "version.json"
    found = _read(mark) if mark.exists() else None if not _has_runs(folder) else 1
    if found is None:
        _write(mark, VERSION)
    elif found != VERSION:
        raise ValueError(
            f"work_dir must hold runs of version {VERSION}, got version {found} in {folder}: delete it, or give another"
        )


def kept(path: Path, compute: Callable[[], Any]) -> Any:
    """What `compute` gives, from the file if it is there: tensors in `.pt`, else JSON."""
    if not path.exists():
        Deadline.check()
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if not path.exists():
                _write(path, compute())
    return _read(path)


def kept_run(target: Path, name: str, train: Callable[[Path], Trainer]) -> list[dict]:
    """Logs of a training run, which `train` does in the folder that it is given; the model is kept beside them."""
    if not (target / "logs.json").exists():
        Deadline.check()
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            if not (target / "logs.json").exists():
                _train_into(target, name, train)
    return _read(target / "logs.json")


def _train_into(target: Path, name: str, train: Callable[[Path], Trainer]) -> None:
    started, work = time.perf_counter(), target.with_name(f"{target.name}.unfinished")
    trainer = train(work)
    trainer.model.save_pretrained(work)
    for checkpoint in work.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    _write(work / "logs.json", trainer.state.log_history)
    shutil.rmtree(target, ignore_errors=True)
    work.rename(target)
    print(f"  {name}: {time.perf_counter() - started:.0f} s", flush=True)


def until_converged() -> dict:
    """Arguments of a training that keeps the weights of the epoch of the lowest loss on validation data.

    Not of the highest accuracy, which can be that of the first epoch where the commonest label is right most of the
    time. Epochs are checkpoints, from which a stopped run goes on.
    """
    return dict(
        eval_strategy="epoch", save_strategy="epoch", save_total_limit=1, load_best_model_at_end=True,
        metric_for_best_model="eval_loss", greater_is_better=False,
    )  # fmt: skip


def train_on(trainer: Trainer) -> None:
    """Trains, from the last checkpoint of the trainer's folder if there is one that is whole."""
    folder = Path(trainer.args.output_dir)
    for checkpoint in folder.glob("checkpoint-*"):
        if not (checkpoint / TRAINER_STATE_NAME).exists():  # written last
            shutil.rmtree(checkpoint)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if folder.is_dir() else None)


def training_time(logs: list[dict]) -> float:
    """Seconds that a run's training took."""
    return next(log["train_runtime"] for log in logs if "train_runtime" in log)


def digest(*parts) -> str:
    """A name for what is kept of a run."""
    described = [asdict(part) if hasattr(part, "__dataclass_fields__") else part for part in parts]
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def _has_runs(folder: Path) -> bool:
    return any(folder.glob("*/logs.json")) or any(folder.glob("*.json"))


def _read(path: Path) -> Any:
    try:
        return torch.load(path) if path.suffix == ".pt" else json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is not whole ({error}): delete it, and it is computed again") from None


def _write(path: Path, found: Any) -> None:
    """In place by one rename: a file is whole or not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    torch.save(found, part) if path.suffix == ".pt" else part.write_text(json.dumps(found))
    part.replace(path)
