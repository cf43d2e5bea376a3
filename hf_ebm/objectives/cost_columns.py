"""What a cost reads beside an output and its reference: columns of the data set, by the names of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from torch import nn


class NamedParameters(NamedTuple):
    """The parameters of a function.

    Attributes:
        first: names of its first two, which are given by their place.
        others: of the others that can be given by name, whether they have to be.
        any_name: whether it takes every other name as well.
    """

    first: list[str]
    others: dict[str, bool]
    any_name: bool

    @classmethod
    def of(cls, function: Callable[..., Any]) -> NamedParameters:
        """Those of a function or a callable object; of a module, whose call takes anything, those of its forward."""
        function = function.forward if isinstance(function, nn.Module) else function
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except ValueError:  # some callables written in C have no signature
            return cls([], {}, False)
        placed = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
        named = [*(one for one in placed[2:] if one.kind != one.POSITIONAL_ONLY)]
        named += [one for one in parameters if one.kind == one.KEYWORD_ONLY]
        return cls(
            [one.name for one in placed[:2]],
            {one.name: one.default is one.empty for one in named},
            any(one.kind == one.VAR_KEYWORD for one in parameters),
        )

    def takes(self, name: str) -> bool:
        """Whether something can be given under this name."""
        return name in self.others or (self.any_name and name not in self.first)

    def needed(self, given: Collection[str] = ()) -> list[str]:
        """What has to be given under its name, but for what is `given` already."""
        return [name for name, needed in self.others.items() if needed and name not in given]


def columns_for(
    cost: str, parameters: NamedParameters, columns: Mapping[str, Any], given: Collection[str] = ()
) -> dict[str, Any]:
    """Those of the columns that a cost reads.

    Args:
        cost: what the cost is called.
        columns: values of each row, by name.
        given: what the cost gets under its name whatever the columns are.

    Raises:
        ValueError: for a column that the cost needs and that isn't there, or called as what it gets anyway.
    """
    for name in columns:
        if name in parameters.first or name in given:
            raise ValueError(f"columns must not be called {name!r}, under which the cost {cost} gets something else")
    for name in parameters.needed(given):
        if name not in columns:
            found = ", ".join(columns) or "none"
            raise ValueError(
                f"the cost {cost} reads the column {name!r} of the data set, which has beside the model's {found}"
            )
    return {name: values for name, values in columns.items() if parameters.takes(name)}
