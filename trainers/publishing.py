"""Cards of what trainers ran, and the code of models that they upload: functions that `ObjectiveTrainer` has."""

from __future__ import annotations

import inspect
from collections.abc import Sized
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from hf_ebm.model_modes import without_adapters
from hf_ebm.publishing.cards import Training, hardware, model_card
from hf_ebm.publishing.remote_code import is_own, write_remote_code

# Of the stock arguments those that change what is learned.
_STATED = (
    "learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps",
    "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "optim", "bf16", "fp16",
    "label_smoothing_factor",
)  # fmt: skip
_WATCHING = ("log_completions", "num_completions_to_print")  # of our own those that don't
# What `datasets` calls data that come from a file or from Python: no name of theirs.
_PACKAGED = {"generator", "csv", "json", "parquet", "text", "arrow", "pandas", "sql"}


class FirstStep(TrainerCallback):
    """Notes at which step a training began: above 0 where it went on from a checkpoint."""

    step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.step = state.global_step


def create_model_card(
    trainer: Any, language: str | None = None, license: str | None = None,
    tags: str | list[str] | None = None, model_name: str | None = None, finetuned_from: str | None = None,
    tasks: str | list[str] | None = None, dataset_tags: str | list[str] | None = None,
    dataset: str | list[str] | None = None, dataset_args: str | list[str] | None = None,
) -> None:  # fmt: skip
    """Writes README.md into the output folder: objective, settings, seed, data and numbers of the run.

    Arguments as in Transformers; `tasks` and `dataset_args` aren't used.
    """
    if not trainer.is_world_process_zero():
        return
    folder = Path(trainer.args.output_dir or ".")
    card = model_card(
        without_adapters(trainer.module),
        name=model_name or folder.name,
        repo_id=trainer.hub_model_id,
        training=trainer.training_facts(),
        dataset=_first(dataset_tags),
        dataset_name=_first(dataset),
        base_model=finetuned_from,
        license=license,
        language=language,
        tags=[tags] if isinstance(tags, str) else tags or (),
        bibtex=trainer.bibtex,
    )
    card.save(folder / "README.md")


def training_facts(trainer: Any) -> Training:
    """What a card says of the run."""
    args, state = trainer.args, trainer.state
    stock = {one.name for one in fields(TrainingArguments)}
    own = {one.name: getattr(args, one.name) for one in fields(trainer.config_class) if one.name not in stock}
    own = {name: value for name, value in own.items() if name not in _WATCHING}
    stated = {name: getattr(args, name) for name in _STATED}
    stated = {name: getattr(value, "value", value) for name, value in stated.items() if value is not None}
    if not stated["label_smoothing_factor"]:  # which most trainers don't have
        del stated["label_smoothing_factor"]
    del stated["num_train_epochs" if stated["max_steps"] > 0 else "max_steps"]  # the one overrides the other
    rows: object = trainer.train_dataset
    runtime = [log["train_runtime"] for log in state.log_history if "train_runtime" in log]
    begun = (callback.step for callback in trainer.callback_handler.callbacks if isinstance(callback, FirstStep))
    return Training(
        trainer=type(trainer).__name__,
        objective=(inspect.getdoc(type(trainer)) or "").partition("\n\n")[0].replace("\n", " "),
        hyperparameters={**own, **stated, "processes": args.world_size},
        seed=args.seed,
        data=_data_name(trainer.train_dataset),
        train_rows=len(rows) if isinstance(rows, Sized) else None,
        steps=state.global_step,
        epochs=state.epoch,
        seconds=runtime[-1] if runtime else None,
        resumed_at=next(begun, 0),
        hardware=hardware(args.device),
        metrics=_metrics(state, args.load_best_model_at_end),
    )


def _metrics(state: TrainerState, best_is_loaded: bool) -> dict[str, float]:
    """The last evaluation, and the loss of the training; of a best model that was loaded, its own evaluation."""
    found: dict[str, float] = {}
    best = state.best_global_step if best_is_loaded else None
    trained = False
    for log in state.log_history:
        trained = trained or "train_loss" in log
        if best is None or trained or log.get("step") == best:
            found |= {name: value for name, value in log.items() if name.startswith("eval_")}
        found |= {name: value for name, value in log.items() if name == "train_loss"}
    speed = ("_runtime", "_per_second")
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, (int, float)) and not name.endswith(speed)
    }


def write_own_code(trainer: Any, folder: str | None) -> None:
    """On the way to the Hub, writes the code of a model of this package beside its weights."""
    model = trainer.module
    if trainer.hub_model_id is not None and trainer.is_world_process_zero() and is_own(type(model)):
        write_remote_code(folder or trainer.args.output_dir or ".", model)


def _first(value: str | list[str] | None) -> str | None:
    return (value[0] if value else None) if isinstance(value, list) else value


def _data_name(dataset: object) -> str | None:
    """What a data set calls itself."""
    info = getattr(dataset, "info", None)
    name = getattr(info, "dataset_name", None) or getattr(info, "builder_name", None)
    return None if name in _PACKAGED else name
