"""Runs a table or figure of the papers again: `python benchmarks/reproduce.py thesis-4.1`.

Writes `NAME.md` and `NAME.json` (raw runs, seeds, machine, command, date) to `benchmarks/results/`, or to
`benchmarks/results/quick/` with `--quick`, which is a reduced version of the same in under four minutes. `all` stands
for everything; with `--minutes` nothing new is begun after that time, and the same command goes on from there:
`all --minutes 0` rewrites the tables whose runs are all there, and says which remain.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script: the benchmarks package lies beside it

import torch
from transformers.utils import logging

from benchmarks.reproduction import (
    chain_lengths,
    chapter_3,
    chapter_4,
    chapter_5,
    chapter_6,
    conditional,
    conditional_figures,
    diagnostics,
    figure_3_1,
    long_outputs,
    parameter_search,
    residual,
    rewards,
    starts,
    storage,
)
from benchmarks.reproduction.chapter_6 import QUICK_ENERGY, EnergyCache, EnergyScale
from benchmarks.reproduction.completion import QUICK_COMPLETION, CompletionCache, CompletionScale
from benchmarks.reproduction.conditional import QUICK_CONDITIONAL, ConditionalCache, ConditionalScale
from benchmarks.reproduction.experiment_cache import QUICK, ExperimentCache, Scale
from benchmarks.reproduction.report import RESULTS, Report
from benchmarks.reproduction.residual_runs import QUICK_RESIDUAL, ResidualCache, ResidualScale
from benchmarks.reproduction.rewards import QUICK_REWARDS, REWARD_SCALE, RewardCache

AnyCache = ExperimentCache | CompletionCache | ResidualCache | EnergyCache | ConditionalCache
SCALES = {
    ExperimentCache: (Scale(), QUICK),
    ResidualCache: (ResidualScale(), QUICK_RESIDUAL),
    ConditionalCache: (ConditionalScale(), QUICK_CONDITIONAL),
    CompletionCache: (CompletionScale(), QUICK_COMPLETION),
    EnergyCache: (EnergyScale(), QUICK_ENERGY),
    RewardCache: (REWARD_SCALE, QUICK_REWARDS),
}


@dataclass(frozen=True)
class Table:
    """A table: its title, columns, what fills it, and where its models are trained."""

    title: str
    columns: list[str]
    fill: Callable[[AnyCache, Report], None]
    experiments: type[AnyCache] = ExperimentCache


_SPLITS = ("validation", "test")
_DECODINGS = [f"{kind} {split}" for kind in ("greedy", "hard beam", "soft beam") for split in _SPLITS]
_TAGGING = [f"{name}{label}" for name in ("unidirectional", "bidirectional") for label in ("", ", whole words")]
TABLES = {
    "starts": Table("the starts of chapters 3 to 5", starts.COLUMNS, starts.table_starts),
    "thesis-3.1": Table(
        "scheduled sampling, hard and soft",
        [f"{task} {split}" for task in ("stress F1", "g2p BLEU") for split in _SPLITS],
        chapter_3.table_3_1,
    ),
    "thesis-3.2": Table("schedules of teacher forcing", ["F1 validation", "F1 test"], chapter_3.table_3_2),
    "thesis-4.1": Table("relaxed beam search, accuracy of tags", _DECODINGS, chapter_4.table_4_1),
    "thesis-4.2": Table("relaxed beam search, macro F1 with label weights", _DECODINGS, chapter_4.table_4_2),
    "thesis-5.1": Table(
        "log Z with and without self-normalization",
        ["train mean", "train var", "dev mean", "dev var", "accuracy/BLEU"],
        chapter_5.table_5_1,
    ),
    "thesis-5.2": Table("tagging from a cross-entropy start", _TAGGING, chapter_5.table_5_2),
    "thesis-5.3": Table("tagging from a self-normalized start", _TAGGING, chapter_5.table_5_3),
    "thesis-5.4": Table(
        "transcription from both starts",
        [f"{name} {metric}" for name in ("regular", "self-normalized") for metric in ("BLEU", "PER", "words")],
        chapter_5.table_5_4,
    ),
    "thesis-5.5": Table(
        "n-gram overlap and length", [*(f"precision_{n}" for n in range(1, 5)), "length_ratio"], chapter_5.table_5_5
    ),
    "thesis-5.6": Table(
        "BLEU by input length", [f"{low}-{high - 1} letters" for low, high in chapter_5.LENGTHS], chapter_5.table_5_6
    ),
}
_COMPLETION = list(parameter_search.METRICS)
_ABLATION = ["Cost", "Nonterm", "PPL"]
TABLES |= {
    "mgs-1": Table("text completion, test", _COMPLETION, parameter_search.table_1, CompletionCache),
    "mgs-4": Table(
        "transcription: MGS, minimum risk, policy gradient",
        [f"{metric} {split}" for split in _SPLITS for metric in ("BLEU", "SBLEU", "MET.", "PER")],
        parameter_search.table_4,
    ),
    "mgs-6": Table("text completion, validation", _COMPLETION, parameter_search.table_6, CompletionCache),
    "mgs-7": Table("parts of the proposal", _ABLATION, parameter_search.table_7, CompletionCache),
    "mgs-figure-4": Table("sharpness of the weights", _ABLATION, parameter_search.table_figure_4, CompletionCache),
}
TABLES["thesis-6.1"] = Table(
    "energies by likelihood, pseudolikelihood, masking", chapter_6.COLUMNS, chapter_6.table_6_1, EnergyCache
)
TABLES |= {
    f"thesis-6.{number}": Table(title, columns, fill, ConditionalCache)
    for number, title, columns, fill in (
        (2, "temperature of the proposal", conditional.ENTROPY_COLUMNS, conditional.table_6_2),
        (3, "nucleus of the proposal", conditional.ENTROPY_COLUMNS, conditional.table_6_3),
        (4, "block sampling", list(conditional.BLOCK_NAMES), conditional.table_6_4),
        (5, "strength of annealing", conditional.ANNEALED_COLUMNS, conditional.table_6_5),
        (6, "sampling around the modes, test words", conditional.TEST_COLUMNS, conditional.table_6_6),
    )
}
TABLES |= {
    f"long-{task}": Table(
        f"{title}, all objectives", long_outputs.columns(task), functools.partial(long_outputs.table, task)
    )
    for task, title in (
        ("stress-phrases", "stress of phrases"),
        ("g2p-phrases", "pronunciation of phrases"),
        ("translation", "translation of verses"),
    )
}
TABLES |= {
    f"rewards-{task}": Table(
        f"sequence-level training by rewards, {task}",
        rewards.columns(task),
        functools.partial(rewards.table, task),
        RewardCache,
    )
    for task in rewards.TASKS_OF_REWARDS
}
TABLES |= {
    "exposure": Table("why 3.1: errors after an error", diagnostics.EXPOSURE_COLUMNS, diagnostics.table_exposure),
    "label-bias": Table("why 5.3 to 5.6: gains by vowel", diagnostics.VOWELS, diagnostics.table_label_bias),
    "room": Table("why mgs-4: the best of a model's samples", diagnostics.ROOM_COLUMNS, diagnostics.table_room),
}
TABLES |= {
    "blocks": Table(
        "why 6.4: longer chains", chain_lengths.BLOCK_COLUMNS, chain_lengths.table_blocks, ConditionalCache
    ),
    "annealing": Table(
        "why 6.6: the thesis' number of epochs",
        list(conditional.FINAL_NAMES),
        chain_lengths.table_annealing,
        ConditionalCache,
    ),
}
TABLES["starts-verses"] = Table(
    "the starts of residual models", ["epochs", "loss", "trained on", "gain"], residual.table_starts, ResidualCache
)
TABLES["residual-1"] = Table("residual models, perplexity", residual.COLUMNS, residual.table_1, ResidualCache)
TABLES["residual-scale"] = Table(
    "residual models by the size of the corpus and the number of negatives",
    residual.SCALE_COLUMNS,
    residual.table_scale,
    ResidualCache,
)
FIGURES = {
    "thesis-figure-3.1": ("the objective along a line in parameter space", figure_3_1.draw),
    "thesis-figure-6.1": ("a masked model projected onto an energy", chapter_6.draw_projection),
    "thesis-figures-6.2-6.3-6.4": ("energy, metric and acceptance by epoch", conditional_figures.draw_epochs),
    "energy-and-metric": ("energy against phoneme errors", conditional_figures.draw_correlation),
    "mgs-figures-1-2-3": ("cost and weights in training", parameter_search.draw_training),
    "residual-figure-scale": ("residual models by size of corpus and number of negatives", residual.draw_scale),
    "residual-figures-1-2-3": ("residual models by position, samples, n-grams, log probability", residual.draw),
}


# `all` leaves to the end what takes longest, and what neither starts nor settings changed.
LAST = {
    "long-translation",
    "rewards-g2p-t5",
    "rewards-translation",
    "rewards-translation-t5",
    "mgs-1",
    "mgs-6",
    "mgs-7",
    "mgs-figure-4",
    "mgs-figures-1-2-3",
    "thesis-figure-6.1",
    "thesis-figures-6.2-6.3-6.4",
    "energy-and-metric",
} | {f"thesis-6.{number}" for number in range(1, 7)}


@functools.cache  # tables share data and models
def experiments_of(kind: type[AnyCache], quick: bool, folder: Path) -> AnyCache:
    """The experiment cache of that kind, at full size or quick."""
    return kind(SCALES[kind][quick], folder)


def main() -> None:
    """Lists or runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="tables or figures, see --list; or all")
    parser.add_argument("--list", action="store_true", help="name everything that can be run")
    parser.add_argument("--quick", action="store_true", help="a reduced version of it, in under four minutes")
    parser.add_argument("--minutes", type=float, help="begin nothing new after so long; run again to go on")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--work_dir",
        type=Path,
        default=RESULTS / "work",
        help="keeps trained models, which tables share, and which go on where they were stopped",
    )
    arguments = parser.parse_args()
    if arguments.list:
        for name, table in TABLES.items():
            print(f"{name:18} {table.title}")
        for name, (title, _) in FIGURES.items():
            print(f"{name:18} {title}")
        return
    in_order = sorted([*TABLES, *FIGURES], key=LAST.__contains__)
    names = in_order if arguments.names == ["all"] else arguments.names
    unknown = [name for name in names if name not in TABLES and name not in FIGURES]
    if unknown or not names:
        parser.error(f"NAME must be one of those that --list names, got {', '.join(unknown) or 'none'}")
    try:
        storage.check_folder(arguments.work_dir)
    except ValueError as error:
        parser.error(str(error))
    if arguments.minutes is not None:
        storage.Deadline.at = time.monotonic() + 60 * arguments.minutes
    torch.set_num_threads(arguments.threads)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    results = RESULTS / "quick" if arguments.quick else RESULTS
    storage.Record.path = None if arguments.quick else RESULTS / "runs.jsonl"
    out_of_time, failed = [], []
    for name in names:
        try:
            run(name, arguments.quick, results, arguments.work_dir)
        except storage.OutOfTime:
            out_of_time.append(name)
        except Exception:  # the other tables' runs don't depend on it
            traceback.print_exc()
            failed.append(name)
    if out_of_time:
        print(f"Run the same command again to go on with: {', '.join(out_of_time)}", flush=True)
    if failed:
        sys.exit(f"Failed, see above: {', '.join(failed)}")


def run(name: str, quick: bool, results: Path, folder: Path) -> None:
    """Fills and writes a table, or draws a figure."""
    if name in FIGURES:
        print(f"{name}: {FIGURES[name][1](results, quick, folder)}", flush=True)
        return
    experiments = experiments_of(TABLES[name].experiments, quick, folder)
    experiments.used.clear()
    report = Report(name, TABLES[name].title, TABLES[name].columns, list(experiments.scale.seeds))
    if isinstance(experiments, ExperimentCache | ResidualCache):
        experiments.trials.clear()
        report.raw["trials"] = experiments.trials
    if isinstance(experiments, ExperimentCache):
        experiments.machines.clear()
        report.machines = experiments.machines
    TABLES[name].fill(experiments, report)
    print(report.save(results, sum(experiments.used.values())), flush=True)


if __name__ == "__main__":
    main()
