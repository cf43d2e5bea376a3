"""Gradients of weights that are read at every step: summed over steps by few large products, not by many small ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

# From so many rows on a product takes longer to compute than its result to write.
_ENOUGH_ROWS = 96


class SummedWeightGradients(TorchFunctionMode):
    """Inside, linear layers hold back what the gradients of their weights are made of, until enough rows are together.

    One object serves all steps of a search. A step has few rows, and the gradient of a large weight takes longer to
    write, and to add to that of other steps, than to multiply. Outputs are those of ordinary layers bit for bit,
    gradients up to the order of sums. Under autocast, and of weights that don't learn, layers are left alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._weights: dict[Tensor, tuple[Tensor, _Sum]] = {}

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is nn.functional.linear and not kwargs and self._sums(*args[:2]):
            return self._product(False, *args)
        return func(*args, **(kwargs or {}))

    def mixed(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """`inputs @ weight`, (N, V) and (V, d)."""
        return self._product(True, inputs, weight) if self._sums(inputs, weight) else inputs @ weight

    def _sums(self, inputs: Tensor, weight: Tensor) -> bool:
        learns = torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf and inputs.dim() > 1
        return learns and not torch.is_autocast_enabled(inputs.device.type)

    def _product(self, mixes: bool, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight not in self._weights:
            total = _Sum()
            self._weights[weight] = _Handle.apply(weight, total), total
        # Of rows, as a view of a layer's own output could not be changed in place by what comes next.
        rows = _Product.apply(inputs.flatten(0, -2), *self._weights[weight], bias, mixes)
        return rows.view(*inputs.shape[:-1], -1)


class _Sum:
    """The gradient of a weight in one backward pass: what is summed, and pairs of factors that wait for others."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.factors: list[tuple[Tensor, Tensor]] = []
        self.backward_pass = -1

    def add(self, left: Tensor, right: Tensor) -> None:
        """Adds `left.T @ right`."""
        current = torch._C._current_graph_task_id()
        if current != self.backward_pass:  # of one that didn't ask for the weight's gradient nothing is left
            self.total, self.factors, self.backward_pass = None, [], current
        self.factors.append((left, right))
        if sum(len(rows) for rows, _ in self.factors) >= _ENOUGH_ROWS:
            self.multiply()

    def multiply(self) -> None:
        if self.factors:
            left, right = (torch.cat(rows) for rows in zip(*self.factors, strict=True))
            self.total = left.t() @ right if self.total is None else self.total.addmm_(left.t(), right)
            self.factors = []


class _Handle(torch.autograd.Function):
    """A weight for products, that hands their sum to the original when all of them have come back."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, total: _Sum) -> Tensor:
        ctx.total = total
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: None) -> tuple[Tensor | None, None]:
        ctx.total.multiply()
        total, ctx.total.total = ctx.total.total, None
        return total, None


class _Product(torch.autograd.Function):
    """A linear layer, or `inputs @ weight` if it mixes; the weight's gradient goes to its sum."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, total: _Sum, bias: Tensor | None, mixes: bool) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.total, ctx.mixes = total, mixes
        return inputs @ weight if mixes else nn.functional.linear(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, None]:
        inputs, weight = ctx.saved_tensors
        ctx.total.add(*((inputs, grad) if ctx.mixes else (grad, inputs)))
        inputs_grad = grad @ (weight.t() if ctx.mixes else weight) if ctx.needs_input_grad[0] else None
        return inputs_grad, None, None, grad.sum(0) if ctx.needs_input_grad[3] else None, None
