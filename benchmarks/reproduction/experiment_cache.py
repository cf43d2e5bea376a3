"""Trains and evaluates sequence-to-sequence models for the tables, each run once.

A run is fixed by its `RunConfig` and seed; its model and scores are kept in a working folder under a digest of them,
so that tables share what they have in common, and an interrupted table goes on where it was.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    EarlyStoppingCallback,
    PreTrainedModel,
    Trainer,
    set_seed,
)

from benchmarks.reproduction.storage import (
    Record,
    digest,
    kept,
    kept_run,
    train_on,
    training_time,
    until_converged,
)
from benchmarks.reproduction.tasks import REWARDS, Task
from hf_ebm import mbr
from hf_ebm.cli.train import OBJECTIVES
from hf_ebm.objectives.costs import HammingCost
from hf_ebm.objectives.losses import IGNORED
from hf_ebm.relaxations.soft_beam import soft_beam_search


@dataclass(frozen=True)
class Scale:
    """Sizes of a run."""

    max_train: int = 20_000
    held_out: int = 1_500
    most_epochs: int = 24  # of what is trained until it has converged; its rate falls to 0 over as many
    patience: int = 6  # epochs without a lower loss on validation data that end it
    search_epochs: int = 3  # of every method that trains on from a start
    trial_epochs: int = 1  # of its trials
    trials: int = 4  # of each method, by which its settings are chosen
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)


QUICK = Scale(200, 50, 2, 1, 1, 1, 2, (1, 2))
TRIAL_SEED = 0  # of the trials, none of the seeds of the tables
BATCH = 128


@dataclass(frozen=True)
class RunConfig:
    """A training run but for its seed. `options` go to the trainer's configuration; `reward` is a name of `REWARDS`.

    With a `patience` it is a training until that many epochs brought no lower loss on validation data, or at most
    `epochs`, of which the best one's weights are kept.
    """

    task: str
    objective: str
    epochs: float
    learning_rate: float
    bidirectional: bool = True
    dropout: float = 0.0
    patience: int | None = None
    options: tuple[tuple[str, object], ...] = ()
    default_label_weight: float = 1.0
    start: RunConfig | None = None

    def then(self, objective: str, epochs: float, learning_rate: float, **options) -> RunConfig:
        """The same model trained on from here under another objective."""
        return replace(
            self, objective=objective, epochs=epochs, learning_rate=learning_rate, patience=None,
            options=tuple(sorted(options.items())), start=self,
        )  # fmt: skip

    def varied(self, **values: tuple) -> list[RunConfig]:
        """This run with every combination of the values: of its own fields, or else of the trainer's settings."""
        runs = []
        for combination in itertools.product(*values.values()):
            given = dict(zip(values, combination, strict=True))
            own = {name: value for name, value in given.items() if name in ("learning_rate", "dropout")}
            options = {**dict(self.options), **{name: value for name, value in given.items() if name not in own}}
            runs.append(replace(self, **own, options=tuple(sorted(options.items()))))
        return runs


@dataclass(frozen=True)
class Decoding:
    """How held-out outputs are found; `alpha` inf is hard."""

    num_beams: int = 1
    normalization: str = "local"
    alpha: float = math.inf


