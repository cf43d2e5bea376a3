"""`create_model_card` and `push_to_hub` of the trainers, from what they ran."""

from __future__ import annotations

import inspect
from collections.abc import Sequence, Sized
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import TrainOutput

from hf_ebm.model_modes import without_adapters
from hf_ebm.publishing.cards import Training, hardware, model_card
from hf_ebm.publishing.hub import upload_errors
from hf_ebm.publishing.remote_code import is_own, write_remote_code

# Of the stock arguments those that change what is learned.
_STATED = (
    "learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps",
    "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm", "optim", "bf16", "fp16",
    "label_smoothing_factor",
)  # fmt: skip

if TYPE_CHECKING:
    _Trainer = Trainer  # what this is mixed into
else:
    _Trainer = object


class _FirstStep(TrainerCallback):
    """Notes at which step a training began: above 0 where it went on from a checkpoint."""

    step = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.step = state.global_step


class PublishingTrainerMixin(_Trainer):
    """Gives a Trainer a card of what it ran, and uploads that carry it. Subclasses have a `config_class`."""

    config_class: ClassVar[type[TrainingArguments]]
    model: PreTrainedModel  # or an adapter of PEFT on one, which passes on what it doesn't have itself

    bibtex: ClassVar[Sequence[str]] = ()

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """The Trainer's; where it began is noted for the card."""
        self.pop_callback(_FirstStep)
        self.add_callback(_FirstStep)
        return super().train(*args, **kwargs)

    def create_model_card(
        self, language: str | None = None, license: str | None = None, tags: str | list[str] | None = None,
        model_name: str | None = None, finetuned_from: str | None = None, tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None, dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:  # fmt: skip
        """Writes README.md into the output folder: objective, settings, seed, data and numbers of the run.

        Arguments as in Transformers; `tasks` and `dataset_args` aren't used.
        """
        if not self.is_world_process_zero():
            return
        folder = Path(self.args.output_dir or ".")
        card = model_card(
            without_adapters(self.accelerator.unwrap_model(self.model)),
            name=model_name or folder.name,
            repo_id=self.hub_model_id,
            training=self.training_facts(),
            dataset=_first(dataset_tags),
            dataset_name=_first(dataset),
            base_model=finetuned_from,
            license=license,
            language=language,
            tags=[tags] if isinstance(tags, str) else tags or (),
            bibtex=self.bibtex,
        )
        card.save(folder / "README.md")

    def training_facts(self) -> Training:
        """What the card says of the run."""
        stock = {field.name: field.default for field in TrainingArguments.__dataclass_fields__.values()}
        own = {one.name: getattr(self.args, one.name) for one in fields(self.config_class) if one.name not in stock}
        stated = {name: getattr(self.args, name) for name in _STATED}
        stated = {name: getattr(value, "value", value) for name, value in stated.items() if value is not None}
        if not stated["label_smoothing_factor"]:  # which most trainers don't have
            del stated["label_smoothing_factor"]
        del stated["num_train_epochs" if stated["max_steps"] > 0 else "max_steps"]  # the one overrides the other
        logs = self.state.log_history
        rows: object = self.train_dataset
        runtime = [log["train_runtime"] for log in logs if "train_runtime" in log]
        begun = (callback.step for callback in self.callback_handler.callbacks if isinstance(callback, _FirstStep))
        return Training(
            trainer=type(self).__name__,
            objective=(inspect.getdoc(type(self)) or "").partition("\n\n")[0].replace("\n", " "),
            hyperparameters={**own, **stated, "processes": self.args.world_size},
            seed=self.args.seed,
            data=_data_name(self.train_dataset),
            train_rows=len(rows) if isinstance(rows, Sized) else None,
            steps=self.state.global_step,
            epochs=self.state.epoch,
            seconds=runtime[-1] if runtime else None,
            resumed_at=next(begun, 0),
            hardware=hardware(self.args.device),
            metrics=self._metrics(logs),
        )

    def _metrics(self, logs: list[dict]) -> dict[str, float]:
        """The last evaluation, and the loss of the training; of a best model that was loaded, its own evaluation."""
        found: dict[str, float] = {}
        best = self.state.best_global_step if self.args.load_best_model_at_end else None
        trained = False
        for log in logs:
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

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's, with the model's code for those who don't have `hf_ebm`.

        Raises:
            OSError: if the upload fails; what is in the output folder is whole.
        """
        advice = f"the model, its card and its settings in {self.args.output_dir} are whole; call push_to_hub again"
        with upload_errors(advice):
            return super().push_to_hub(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The Trainer's; on the way to the Hub the model's code is written beside the weights."""
        super().save_model(output_dir, _internal_call)
        model = self.accelerator.unwrap_model(self.model)
        if self.hub_model_id is not None and self.is_world_process_zero() and is_own(type(model)):
            write_remote_code(output_dir or self.args.output_dir or ".", model)


# What `datasets` calls data that come from a file or from Python: no name of theirs.
_PACKAGED = {"generator", "csv", "json", "parquet", "text", "arrow", "pandas", "sql"}


def _first(value: str | list[str] | None) -> str | None:
    return (value[0] if value else None) if isinstance(value, list) else value


def _data_name(dataset: object) -> str | None:
    """What a data set calls itself."""
    info = getattr(dataset, "info", None)
    name = getattr(info, "dataset_name", None) or getattr(info, "builder_name", None)
    return None if name in _PACKAGED else name
