"""Rewards of decoded sequences, larger is better: what a reward function is given, what it may return, and their sum.

A reward function takes what it reads by name and returns a value for each completion; a cost (`SequenceCost`) is the
reward `-cost`. Of N completions F functions give values (N, F), nan where one has none to give.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hf_ebm.checks import listed, number, shown
from hf_ebm.objectives.costs import NamedParameters, SequenceCost, columns_for

Ids = list[list[int]]
_LARGEST = torch.finfo(torch.float32).max  # sums of rewards are of single precision
GIVEN = ("completions", "prompts", "references", "completion_ids", "prompt_ids", "reference_ids")


@dataclass
class Decoded:
    """Completions with what stands beside them, a value of everything for each.

    Args:
        completion_ids, reference_ids: token ids with their end; a reference that isn't there has none.
        prompt_ids: None where a model reads something else than tokens.
        columns: of the data set, what the model doesn't take.
        decode: token ids as texts; None without a tokenizer.
        prompt_texts, reference_texts: as the data set has them, in place of what `decode` makes of ids.
        text_columns: these by the names of their columns.
    """

    completion_ids: Ids
    reference_ids: Ids
    prompt_ids: Ids | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    decode: Callable[[Ids], list[str]] | None = None
    prompt_texts: Sequence | None = None
    reference_texts: Sequence | None = None
    text_columns: Mapping[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def completions(self) -> list[str]:
        return self._texts(self.completion_ids)

    @functools.cached_property
    def references(self) -> Sequence:
        return self._texts(self.reference_ids) if self.reference_texts is None else self.reference_texts

    @functools.cached_property
    def prompts(self) -> Sequence | None:
        if self.prompt_texts is not None:
            return self.prompt_texts
        return None if self.prompt_ids is None else self._texts(self.prompt_ids)

    def _texts(self, ids: Ids) -> list[str]:
        if self.decode is None:
            raise ValueError("processing_class must be given for rewards to read texts")
        return self.decode(ids)


@dataclass(frozen=True)
class RewardFunction:
    """A function on keywords: any of `GIVEN`, and columns of the data set.

    With `**kwargs` it is given everything there is, texts where there is a tokenizer.
    """

    name: str
    function: Callable[..., Any]

    @functools.cached_property
    def parameters(self) -> NamedParameters:
        """What the function takes."""
        return NamedParameters.of(self.function, placed=0)

    @property
    def needs_references(self) -> bool:
        """Whether it can't do without."""
        return any(self.parameters.others.get(name, False) for name in ("references", "reference_ids"))

    @property
    def needs_texts(self) -> bool:
        """Whether it can't do without."""
        return any(self.parameters.others.get(name, False) for name in ("completions", "prompts", "references"))

    def __call__(self, decoded: Decoded) -> Any:
        """What the function returns; `ValueError` for a column or prompts that it needs and that aren't there."""
        texts = {name: values for name, values in decoded.text_columns.items() if name not in GIVEN}
        wanted = columns_for(self.name, self.parameters, {**texts, **decoded.columns}, GIVEN, "reward")
        for name in GIVEN:
            if not self.parameters.takes(name):
                continue
            if decoded.decode is None and not name.endswith("_ids") and not self.parameters.others.get(name):
                continue
            wanted[name] = getattr(decoded, name)
            if wanted[name] is None and self.parameters.others.get(name):
                raise ValueError(f"inputs must have input_ids: the reward {self.name!r} reads {name}")
        return self.function(**wanted)


