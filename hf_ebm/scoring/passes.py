"""A forward pass, what is read of it, and how compiled code runs it.

Compiled code takes no notice of hooks that come or go: those that were there as it was traced are part of it. So the
hook on a compiled model's encoder stays, and looks up what is read in what the pass of its thread has said; PyTorch
makes the positions an input of the code, and compiles a pass that reads no positions, which is anybody else's, apart.
Rows are run in few sizes, as compiled code may be of one size, and a CUDA graph always is.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

_LEAST_ROWS = 8


class Pass(NamedTuple):
    """A forward pass.

    Attributes:
        input_ids: (N, T) token ids.
        positions: (N, P) what is read; the same P in passes that run together.
        inputs: further model inputs.
    """

    input_ids: Tensor
    positions: Tensor
    inputs: dict[str, Any]

    def rows(self, first: int, stop: int) -> Pass:
        """Rows `first` to `stop`; those beyond the last are the last again."""
        device = self.input_ids.device
        numbers = torch.arange(first, stop, device=device).clamp_max(len(self.input_ids) - 1)

        def cut(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(cut(item) for item in value)
            return value[numbers.to(value.device)] if isinstance(value, Tensor) else value

        return Pass(cut(self.input_ids), cut(self.positions), {name: cut(value) for name, value in self.inputs.items()})


def gather_positions(values: Tensor, positions: Tensor) -> Tensor:
    """`values` (N, T, D) at `positions` (N, P) → (N, P, D)."""
    return values.gather(1, positions.to(values.device)[..., None].expand(-1, -1, values.shape[-1]))


def is_compiled(model: nn.Module) -> bool:
    """Whether a model or a part of it was compiled, by `torch.compile` or in place.

    >>> is_compiled(torch.nn.Linear(2, 2)), is_compiled(torch.compile(torch.nn.Linear(2, 2)))
    (False, True)
    """
    return any(map(is_compiled_itself, model.modules()))


def is_compiled_itself(module: nn.Module) -> bool:
    """Whether a module was compiled, whatever its submodules are.

    >>> is_compiled_itself(torch.nn.Sequential(torch.compile(torch.nn.Linear(2, 2))))
    False
    """
    own = vars(module)
    return own.get("_compiled_call_impl") is not None or "_orig_mod" in own["_modules"]


def few_sizes(rows: int) -> Iterator[tuple[int, int]]:
    """Rows in powers of two, `(first, stop)` each; the last may go an eighth of its size beyond, or 8 rows.

    >>> list(few_sizes(250)), list(few_sizes(200))
    ([(0, 256)], [(0, 128), (128, 192), (192, 200)])
    """
    first = 0
    while first < rows:
        size = max(_LEAST_ROWS, 1 << (rows - first - 1).bit_length())
        if first + size - rows > max(_LEAST_ROWS, size // 8):
            size //= 2
        yield first, first + size
        first += size


class _Read(threading.local):
    """What this thread's pass reads, (N, P), where the hook cuts it down."""

    positions: Tensor | None = None


_READ = _Read()


@contextmanager
def read_in_compiled(base: nn.Module, positions: Tensor) -> Iterator[None]:
    """Inside, the output of `base` has `positions` (N, P) alone, also in compiled code, if that hasn't run before."""
    if _keep_read not in base._forward_hooks.values():
        base.register_forward_hook(_keep_read)
    _READ.positions = positions
    try:
        yield
    finally:
        _READ.positions = None


def _keep_read(module: nn.Module, args: tuple, output: ModelOutput) -> ModelOutput:
    if _READ.positions is not None:
        first = next(iter(output.keys()))
        output[first] = gather_positions(output[first], _READ.positions)
    return output
