"""Tables of what was decoded, with its rewards: printed, written as Parquet files, and sent to trackers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from accelerate.utils import gather_object

from hf_ebm.runtime import put_in_place
from hf_ebm.trainers.objective import ObjectiveTrainer
from hf_ebm.trainers.rewards import RewardTerms, Scores

FOLDER = "completions"  # in the output folder
Columns = dict[str, list]


class CompletionLog:
    """What a trainer decoded for the last update, or for an evaluation, until that is logged.

    A table has a row for each completion: `step`, `prompt`, `completion`, `reference`, and the rewards, `rewards/NAME`
    of each function and `reward`, their weighted sum; of a cost `cost` alone. What a function wasn't applicable to, or
    could not say, is missing, and so are prompts that aren't tokens. Without a tokenizer texts are the ids. Several
    processes' completions are one table, which the first process writes.

    Args:
        trainer: whose output folder, trackers (`report_to`) and tokenizer are used.
        rewards: of what is decoded.
        num_printed: rows that are printed of a table; files and trackers get all.
    """

    def __init__(self, trainer: ObjectiveTrainer, rewards: RewardTerms, num_printed: int):
        self.trainer, self.rewards, self.num_printed = trainer, rewards, num_printed
        self._mode, self._step = "eval", -1
        self._kept: dict[bool, list[Columns]] = {True: [], False: []}  # by whether the trainer trains

    def begin_evaluation(self, name: str) -> None:
        """Says what the next evaluation is called."""
        self._mode, self._kept[False] = name, []

    def add(self, scores: Scores) -> None:
        """Takes in completions with their rewards; those of earlier updates are dropped."""
        training, step = self.trainer.model.training, self.trainer.state.global_step
        if training and step != self._step:
            self._step, self._kept[True] = step, []
        self._kept[training].append(self._columns(scores))

    def _columns(self, scores: Scores) -> Columns:
        decoded = scores.decoded
        if not hasattr(self.trainer.processing_class, "batch_decode"):
            decoded = replace(decoded, decode=_as_numbers)
        count = len(scores.total)
        values = scores.values.masked_fill(scores.skipped, float("nan"))
        found: Columns = {
            "prompt": [None] * count if decoded.prompts is None else list(decoded.prompts),
            "completion": decoded.completions,
            "reference": [_one_text(reference) for reference in decoded.references],
        }
        if not self.rewards.logs:
            return {**found, "cost": scores.costs.tolist()}
        for term, column in zip(self.rewards.terms, values.T.tolist(), strict=True):
            found[f"rewards/{term.name}"] = [None if value != value else value for value in column]
        return {**found, "reward": scores.total.tolist()}

    def write(self, training: bool) -> None:
        """Prints, writes and sends what there is since the last time; all processes call it together."""
        parts, self._kept[training] = gather_object(self._kept[training]), []
        if not parts or not self.trainer.is_world_process_zero():
            return
        step, mode = self.trainer.state.global_step, "train" if training else self._mode
        columns = {name: [value for part in parts for value in part[name]] for name in parts[0]}
        if self.num_printed:
            print_table({name: values[: self.num_printed] for name, values in columns.items()}, f"{mode}, step {step}")
        table = as_table({"step": [step] * len(columns["completion"]), **columns})
        file = Path(self.trainer.args.output_dir or ".", FOLDER, f"{mode}-{step:05d}.parquet")
        file.parent.mkdir(parents=True, exist_ok=True)  # the name of an evaluation set may have slashes
        with put_in_place(file) as path:
            pyarrow.parquet.write_table(table, path)
        for tracker in self.trainer.args.report_to or []:
            if tracker in TRACKERS:
                TRACKERS[tracker](f"{mode}/{FOLDER}", table.to_pandas(), step)


def as_table(columns: Columns) -> pyarrow.Table:
    """Columns with the types that they have in every table, whatever is missing in this one."""
    types = {"step": pyarrow.int64(), **dict.fromkeys(("prompt", "completion", "reference"), pyarrow.string())}
    return pyarrow.table(columns, pyarrow.schema([(name, types.get(name, pyarrow.float64())) for name in columns]))


def print_table(columns: Columns, title: str) -> None:
    """Prints a table, by `rich` where it is installed."""
    rows = [[_cell(value) for value in row] for row in zip(*columns.values(), strict=True)]
    names = [name.removeprefix("rewards/") for name in columns]
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print("\n".join([title, *("\t".join(row) for row in [names, *rows])]))
        return
    table = Table(title=title, show_lines=True)
    for name in names:
        table.add_column(Text(name))  # whose square brackets are no markup
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


def _cell(value: str | float | None) -> str:
    return "" if value is None else value if isinstance(value, str) else f"{value:.4g}"


def _one_text(reference: Any) -> str | None:
    """Of several references that are all right, all."""
    return (reference if isinstance(reference, str) else "\n".join(reference)) if reference else None


def _as_numbers(rows: Sequence[Sequence[int]]) -> list[str]:
    return [" ".join(map(str, ids)) for ids in rows]


def _to_wandb(name: str, frame: Any, step: int) -> None:
    import wandb

    if wandb.run is not None:
        wandb.log({name: wandb.Table(dataframe=frame), "train/global_step": step})


def _to_trackio(name: str, frame: Any, step: int) -> None:
    import trackio

    trackio.log({name: trackio.Table(dataframe=frame), "train/global_step": step})


def _to_mlflow(name: str, frame: Any, step: int) -> None:
    import mlflow

    mlflow.log_table(frame, f"{name}-{step:05d}.json")


def _to_comet(name: str, frame: Any, step: int) -> None:
    import comet_ml

    experiment = comet_ml.get_running_experiment()
    if experiment is not None:
        experiment.log_table(f"{name}-{step:05d}.csv", frame)


# Those of `report_to` that have tables, by their names there.
TRACKERS: dict[str, Callable[[str, Any, int], None]] = {
    "wandb": _to_wandb,
    "trackio": _to_trackio,
    "mlflow": _to_mlflow,
    "comet_ml": _to_comet,
}