@dataclass(frozen=True)
class CostReward:
    """`-cost`."""

    name: str
    cost: SequenceCost
    needs_references: bool = True

    @property
    def parameters(self) -> NamedParameters:
        """What the cost takes beside predictions and references."""
        return self.cost.parameters

    @property
    def needs_texts(self) -> bool:
        """Whether the cost reads texts."""
        return self.cost.reads == "texts"

    def __call__(self, decoded: Decoded) -> torch.Tensor:
        """(N,) float32; raises what the cost does, and `ValueError` for prompts that aren't there."""
        texts = self.needs_texts
        prompts = None
        if self.parameters.takes("prompts"):
            prompts = decoded.prompts if texts else decoded.prompt_ids
            if prompts is None and self.parameters.others.get("prompts"):
                raise ValueError(f"inputs must have input_ids: the cost {self.cost.name!r} reads prompts")
        predictions = decoded.completions if texts else decoded.completion_ids
        references = decoded.references if texts else decoded.reference_ids
        return -self.cost(predictions, references, prompts, decoded.columns)


def reward_values(name: str, returned: object, count: int) -> tuple[torch.Tensor, torch.Tensor, ValueError | None]:
    """What a reward function returned for `count` completions: values, which of them are missing, and why.

    A list, an array, a tensor or the like is read, of numbers of any type; None for a completion that the function has
    nothing to say about. Of another number of values than completions all are missing.

    Returns:
        (N,) float64 on the CPU, nan for None and what is missing; (N,) bool; an error that names the function and the
        first such row, None where nothing is missing.

    Example:
        >>> reward_values("mine", [1, None, float("inf")], 3)[:2]
        (tensor([1., nan, nan], dtype=torch.float64), tensor([False, False,  True]))
    """
    found, values = listed(returned), torch.full((count,), torch.nan, dtype=torch.float64)
    if found is None or len(found) != count:
        given = shown(returned) if found is None else f"{len(found)} values"
        every = torch.ones(count, dtype=torch.bool)
        return (
            values,
            every,
            ValueError(f"the reward {name} must return a number or None for each of {count} rows, got {given}"),
        )
    missing = torch.zeros(count, dtype=torch.bool)
    for row, value in enumerate(found):
        as_float = float(value) if isinstance(value, (bool, np.bool_)) else number(value)
        if as_float is not None and abs(as_float) <= _LARGEST:
            values[row] = as_float + 0.0  # no -0
        else:
            missing[row] = value is not None
    error = None
    for row in missing.nonzero()[:1, 0].tolist():
        error = ValueError(f"the reward {name} must be a finite number or None, got {shown(found[row])} in row {row}")
    return values, missing, error


def fill_skipped(values: torch.Tensor, skipped: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Values (N,) with the mean of a group's others in place of those that are skipped.

    So a candidate whose reward isn't known is no better and no worse than the others of its prompt: its advantage over
    their mean is 0, and theirs over the mean are what they would be without it. Where a group has no other, it is the
    mean of all; where there is none at all, it stays nan, and the function is left out.

    Args:
        values: nan where there is none.
        skipped: (N,) bool.
        groups: (N,), the prompt of each.

    Example:
        >>> nan, groups = float("nan"), torch.tensor([0, 0, 0, 1])
        >>> fill_skipped(torch.tensor([1.0, 3.0, nan, nan]), torch.tensor([False, False, True, False]), groups)
        tensor([1., 3., 2., nan])
    """
    filled = values.clone()
    for at in skipped.nonzero()[:, 0].tolist():
        beside = values[groups == groups[at]].nanmean()
        filled[at] = values.nanmean() if bool(beside.isnan()) else beside
    return filled


def total_rewards(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`Σ_f w_f r_f` over the functions that have a value for a row: (N, F) and (F,) -> (N,); 0 where none has.

    Example:
        >>> total_rewards(torch.tensor([[1.0, 2.0], [float("nan"), 2.0]]), torch.tensor([1.0, 0.5]))
        tensor([2., 1.])
    """
    return (values * weights).nansum(1)


def group_deviations(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Standard deviation of each group's rewards (G,), of the population; exactly 0 where all are equal.

    Example:
        >>> group_deviations(torch.tensor([1.0, 3.0, 0.1, 0.1, 0.1]), torch.tensor([0, 0, 1, 1, 1]))
        tensor([1., 0.])
    """
    members = [rewards[groups == group] for group in groups.unique().tolist()]
    return torch.stack([(own - own[0]).std(correction=0) for own in members])
