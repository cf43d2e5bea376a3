"""What the objectives of `hf-ebm train` share: their folder, their run and its result.

- `data`: what is read; `models`: what is trained, and how it is judged; `energies`: the objectives of energies.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import datasets
from accelerate import PartialState
from transformers import Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from hf_ebm.cli.tables import to_json


def print_metrics(config: TrainingArguments, train: Callable[[], dict[str, float]]) -> None:
    """Trains, and prints what it gives as one line of JSON."""
    with contextlib.redirect_stdout(sys.stderr):  # the Trainer prints its logs; standard output is for the result
        try:
            metrics = train()
        except KeyboardInterrupt as interrupt:
            raise KeyboardInterrupt(_how_to_go_on(Path(config.output_dir or "."))) from interrupt
    if config.process_index == 0:
        print(to_json(metrics))


def _how_to_go_on(output: Path) -> str:
    if not output.is_dir() or get_last_checkpoint(output) is None:
        return f"no checkpoint had been saved to {output}, so the command starts anew"
    return "to continue, repeat the command with --resume_from_checkpoint last"


def begin(config: TrainingArguments) -> None:
    """Sets bars, caches and seed, once every process has looked at the output folder."""
    if config.process_index != 0 or not sys.stderr.isatty():  # bars are for people
        config.disable_tqdm = True
        datasets.disable_progress_bars()
    datasets.disable_caching()  # encoded rows would be left beside the data
    PartialState().wait_for_everyone()  # nobody fills the folder before everybody has looked into it
    set_seed(config.seed)


def run_trainer(trainer: Trainer, checkpoint: str | None, evaluate: bool) -> dict[str, float]:
    """Trains, evaluates if asked to, and saves model, metrics and state."""
    metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    trainer.save_model()
    trainer.save_metrics("train", metrics)
    if evaluate:
        found = trainer.evaluate()
        trainer.save_metrics("eval", found)
        metrics = {**metrics, **found}
    trainer.save_state()
    return metrics


def check_evaluation(config: TrainingArguments, eval_file: str | None) -> None:
    """Raises `ValueError` for an evaluation without its file, or a file without an evaluation."""
    if config.do_eval != (eval_file is not None):
        raise ValueError("eval_file and --do_eval (or --eval_strategy) go together")


def output_checkpoint(config: TrainingArguments) -> str | None:
    """The checkpoint to go on from. Raises `ValueError` if there is none, or the output has to be empty and isn't."""
    output, given = Path(config.output_dir or "."), config.resume_from_checkpoint
    there = next(parent for parent in (output, *output.resolve().parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"output_dir: {output} cannot be written; {there} is not a folder or not writable")
    if given is None or given.lower() == "false":
        if output.exists() and any(output.iterdir()):
            raise ValueError(
                f"output_dir: {output} is not empty; choose another folder, or go on from its last checkpoint with "
                "--resume_from_checkpoint last"
            )
        return None
    if given.lower() in ("true", "last"):
        checkpoint = get_last_checkpoint(output) if output.exists() else None
        if checkpoint is None:
            raise ValueError(f"resume_from_checkpoint: there is no checkpoint in {output}")
        return checkpoint
    if not (Path(given) / "trainer_state.json").exists():
        raise ValueError(f"resume_from_checkpoint must be 'last' or the folder of a checkpoint, got {given!r}")
    return given
