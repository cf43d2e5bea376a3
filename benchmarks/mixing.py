"""How fast samplers mix: each target by each sampler, at equal budgets of masked rows, against references.

A run is a target, a sampler, a seed, a number of chains and a budget of rows. It is appended to a file of JSON lines,
and left out where that holds it already, so measuring goes on over days; tables are made of the file (`--minutes 0`
runs nothing). Chains start at the model's own fill, an epoch old, the same for all samplers of a seed. Of every
estimate the first quarter of draws is left out. Seconds are CPU time of this process.

A target's reference is exact where it can be (enumeration, the transfer matrix), else the runs of ten times the budget
that the file holds, which `--references` makes. Errors are of the mean energy and of a token's share of the free
positions: the greater of the distance from the reference and the standard error over chains.

`--targets toy --rows 1000` takes seconds, the whole table, `--references`, an hour of a core.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from transformers.utils import logging

from benchmarks.common import describe_machine, print_table
from benchmarks.mixing_measures import LAG, errors_at, measured, pooled, reference_of, rows_to
from benchmarks.mixing_samplers import SAMPLERS
from benchmarks.mixing_targets import TARGETS, Target

FILE = Path(__file__).parent / "results" / "mixing.jsonl"
KEY = ("target", "sampler", "seed", "chains", "budget")
MAIN_TARGETS = [
    "toy", "sharp toy", "Ising 10x10", "Potts 10x10, 3 states", "embedded 4 of 16 words", "embedded 4", "embedded 8",
    "embedded 12", "reaction 8",
]  # fmt: skip
MAIN_SAMPLERS = [
    "careful loop", "single site", "pairs", "1 and 3", "pairs, 4 replicas", "SMC of 64", "Gibbs with gradients",
    "discrete Langevin",
]  # fmt: skip
REFERENCE = "pairs"  # what makes a reference where none is exact
INDEPENDENT = 1000  # draws whose error is to be reached where sequences can be listed


@cache
def target_of(name: str) -> Target:
    """The target of a name, made once."""
    return TARGETS[name]()


def run(target: str, sampler: str, seed: int, chains: int, budget: int) -> dict:
    """One run's line."""
    law = target_of(target)
    start = law.starts(chains, seed)
    began = time.process_time()
    draws = SAMPLERS[sampler](law, start, budget, seed + 1)
    seconds = time.process_time() - began
    said = dict(zip(KEY, (target, sampler, seed, chains, budget), strict=True))
    return said | measured(draws, seconds, law.token)


def add(said: dict, path: Path) -> None:
    """Appends a line, with where it was made."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=FILE.parent)
    origin = {"commit": commit.stdout.strip(), "machine": describe_machine()}
    with path.open("a") as file:
        file.write(json.dumps(said | origin) + "\n")


def lines(path: Path) -> list[dict]:
    """The runs of a file, if there is one."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


Groups = dict[tuple[str, int], dict[str, list[dict]]]


def by_sampler(found: list[dict], chosen: argparse.Namespace) -> Groups:
    """The runs of each target and budget by sampler."""
    groups: Groups = defaultdict(lambda: defaultdict(list))
    for line in found:
        if "known" not in line and line["target"] in chosen.targets and line["sampler"] in chosen.samplers:
            groups[line["target"], line["budget"]][line["sampler"]].append(line)
    return groups


def mean_of(runs: list[dict], name: str) -> float:
    """Of a figure, which particles may not have, over runs; harmonic if it is by spread, whose errors have a mean."""
    values = [line.get(name, math.nan) for line in runs]
    return statistics.harmonic_mean(values) if name.startswith("spread_") else statistics.fmean(values)


MIXING = [
    "target", "rows", "sampler", "seeds", "s", "mean energy ± s.e.", "worst R-hat: energy", "tokens", "ESS/1000 rows",
    "ESS/s", "ESS/s vs loop", "by spread: ESS/1000 rows", "ESS/s", "ESS/s vs loop", "changes/1000 rows",
    f"tokens kept after {LAG} rows a chain",
]  # fmt: skip


def mixing_table(groups: Groups) -> Iterator[list]:
    """A row for each target, budget and sampler: means over seeds, the worst R-hat."""
    for (target, budget), samplers in groups.items():
        for name, runs in samplers.items():
            energy, error, _, _ = pooled(runs)
            row = [target, f"{budget:,}", name, len(runs), mean_of(runs, "seconds"), f"{energy:.2f} ± {error:.2f}"]
            row += [max(line.get(field, math.nan) for line in runs) for field in ("r_hat", "r_hat_tokens")]
            for kind in ("", "spread_"):
                per_second, loop = f"{kind}ess_per_second", samplers.get("careful loop")
                row += [mean_of(runs, f"{kind}ess_per_1000_rows"), mean_of(runs, per_second)]
                row += [row[-1] / mean_of(loop, per_second) if loop else math.nan]
            yield [*row, mean_of(runs, "changes_per_1000_rows"), mean_of(runs, "tokens_kept")]


