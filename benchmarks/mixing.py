"""How fast samplers mix: each target by each sampler, at equal budgets of masked rows, against references.

A run is a target, a sampler, a seed, a number of chains and a budget of rows. It is appended to a file of JSON lines,
and left out where that holds it already, so measuring goes on over days; tables are made of the file (`--minutes 0`
runs nothing). Chains start at the model's own fill, an epoch old, the same for all samplers of a seed. Of every
estimate the first quarter of draws is left out. Seconds are CPU time of this process.

The reference of a target is its exact law where it can be enumerated, else the runs made with `--reference`, which
have ten times the budget. Errors are of the mean energy and of a token's share of the free positions: the greater of
the distance from the reference and the standard error over chains.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from transformers.utils import logging

from benchmarks.common import describe_machine, print_table
from benchmarks.mixing_samplers import SAMPLERS, Draws
from benchmarks.mixing_targets import TARGETS, MaskedTarget
from hf_ebm.sampling.convergence import energy_diagnostics

FILE = Path(__file__).parent / "results" / "mixing.jsonl"
KEY = ("target", "sampler", "seed", "chains", "budget")
CHECKPOINTS = 8  # an estimate after this share of the draws each: 2^-7 … 1
LAG = 2_000  # masked rows a chain after which tokens are compared


def kept(draws: torch.Tensor) -> torch.Tensor:
    """Draws (C, D, …) without the first quarter."""
    return draws[:, draws.shape[1] // 4 :]


def over_chains(values: torch.Tensor) -> tuple[float, float]:
    """Mean of (C, D) and its standard error over chains."""
    means = values.double().mean(1)
    return float(means.mean()), float(means.std() / len(means) ** 0.5)


def tokens_kept(states: torch.Tensor, lag: int) -> float:
    """Share of the tokens of `states` (C, epochs, L) still there `lag` epochs later, above chance.

    Chance is how often two chains agree: 0 says that the tokens are forgotten, 1 that none has moved.
    """
    if lag >= states.shape[1]:
        return math.nan
    chains = len(states)
    same = sum(float((states == other).double().mean()) for other in states)  # each with itself among them
    chance = (same - 1) / (chains - 1)
    kept = float((states[:, lag:] == states[:, :-lag]).double().mean())
    return (kept - chance) / (1 - chance)


def measured(draws: Draws, seconds: float, token: int, pilot: torch.Tensor) -> dict:
    """What a line of the file says of draws.

    Args:
        token: whose share is estimated.
        pilot: (L,) a state that draws' distances are taken to, in tokens.
    """
    count = draws.energies.shape[1]
    energies, states = kept(draws.energies), kept(draws.states)
    share = energies.shape[1] / count
    of_energy = energy_diagnostics(energies)
    of_distance = energy_diagnostics((states != pilot).sum(-1))
    estimates = []
    for part in range(CHECKPOINTS):
        end = count >> (CHECKPOINTS - 1 - part)
        if end < 4:
            continue
        found = (
            over_chains(kept(draws.energies[:, :end])),
            over_chains((kept(draws.states[:, :end]) == token).double().mean(-1)),
        )
        estimates.append([round(draws.rows * end / count), *(round(value, 6) for pair in found for value in pair)])
    return {
        "rows": draws.rows, "seconds": round(seconds, 3), "draws": count,
        "mean_energy": estimates[-1][1], "mean_energy_se": estimates[-1][2],
        "sd_energy": float(energies.std()), "min_energy": float(draws.energies.min()),
        "r_hat": of_energy.r_hat, "r_hat_distance": of_distance.r_hat,
        "ess_per_1000_rows": 1000 * of_energy.ess_bulk / (draws.rows * share),
        "ess_per_second": of_energy.ess_bulk / (seconds * share),
        "distance_ess_per_1000_rows": 1000 * of_distance.ess_bulk / (draws.rows * share),
        "changes_per_1000_rows": 1000 * draws.changed / draws.rows,
        "tokens_kept": tokens_kept(states, max(1, round(LAG * len(energies) * count / draws.rows))),
        "estimates": estimates,
    }  # fmt: skip


@cache
def target_of(name: str) -> MaskedTarget:
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
    return said | measured(draws, seconds, law.token, start[0, law.columns])


def origin() -> dict:
    """Where and by what a line was made."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=FILE.parent)
    return {
        "commit": commit.stdout.strip(), "machine": describe_machine(), "command": " ".join(sys.argv[1:]),
        "torch": torch.__version__,
    }  # fmt: skip


