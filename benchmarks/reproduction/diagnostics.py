"""Experiments that tell apart the likeliest reasons why a claim isn't seen, with the models of other tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.reproduction.chapter_3 import METRIC, ROWS, scheduled_sampling
from benchmarks.reproduction.chapter_4 import BEAMS, converged_start, soft_beam, trained_on
from benchmarks.reproduction.chapter_5 import LOG_Z_WEIGHT
from benchmarks.reproduction.experiment_cache import Decoding, ExperimentCache, RunConfig
from benchmarks.reproduction.parameter_search import for_cost
from benchmarks.reproduction.report import Report
from benchmarks.reproduction.tasks import TASKS
from hf_ebm.objectives.sequence_costs import sentence_bleu_cost

UNDECIDED = "-"  # the label of consonants, which have nothing to decide
BASELINE, HARD, SOFT = "CE, trained on", "scheduled sampling, hard", "scheduled sampling, soft"
FORCED, OWN, FORCED_AFTER, OWN_AFTER = (
    f"{after}{whose} prefix" for after in ("", "after an error, ") for whose in ("gold", "own")
)
EXPOSURE_COLUMNS = [FORCED, OWN, FORCED_AFTER, OWN_AFTER, "exposure"]
VOWELS = ["first vowel", "between", "last vowel"]
DRAWN = 8
ROOM_COLUMNS = ["greedy", f"mean of {DRAWN}", f"best of {DRAWN}"]

Labels = Sequence[Sequence[str]]


def table_exposure(experiments: ExperimentCache, report: Report) -> None:
    """Errors of taggers with gold and own prefixes: is there an exposure bias, and does scheduled sampling lower it?

    Where prefixes say little, errors after a first error are as many with the gold prefix as with the model's own:
    then scheduled sampling has nothing to mend. Where they are more with its own, the objective doesn't mend it.
    """
    for task in ("stress", "stress-phrases"):
        metric = METRIC.get(task, TASKS[task].selection)
        runs = {BASELINE: trained_on(experiments, converged_start(experiments, task))}
        for name, row in ((HARD, "Bengio et al. 2015, greedy"), (SOFT, "α-soft fixed, greedy")):
            runs[name] = scheduled_sampling(experiments, task, metric, **ROWS[row])
        for name, run in runs.items():
            found = [_exposure(experiments, run, seed) for seed in experiments.scale.seeds]
            report.add(f"{task}, {name}", {column: [one[column] for one in found] for column in EXPOSURE_COLUMNS})
        row = f"{task}, {BASELINE}"
        report.finding(f"{task}: an own prefix with an error brings more errors", (row, OWN_AFTER), (row, FORCED_AFTER))
        for name in (HARD, SOFT):
            better, worse = (row, "exposure"), (f"{task}, {name}", "exposure")
            report.finding(f"{task}: {name} lowers them", better, worse)
    report.notes.append(
        "Wrong labels of vowels, per cent, validation, greedy. After an error: vowels that follow the first wrong one "
        "of the model's own output, labelled after the gold prefix and after its own. Exposure: their difference."
    )


def _exposure(experiments: ExperimentCache, run: RunConfig, seed: int) -> dict[str, float]:
    def compute() -> dict[str, float]:
        gold = experiments.task(run.task).texts["validation"]["target"]
        own = experiments.outputs(run, seed, "validation", Decoding())
        forced = experiments.forced_outputs(run, seed, "validation")
        return exposure(*([text.split() for text in texts] for texts in (gold, forced, own)))

    return experiments.kept("exposure", run, seed, compute)


def exposure(gold: Labels, forced: Labels, own: Labels) -> dict[str, float]:
    """Per cent of wrong labels of vowels with gold and own prefixes, and after the first wrong one of the own output.

    Args:
        gold: labels of each row.
        forced: predicted after the gold prefix.
        own: predicted after what was predicted before; a label that is missing is wrong.
    """
    wrong_forced, wrong = _wrong(gold, forced), _wrong(gold, own)
    after = [row.index(True) + 1 if True in row else len(row) for row in wrong]
    parts = {FORCED: wrong_forced, OWN: wrong}
    parts[FORCED_AFTER], parts[OWN_AFTER] = (
        [row[start:] for row, start in zip(rows, after, strict=True)] for rows in (wrong_forced, wrong)
    )
    found = {
        name: 100 * statistics.fmean([flag for row in rows for flag in row] or [0]) for name, rows in parts.items()
    }
    return {**found, "exposure": found[OWN_AFTER] - found[FORCED_AFTER]}


def table_label_bias(experiments: ExperimentCache, report: Report) -> None:
    """Where global normalization gains: label bias loses what comes later in the input.

    A unidirectional encoder has not seen it when it labels the first vowel; it has when it labels the last, as a
    bidirectional one always has. Gains of label bias are those of the first vowel of a unidirectional tagger.
    """
    for encoder, bidirectional in (("unidirectional", False), ("bidirectional", True)):
        start = converged_start(experiments, "stress", bidirectional, LOG_Z_WEIGHT)
        for normalization in ("local", "global"):
            run = soft_beam(experiments, start, "accuracy", normalization=normalization)
            decoding = Decoding(BEAMS, normalization)
            found = [_by_vowel(experiments, run, seed, decoding) for seed in experiments.scale.seeds]
            report.add(f"{encoder}, {normalization}", {place: [one[place] for one in found] for place in VOWELS})
        better, worse = (report.rows[f"{encoder}, {normalization}"] for normalization in ("global", "local"))
        gains = {place: [a - b for a, b in zip(better[place], worse[place], strict=True)] for place in VOWELS}
        report.add(f"{encoder}, gain", gains)
        for place in VOWELS:
            cells = ((f"{encoder}, {normalization}", place) for normalization in ("global", "local"))
            report.finding(f"{encoder}, {place}: global above local", *cells)
        row = f"{encoder}, gain"
        report.finding(f"{encoder}: more at the first vowel than at the last", (row, VOWELS[0]), (row, VOWELS[-1]))
    report.notes.append(
        "Accuracy of stress, validation, hard beam search, from the self-normalized starts (the models of table 5.3)."
    )


def _by_vowel(experiments: ExperimentCache, run: RunConfig, seed: int, decoding: Decoding) -> dict[str, float]:
    def compute() -> dict[str, float]:
        gold = experiments.task(run.task).texts["validation"]["target"]
        own = experiments.outputs(run, seed, "validation", decoding)
        return accuracy_by_vowel([text.split() for text in gold], [text.split() for text in own])

    return experiments.kept("by-vowel", run, seed, compute)


def accuracy_by_vowel(gold: Labels, own: Labels) -> dict[str, float]:
    """Per cent of right labels of each row's first vowel, its last, and those between."""
    wrong = _wrong(gold, own)
    parts = ([row[:1] for row in wrong], [row[1:-1] for row in wrong], [row[-1:] for row in wrong])
    return {
        place: 100 - 100 * statistics.fmean([flag for row in rows for flag in row] or [0])
        for place, rows in zip(VOWELS, parts, strict=True)
    }


