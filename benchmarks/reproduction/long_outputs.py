"""All objectives of the papers on tasks with longer outputs: phrases of several words, and translation of verses."""

from __future__ import annotations

from benchmarks.reproduction.chapter_3 import ROWS, scheduled_sampling
from benchmarks.reproduction.chapter_4 import BASELINE, BEAMS, START, converged_start, soft_beam, trained_on
from benchmarks.reproduction.chapter_5 import LOG_Z_WEIGHT
from benchmarks.reproduction.experiment_cache import Decoding, ExperimentCache, RunConfig
from benchmarks.reproduction.parameter_search import for_cost
from benchmarks.reproduction.report import Report
from benchmarks.reproduction.tasks import TASKS

HARD, SOFT = "scheduled sampling, hard", "scheduled sampling, soft"
LOCAL, GLOBAL, NORMALIZED = "soft beam, local", "soft beam, global", "self-normalized start"
GLOBAL_NORMALIZED = "soft beam, global, from the self-normalized start"
COLUMNS = [f"{decoding} {split}" for split in ("validation", "test") for decoding in ("greedy", f"beam {BEAMS}")]
NGRAMS = f"4-grams, beam {BEAMS} test"
COSTS = {"MGS": "MGS-SBLEU", "minimum risk": "MRT"}  # names in the tables of Welleck and Cho


def columns(task: str) -> list[str]:
    """Columns of a task's table: with 4-grams where outputs aren't labels."""
    return COLUMNS if TASKS[task].tagging else [*COLUMNS, NGRAMS]


def _runs(experiments: ExperimentCache, task: str) -> dict[str, RunConfig]:
    """Every method's run; those on costs for transcription and translation alone."""
    metric = TASKS[task].selection
    start, normalized = (converged_start(experiments, task, True, weight) for weight in (0.0, LOG_Z_WEIGHT))
    runs = {START: start, BASELINE: trained_on(experiments, start), NORMALIZED: normalized}
    for name, row in ((HARD, "Bengio et al. 2015, greedy"), (SOFT, "α-soft fixed, greedy")):
        runs[name] = scheduled_sampling(experiments, task, metric, **ROWS[row])
    runs[LOCAL] = soft_beam(experiments, start, metric)
    runs[GLOBAL] = soft_beam(experiments, start, metric, normalization="global")
    runs[GLOBAL_NORMALIZED] = soft_beam(experiments, normalized, metric, normalization="global")
    for name, known in {} if TASKS[task].tagging else COSTS.items():
        runs[name] = for_cost(experiments, start, known, metric)
    return runs


def table(task: str, experiments: ExperimentCache, report: Report) -> None:
    """Each method, decoded greedily and by hard beam search."""
    metric = TASKS[task].selection
    for name, run in _runs(experiments, task).items():
        normalization = str(dict(run.options).get("normalization", "local"))
        if NGRAMS in report.columns:
            precisions = experiments.each_seed(run, "test", Decoding(BEAMS, normalization), "precision_4")
            report.add(name, {NGRAMS: precisions})
        for split in ("validation", "test"):
            for label, beams in (("greedy", 1), (f"beam {BEAMS}", BEAMS)):
                decoding = Decoding(beams, normalization)
                report.add(name, {f"{label} {split}": experiments.each_seed(run, split, decoding, metric)})
    report.notes.append(
        f"{metric}, per cent. All but the starts train for {experiments.scale.search_epochs} epochs from a converged "
        "start; each has as many trials of its learning rate and its own setting on validation data."
    )
    greedy, beam = "greedy test", f"beam {BEAMS} test"
    report.finding("greedy: hard scheduled sampling above CE trained on", (HARD, greedy), (BASELINE, greedy))
    report.finding("greedy: soft above hard scheduled sampling", (SOFT, greedy), (HARD, greedy))
    report.finding("beam: local search above CE trained on", (LOCAL, beam), (BASELINE, beam))
    report.finding("beam: global search above CE trained on", (GLOBAL_NORMALIZED, beam), (BASELINE, beam))
    report.finding("beam: global above local search", (GLOBAL_NORMALIZED, beam), (LOCAL, beam))
    if NGRAMS in report.columns:
        report.finding("4-grams: global above local search", (GLOBAL_NORMALIZED, NGRAMS), (LOCAL, NGRAMS))
    for name in [name for name in COSTS if name in report.rows]:
        report.finding(f"greedy: {name} above CE trained on", (name, greedy), (BASELINE, greedy))
