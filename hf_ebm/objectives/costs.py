"""What a cost is, and what it reads: of whole sequences (`SequenceCost`), or a sum over positions (`HammingCost`).

Beside an output and its reference a cost reads columns of the data set, by the names of its parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from hf_ebm.checks import as_callable, as_list, as_number, check_choice, is_dense, row_numbers, shown

# labels (B, T), vocabulary size V -> the cost of every token (B, T, V), or of any token but the label (B, T)
DecomposableCost = Callable[[torch.Tensor, int], torch.Tensor]


class NamedParameters(NamedTuple):
    """The parameters of a function.

    Attributes:
        first: names of its first two, which are given by their place (of a reward function none).
        others: of the others that can be given by name, whether they have to be.
        any_name: whether it takes every other name as well.
    """

    first: list[str]
    others: dict[str, bool]
    any_name: bool

    @classmethod
    def of(cls, function: Callable[..., Any], placed: int = 2) -> NamedParameters:
        """Those of a function or a callable object; of a module, whose call takes anything, those of its forward."""
        function = function.forward if isinstance(function, nn.Module) else function
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except ValueError:  # some callables written in C have no signature
            return cls([], {}, False)
        ordered = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
        named = [*(one for one in ordered[placed:] if one.kind != one.POSITIONAL_ONLY)]
        named += [one for one in parameters if one.kind == one.KEYWORD_ONLY]
        return cls(
            [one.name for one in ordered[:placed]],
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
    cost: str, parameters: NamedParameters, columns: Mapping[str, Any], given: Collection[str] = (), kind: str = "cost"
) -> dict[str, Any]:
    """Those of the columns that a cost or a reward, by its `kind`, reads.

    Args:
        cost: what it is called.
        columns: values of each row, by name.
        given: what the cost gets under its name whatever the columns are.

    Raises:
        ValueError: for a column that the cost needs and that isn't there, or called as what it gets anyway.

    Example:
        >>> parameters = NamedParameters.of(lambda predictions, references, weight: weight)
        >>> columns_for("weighted", parameters, {"weight": [0.5, 2.0], "id": [7, 8]})
        {'weight': [0.5, 2.0]}
    """
    for name in columns:
        if name in parameters.first or name in given:
            raise ValueError(f"columns must not be called {name!r}, under which the {kind} {cost} gets something else")
    for name in parameters.needed(given):
        if name not in columns:
            found = ", ".join(columns) or "none"
            raise ValueError(
                f"the {kind} {cost} reads the column {name!r} of the data set, which has beside the model's {found}"
            )
    return {name: values for name, values in columns.items() if parameters.takes(name)}


@dataclass(frozen=True)
class SequenceCost:
    """A cost with what it reads.

    Args:
        name: how messages and logs call it.
        function: `(predictions, references) -> (B,)` numbers; it also gets `prompts=`, and columns of the data set, if
            it has parameters of these names or takes any.
        reads: whether it wants predictions as texts or as lists of token ids.

    Raises:
        ValueError: for another `reads`.
    """

    name: str
    function: Callable[..., Any]
    reads: Literal["texts", "ids"]

    def __post_init__(self) -> None:
        check_choice(f"reads of the cost {self.name}", self.reads, ("texts", "ids"))
        as_callable(f"function of the cost {self.name}", self.function)

    @cached_property
    def parameters(self) -> NamedParameters:
        """What the function takes by name."""
        return NamedParameters.of(self.function)

    @property
    def needs_references(self) -> bool:
        """Whether the function's second parameter has no default."""
        named = NamedParameters.of(self.function, placed=1).others
        return all(named.get(name, True) for name in self.parameters.first[1:])

    @torch.no_grad()
    def __call__(
        self,
        predictions: Sequence,
        references: Sequence,
        prompts: Sequence | None = None,
        columns: Mapping[str, Any] | None = None,
    ) -> torch.Tensor:
        """(B,) float32, without a gradient.

        Raises:
            ValueError: naming the cost, if it didn't return one finite number for each prediction, or needs a column
                that isn't there.
        """
        given = columns_for(self.name, self.parameters, columns or {}, ("prompts",))
        given |= {"prompts": prompts} if self.parameters.takes("prompts") else {}
        returned = self.function(predictions, references, **given)
        device = returned.device if isinstance(returned, torch.Tensor) else torch.device("cpu")
        costs = row_numbers(f"the cost {self.name}", returned, len(predictions), device).float().detach()
        for row in (~costs.isfinite()).nonzero()[:1, 0].tolist():
            raise ValueError(f"the cost {self.name} must be finite, got {float(costs[row])} in row {row}")
        return costs


class HammingCost:
    """1 for every token that isn't the label, times the weight of the token that was predicted.

    A weight of 2 for the label `O` punishes missed entities twice (Goyal et al. 2018, section 5.1).

    Args:
        token_weights: weight of each *predicted* token, V non-negative numbers; default 1.

    Raises:
        ValueError: for a weight that is negative or no number; when called, for another number of weights than tokens.
    """

    def __init__(self, token_weights: Sequence[float] | None = None):
        self.token_weights = None
        if token_weights is not None:
            weights = as_list("token_weights", token_weights, "numbers")
            self.token_weights = [as_number("token_weights", weight, least=0) for weight in weights]

    def __call__(self, labels: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """(B, T) for equal weights (1 everywhere), (B, T, V) otherwise."""
        if self.token_weights is None:
            return torch.ones_like(labels, dtype=torch.float32)
        if len(self.token_weights) != vocab_size:
            raise ValueError(
                f"token_weights must have one weight for each of {vocab_size} tokens, got {len(self.token_weights)}"
            )
        weights = torch.tensor(self.token_weights, device=labels.device).expand(*labels.shape, -1)
        return weights.scatter(2, labels.clamp_min(0)[..., None], 0.0)


def cost_of_tokens(costs: torch.Tensor, labels: torch.Tensor, step: int, vocab_size: int) -> torch.Tensor:
    """d_t of one step, (B, V), from costs (B, T, V) or (B, T), see `DecomposableCost`.

    Example:
        >>> cost_of_tokens(torch.ones(1, 2), torch.tensor([[2, 0]]), step=0, vocab_size=3)
        tensor([[1., 1., 0.]])
    """
    if costs.dim() == 3:
        return costs[:, step]
    of_step = costs[:, step, None].expand(-1, vocab_size)
    return of_step.scatter(1, labels[:, step, None].clamp_min(0), 0.0)


def check_costs(costs: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The costs a `DecomposableCost` returned, without a gradient.

    Raises:
        ValueError: for another shape than (B, T) or (B, T, V), or a value that isn't finite.

    Example:
        >>> check_costs(torch.ones(1, 2, requires_grad=True), torch.tensor([[0, 1]]), vocab_size=3)
        tensor([[1., 1.]])
    """
    shapes = (tuple(labels.shape), (*labels.shape, vocab_size))
    if not is_dense(costs) or not costs.is_floating_point() or tuple(costs.shape) not in shapes:
        raise ValueError(f"cost must return a tensor of floats of shape {shapes[0]} or {shapes[1]}, got {shown(costs)}")
    if not bool(torch.isfinite(costs).all()):
        raise ValueError("cost must return finite numbers, got inf or nan")
    return costs.detach()
