"""Trains residual models and their baselines on continuations of verses, and keeps what is sampled and computed.

The base is the embedded language model, trained on until it has converged; all other models start from it, the encoder
of BIT from the embedded masked model, trained on likewise, and all are evaluated on the same samples of the base. As in
`experiment_cache`, a run is fixed by its configuration and seed and kept under a digest of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    EarlyStoppingCallback,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

from benchmarks.reproduction.residual_models import fresh_model
from benchmarks.reproduction.storage import digest, kept, kept_run, train_on, training_time, until_converged
from hf_ebm.assets import KJV_MASKED_LM, held_out_verses, load_embedded_causal
from hf_ebm.assets.train_masked_lm import RandomRateMasking
from hf_ebm.data.bibles import load_kjv_verses
from hf_ebm.data.conditional import split_continuations
from hf_ebm.models.autoregressive_product import ProductLM
from hf_ebm.models.residual import ResidualEnergyModel
from hf_ebm.models.residual.candidates import SamplingParameters, candidate_energies, sample_continuations
from hf_ebm.models.residual.scoring_residual import bounds_by_size, lm_log_probs
from hf_ebm.objectives.completions import pad_right
from hf_ebm.objectives.losses import IGNORED
from hf_ebm.trainers import ResidualNCEConfig, ResidualNCETrainer

PREFIX_TOKENS, MAX_NEW_TOKENS = 10, 20
ROWS_AT_ONCE = 256
MASKED_SHARES = (0.05, 0.5)
MOST_NEGATIVES = 8


@dataclass(frozen=True)
class ResidualScale:
    """Sizes of a run."""

    corpus: int = 20_000  # verses that the base is trained on
    max_train: int = 10_000  # of them, that all other models are trained on
    negatives: int = 2
    held_out: int = 300
    samples: int = 64
    most_epochs: int = 8  # of the base
    trial_train: int = 2_500  # verses that a trial trains on
    trial_samples: int = 16  # by which a trial is judged
    trials: int = 4
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)


QUICK_RESIDUAL = ResidualScale(200, 100, 1, 12, 16, 1, 50, 8, 1, (1, 2))
TRIAL_SEED = 0
PATIENCE = 2  # epochs without a lower loss on validation verses that end the base's training
RATES, DROPOUTS = (2e-4, 5e-5), (0.1, 0.3)


@dataclass(frozen=True)
class ResidualRunConfig:
    """A model but for the seed: "base" and "masked" are the converged ones, of one seed, of which others are made."""

    kind: str  # base, trained_on, ralm, balm, unit, bit; masked, masked_on
    max_train: int
    negatives: int = 0
    learning_rate: float = 3e-4
    dropout: float = 0.1
    epochs: int = 1

    @property
    def has_energy(self) -> bool:
        """Whether it is a residual energy model."""
        return self.kind in ("unit", "bit")


@dataclass
class ResidualCache:
    """Makes and keeps runs. Neither code nor data are part of a digest: a change of what they mean raises `VERSION`."""

    scale: ResidualScale
    folder: Path
    used: dict[str, float] = field(default_factory=dict)  # seconds that each model in use took to train
    trials: list[dict] = field(default_factory=list)  # what settings were chosen by

    def __post_init__(self):
        self.embedded, self.tokenizer = load_embedded_causal()
        self.sampling = SamplingParameters(MAX_NEW_TOKENS, (self.tokenizer.sep_token_id,))
        self.base_run, self.masked_run = (
            ResidualRunConfig(kind, self.scale.corpus, epochs=self.scale.most_epochs) for kind in ("base", "masked")
        )
        self.masking = RandomRateMasking(self.tokenizer, *MASKED_SHARES, torch.Generator().manual_seed(0))

    @cached_property
    def base(self) -> PreTrainedModel:
        """The converged language model."""
        return AutoModelForCausalLM.from_pretrained(self._trained(self.base_run, 0)).eval()

    @cached_property
    def masked(self) -> PreTrainedModel:
        """The converged masked language model."""
        return AutoModelForMaskedLM.from_pretrained(self._trained(self.masked_run, 0)).eval()

    def chosen(self, kind: str) -> ResidualRunConfig:
        """The run of that kind whose trial has the lowest perplexity on validation verses; base as it is.

        A trial is of one seed that no table shows and of fewer verses; each kind has as many, `ResidualScale.trials`.
        """
        if kind == "base":
            return self.base_run
        negatives = self.scale.negatives if kind in ("unit", "bit") else 0
        runs = [
            ResidualRunConfig(kind, self.scale.trial_train, negatives, rate, dropout)
            for dropout in DROPOUTS
            for rate in RATES
        ][: self.scale.trials]
        found = [float(torch.stack(self.nats(run, TRIAL_SEED, "validation")).mean()) for run in runs]
        best = min(range(len(runs)), key=found.__getitem__)
        trials = {"metric": "nats a verse", "runs": [asdict(run) for run in runs], "validation": found, "chosen": best}
        if trials not in self.trials:
            self.trials.append(trials)
        return replace(runs[best], max_train=self.scale.max_train)

    def rows(self, split: str) -> list[dict]:
        """Prefixes and continuations of a held-out split."""
        return self._held_out_rows[split == "test"]

    @cached_property
    def _held_out_rows(self) -> list[list[dict]]:
        return [self._split(verses)[: self.scale.held_out] for verses in held_out_verses()]

    @cached_property
    def _corpus(self) -> list[dict]:
        rows = self._split(load_kjv_verses(self.folder / "text")[0])
        return _spread(rows, self.scale.corpus)

    def train_rows(self, count: int, negatives: int = 0) -> list[dict]:
        """So many rows of the corpus, with the first so many of their samples of the base."""
        if not negatives:
            return _spread(self._corpus, count)
        # Few are drawn for the whole corpus, of which runs take parts, many for the verses of the run.
        few = negatives <= self.scale.negatives
        drawn_for, most = (self.scale.corpus, self.scale.negatives) if few else (count, MOST_NEGATIVES)
        path = self.folder / f"negatives-{digest(self.base_run, drawn_for, most)}.json"
        rows = kept(path, lambda: self._with_negatives(_spread(self._corpus, drawn_for), most))
        return [{**row, "negatives": row["negatives"][:negatives]} for row in _spread(rows, count)]

    def _with_negatives(self, rows: list[dict], count: int) -> list[dict]:
        prefixes = [torch.tensor(row["prefix_ids"]) for row in rows]
        drawn = sample_continuations(self.base, prefixes, count, self.sampling, 0, 1024)
        return [{**row, "negatives": [ids.tolist() for ids in own]} for row, own in zip(rows, drawn, strict=True)]

    def _split(self, verses: list[str]) -> list[dict]:
        end = self.tokenizer.sep_token_id
        return split_continuations(verses, self.tokenizer, [end], PREFIX_TOKENS, MAX_NEW_TOKENS)

    def model(self, run: ResidualRunConfig, seed: int) -> PreTrainedModel:
        """The trained model, from the folder if it is there."""
        if run.kind == "base":
            return self.base
        target = self._trained(run, seed)
        classes = {"unit": ResidualEnergyModel, "bit": ResidualEnergyModel, "ralm": ProductLM}
        return classes.get(run.kind, AutoModelForCausalLM).from_pretrained(target).eval()

    def training_logs(self, run: ResidualRunConfig, seed: int) -> list[dict]:
        """What the trainer logged; a model that isn't in the folder is trained, and its training time counts."""
        target = self.folder / self._name(run, seed)
        logs = kept_run(target, f"{run} seed {seed}", lambda work: self._train(run, seed, work))
        self.used[target.name] = training_time(logs)
        return logs

    def _name(self, run: ResidualRunConfig, seed: int, *parts) -> str:
        return digest(run, seed, self.base_run, *parts)

    def _trained(self, run: ResidualRunConfig, seed: int) -> Path:
        self.training_logs(run, seed)
        return self.folder / self._name(run, seed)

    def _train(self, run: ResidualRunConfig, seed: int, work: Path) -> Trainer:
        set_seed(seed)
        if run.kind == "base":
            model = self.embedded
        elif run.kind == "masked":
            model = AutoModelForMaskedLM.from_pretrained(KJV_MASKED_LM, dtype=torch.float32)
        else:
            trained_on = run.kind == "masked_on"
            model = copy.deepcopy(self.masked) if trained_on else fresh_model(run.kind, self.base, self.masked)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = run.dropout
        shared = dict(
            output_dir=str(work), seed=seed, num_train_epochs=run.epochs, learning_rate=run.learning_rate,
            per_device_train_batch_size=32, warmup_steps=0.1, lr_scheduler_type="cosine", weight_decay=0.01,
            logging_steps=25, save_strategy="no", report_to=[], use_cpu=True, bf16=True, disable_tqdm=True,
        )  # fmt: skip
        data: dict = {"train_dataset": self.train_rows(run.max_train, run.negatives)}
        if run.kind in ("base", "masked"):
            shared |= until_converged()
            data["callbacks"] = [EarlyStoppingCallback(PATIENCE)]
        if run.has_energy:
            args = ResidualNCEConfig(**shared, max_new_tokens=MAX_NEW_TOKENS, max_grad_norm=1.0)
            trainer = ResidualNCETrainer(model, args, **data)
        else:
            masks = run.kind in ("masked", "masked_on")
            args = TrainingArguments(
                **shared, max_grad_norm=1.0, remove_unused_columns=False, per_device_eval_batch_size=1 if masks else 32
            )
            data |= {"data_collator": self._collate_masked if masks else self._collate}
            held_out = self._masked_rows if masks else self.rows("validation")
            trainer = Trainer(model, args, eval_dataset=held_out, **data)
        train_on(trainer)
        if not run.has_energy:
            trainer.evaluate()
        return trainer

    @cached_property
    def _masked_rows(self) -> list[dict[str, torch.Tensor]]:
        """Validation verses with the same masks in every evaluation, each a batch of its own."""
        masking = RandomRateMasking(self.tokenizer, *MASKED_SHARES, torch.Generator().manual_seed(1))
        return [
            masking([{"input_ids": row["prefix_ids"] + row["continuation_ids"]}]) for row in self.rows("validation")
        ]

    def _collate_masked(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        if "labels" in rows[0]:
            return rows[0]
        return self.masking([{"input_ids": row["prefix_ids"] + row["continuation_ids"]} for row in rows])

    def _collate(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        """A causal batch whose targets are the continuations."""
        both = [(row["prefix_ids"], row["continuation_ids"]) for row in rows]
        ids, mask = pad_right([torch.tensor([*prefix, *after]) for prefix, after in both], self.tokenizer.pad_token_id)
        labels, _ = pad_right([torch.tensor([IGNORED] * len(prefix) + after) for prefix, after in both], IGNORED)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def samples(self, split: str) -> list[list[torch.Tensor]]:
        """Continuations that the base samples for each held-out prefix."""

        def compute() -> dict[str, torch.Tensor]:
            prefixes = [torch.tensor(row["prefix_ids"]) for row in self.rows(split)]
            drawn = sample_continuations(self.base, prefixes, self.scale.samples, self.sampling, 1, 1024)
            padded, mask = pad_right([ids for own in drawn for ids in own], self.tokenizer.pad_token_id)
            return {"ids": padded.short(), "lengths": mask.sum(1)}

        found = self.kept("samples", self.base_run, 0, compute, split, self.scale.samples)
        rows = [ids[:length].long() for ids, length in zip(found["ids"], found["lengths"].tolist(), strict=True)]
        return [rows[at : at + self.scale.samples] for at in range(0, len(rows), self.scale.samples)]

    def log_probs(self, run: ResidualRunConfig, seed: int, split: str) -> torch.Tensor:
        """(N, T) log probability of each token of the continuations under a language model; see `lm_log_probs`."""

        def compute() -> torch.Tensor:
            rows = self.rows(split)
            prefixes, after = (
                [torch.tensor(row[f"{name}_ids"]) for row in rows] for name in ("prefix", "continuation")
            )
            model = self.model(run, seed)
            return lm_log_probs(model, prefixes, after, self.tokenizer.pad_token_id, 50)

        return self.kept("log_probs", run, seed, compute, split)

    def energies(self, run: ResidualRunConfig, seed: int, split: str) -> dict[str, torch.Tensor]:
        """Energies of the continuations, `real` (N,), and of the samples, `sampled` (N, n): fewer for a trial."""
        count = self.scale.trial_samples if seed == TRIAL_SEED else self.scale.samples

        def compute() -> dict[str, torch.Tensor]:
            model, real, sampled = self.model(run, seed), [], []
            for row, drawn in zip(self.rows(split), self.samples(split), strict=True):
                own = [torch.tensor(row["continuation_ids"]), *drawn[:count]]
                found = candidate_energies(model, torch.tensor(row["prefix_ids"]), own, ROWS_AT_ONCE)
                real.append(found[0])
                sampled.append(found[1:])
            return {"real": torch.stack(real), "sampled": torch.stack(sampled)}

        return self.kept("energies", run, seed, compute, split, count)

    def nats(self, run: ResidualRunConfig, seed: int, split: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Minus the log probability of each continuation, (N,): a lower and an upper estimate, or the same twice."""
        if not run.has_energy:
            nats = -self.log_probs(run, 0 if run.kind == "base" else seed, split).nansum(1)
            return nats, nats
        energies = self.energies(run, seed, split)
        bounds = bounds_by_size(energies["sampled"], [energies["sampled"].shape[1]])
        nats = energies["real"] - self.log_probs(self.base_run, 0, split).nansum(1)
        return nats + bounds.lower[:, 0], nats + bounds.upper[:, 0]

    def kept(self, name: str, run: ResidualRunConfig, seed: int, compute: Callable[[], Any], *parts) -> Any:
        """What `compute` gives of a run, from the folder if it is there; the time of the run's training counts."""
        self._trained(run, seed)
        return kept(self.folder / f"{name}-{self._name(run, seed, *parts, self.scale.held_out)}.pt", compute)


def _spread(rows: list[dict], count: int) -> list[dict]:
    """So many rows from the whole book, whose parts differ."""
    return rows[:: max(1, len(rows) // count)][:count]