def lines(path: Path) -> list[dict]:
    """The runs of a file, if there is one."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Reference(NamedTuple):
    """Mean energy and the token's share, with their standard errors, and where they come from."""

    energy: float
    energy_se: float
    share: float
    share_se: float
    source: str


@cache
def exact_reference(name: str) -> Reference | None:
    """By enumeration, or `None`."""
    law = target_of(name)
    exact = law.exact()
    if exact is None:
        return None
    probabilities = exact.log_probabilities.exp()
    share = (exact.sequences == law.token).double().mean(1)
    return Reference(float(probabilities @ exact.energy), 0.0, float(probabilities @ share), 0.0, "enumeration")


def reference_of(name: str, found: list[dict]) -> Reference | None:
    """The exact law's, else the mean of runs that were made as references."""
    runs = [line for line in found if line["target"] == name and line.get("reference")]
    if not runs:
        return exact_reference(name)
    count, estimates = len(runs), [line["estimates"][-1] for line in runs]
    energy, share = (statistics.fmean(one[place] for one in estimates) for place in (1, 3))
    errors = (math.sqrt(sum(one[place] ** 2 for one in estimates)) / count for place in (2, 4))
    energy_se, share_se = errors
    rows, r_hat = sum(line["rows"] for line in runs), max(line["r_hat"] for line in runs)
    source = f"{', '.join(sorted({line['sampler'] for line in runs}))}, {rows:,} rows, R-hat {r_hat:.2f}"
    return Reference(energy, energy_se, share, share_se, source)


