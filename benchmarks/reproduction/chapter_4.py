"""Thesis chapter 4: relaxed beam search against cross entropy (tables 4.1 and 4.2)."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.reproduction.experiment_cache import Decoding, ExperimentCache, RunConfig
from benchmarks.reproduction.report import Report

LEARNING_RATE, SEARCH_LEARNING_RATE = 2e-3, 1e-3
BEAMS, GROWTH = 3, 1.6
OBJECTIVES = {
    "hinge, annealed α": {"loss": "hinge", "alpha_growth": GROWTH},
    "hinge, α = 1": {"loss": "hinge", "alpha_growth": 1.0},
    "direct loss, α = 1": {"loss": "direct", "alpha_growth": 1.0},
    "direct loss, annealed α": {"loss": "direct", "alpha_growth": GROWTH},
}


def cross_entropy(experiments: ExperimentCache, task: str, bidirectional: bool = True) -> RunConfig:
    """The warm start of locally normalized models: a weight of 0 reports log Z and leaves cross entropy."""
    options = (("log_z_weight", 0.0),)
    return RunConfig(task, "self-normalized", experiments.scale.pretrain_epochs, LEARNING_RATE, bidirectional, options)


def soft_beam(experiments: ExperimentCache, start: RunConfig, **options) -> RunConfig:
    """The relaxed beam search from a trained model."""
    return start.then(
        "soft-beam", experiments.scale.search_epochs, SEARCH_LEARNING_RATE,
        **{"beam_size": BEAMS, "alpha": 1.0, "alpha_growth": GROWTH, **options},
    )  # fmt: skip


def trained_on(experiments: ExperimentCache, start: RunConfig) -> RunConfig:
    """The start's own objective for as many more epochs as a search gets: what of its gain is only more training."""
    return start.then(start.objective, experiments.scale.search_epochs, SEARCH_LEARNING_RATE, **dict(start.options))


def final_alpha(experiments: ExperimentCache, run: RunConfig) -> float:
    """α of the last epoch, with which soft beam search decodes."""
    options = dict(run.options)
    return options["alpha"] * options["alpha_growth"] ** (experiments.scale.search_epochs - 1)


def _decodings(experiments: ExperimentCache, run: RunConfig, metric: str) -> dict[str, list[float]]:
    searched = run.objective == "soft-beam"
    soft = final_alpha(experiments, run) if searched else GROWTH ** (experiments.scale.search_epochs - 1)
    kinds = {} if searched else {"greedy": Decoding()}
    kinds |= {"hard beam": Decoding(BEAMS), "soft beam": Decoding(BEAMS, alpha=soft)}
    return {
        f"{kind} {split}": experiments.each_seed(run, split, decoding, metric)
        for kind, decoding in kinds.items()
        for split in ("validation", "test")
    }


def _fill(experiments: ExperimentCache, report: Report, metric: str, weight: float, bidirectional: bool) -> None:
    start = cross_entropy(experiments, "stress", bidirectional)
    report.add("Baseline CE", _decodings(experiments, start, metric))
    report.add("Baseline CE, trained on", _decodings(experiments, trained_on(experiments, start), metric))
    for row, options in OBJECTIVES.items():
        run = replace(soft_beam(experiments, start, **options), default_label_weight=weight)
        report.add(row, _decodings(experiments, run, metric))
    direct, hinge = "direct loss, annealed α", "hinge, annealed α"
    for kind in ("hard beam test", "soft beam test"):
        report.finding(f"{kind}: direct loss above CE", (direct, kind), ("Baseline CE", kind))
        report.finding(f"{kind}: direct loss above CE trained on", (direct, kind), ("Baseline CE, trained on", kind))
        report.finding(f"{kind}: annealed α above α = 1, direct", (direct, kind), ("direct loss, α = 1", kind))
        report.finding(f"{kind}: annealed α above α = 1, hinge", (hinge, kind), ("hinge, α = 1", kind))
        report.finding(f"{kind}: direct loss above hinge", (direct, kind), (hinge, kind))


def table_4_1(experiments: ExperimentCache, report: Report) -> None:
    """Accuracy of tags, with a unidirectional encoder."""
    _fill(experiments, report, "accuracy", 1.0, bidirectional=False)
    report.notes.append(
        f"Stress tagging (accuracy on vowels), unidirectional encoder with fixed attention, k = {BEAMS}, α = 1 or "
        f"{GROWTH}^epoch, local scores; soft beam decoding at the α of the last epoch. The paper's tagger is "
        "bidirectional; on this task that leaves search almost nothing to decide (tables 5.2 and 5.3)."
    )


def table_4_2(experiments: ExperimentCache, report: Report) -> None:
    """Macro F1 with the default label's errors counted twice, with a bidirectional encoder."""
    _fill(experiments, report, "macro_f1", 2.0, bidirectional=True)
    report.notes.append(
        f"Stress tagging (macro F1 of primary and secondary stress), bidirectional encoder, k = {BEAMS}; the Hamming "
        "cost of a wrong '0' (unstressed, the commonest label of vowels) is 2, as that of 'O' in the paper."
    )
