"""Thesis chapter 3: differentiable scheduled sampling (tables 3.1 and 3.2)."""

from __future__ import annotations

from benchmarks.reproduction.experiment_cache import Decoding, ExperimentCache, RunConfig
from benchmarks.reproduction.report import Report

LEARNING_RATE = 2e-3
METRIC = {"stress": "macro_f1", "g2p": "bleu"}
# k for eight epochs: 76% gold inputs in the second, 41% in the last.
DECAY = 4.0
ROWS = {
    "Bengio et al. 2015, greedy": {"inputs": "argmax"},
    "Bengio et al. 2015, sample": {"inputs": "sample"},
    "α-soft fixed, greedy": {"inputs": "soft_argmax", "alpha": 1.0},
    "α-soft fixed, sample": {"inputs": "soft_sample", "alpha": 1.0},
    "α-soft annealed, greedy": {"inputs": "soft_argmax", "alpha": 1.0, "alpha_growth": 1.3},
    "α-soft annealed, sample": {"inputs": "soft_sample", "alpha": 1.0, "alpha_growth": 1.3},
}


def scheduled(experiments: ExperimentCache, task: str, **options) -> RunConfig:
    """Scheduled sampling from fresh weights."""
    return RunConfig(
        task, "scheduled-sampling", experiments.scale.scheduled_epochs, LEARNING_RATE,
        options=tuple(sorted({"decay_strength": DECAY, **options}.items())),
    )  # fmt: skip


def _columns(experiments: ExperimentCache, run: RunConfig, label: str, metric: str) -> dict[str, list[float]]:
    return {
        f"{label} {split}": experiments.each_seed(run, split, Decoding(), metric) for split in ("validation", "test")
    }


def table_3_1(experiments: ExperimentCache, report: Report) -> None:
    """Cross entropy against scheduled sampling, hard and soft."""
    labels = {"stress": "stress F1", "g2p": "g2p BLEU"}
    for task, label in labels.items():
        baseline = RunConfig(task, "cross-entropy", experiments.scale.scheduled_epochs, LEARNING_RATE)
        report.add("Baseline CE", _columns(experiments, baseline, label, METRIC[task]))
        for row, options in ROWS.items():
            run = scheduled(experiments, task, **options)
            report.add(row, _columns(experiments, run, label, METRIC[task]))
    report.notes.append(
        f"Bidirectional LSTM, greedy decoding, {experiments.scale.scheduled_epochs} epochs for every row, final model, "
        f"inverse sigmoid with k = {DECAY:g}, α = 1 fixed or 1.3^epoch. F1 is the macro average over primary and "
        "secondary stress of vowels."
    )
    for label in labels.values():
        column = f"{label} test"
        for kind in ("greedy", "sample"):
            hard = (f"Bengio et al. 2015, {kind}", column)
            report.finding(f"{label}, {kind}: hard above CE", hard, ("Baseline CE", column))
            for soft in ("fixed", "annealed"):
                row = (f"α-soft {soft}, {kind}", column)
                report.finding(f"{label}, {kind}: α-soft {soft} above hard", row, hard)


def table_3_2(experiments: ExperimentCache, report: Report) -> None:
    """Schedules of teacher forcing."""
    settings = {
        "100": {"decay_strength": 100.0},
        "10": {"decay_strength": 10.0},
        "1": {"decay_strength": 1.0},
        "always": {"teacher_forcing_schedule": "always"},
    }
    for name, options in settings.items():
        run = scheduled(experiments, "stress", inputs="soft_argmax", alpha=1.0, alpha_growth=1.3, **options)
        report.add(f"k = {name}" if name != "always" else name, _columns(experiments, run, "F1", "macro_f1"))
    report.notes.append("Stress tagging, soft argmax with α = 1.3^epoch; larger k decays later and more gently.")
    report.finding("k = 100 above always", ("k = 100", "F1 test"), ("always", "F1 test"))
    report.finding("k = 10 above k = 1", ("k = 10", "F1 test"), ("k = 1", "F1 test"))
