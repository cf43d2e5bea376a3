"""Thesis chapter 6: what the masked objective learns of an enumerable language, against (pseudo)likelihood.

Each run trains a `BiLSTMForMaskedLM` on sequences of a synthetic language, keeps the step that is best on a tenth of
them, and is evaluated by exact expectations under the true distribution: no test set, no sampling error.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from transformers import set_seed

from benchmarks.reproduction.phonemes import PhonemeRunConfig, phoneme_scores
from benchmarks.reproduction.report import Report, pyplot_without_display, save_figure
from benchmarks.reproduction.storage import digest, kept
from hf_ebm import BiLSTMForMaskedLM, BiLSTMMaskedLMConfig, EnergyModel, exact
from hf_ebm.data.synthetic import END, FIRST_SYMBOL, MASK, PAD, START, HiddenMarkovModel, Language, palindromes, rows_of
from hf_ebm.scoring.energies import token_scores
from hf_ebm.trainers import EnergyTrainer, EnergyTrainingConfig

SYMBOLS, LENGTH = 5, 5


@dataclass(frozen=True)
class EnergyScale:
    """Sizes of a run."""

    sizes: tuple[int, ...] = (1_000, 10_000)
    teacher_size: int = 100_000
    projection_sizes: tuple[int, ...] = (100, 300, 1_000, 3_000)
    max_steps: int = 600
    eval_steps: int = 50
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    phonemes: PhonemeRunConfig = field(default_factory=PhonemeRunConfig)


FEW_PHONEMES = PhonemeRunConfig(max_length=2, max_steps=5, hidden_size=8, pseudolikelihood_rows=20)
QUICK_ENERGY = EnergyScale((200,), 500, (50, 100), 20, 10, (1, 2), FEW_PHONEMES)


@dataclass(frozen=True)
class EnergyRunConfig:
    """A training run but for its seed, which draws data and weights."""

    language: str  # "palindromes", "hmm low", "hmm high"
    size: int
    objective: str
    learning_rate: float = 1e-2


@dataclass
class EnergyCache:
    """Makes and keeps runs. Their folder has to be deleted when code or data change: neither is part of a digest."""

    scale: EnergyScale
    folder: Path
    used: dict[str, float] = field(default_factory=dict)  # seconds that each run in use took

    def language(self, name: str, seed: int) -> Language:
        """The true distribution; each seed has its own hidden Markov model."""
        if name == "palindromes":
            return palindromes(SYMBOLS, LENGTH)
        return HiddenMarkovModel.draw(seed, name.removeprefix("hmm "), num_symbols=SYMBOLS).language(LENGTH)

    def scores(self, run: EnergyRunConfig, seed: int) -> dict[str, float]:
        """Expected losses of the trained model: `nll`, `pll` and `mlm`, in nats a sequence."""
        path = self.folder / f"energy-{digest(run, seed, self.scale.max_steps, self.scale.eval_steps)}.json"
        found = kept(path, lambda: self._losses(run, seed))
        self.used[path.name] = found["seconds"]
        return found

    def _losses(self, run: EnergyRunConfig, seed: int) -> dict:
        started = time.perf_counter()
        losses = evaluate(self._trained(run, seed), self.language(run.language, seed))
        return {**losses, "seconds": time.perf_counter() - started, **asdict(run)}

    def _trained(self, run: EnergyRunConfig, seed: int) -> EnergyModel:
        rows = rows_of(self.language(run.language, seed).sample(run.size, 1000 * seed + 1))
        held_out = max(10, run.size // 10)
        set_seed(seed)
        teacher = self._teacher(run.language, seed) if run.objective.startswith("kl") else None
        work = self.folder / f"energy-{digest(run, seed, self.scale.max_steps)}.unfinished"
        args = EnergyTrainingConfig(
            str(work), objective=run.objective, max_steps=self.scale.max_steps, learning_rate=run.learning_rate,
            per_device_train_batch_size=100, per_device_eval_batch_size=1000, lr_scheduler_type="cosine", seed=seed,
            eval_strategy="steps", eval_steps=self.scale.eval_steps, save_steps=self.scale.eval_steps,
            save_total_limit=1, load_best_model_at_end=True, metric_for_best_model="loss",
            report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=self.scale.max_steps,
        )  # fmt: skip
        trainer = EnergyTrainer(
            fresh_model(), args, teacher=teacher, train_dataset=rows[held_out:], eval_dataset=rows[:held_out]
        )
        trainer.train()
        shutil.rmtree(work)
        print(f"  {run} seed {seed}", flush=True)
        return trainer.model

    def _teacher(self, language: str, seed: int) -> EnergyModel:
        """A masked model of a large sample, kept whole."""
        run = EnergyRunConfig(language, self.scale.teacher_size, "mlm")
        path = self.folder / f"teacher-{digest(run, seed, self.scale.max_steps)}"
        if not (path / "config.json").exists():
            self._trained(run, seed).save_pretrained(path)
        return EnergyModel.from_pretrained(path)


def fresh_model() -> EnergyModel:
    """A BiLSTM with 64 states for each side."""
    mlm = BiLSTMForMaskedLM(BiLSTMMaskedLMConfig(vocab_size=FIRST_SYMBOL + SYMBOLS, embedding_dim=32, hidden_size=128))
    return EnergyModel(
        mlm, energy="raw", mask_token_id=MASK, pad_token_id=PAD, special_token_ids=[PAD, START, END],
        excluded_token_ids=[], prefix_token_ids=[START], suffix_token_ids=[END],
    )  # fmt: skip


@torch.no_grad()
def evaluate(model: EnergyModel, language: Language) -> dict[str, float]:
    """Expectations under the true distribution of exact likelihood, pseudolikelihood and masked conditionals."""
    tokens = torch.arange(FIRST_SYMBOL, FIRST_SYMBOL + SYMBOLS)
    logits = model.mlm.eval().double().context_logits([START], [END], tokens, LENGTH)
    tables = {energy: [token_scores(part, tokens, energy) for part in logits] for energy in ("raw", "local")}
    energies = exact.energies_from_contexts(tables["raw"])
    sequences, weights = torch.tensor(language.sequences), torch.tensor(language.log_probs).exp()
    conditionals = exact.log_conditionals(energies, sequences)
    losses = {
        "nll": exact.negative_log_likelihoods(energies, sequences),
        "pll": exact.negative_pseudolikelihoods(conditionals, sequences),
        "mlm": exact.energies_from_contexts(tables["local"])[tuple(sequences.T)],
    }
    return {name: float((weights * values).sum()) for name, values in losses.items()}


LANGUAGES = {"p": "palindromes", "h": "hmm low", "h+": "hmm high"}
OBJECTIVES = {"LL": "mle", "PLL": "pll", "MLM": "mlm"}
COLUMNS = ["true", *(f"NLL {name}" for name in OBJECTIVES), "PLL of PLL", "PLL of MLM", "MLM of PLL", "MLM of MLM"]


def table_6_1(experiments: EnergyCache, report: Report) -> None:
    """Negative log-likelihoods of three objectives."""
    seeds = experiments.scale.seeds
    for mark, language in LANGUAGES.items():
        for size in experiments.scale.sizes:
            name = f"{mark[0]}-{f'{size // 1000}k' if size >= 1000 else size}{mark[1:]}"
            report.add(name, {"true": [experiments.language(language, seed).entropy for seed in seeds]})
            found = {
                column: [experiments.scores(EnergyRunConfig(language, size, objective), seed) for seed in seeds]
                for column, objective in OBJECTIVES.items()
            }
            report.add(name, {f"NLL {column}": [run["nll"] for run in runs] for column, runs in found.items()})
            for metric in ("pll", "mlm"):
                for column in ("PLL", "MLM"):
                    report.add(name, {f"{metric.upper()} of {column}": [run[metric] for run in found[column]]})
            for better, worse in (("LL", "PLL"), ("PLL", "MLM")):
                report.finding(f"{name}: {better} below {worse}", (name, f"NLL {worse}"), (name, f"NLL {better}"))
    _add_phonemes(experiments, report)
    report.notes.append(
        f"Nats a sequence of {LENGTH} symbols out of {SYMBOLS}, exact expectations under the true distribution (the "
        "thesis: a test set). Each seed has its own data, weights and hidden Markov model; the best of every "
        f"{experiments.scale.eval_steps} of {experiments.scale.max_steps} steps on a tenth of the data."
    )


def _add_phonemes(experiments: EnergyCache, report: Report) -> None:
    """The row of pronunciations: one seed, a real test set, and log Z over 39^6 sequences."""
    configs = {name: replace(experiments.scale.phonemes, objective=name.lower()) for name in ("PLL", "MLM")}
    found = {name: phoneme_scores(experiments.folder, run) for name, run in configs.items()}
    experiments.used |= {f"phonemes {name}": scores["seconds"] for name, scores in found.items()}
    report.add("phoneme", {f"NLL {name}": [scores["nll"]] for name, scores in found.items()})
    for metric in ("pll", "mlm"):
        report.add("phoneme", {f"{metric.upper()} of {name}": [scores[metric]] for name, scores in found.items()})
    run, scores = configs["PLL"], found["PLL"]
    report.notes.append(
        f"phoneme: pronunciations of up to {run.max_length} of 39 phonemes, {scores['test_rows']} test rows (PLL of "
        f"the first {run.pseudolikelihood_rows}), one seed, {run.max_steps} steps of {run.batch_size} rows, "
        f"{run.hidden_size // 2} states a side. NLL is given the length; log Z is exact, all lengths in "
        f"{scores['log_z_seconds']:.0f} s. Likelihood isn't trained: log Z would be needed at every step."
    )


def draw_projection(results: Path, quick: bool, folder: Path) -> Path:
    """Figure 6.1: negative log-likelihood by size of the data, with and without a masked model to project."""
    experiments = EnergyCache(QUICK_ENERGY if quick else EnergyScale(), folder)
    scale, raw = experiments.scale, {}
    figure, panels = pyplot_without_display().subplots(1, 2, figsize=(12, 4.5))
    seeds = scale.seeds[:3]
    for axes, language in zip(panels, ("palindromes", "hmm low"), strict=True):
        raw[language] = {"true": [experiments.language(language, seed).entropy for seed in seeds]}
        teacher = EnergyRunConfig(language, scale.teacher_size, "mlm")
        raw[language]["masked model"] = [experiments.scores(teacher, seed)["nll"] for seed in seeds]
        for name, objective in (("KL", "kl"), ("KL and PLL", "kl+pll"), ("PLL alone", "pll"), ("MLM alone", "mlm")):
            raw[language][name] = {
                size: [experiments.scores(EnergyRunConfig(language, size, objective), seed)["nll"] for seed in seeds]
                for size in scale.projection_sizes
            }
            values = torch.tensor(list(raw[language][name].values())) - torch.tensor(raw[language]["true"])
            axes.errorbar(scale.projection_sizes, values.mean(1), values.std(1), marker="o", capsize=3, label=name)
        above = [a - b for a, b in zip(raw[language]["masked model"], raw[language]["true"], strict=True)]
        label = f"masked model ({scale.teacher_size} sequences)"
        axes.axhline(sum(above) / len(seeds), color="black", linestyle="--", label=label)
        axes.set_yscale("log")
        axes.set_xscale("log")
        axes.set_xlabel(f"sequences of {language}")
        axes.set_ylabel("NLL above the true one, nats a sequence (figure 6.1)")
        axes.legend()
    return save_figure(results, "thesis-figure-6.1", figure, {"seeds": seeds, **raw})
