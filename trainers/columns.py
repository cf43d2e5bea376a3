"""Columns of a data set that the model's forward doesn't take: kept apart from its batch, for a cost to read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

COLUMNS = "columns"  # where they are in a batch: values of all rows by name


class ColumnsApart:
    """A collator that makes a batch of what the model takes and puts the rest under `COLUMNS`.

    Collators of Transformers know no other columns than the model's, so they are given these alone, and the others are
    kept as they are, lists with a value for each row. One of your own is given whole rows; what it makes of other names
    is kept as it made it.

    Args:
        collator: of rows.
        names: what the model takes.
        keep: whether the rest is wanted at all.
    """

    def __init__(self, collator: Callable[[list], Mapping[str, Any]], names: Collection[str], keep: bool):
        self.collator, self.names, self.keep = collator, frozenset(names), keep
        module = getattr(collator, "__module__", None) or type(collator).__module__
        self.knows_no_more = module.partition(".")[0] in ("transformers", "torch")

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if self.knows_no_more:
            batch = dict(self.collator([self._own(row) for row in rows]))
            others = {name: [row.get(name) for row in rows] for name in rows[0] if name not in self.names}
        else:
            batch = dict(self.collator(list(rows)))
            others = {name: value for name, value in batch.items() if name not in self.names}
        return {**self._own(batch), **({COLUMNS: others} if others and self.keep else {})}

    def _own(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name in self.names}


def column_names(data: Any) -> list[str]:
    """Of a data set, where they can be known before it is read."""
    if isinstance(data, list):
        return list(data[0]) if data and isinstance(data[0], Mapping) else []
    return list(getattr(data, "column_names", None) or [])


def without_columns(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """What the model is given of a batch."""
    return {name: value for name, value in inputs.items() if name != COLUMNS}


def columns_at(columns: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """The values of some rows, which may repeat."""
    return {
        name: values[torch.tensor(rows, device=values.device)]
        if isinstance(values, torch.Tensor)
        else [values[row] for row in rows]
        for name, values in columns.items()
    }