@dataclass
class ExperimentCache:
    """Makes and keeps runs. Neither code nor data are part of a digest: a change of what they mean raises `VERSION`.

    Nor are the seeds, trials and epochs of the scale, which say what is run: what was run stays when they change.
    """

    scale: Scale
    folder: Path
    used: dict[str, float] = field(default_factory=dict)  # seconds that each model in use took to train
    machines: set[str] = field(default_factory=set)  # where what is in use was run, and when
    trials: list[dict] = field(default_factory=list)  # what settings were chosen by
    _data: dict = field(default_factory=dict)

    def chosen(self, runs: list[RunConfig], decoding: Decoding, metric: str, sign: int = 1) -> RunConfig:
        """The run whose trial has the highest metric of validation data, or with a `sign` of -1 the lowest.

        The first of equals. A trial is of one seed that no table shows and, of what trains on from a start, of
        `Scale.trial_epochs` at most. Each method has as many, `Scale.trials`; further runs aren't tried. What the start
        of a run was trained with was chosen before, in the same way.
        """
        runs = runs[: self.scale.trials]
        tried = [replace(run, epochs=min(run.epochs, self.scale.trial_epochs)) if run.start else run for run in runs]
        found = [self.scores(run, TRIAL_SEED, "validation", decoding)[metric] for run in tried]
        best = max(range(len(runs)), key=lambda at: sign * found[at])
        described = [{**asdict(run), "start": None} for run in runs]
        trials = {"metric": metric, "runs": described, "validation": found, "chosen": best}
        if trials not in self.trials:
            self.trials.append(trials)
        return runs[best]

    def model(self, run: RunConfig, seed: int) -> PreTrainedModel:
        """The trained model."""
        self.training_logs(run, seed)
        return AutoModelForSeq2SeqLM.from_pretrained(self.folder / self._name(run, seed)).eval()

    def training_logs(self, run: RunConfig, seed: int) -> list[dict]:
        """What the trainer logged, the final evaluation last; what isn't in the folder is trained."""
        logs = self._logs(run, seed)
        self.used |= self._seconds(run, seed)
        return logs

    def _logs(self, run: RunConfig, seed: int) -> list[dict]:
        name = f"{run.task} {run.objective} {dict(run.options)} seed {seed}"
        return kept_run(self.folder / self._name(run, seed), name, lambda work: self._train(run, seed, work))

    def _seconds(self, run: RunConfig, seed: int) -> dict[str, float]:
        """What a model took to train, and what it starts from."""
        own = {self._name(run, seed): training_time(self._logs(run, seed))}
        return own | (self._seconds(run.start, seed) if run.start else {})

    def scores(self, run: RunConfig, seed: int, split: str, decoding: Decoding) -> dict:
        """Metrics of a split, per cent where they are shares; `bleu 3-5` and so on are by source length."""

        def compute() -> dict:
            task = self.task(run.task)
            return task.kind.scores(self.outputs(run, seed, split, decoding), task.texts[split])

        return self.kept("scores", run, seed, compute, split, asdict(decoding))

    def kept(self, name: str, run: RunConfig, seed: int, compute: Callable[[], Any], *parts) -> Any:
        """What `compute` gives of a run, recorded or from the folder if it is there; the run's training time counts."""
        name = f"{name}/{self._name(run, seed, *parts)}"
        said = Record.get(name)
        if said is None:
            seconds = self._seconds(run, seed)
            said = Record.add(name, kept(self.folder / f"{name}.json", compute), seconds)
        self.used |= said["seconds"]
        self.machines.add(said["machine"])
        return said["found"]

    def each_seed(self, run: RunConfig, split: str, decoding: Decoding, metric: str) -> list[float]:
        """A metric for each seed."""
        return [self.scores(run, seed, split, decoding)[metric] for seed in self.scale.seeds]

    def _name(self, *parts) -> str:
        return digest(*parts, self.scale.max_train, self.scale.held_out)

    def task(self, name: str) -> Task:
        """A task's data, loaded once."""
        if name not in self._data:
            self._data[name] = Task(name, self.scale.max_train, self.scale.held_out)
        return self._data[name]

    def _train(self, run: RunConfig, seed: int, work: Path) -> Trainer:
        task = self.task(run.task)
        set_seed(seed)
        model = self.model(run.start, seed) if run.start else task.fresh_model(run.bidirectional, run.dropout)
        config_class, trainer_class, _ = OBJECTIVES[run.objective]
        settings = dict(
            output_dir=str(work), seed=seed, num_train_epochs=run.epochs, learning_rate=run.learning_rate,
            per_device_train_batch_size=BATCH, per_device_eval_batch_size=256, max_grad_norm=1.0,
            train_sampling_strategy="group_by_length", lr_scheduler_type="linear", logging_strategy="epoch",
            save_strategy="no", eval_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        extra: dict = {}
        if run.patience is not None:
            settings |= until_converged()
            extra["callbacks"] = [EarlyStoppingCallback(run.patience)]
        options = dict(run.options)
        if "reward" in options:
            extra["reward_funcs"] = REWARDS[str(options.pop("reward"))]
        config = config_class(**settings | options)
        if run.default_label_weight != 1:
            extra["cost"] = HammingCost(task.label_weights(run.default_label_weight))
        trainer = trainer_class(
            model, config, train_dataset=task.encoded["train"], eval_dataset=task.encoded["validation"],
            data_collator=DataCollatorForSeq2Seq(task.tokenizer), processing_class=task.tokenizer, **extra,
        )  # fmt: skip
        train_on(trainer)
        trainer.evaluate()
        return trainer

    def outputs(self, run: RunConfig, seed: int, split: str, decoding: Decoding) -> list[str]:
        """What the model's search finds for each row of a split."""
        settings = dict(
            num_beams=decoding.num_beams, do_sample=False, length_penalty=0.0, custom_generate=soft_beam_search,
            alpha=decoding.alpha, normalization=decoding.normalization,
        )  # fmt: skip
        return self._generated(run, seed, split, settings)[0]

    def drawn_outputs(self, run: RunConfig, seed: int, split: str, count: int) -> list[list[str]]:
        """So many samples of the model for each row, those of one draw together."""
        set_seed(seed)
        return self._generated(run, seed, split, dict(do_sample=True, top_k=0, num_return_sequences=count))

    def least_risk_outputs(self, run: RunConfig, seed: int, split: str, cost: Any, count: int) -> list[str]:
        """Of so many samples for each row that of the least expected cost."""
        set_seed(seed)
        tokenizer = self.task(run.task).tokenizer
        settings = dict(custom_generate=mbr, cost=cost, processing_class=tokenizer, do_sample=True, top_k=0)
        return self._generated(run, seed, split, settings | {"num_return_sequences": count}, each=1)[0]

    def _generated(
        self, run: RunConfig, seed: int, split: str, settings: dict, each: int | None = None
    ) -> list[list[str]]:
        model, task = self.model(run, seed), self.task(run.task)
        encoded, count = task.encoded[split], each or settings.get("num_return_sequences", 1)
        order = sorted(range(len(encoded)), key=lambda row: len(encoded[row]["input_ids"]))
        outputs: list[list[str]] = [[""] * len(encoded) for _ in range(count)]
        for at in range(0, len(order), 256):
            rows = order[at : at + 256]
            batch = task.tokenizer.pad({"input_ids": [encoded[row]["input_ids"] for row in rows]}, return_tensors="pt")
            ids = model.generate(**batch, max_new_tokens=task.kind.longest, **settings)
            found = task.tokenizer.batch_decode(ids, skip_special_tokens=True)
            for place, text in enumerate(found):
                outputs[place % count][rows[place // count]] = text
        return outputs

    def forced_outputs(self, run: RunConfig, seed: int, split: str) -> list[str]:
        """The likeliest symbol after each gold prefix, as many as the gold output has."""
        model, task = self.model(run, seed), self.task(run.task)
        collate, rows = DataCollatorForSeq2Seq(task.tokenizer), list(task.encoded[split])
        outputs = []
        for at in range(0, len(rows), 256):
            batch = collate(rows[at : at + 256])
            with torch.no_grad():
                ids = model(**batch).logits.argmax(-1)
            lengths = (batch["labels"] != IGNORED).sum(1) - 1  # without the end
            outputs += [
                " ".join(task.tokenizer.convert_ids_to_tokens(own[:length]))
                for own, length in zip(ids.tolist(), lengths.tolist(), strict=True)
            ]
        return outputs