def _wrong(gold: Labels, found: Labels) -> list[list[bool]]:
    """Whether each vowel's label is wrong."""
    return [
        [at >= len(labels) or labels[at] != truth for at, truth in enumerate(truths) if truth != UNDECIDED]
        for truths, labels in zip(gold, found, strict=True)
    ]


def table_room(experiments: ExperimentCache, report: Report) -> None:
    """What a model's own samples would gain by the cost: is there room for minimum risk and MGS, or is it the search?

    Minimum risk moves probability to a model's better samples. If the best of a few samples is hardly better than its
    greedy output there is no room; if it is, and the mean of the samples comes nearer to it, the objective works.
    """
    start = converged_start(experiments, "g2p")
    runs = {"MLE": start, "MLE, trained on": trained_on(experiments, start)}
    runs |= {name: for_cost(experiments, start, name, "sentence_bleu") for name in ("MGS-SBLEU", "MRT")}
    for name, run in runs.items():
        found = [_room(experiments, run, seed) for seed in experiments.scale.seeds]
        report.add(name, {column: [one[column] for one in found] for column in ROOM_COLUMNS})
    report.finding("room: the best sample above the greedy output", ("MLE", ROOM_COLUMNS[2]), ("MLE", "greedy"))
    for name in ("MGS-SBLEU", "MRT"):
        for column in ROOM_COLUMNS:
            report.finding(f"{column}: {name} above MLE, trained on", (name, column), ("MLE, trained on", column))
    report.notes.append(f"Grapheme-to-phoneme, validation, sentence BLEU; {DRAWN} samples of each word.")


def _room(experiments: ExperimentCache, run: RunConfig, seed: int) -> dict[str, float]:
    def compute() -> dict[str, float]:
        references = list(experiments.task(run.task).texts["validation"]["references"])
        greedy = experiments.outputs(run, seed, "validation", Decoding())
        drawn = experiments.drawn_outputs(run, seed, "validation", DRAWN)
        scores = [[100 * (1 - float(cost)) for cost in sentence_bleu_cost(texts, references)] for texts in drawn]
        values = (
            100 * (1 - float(sentence_bleu_cost(greedy, references).mean())),
            statistics.fmean(statistics.fmean(row) for row in scores),
            statistics.fmean(max(of_word) for of_word in zip(*scores, strict=True)),
        )
        return dict(zip(ROOM_COLUMNS, values, strict=True))

    return experiments.kept("room", run, seed, compute)
