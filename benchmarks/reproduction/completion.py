"""Fine-tunes the embedded causal model for completion of verses, and evaluates its greedy completions.

As in `experiment_cache`, a run is fixed by its `RunConfig` and seed and kept under a digest of them.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DataCollatorForSeq2Seq, GenerationConfig, Trainer, TrainingArguments

from benchmarks.reproduction.storage import digest, kept, kept_run, training_time
from hf_ebm.assets import KJV_CAUSAL_LM, held_out_verses, load_embedded_causal
from hf_ebm.data.bibles import completion_rows, load_kjv_verses
from hf_ebm.objectives.completions import ends_at
from hf_ebm.objectives.sequence_costs import non_termination, normalized_edit_distance, repetition
from hf_ebm.trainers import MGSConfig, MGSTrainer
from hf_ebm.trainers.costs import ScorerCost

PROMPT_LENGTH = 10


@dataclass(frozen=True)
class CompletionScale:
    """Sizes of a run."""

    max_train: int = 20_000
    held_out: int = 400
    steps: int = 80
    max_new_tokens: int = 130  # five times the mean length of a continuation, as the paper's 500 of 108
    seeds: tuple[int, ...] = (1, 2, 3)


QUICK_COMPLETION = CompletionScale(400, 40, 4, 60, (1, 2))


@dataclass(frozen=True)
class CompletionRunConfig:
    """Training on from the embedded model, but for the seed; no objective is the embedded model itself."""

    objective: str | None = None  # "mgs" or "likelihood"
    cost: str = "lm"  # or a name of hf_ebm's costs
    learning_rate: float = 3e-4
    options: tuple[tuple[str, object], ...] = ()


@dataclass
class CompletionCache:
    """Makes and keeps runs. Their folder has to be deleted when code or data change: neither is part of a digest."""

    scale: CompletionScale
    folder: Path
    used: dict[str, float] = field(default_factory=dict)  # seconds that each model in use took to train

    def __post_init__(self):
        self.start, self.tokenizer = load_embedded_causal()
        self.scorer = ScorerCost(self.start, self.tokenizer.pad_token_id)
        self._rows: dict[str, list[dict]] = {}

    def rows(self, split: str) -> list[dict]:
        """Prompts and continuations of a split, tokenized."""
        if split not in self._rows:
            if split == "train":
                verses, count = load_kjv_verses(self.folder / "text")[0], self.scale.max_train
            else:
                verses, count = held_out_verses()[split == "test"], self.scale.held_out
            self._rows[split] = list(completion_rows(verses, self.tokenizer, PROMPT_LENGTH))[:count]
        return self._rows[split]

    def model(self, run: CompletionRunConfig, seed: int):
        """The trained model."""
        if run.objective is None:
            return self.start
        self._logs(run, seed)
        return AutoModelForCausalLM.from_pretrained(self.folder / digest(run, seed, self.scale)).eval()

    def training_logs(self, run: CompletionRunConfig, seed: int) -> list[dict]:
        """What the trainer logged at each step; what isn't in the folder is trained."""
        return [log for log in self._logs(run, seed) if "loss" in log]

    def _logs(self, run: CompletionRunConfig, seed: int) -> list[dict]:
        target = self.folder / digest(run, seed, self.scale)
        logs = kept_run(target, f"{run} seed {seed}", lambda work: self._train(run, seed, work))
        self.used[target.name] = training_time(logs)
        return logs

    def scores(self, run: CompletionRunConfig, seed: int, split: str) -> dict[str, float]:
        """Metrics of greedy completions of a split, and the perplexity of its continuations."""
        path = self.folder / "scores" / f"{digest(run, seed, self.scale, split)}.json"
        if run.objective is not None:
            self._logs(run, seed)  # the time counts
        return kept(path, lambda: self._evaluate(self.model(run, seed), split))

    def each_seed(self, run: CompletionRunConfig, split: str, metric: str) -> list[float]:
        """A metric for each seed."""
        return [self.scores(run, seed, split)[metric] for seed in self.scale.seeds]

    def humans(self, split: str) -> dict[str, float]:
        """The same metrics of the verses themselves."""
        return self._describe([row["input_ids"][PROMPT_LENGTH:] for row in self.rows(split)], split)

    def _train(self, run: CompletionRunConfig, seed: int, work: Path) -> Trainer:
        model, tokenizer = load_embedded_causal()
        shared = dict(
            output_dir=str(work), seed=seed, max_steps=self.scale.steps, learning_rate=run.learning_rate,
            per_device_train_batch_size=16, max_grad_norm=1.0, train_sampling_strategy="group_by_length",
            lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to=[], use_cpu=True,
            disable_tqdm=True,
        )  # fmt: skip
        data = {"train_dataset": self.rows("train"), "data_collator": DataCollatorForSeq2Seq(tokenizer)}
        if run.objective == "mgs":
            cost = self.scorer if run.cost == "lm" else run.cost
            trainer = MGSTrainer(model, MGSConfig(**shared, **dict(run.options)), cost=cost, **data)
        else:
            trainer = Trainer(model, TrainingArguments(**shared), **data)
        trainer.train()
        return trainer

    @torch.no_grad()
    def _evaluate(self, model, split: str) -> dict[str, float]:
        rows, found = self.rows(split), []
        config = GenerationConfig(
            do_sample=False, max_new_tokens=self.scale.max_new_tokens, eos_token_id=self.tokenizer.sep_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
        )  # fmt: skip
        for at in range(0, len(rows), 100):
            prompts = torch.tensor([row["input_ids"][:PROMPT_LENGTH] for row in rows[at : at + 100]])
            ids = model.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), generation_config=config)
            found += [ids.tolist() for ids in ends_at(ids[:, PROMPT_LENGTH:], [self.tokenizer.sep_token_id])]
        continuations = [row["input_ids"][PROMPT_LENGTH:] for row in rows]
        nats = ScorerCost(model, self.tokenizer.pad_token_id)(continuations, None, self._prompts(rows))
        perplexity = math.exp(float(nats.double().sum()) / sum(map(len, continuations)))
        return {**self._describe(found, split), "perplexity": perplexity}

    def _describe(self, sequences: list[list[int]], split: str) -> dict[str, float]:
        rows = self.rows(split)
        continuations = [row["input_ids"][PROMPT_LENGTH:] for row in rows]
        return {
            "lm": float(self.scorer(sequences, None, self._prompts(rows)).mean()),
            "edit": float(normalized_edit_distance(sequences, continuations).mean()),
            "nonterm": float(non_termination(sequences, self.tokenizer.sep_token_id).mean()),
            "repetition": float(repetition(sequences).mean()),
            "length": sum(map(len, sequences)) / len(sequences),
        }

    @staticmethod
    def _prompts(rows: list[dict]) -> list[list[int]]:
        return [row["input_ids"][:PROMPT_LENGTH] for row in rows]


def embedded_results() -> dict:
    """How the embedded model was trained."""
    return json.loads((KJV_CAUSAL_LM / "training_results.json").read_text(encoding="utf-8"))
