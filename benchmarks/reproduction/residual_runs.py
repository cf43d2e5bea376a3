"""Trains residual models and their baselines on continuations of verses, and keeps what is sampled and computed.

As in `experiment_cache`, a run is fixed by its `RunConfig` and seed and kept under a digest of them. All models are
evaluated on the same samples of the embedded language model.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

from benchmarks.reproduction.storage import digest, kept, kept_run, training_time
from hf_ebm.assets import KJV_MASKED_LM, held_out_verses, load_embedded_causal
from hf_ebm.data.bibles import load_kjv_verses
from hf_ebm.data.conditional import split_continuations
from hf_ebm.models.autoregressive_product import ProductLM
from hf_ebm.models.residual import ResidualEnergyModel
from hf_ebm.models.residual.candidates import SamplingParameters, candidate_energies, sample_continuations
from hf_ebm.models.residual.scoring_residual import lm_log_probs
from hf_ebm.objectives.completions import pad_right
from hf_ebm.objectives.losses import IGNORED
from hf_ebm.trainers import ResidualNCEConfig, ResidualNCETrainer

PREFIX_TOKENS, MAX_NEW_TOKENS = 10, 20
ROWS_AT_ONCE = 256


@dataclass(frozen=True)
class ResidualScale:
    """Sizes of a run."""

    max_train: int = 20_000
    negatives: int = 2
    held_out: int = 300
    samples: int = 64
    seeds: tuple[int, ...] = (1, 2, 3)


QUICK_RESIDUAL = ResidualScale(200, 1, 12, 16, (1, 2))


@dataclass(frozen=True)
class ResidualRunConfig:
    """A model trained from the embedded ones, but for the seed; `kind` "base" is the embedded model itself."""

    kind: str  # base, trained_on, ralm, balm, unit, bit
    learning_rate: float = 2e-4
    epochs: int = 1

    @property
    def has_energy(self) -> bool:
        """Whether it is a residual energy model."""
        return self.kind in ("unit", "bit")


@dataclass
class ResidualCache:
    """Makes and keeps runs. Their folder has to be deleted when code or data change: neither is part of a digest."""

    scale: ResidualScale
    folder: Path
    used: dict[str, float] = field(default_factory=dict)  # seconds that each model in use took to train

    def __post_init__(self):
        self.base, self.tokenizer = load_embedded_causal()
        self.sampling = SamplingParameters(MAX_NEW_TOKENS, (self.tokenizer.sep_token_id,))

    def rows(self, split: str) -> list[dict]:
        """Prefixes and continuations of a split; those of "train" with negatives."""
        return self._train_rows if split == "train" else self._held_out_rows[split == "test"]

    @cached_property
    def _held_out_rows(self) -> list[list[dict]]:
        return [self._split(verses)[: self.scale.held_out] for verses in held_out_verses()]

    @cached_property
    def _train_rows(self) -> list[dict]:
        path = self.folder / f"negatives-{digest(self.scale.max_train, self.scale.negatives)}.json"
        return kept(path, self._with_negatives)

    def _with_negatives(self) -> list[dict]:
        rows = self._split(load_kjv_verses(self.folder / "text")[0])
        # From the whole book, whose parts differ.
        rows = rows[:: max(1, len(rows) // self.scale.max_train)][: self.scale.max_train]
        prefixes = [torch.tensor(row["prefix_ids"]) for row in rows]
        drawn = sample_continuations(self.base, prefixes, self.scale.negatives, self.sampling, 0, 1024)
        for row, own in zip(rows, drawn, strict=True):
            row["negatives"] = [ids.tolist() for ids in own]
        return rows

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

    def _trained(self, run: ResidualRunConfig, seed: int) -> Path:
        """The folder of a model, which is trained if it isn't there; its training time counts."""
        # How much is held out changes no model.
        target = self.folder / digest(run, seed, self.scale.max_train, self.scale.negatives)
        logs = kept_run(target, f"{run} seed {seed}", lambda work: self._train(run, seed, work))
        self.used[target.name] = training_time(logs)
        return target

    def _train(self, run: ResidualRunConfig, seed: int, work: Path) -> Trainer:
        set_seed(seed)
        model = fresh_model(run.kind, self.base)
        shared = dict(
            output_dir=str(work), seed=seed, num_train_epochs=run.epochs, learning_rate=run.learning_rate,
            per_device_train_batch_size=32, warmup_steps=100, lr_scheduler_type="cosine", weight_decay=0.01,
            logging_steps=25, save_strategy="no", report_to=[], use_cpu=True, bf16=True, disable_tqdm=True,
        )  # fmt: skip
        if run.has_energy:
            args = ResidualNCEConfig(**shared, max_new_tokens=MAX_NEW_TOKENS, max_grad_norm=1.0)
            trainer = ResidualNCETrainer(model, args, train_dataset=self.rows("train"))
        else:
            args = TrainingArguments(**shared, max_grad_norm=1.0, remove_unused_columns=False)
            trainer = Trainer(model, args, train_dataset=self.rows("train"), data_collator=self._collate)
        trainer.train()
        return trainer

    def _collate(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        """A causal batch whose targets are the continuations."""
        both = [(row["prefix_ids"], row["continuation_ids"]) for row in rows]
        ids, mask = pad_right([torch.tensor([*prefix, *after]) for prefix, after in both], self.tokenizer.pad_token_id)
        labels, _ = pad_right([torch.tensor([IGNORED] * len(prefix) + after) for prefix, after in both], IGNORED)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    def samples(self, split: str, count: int | None = None) -> list[list[torch.Tensor]]:
        """Continuations that the embedded model samples for each held-out prefix."""
        count = self.scale.samples if count is None else count
        path = self.folder / f"samples-{digest(split, self.scale, count)}.pt"
        if not path.exists():
            prefixes = [torch.tensor(row["prefix_ids"]) for row in self.rows(split)]
            drawn = sample_continuations(self.base, prefixes, count, self.sampling, 1, 1024)
            padded, mask = pad_right([ids for own in drawn for ids in own], self.tokenizer.pad_token_id)
            torch.save({"ids": padded.short(), "lengths": mask.sum(1)}, path)
        kept = torch.load(path)
        rows = [ids[:length].long() for ids, length in zip(kept["ids"], kept["lengths"].tolist(), strict=True)]
        return [rows[at : at + count] for at in range(0, len(rows), count)]

    def log_probs(self, run: ResidualRunConfig, seed: int, split: str) -> torch.Tensor:
        """(N, T) log probability of each token of the continuations under a language model; see `lm_log_probs`."""

        def compute() -> torch.Tensor:
            rows = self.rows(split)
            prefixes, after = (
                [torch.tensor(row[f"{name}_ids"]) for row in rows] for name in ("prefix", "continuation")
            )
            model = self.model(run, seed)
            return lm_log_probs(model, prefixes, after, self.tokenizer.pad_token_id, 50)

        return self.kept("log_probs", (run, seed, split), compute)

    def energies(self, run: ResidualRunConfig, seed: int, split: str) -> dict[str, torch.Tensor]:
        """Energies of the continuations, `real` (N,), and of the samples, `sampled` (N, n)."""

        def compute() -> dict[str, torch.Tensor]:
            model, real, sampled = self.model(run, seed), [], []
            for row, drawn in zip(self.rows(split), self.samples(split), strict=True):
                own = [torch.tensor(row["continuation_ids"]), *drawn]
                found = candidate_energies(model, torch.tensor(row["prefix_ids"]), own, ROWS_AT_ONCE)
                real.append(found[0])
                sampled.append(found[1:])
            return {"real": torch.stack(real), "sampled": torch.stack(sampled)}

        return self.kept("energies", (run, seed, split), compute)

    def kept(self, name: str, key: tuple, compute):
        """What `compute` gives, from the folder if it is there; the first part of `key` is a run, then its seed."""
        path = self.folder / f"{name}-{digest(*key, self.scale)}.pt"
        if not path.exists():
            found = compute()
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(found, path)
        elif key[0].kind != "base":
            self._trained(key[0], key[1])  # its training time counts
        return torch.load(path)


def fresh_model(kind: str, base: PreTrainedModel) -> PreTrainedModel:
    """A model of that kind before training, made of the embedded ones."""
    lm, _ = load_embedded_causal()
    if kind == "trained_on":
        return lm.train()
    if kind == "ralm":
        return ProductLM.from_lm(lm)
    if kind == "balm":
        return deepened(lm, 8)
    # The encoder as the paper has it: a model of the same text, without its head.
    if kind == "unit":
        return ResidualEnergyModel(base, lm.transformer).train()
    return ResidualEnergyModel(base, AutoModel.from_pretrained(KJV_MASKED_LM, dtype=torch.float32)).train()


def deepened(lm: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A GPT-2 with further layers on top that change nothing until they are trained."""
    config = copy.deepcopy(lm.config)
    config.n_layer += layers
    deep = AutoModelForCausalLM.from_config(config)
    deep.load_state_dict(lm.state_dict(), strict=False)
    for block in deep.transformer.h[lm.config.n_layer :]:
        for projection in (block.attn.c_proj, block.mlp.c_proj):
            nn.init.zeros_(projection.weight)
            nn.init.zeros_(projection.bias)
    return deep