def by_sampler(found: Iterable[dict], chosen: argparse.Namespace) -> dict[tuple[str, int], dict[str, list[dict]]]:
    """The runs of each target and budget by sampler."""
    groups: dict[tuple[str, int], dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for line in found:
        if line["target"] in chosen.targets and line["sampler"] in chosen.samplers and not line.get("reference"):
            groups[line["target"], line["budget"]][line["sampler"]].append(line)
    return groups


def mixing_table(found: list[dict], chosen: argparse.Namespace) -> Iterator[list]:
    """A row for each target, budget and sampler: means over seeds, the worst R-hat."""
    mean = lambda runs, name: statistics.fmean(line[name] for line in runs)  # noqa: E731
    for (target, budget), samplers in by_sampler(found, chosen).items():
        base = samplers.get("careful loop", [])
        for name, runs in samplers.items():
            energy = mean(runs, "mean_energy")
            error = math.sqrt(sum(line["mean_energy_se"] ** 2 for line in runs)) / len(runs)
            per_row, per_second = mean(runs, "ess_per_1000_rows"), mean(runs, "ess_per_second")
            times = [
                own / mean(base, field) if base else math.nan
                for own, field in ((per_row, "ess_per_1000_rows"), (per_second, "ess_per_second"))
            ]
            yield [
                target, f"{budget:,}", name, len(runs), mean(runs, "seconds"), f"{energy:.2f} ± {error:.2f}",
                *(max(line[field] for line in runs) for field in ("r_hat", "r_hat_distance")),
                per_row, per_second, *times, mean(runs, "distance_ess_per_1000_rows"),
                mean(runs, "changes_per_1000_rows"), mean(runs, "tokens_kept"),
            ]  # fmt: skip


MIXING = [
    "target", "rows", "sampler", "seeds", "s", "mean energy ± s.e.", "worst R-hat: energy", "distance", "ESS/1000 rows",
    "ESS/s", "ESS/row vs loop", "ESS/s vs loop", "distance's ESS/1000 rows", "changes/1000 rows",
    f"tokens kept after {LAG} rows a chain",
]  # fmt: skip


def errors_at(runs: list[dict], reference: Reference) -> list[tuple[int, float, float]]:
    """`(rows, error of the mean energy, of the token's share)` at each checkpoint: root mean squares over runs."""
    points = zip(*(line["estimates"] for line in runs), strict=False)
    result = []
    for point in points:
        rows = round(statistics.fmean(one[0] for one in point))
        squares = [
            (max(abs(one[1] - reference.energy), one[2]) ** 2, max(abs(one[3] - reference.share), one[4]) ** 2)
            for one in point
        ]
        result.append((rows, *(math.sqrt(statistics.fmean(own)) for own in zip(*squares, strict=True))))
    return result


def rows_to(errors: list[tuple[int, float]], least: float) -> int | None:
    """The first checkpoint from which on the error stays within `least`.

    Example:
        >>> rows_to([(10, 3.0), (20, 0.5), (40, 2.0), (80, 0.9)], 1.0)
        80
    """
    reached = None
    for rows, error in reversed(errors):
        if error > least:
            break
        reached = rows
    return reached


def error_table(found: list[dict], chosen: argparse.Namespace) -> Iterator[list]:
    """A row for each target, budget and sampler: its errors, and what it spends to come within the given ones."""
    for (target, budget), samplers in by_sampler(found, chosen).items():
        reference = reference_of(target, found)
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


def references_table(found: list[dict], chosen: argparse.Namespace) -> Iterator[list]:
    """What errors are counted from."""
    for name in dict.fromkeys(line["target"] for line in found if line["target"] in chosen.targets):
        one = reference_of(name, found)
        if one is not None:
            yield [name, f"{one.energy:.2f} ± {one.energy_se:.2f}", f"{one.share:.4f} ± {one.share_se:.4f}", one.source]


def print_tables(found: list[dict], chosen: argparse.Namespace) -> None:
    """All tables of the runs of a file."""
    print_table(MIXING, mixing_table(found, chosen))
    print()
    print_table(["target", "mean energy", "token's share", "reference"], references_table(found, chosen))
    print()
    header = ["target", "rows", "sampler", "seeds", "error of the mean energy", "of the token's share"]
    header += [f"rows (s) to {chosen.energy_error} nats", f"rows (s) to {chosen.share_error}"]
    print_table(header, error_table(found, chosen))


def main() -> None:
    """Makes the runs that the file lacks, and prints its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--samplers", nargs="+", choices=list(SAMPLERS), default=list(SAMPLERS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--chains", type=int, default=16)
    parser.add_argument("--rows", type=int, default=60_000, help="budget of masked rows")
    parser.add_argument("--reference", action="store_true", help="make references: of ten times the budget")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no run after this time")
    parser.add_argument("--energy_error", type=float, default=1.0, help="nats that the mean energy may be away")
    parser.add_argument("--share_error", type=float, default=0.01, help="how far the token's share may be away")
    parser.add_argument("--file", type=Path, default=FILE, help="runs, a line each")
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    logging.disable_progress_bar()
    until = time.monotonic() + 60 * chosen.minutes
    there = {tuple(line[name] for name in KEY) for line in lines(chosen.file)}
    budget = chosen.rows * (10 if chosen.reference else 1)
    wanted = [
        (target, sampler, seed, chosen.chains, budget)
        for target in chosen.targets
        for seed in chosen.seeds
        for sampler in chosen.samplers
    ]
    for key in wanted:
        if key in there or time.monotonic() >= until:
            continue
        line = run(*key) | origin() | ({"reference": True} if chosen.reference else {})
        with chosen.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
    print_tables(lines(chosen.file), chosen)


if __name__ == "__main__":
    main()
