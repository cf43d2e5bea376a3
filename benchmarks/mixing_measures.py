"""What `benchmarks.mixing` says of a run's draws, and of its errors."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.mixing_samplers import Draws
from hf_ebm.sampling.convergence import energy_and_tokens

CHECKPOINTS = 8  # an estimate after this share of the draws each: 2^-7 … 1
LAG = 2_000  # masked rows a chain after which tokens are compared


def kept(draws: Tensor) -> Tensor:
    """Draws (C, D, …) without the first quarter.

    Example:
        >>> kept(torch.arange(8)[None])
        tensor([[2, 3, 4, 5, 6, 7]])
    """
    return draws[:, draws.shape[1] // 4 :]


def over_chains(values: Tensor, log_weights: Tensor | None = None) -> tuple[float, float]:
    """Mean of (C, D) and its standard error over chains, or over runs of weighted particles.

    Example:
        >>> over_chains(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        (2.5, 1.0)
        >>> over_chains(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0.0, -torch.inf], [0.0, 0.0]]))
        (2.6666666666666665, 1.5713484026367723)
    """
    values = values.double()
    log_weights = torch.zeros_like(values) if log_weights is None else log_weights.double()
    weights = (log_weights - log_weights.max()).exp()
    share = weights.sum(1) / weights.sum()
    means = (weights * values).sum(1) / weights.sum(1)
    mean, runs = (share * means).sum(), len(values)
    return float(mean), float((share.square() * (means - mean).square()).sum().mul(runs / (runs - 1)).sqrt())


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


def measured(draws: Draws, seconds: float, token: int) -> dict:
    """What a line of the file says of draws.

    Effective samples by spread are those whose mean would have the standard error that chains' means have: unlike those
    by autocorrelation they are few where chains disagree.

    Args:
        token: whose share is estimated.
    """
    said = {"rows": draws.rows, "seconds": round(seconds, 3), "draws": draws.energies.shape[1]}
    if draws.replicas is not None:
        of_chains = ("temperatures", "swap_rates", "round_trips")
        said |= {name: getattr(draws.replicas, name).double().mean(0).tolist() for name in of_chains}
    said |= _of_particles(draws, token) if draws.log_weights is not None else _of_chains(draws, seconds, token)
    _, mean, error, *_ = said["estimates"][-1]
    by_spread = (said["sd_energy"] / error) ** 2 if error else math.nan
    return said | {
        "mean_energy": mean, "mean_energy_se": error, "min_energy": float(draws.energies.min()),
        "spread_ess_per_1000_rows": 1000 * by_spread / draws.rows, "spread_ess_per_second": by_spread / seconds,
    }  # fmt: skip


def _of_chains(draws: Draws, seconds: float, token: int) -> dict:
    count = draws.energies.shape[1]
    energies, states = kept(draws.energies), kept(draws.states)
    share = energies.shape[1] / count
    of_energy, of_tokens = energy_and_tokens(states, energies)
    ends = [count >> (CHECKPOINTS - 1 - part) for part in range(CHECKPOINTS)]
    estimates = [
        _estimate(draws.rows * end / count, kept(draws.energies[:, :end]), kept(draws.states[:, :end]), token)
        for end in ends
        if end >= 4 or end == count
    ]
    return {
        "estimates": estimates, "sd_energy": float(energies.std()),
        "r_hat": of_energy.r_hat, "r_hat_tokens": of_tokens.r_hat,
        "ess_per_1000_rows": 1000 * of_energy.ess_bulk / (draws.rows * share),
        "ess_per_second": of_energy.ess_bulk / (seconds * share),
        "tokens_ess_per_1000_rows": 1000 * of_tokens.ess_bulk / (draws.rows * share),
        "changes_per_1000_rows": 1000 * draws.changed / draws.rows,
        "tokens_kept": tokens_kept(states, max(1, round(LAG * len(energies) * count / draws.rows))),
    }  # fmt: skip


def _of_particles(draws: Draws, token: int) -> dict:
    mean, _ = over_chains(draws.energies, draws.log_weights)
    variance, _ = over_chains((draws.energies - mean).square(), draws.log_weights)
    estimate = _estimate(draws.rows, draws.energies, draws.states, token, draws.log_weights)
    return {"estimates": [estimate], "sd_energy": math.sqrt(variance)}


def _estimate(rows: float, energies: Tensor, states: Tensor, token: int, log_weights: Tensor | None = None) -> list:
    """Rows, then mean and standard error of the energy and of the token's share."""
    found = (over_chains(own, log_weights) for own in (energies, (states == token).double().mean(-1)))
    return [round(rows), *(round(value, 6) for pair in found for value in pair)]


class Reference(NamedTuple):
    """Mean energy and the token's share, with their standard errors, and where they come from."""

    energy: float
    energy_se: float
    share: float
    share_se: float
    source: str


def pooled(runs: list[dict]) -> tuple[float, float, float, float]:
    """Mean energy, its standard error, and the same of the token's share, of equally long runs of other seeds."""
    estimates, count = [line["estimates"][-1] for line in runs], len(runs)
    means = (statistics.fmean(one[place] for one in estimates) for place in (1, 3))
    errors = (math.sqrt(sum(one[place] ** 2 for one in estimates)) / count for place in (2, 4))
    (energy, share), (energy_se, share_se) = means, errors
    return energy, energy_se, share, share_se


def reference_of(target: str, budget: int, found: list[dict]) -> Reference | None:
    """What is known of a target, else the runs of ten times the budget, of the sampler with the least error."""
    runs: dict[tuple[str, int], list[dict]] = defaultdict(list)
    for line in found:
        if line["target"] == target and "known" in line:
            energy, share, source = line["known"]
            return Reference(energy, 0.0, share, 0.0, source)
        if line["target"] == target and line["budget"] >= 10 * budget:
            runs[line["sampler"], line["budget"]].append(line)
    if not runs:
        return None
    (sampler, _), own = min(runs.items(), key=lambda item: pooled(item[1])[1])
    r_hat = max(line.get("r_hat", math.nan) for line in own)
    return Reference(*pooled(own), f"{sampler}, {sum(line['rows'] for line in own):,} rows, R-hat {r_hat:.2f}")


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