def replicas_table(groups: Groups) -> Iterator[list]:
    """A row for each target, budget and sampler with replicas: means over chains, of the first seed."""
    for (target, budget), samplers in groups.items():
        for name, (line, *_) in samplers.items():
            if "round_trips" in line:
                shown = [", ".join(f"{value:.2f}" for value in line[field]) for field in ("temperatures", "swap_rates")]
                yield [target, f"{budget:,}", name, *shown, line["round_trips"]]


def error_table(groups: Groups, found: list[dict], chosen: argparse.Namespace) -> Iterator[list]:
    """A row for each target, budget and sampler: its errors, and what it spends to come within the given ones."""
    for (target, budget), samplers in groups.items():
        reference = reference_of(target, budget, found)
        if reference is None:
            continue
        for name, runs in samplers.items():
            errors = errors_at(runs, reference)
            pace = statistics.fmean(line["seconds"] / line["rows"] for line in runs)
            spent = [
                rows_to([(one[0], one[place]) for one in errors], least)
                for place, least in ((1, chosen.energy_error), (2, chosen.share_error))
            ]
            shown = ["not reached" if rows is None else f"{rows:,} ({rows * pace:.3g} s)" for rows in spent]
            yield [target, f"{budget:,}", name, len(runs), errors[-1][1], errors[-1][2], *shown]


def references_table(groups: Groups, found: list[dict]) -> Iterator[list]:
    """What errors are counted from."""
    for target, budget in groups:
        one = reference_of(target, budget, found)
        if one is not None:
            energy, share = f"{one.energy:.2f} ± {one.energy_se:.2f}", f"{one.share:.4f} ± {one.share_se:.4f}"
            yield [target, f"{budget:,}", energy, share, one.source]


def independence_table(groups: Groups, found: list[dict]) -> Iterator[list]:
    """What it takes to have the error of independent draws, which cost nothing once all sequences are listed."""
    for (target, budget), samplers in groups.items():
        reference = reference_of(target, budget, found)
        if reference is None or not reference.source.startswith("enumeration"):
            continue
        listed = int(reference.source.split()[1].replace(",", ""))
        for name, runs in samplers.items():
            rows = 1000 * INDEPENDENT / mean_of(runs, "spread_ess_per_1000_rows")
            yield [target, f"{budget:,}", name, f"{listed:,}", f"{rows:,.0f}", rows / listed]


def print_tables(found: list[dict], chosen: argparse.Namespace) -> None:
    """All tables of the runs of a file."""
    groups = by_sampler(found, chosen)
    print_table(MIXING, mixing_table(groups))
    print()
    print_table(
        ["target", "rows", "sampler", "temperatures", "swap rates", "round trips a chain"], replicas_table(groups)
    )
    print()
    print_table(["target", "rows", "mean energy", "token's share", "reference"], references_table(groups, found))
    print()
    header = ["target", "rows", "sampler", "seeds", "error of the mean energy", "of the token's share"]
    header += [f"rows (s) to {chosen.energy_error} nats", f"rows (s) to {chosen.share_error}"]
    print_table(header, error_table(groups, found, chosen))
    print()
    header = ["target", "rows", "sampler", "rows of listing all", f"rows to {INDEPENDENT} effective samples", "ratio"]
    print_table(header, independence_table(groups, found))


def main() -> None:
    """Makes the runs that the file lacks, and prints its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=MAIN_TARGETS)
    parser.add_argument("--samplers", nargs="+", choices=list(SAMPLERS), default=MAIN_SAMPLERS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--chains", type=int, default=16)
    parser.add_argument("--rows", type=int, default=20_000, help="budget of masked rows")
    parser.add_argument("--references", action="store_true", help="then runs of ten times the budget for errors")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no run after this time")
    parser.add_argument("--energy_error", type=float, default=1.0, help="nats that the mean energy may be away")
    parser.add_argument("--share_error", type=float, default=0.01, help="how far the token's share may be away")
    parser.add_argument("--file", type=Path, default=FILE, help="runs, a line each")
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    logging.disable_progress_bar()
    until = time.monotonic() + 60 * chosen.minutes
    found = lines(chosen.file)
    there = {tuple(line[name] for name in KEY) for line in found if "known" not in line}
    known = {line["target"] for line in found if "known" in line}
    wanted = [
        (target, sampler, seed, chosen.chains, chosen.rows)
        for seed, target, sampler in itertools.product(chosen.seeds, chosen.targets, chosen.samplers)
    ]
    if chosen.references:
        wanted += [(target, REFERENCE, 0, chosen.chains, 10 * chosen.rows) for target in chosen.targets]
    for key in wanted:
        if key in there or time.monotonic() >= until:
            continue
        target, *_, rows = key
        law = target_of(target)
        if law.is_known and target not in known:
            add({"target": target, "known": law.known()}, chosen.file)
            known.add(target)
        if not (law.is_known and rows > chosen.rows):
            add(run(*key), chosen.file)
    print_tables(lines(chosen.file), chosen)


if __name__ == "__main__":
    main()
