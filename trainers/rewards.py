"""All reward functions of a trainer: what they return for completions, its weighted sum, and what is logged of it."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from hf_ebm.checks import as_list, as_number
from hf_ebm.loading import first_line
from hf_ebm.objectives.rewards import (
    CostReward,
    Decoded,
    RewardFunction,
    fill_skipped,
    group_deviations,
    reward_values,
    total_rewards,
)

logger = logging.get_logger(__name__)

Sums = dict[str, tuple[torch.Tensor, torch.Tensor]]
ERRORS = ("raise", "skip")


class Scores(NamedTuple):
    """Rewards of N completions under F functions.

    Attributes:
        total: weighted sum, (N,) float32.
        values: of each function, (N, F) float64, nan where it gave none.
        skipped: (N, F) bool.
        decoded: the completions.
    """

    total: torch.Tensor
    values: torch.Tensor
    skipped: torch.Tensor
    decoded: Decoded

    @property
    def costs(self) -> torch.Tensor:
        """Minus the total, (N,)."""
        return -self.total + 0.0  # no -0


class RewardTerms:
    """All reward functions of a trainer, called one after the other, async ones together.

    Args:
        terms: the functions.
        weights: one for each; by default 1.
        errors: "raise", or "skip" for what a function could not say: an exception, another number of values than
            completions, nan or inf. What is skipped counts as `fill_skipped` says.
        logs: whether terms are logged by name.

    Raises:
        ValueError: for another number of weights, or one that isn't finite.
    """

    def __init__(
        self,
        terms: Sequence[RewardFunction | CostReward],
        weights: Sequence[float] | None = None,
        errors: str = "raise",
        logs: bool = True,
    ):
        self.terms, self.errors, self.logs = list(terms), errors, logs
        given = [1.0] * len(self.terms) if weights is None else as_list("reward_weights", weights, "numbers")
        if len(given) != len(self.terms):
            raise ValueError(f"reward_weights must be {len(self.terms)}, one for each function, got {len(given)}")
        self.weights = torch.tensor([as_number("reward_weights", weight) for weight in given], dtype=torch.float64)
        self._warned: set[str] = set()

    @property
    def needs_references(self) -> bool:
        """Whether a function can't do without."""
        return any(term.needs_references for term in self.terms)

    @property
    def needs_texts(self) -> list[str]:
        """The functions that can't do without."""
        return [term.name for term in self.terms if term.needs_texts]

    def __call__(self, decoded: Decoded, rows: Sequence[int]) -> Scores:
        """Rewards of completions, each of a row of a batch.

        Raises:
            ValueError: for what a function returned, naming it and the row, and what functions raise, unless skipped;
                for a sum beyond single precision.
        """
        count, groups = len(decoded.completion_ids), torch.tensor(rows)
        values, skipped = [], []
        for term, outcome in zip(self.terms, self._outcomes(decoded), strict=True):
            known, wrong = torch.full((count,), torch.nan, dtype=torch.float64), outcome
            missing = torch.ones(count, dtype=torch.bool)
            if not isinstance(outcome, Exception):
                known, missing, wrong = reward_values(term.name, outcome, count)
            if wrong is not None:
                self._refuse(term.name, wrong)
            values.append(fill_skipped(known, missing, groups) if bool(missing.any()) else known)
            skipped.append(missing)
        found = torch.stack(values, 1)
        total = total_rewards(found, self.weights).float()
        for row in (~total.isfinite()).nonzero()[:1, 0].tolist():
            raise ValueError(f"reward_weights: the sum of rewards must be finite, got {float(total[row])} in row {row}")
        return Scores(total, found, torch.stack(skipped, 1), decoded)

    def _refuse(self, name: str, wrong: Exception) -> None:
        if self.errors == "raise":
            wrong.add_note(f"in the reward function {name}")
            raise wrong
        if name not in self._warned:
            self._warned.add(name)
            logger.warning(f"the reward function {name} is skipped where it fails, as here: {first_line(wrong)}")

    def _outcomes(self, decoded: Decoded) -> list[Any]:
        """What each function returned, or raised."""
        outcomes: list[Any] = []
        for term in self.terms:
            try:
                outcomes.append(term(decoded))
            except Exception as error:
                outcomes.append(error)
        awaited = [outcome for outcome in outcomes if inspect.isawaitable(outcome)]
        if not awaited:
            return outcomes
        given = iter(self._loop.submit(self._runner.run, _gathered(awaited)).result())
        return [next(given) if inspect.isawaitable(outcome) else outcome for outcome in outcomes]

    @functools.cached_property
    def _loop(self) -> ThreadPoolExecutor:
        """A thread of its own, as a notebook's has a running loop already."""
        return ThreadPoolExecutor(1, "reward functions")

    @functools.cached_property
    def _runner(self) -> asyncio.Runner:
        """One loop for all calls: clients of services belong to the loop that they began in."""
        return asyncio.Runner()

    def names(self, grouped: bool) -> tuple[str, ...]:
        """Under which `sums` are logged."""
        if not self.logs:
            return ()
        kinds = ["mean", "square", *(["skipped"] if self.errors == "skip" else [])]
        own = [f"rewards/{term.name}/{kind}" for term in self.terms for kind in kinds]
        return (*own, "reward", *(("reward_std", "zero_deviation_share") if grouped else ()))

    def sums(self, scores: Scores, device: torch.device, rows: Sequence[int] | None = None) -> Sums:
        """Sums and counts of what is logged, by `names`.

        Args:
            rows: of each completion the row whose candidate it is; deviations are those of a row's candidates.
        """
        found: list[tuple[torch.Tensor, torch.Tensor | int]] = []
        count = len(scores.total)
        for values, skipped in zip(scores.values.T, scores.skipped.T, strict=True):
            known = values[~values.isnan() & ~skipped]
            found += [(known.sum(), len(known)), (known.square().sum(), len(known))]
            found += [(skipped.sum(), count)] if self.errors == "skip" else []
        found.append((scores.total.double().sum(), count))
        if rows is not None:
            deviations = group_deviations(scores.total, torch.tensor(rows))
            found += [(deviations.sum(), len(deviations)), ((deviations == 0).sum(), len(deviations))]
        pairs = [(total.to(device), torch.as_tensor(number, device=device)) for total, number in found]
        return dict(zip(self.names(rows is not None), pairs, strict=True)) if self.logs else {}


async def _gathered(awaited: Sequence[Any]) -> list[Any]:
    return await asyncio.gather(*awaited, return_exceptions=True)


def with_deviations(averages: dict[str, float]) -> dict[str, float]:
    """Averages of what is logged, with the deviation of each term in place of its mean square."""
    found = dict(averages)
    for name in averages:
        if name.startswith("rewards/") and name.endswith("/square"):
            stem = name.removesuffix("square")
            found[f"{stem}std"] = max(found.pop(name) - averages[f"{stem}mean"] ** 2, 0.0) ** 0.5  # or nan
    return found
