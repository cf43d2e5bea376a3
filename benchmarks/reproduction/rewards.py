"""Training by rewards of what is decoded: transcription by phoneme errors, translation by chrF; an LSTM and a small T5.

The policy gradient's leave-one-out baseline, GRPO and ranking beside minimum risk, from a converged start, and minimum
Bayes risk decoding of each. Every method has the same candidates a row, trials and epochs.
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.reproduction.chapter_4 import BASELINE, RATES, START, converged_start, trained_on
from benchmarks.reproduction.experiment_cache import Decoding, ExperimentCache, RunConfig, Scale
from benchmarks.reproduction.report import Report
from benchmarks.reproduction.tasks import chrf

CANDIDATES = 4
SAMPLES = 16  # of which minimum Bayes risk decoding chooses
REWARD_SCALE = Scale(search_epochs=1, seeds=(1, 2, 3))
QUICK_REWARDS = Scale(64, 16, 2, 1, 1, 1, 2, (1, 2))
# name: (objective, its settings, the one that is chosen beside the rate)
METHODS: dict[str, tuple[str, dict, dict[str, tuple]]] = {
    "minimum risk": ("minimum-risk", {}, {"sharpness": (1.0, 0.1)}),
    "RLOO": ("policy-gradient", {"baseline": "leave_one_out"}, {"cross_entropy_weight": (0.0, 0.1)}),
    "GRPO": ("grpo", {}, {"kl_weight": (0.0, 0.04)}),
    "ranking": ("ranking", {}, {"candidates": ("sampling", "beams")}),
}
LEAST_RISK = ", least risk"


class RewardCache(ExperimentCache):
    """Runs of fewer seeds and epochs than the other tables', whose starts it shares."""


class RewardTask(NamedTuple):
    """What a task is trained for: a name of `REWARDS`, the cost of decoding, and the metric of what was reached."""

    reward: str
    cost: object
    metric: str
    sign: int  # -1 where less is better
    epochs: float  # of every method, at most


def chrf_cost(predictions: list[str], references: list[str]) -> list[float]:
    """1 less chrF, from 0 to 1."""
    return [1 - value for value in chrf(predictions, references)]


_OF_PHONEMES = RewardTask("phoneme_error", "phoneme_error", "phoneme_error_rate", -1, 1)
_OF_VERSES = RewardTask("chrf", chrf_cost, "chrf", 1, 0.5)
TASKS_OF_REWARDS = {
    "g2p": _OF_PHONEMES, "g2p-t5": _OF_PHONEMES, "translation": _OF_VERSES, "translation-t5": _OF_VERSES,
}  # fmt: skip


def columns(task: str) -> list[str]:
    """The metric of the reward by split and decoding, and BLEU."""
    metric = TASKS_OF_REWARDS[task].metric
    splits = [f"{metric} {split}{decoding}" for split in ("validation", "test") for decoding in ("", LEAST_RISK)]
    return [*splits, "bleu test"]


def table(task: str, experiments: ExperimentCache, report: Report) -> None:
    """Each method, decoded greedily and by minimum Bayes risk of its own samples."""
    kind = TASKS_OF_REWARDS[task]
    start = converged_start(experiments, task)
    runs, epochs = (
        {START: start, BASELINE: trained_on(experiments, start)},
        kind.epochs * experiments.scale.search_epochs,
    )
    for name, (objective, settings, own) in METHODS.items():
        run = start.then(
            objective,
            epochs,
            RATES[0],
            reward=kind.reward,
            num_candidates=CANDIDATES,
            **settings,
        )
        runs[name] = experiments.chosen(run.varied(learning_rate=RATES, **own), Decoding(), kind.metric, kind.sign)
    seeds = experiments.scale.seeds
    for name, run in runs.items():
        for split in ("validation", "test"):
            column = f"{kind.metric} {split}"
            report.add(name, {column: experiments.each_seed(run, split, Decoding(), kind.metric)})
            least = [_least_risk(experiments, run, seed, split, kind.cost)[kind.metric] for seed in seeds]
            report.add(name, {f"{column}{LEAST_RISK}": least})
        report.add(name, {"bleu test": experiments.each_seed(run, "test", Decoding(), "bleu")})
    report.notes.append(
        f"{kind.metric}, {'lower' if kind.sign < 0 else 'higher'} is better; greedy, and of {SAMPLES} samples that of "
        "the least expected cost. All but the start train on from it: cross entropy for "
        f"{experiments.scale.search_epochs} more epochs, the others for {epochs:g} on the reward {kind.reward} of "
        f"{CANDIDATES} candidates a row; each has as many trials on validation data, of its learning rate and one "
        "setting of its own."
    )
    test = f"{kind.metric} test"
    for name in METHODS:
        for reference in (START, BASELINE):
            better, worse = [(name, test), (reference, test)][:: kind.sign]
            report.finding(f"{test}: {name} better than {reference}", better, worse)
    better, worse = [(START, test + LEAST_RISK), (START, test)][:: kind.sign]
    report.finding(f"{test}: of the start, least risk better than greedy", better, worse)


def _least_risk(experiments: ExperimentCache, run: RunConfig, seed: int, split: str, cost: object) -> dict[str, float]:
    def compute() -> dict[str, float]:
        task = experiments.task(run.task)
        return task.kind.scores(experiments.least_risk_outputs(run, seed, split, cost, SAMPLES), task.texts[split])

    return experiments.kept("least_risk", run, seed, compute, split, SAMPLES)
