"""Thesis chapter 3: differentiable scheduled sampling (tables 3.1 and 3.2)."""

from __future__ import annotations

from benchmarks.reproduction.chapter_4 import BASELINE, RATES, START, converged_start, trained_on
from benchmarks.reproduction.experiment_cache import Decoding, ExperimentCache, RunConfig
from benchmarks.reproduction.report import Report

METRIC = {"stress": "macro_f1", "g2p": "bleu"}
# k in hundredths of the training: half of the inputs are gold at 8 and 60% of it.
DECAYS = (5.0, 20.0)
ROWS = {
    "Bengio et al. 2015, greedy": {"inputs": "argmax"},
    "Bengio et al. 2015, sample": {"inputs": "sample"},
    "α-soft fixed, greedy": {"inputs": "soft_argmax", "alpha": 1.0, "alpha_growth": 1.0},
    "α-soft fixed, sample": {"inputs": "soft_sample", "alpha": 1.0, "alpha_growth": 1.0},
    "α-soft annealed, greedy": {"inputs": "soft_argmax", "alpha": 1.0, "alpha_growth": 1.02},
    "α-soft annealed, sample": {"inputs": "soft_sample", "alpha": 1.0, "alpha_growth": 1.02},
}


def scheduled(experiments: ExperimentCache, task: str, **options) -> RunConfig:
    """Scheduled sampling from the converged start."""
    return converged_start(experiments, task).then(
        "scheduled-sampling", experiments.scale.search_epochs, RATES[0], schedule_unit="percent", **options
    )


def scheduled_sampling(experiments: ExperimentCache, task: str, metric: str, **options) -> RunConfig:
    """The same with the rate and decay that are chosen."""
    trials = scheduled(experiments, task, **options).varied(learning_rate=RATES, decay_strength=DECAYS)
    return experiments.chosen(trials, Decoding(), metric)


def _columns(experiments: ExperimentCache, run: RunConfig, label: str, metric: str) -> dict[str, list[float]]:
    return {
        f"{label} {split}": experiments.each_seed(run, split, Decoding(), metric) for split in ("validation", "test")
    }


def table_3_1(experiments: ExperimentCache, report: Report) -> None:
    """Cross entropy against scheduled sampling, hard and soft."""
    labels = {"stress": "stress F1", "g2p": "g2p BLEU"}
    for task, label in labels.items():
        start = converged_start(experiments, task)
        report.add(START, _columns(experiments, start, label, METRIC[task]))
        report.add(BASELINE, _columns(experiments, trained_on(experiments, start), label, METRIC[task]))
        for row, options in ROWS.items():
            run = scheduled_sampling(experiments, task, METRIC[task], **options)
            report.add(row, _columns(experiments, run, label, METRIC[task]))
    report.notes.append(
        f"Bidirectional LSTM, greedy decoding; all rows but the first train for {experiments.scale.search_epochs} "
        "epochs from the converged start; inverse sigmoid in hundredths of the training, α = 1 fixed or growing by "
        f"1.02 a hundredth; learning rate of {RATES} and k of {DECAYS} chosen. F1 is the macro average over primary "
        "and secondary stress of vowels."
    )
    for label in labels.values():
        column = f"{label} test"
        for kind in ("greedy", "sample"):
            hard = (f"Bengio et al. 2015, {kind}", column)
            report.finding(f"{label}, {kind}: hard above CE trained on", hard, (BASELINE, column))
            for soft in ("fixed", "annealed"):
                row = (f"α-soft {soft}, {kind}", column)
                report.finding(f"{label}, {kind}: α-soft {soft} above hard", row, hard)


def table_3_2(experiments: ExperimentCache, report: Report) -> None:
    """Schedules of teacher forcing."""
    settings = {
        "20": {"decay_strength": 20.0},
        "10": {"decay_strength": 10.0},
        "5": {"decay_strength": 5.0},
        "always": {"teacher_forcing_schedule": "always"},
    }
    for name, options in settings.items():
        run = scheduled(experiments, "stress", inputs="soft_argmax", alpha=1.0, **options)
        trials = run.varied(learning_rate=RATES, alpha_growth=(1.0, 1.02))
        run = experiments.chosen(trials, Decoding(), METRIC["stress"])
        report.add(f"k = {name}" if name != "always" else name, _columns(experiments, run, "F1", "macro_f1"))
    report.notes.append(
        "Stress tagging, soft argmax from the converged start; larger k decays later and more gently; learning rate "
        "and growth of α chosen."
    )
    report.finding("k = 20 above always", ("k = 20", "F1 test"), ("always", "F1 test"))
    report.finding("k = 20 above k = 5", ("k = 20", "F1 test"), ("k = 5", "F1 test"))
