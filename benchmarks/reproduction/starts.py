"""The starts of chapters 3 to 5: how long they were trained, with what, and what more training would bring."""

from __future__ import annotations

from benchmarks.reproduction.chapter_4 import trained_on
from benchmarks.reproduction.chapter_5 import start
from benchmarks.reproduction.experiment_cache import Decoding, ExperimentCache
from benchmarks.reproduction.report import Report
from benchmarks.reproduction.tasks import TASKS

# name: (task, self-normalized, bidirectional)
STARTS = {
    "stress, unidirectional": ("stress", False, False),
    "stress, unidirectional, self-normalized": ("stress", True, False),
    "stress, bidirectional": ("stress", False, True),
    "stress, bidirectional, self-normalized": ("stress", True, True),
    "g2p": ("g2p", False, True),
    "g2p, self-normalized": ("g2p", True, True),
}
COLUMNS = ["epochs", "best epoch", "validation", "trained on", "gain"]


def table_starts(experiments: ExperimentCache, report: Report) -> None:
    """What each start reached, and that its own objective brings no more. Test data isn't touched."""
    curves: dict[str, list[list[float]]] = {}
    for name, (task, self_normalized, bidirectional) in STARTS.items():
        run = start(experiments, task, self_normalized, bidirectional)
        metric = TASKS[task].selection
        logs = [experiments.training_logs(run, seed) for seed in experiments.scale.seeds]
        # The last evaluation is that of the weights that were kept.
        curves[name] = [[log["eval_loss"] for log in seed if "eval_loss" in log][:-1] for seed in logs]
        reached = experiments.each_seed(run, "validation", Decoding(), metric)
        more = experiments.each_seed(trained_on(experiments, run), "validation", Decoding(), metric)
        report.add(name, {
            "epochs": [float(len(curve)) for curve in curves[name]],
            "best epoch": [1.0 + min(range(len(curve)), key=curve.__getitem__) for curve in curves[name]],
            "validation": reached,
            "trained on": more,
            "gain": [after - before for before, after in zip(reached, more, strict=True)],
        })  # fmt: skip
        chosen = dict(run.options)
        report.notes.append(f"{name}: dropout {run.dropout:g}, weight decay {chosen['weight_decay']:g}.")
    report.notes.append(
        f"Accuracy of stress, BLEU of g2p, validation, greedy. Trained until {experiments.scale.patience} epochs "
        f"brought no lower loss, at most {experiments.scale.most_epochs}, over which the rate falls to 0; dropout and "
        "weight decay were chosen without self-normalization. Trained on: "
        f"{experiments.scale.search_epochs} more epochs at the rate that does best, linear to 0."
    )
    report.raw["curves"] = curves
