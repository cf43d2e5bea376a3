"""Logits of a masked language model at chosen positions, without running elsewhere what is needed only there.

The head of a masked language model (hidden size times vocabulary) is often as expensive as its encoder, and an energy
reads one position per masked copy. A forward hook on the base model keeps only the hidden states at those positions,
so the model's own forward applies its own head to them. Where one position a row is read, the last feed-forward network
runs there alone, too: hooks on the linear layers that widen its input keep that position, and the model's own residual
sum, which broadcasts, is then right there and meaningless elsewhere. Whether both equal the full forward is checked on
first use.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput, logging

from hf_ebm.model_modes import evaluation_mode

logger = logging.get_logger(__name__)

# Rounding differs between a matrix product of many rows and one of few; this is what is allowed for it, per dtype,
# relative to the largest logit.
_RELATIVE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


# `(values (N, T, D), positions (N, P)) -> values` of which those at the positions count.
_Narrowing = Callable[[Tensor, Tensor], Tensor]


def gather_positions(values: Tensor, positions: Tensor) -> Tensor:
    """`values` (N, T, D) at `positions` (N, P) → (N, P, D)."""
    return values.gather(1, positions.to(values.device)[..., None].expand(-1, -1, values.shape[-1]))


class _Hooks(NamedTuple):
    """Where a forward is cut down to the positions that are read.

    Attributes:
        base: its output is.
        narrow: the linear layers whose input is, by their names under `base`.
    """

    base: nn.Module
    narrow: dict[str, nn.Linear]


class PositionLogits:
    """Callable `(input_ids (N, T), positions (N, P), **model inputs) -> logits (N, P, V)`.

    Args:
        model: a masked language model whose forward returns an output with `.logits` of shape (N, T, V).
        input_name: the model input that takes the ids whose positions are read.
    """

    def __init__(self, model: nn.Module, input_name: str = "input_ids"):
        self.model = model
        self.input_name = input_name
        self._verified: dict[tuple, bool] = {}

    def __call__(self, input_ids: Tensor, positions: Tensor, **inputs: Any) -> Tensor:
        inputs = {self.input_name: input_ids, "return_dict": True, **inputs}
        base = self.base
        if base is not None and positions.shape[1] < input_ids.shape[1]:
            # Gradient checkpointing runs layers again when these hooks are gone, so not where gradients are wanted.
            narrow = last_expansions(base) if positions.shape[1] == 1 and not torch.is_grad_enabled() else {}
            head_alone, both = _Hooks(base, {}), _Hooks(base, narrow)
            if self._hold(head_alone, inputs, positions):
                hooks = both if narrow and self._hold(both, inputs, positions) else head_alone
                return self._hooked(hooks, inputs, positions)
        return gather_positions(self.model(**inputs).logits, positions)

    @property
    def base(self) -> nn.Module | None:
        """The encoder under the head, or `None` where the model doesn't name one."""
        base = getattr(self.model, getattr(self.model, "base_model_prefix", "") or "-", None)
        return base if isinstance(base, nn.Module) and base is not self.model else None

    def _hooked(
        self, hooks: _Hooks, inputs: dict, positions: Tensor, narrowed: _Narrowing = gather_positions
    ) -> Tensor:
        rows, length = inputs[self.input_name].shape
        owner = get_ident()  # other threads may be running the model while the hooks are there

        def keep_output(module: nn.Module, args: tuple, output: ModelOutput) -> ModelOutput:
            if get_ident() != owner:
                return output
            first = next(iter(output.keys()))
            if output[first].shape[1] < length:  # on a GPU an index out of range would end the process
                raise ValueError(f"{type(module).__name__} returned {output[first].shape[1]} positions of {length}")
            output[first] = gather_positions(output[first], positions)
            return output

        def keep_input(module: nn.Module, args: tuple) -> tuple | None:
            # Layers that get chunks, experts' shares or other layouts than (N, T, D) run on all they get.
            whole = args[0].dim() == 3 and args[0].shape[0] == rows and args[0].shape[1] >= length
            return (narrowed(args[0], positions), *args[1:]) if whole and get_ident() == owner else None

        handles = [hooks.base.register_forward_hook(keep_output)]
        handles += [linear.register_forward_pre_hook(keep_input) for linear in hooks.narrow.values()]
        try:
            return self.model(**inputs).logits
        finally:
            for handle in handles:
                handle.remove()

    def _hold(self, hooks: _Hooks, inputs: dict, positions: Tensor) -> bool:
        """Whether the hooked forward equals the one with fewer hooks, found out on at most two rows.

        Once for each dtype, device and make of the model (adapters may come and go), and narrow layers for each
        doubling of the length.
        """
        ids = inputs[self.input_name]
        numbers = next(self.model.parameters()).dtype, ids.device.type, torch.is_autocast_enabled(ids.device.type)
        make = sum(1 for _ in hooks.base.modules()), ids.shape[1].bit_length() if hooks.narrow else 0
        key = (*numbers, *make, tuple(hooks.narrow))
        if key not in self._verified:
            verdict = self._verify(hooks, inputs, positions)
            if verdict is None:
                return False
            self._verified[key] = verdict
            name = type(self.model).__name__
            if not verdict and hooks.narrow:
                logger.info(f"{name}: its last feed-forward network runs at every position.")
            elif not verdict:
                logger.warning_once(
                    f"{name}: applying the head to chosen positions does not reproduce its full forward; the head is "
                    "applied to every position instead (slower, same values)."
                )
        return self._verified[key]

    @torch.no_grad()
    def _verify(self, hooks: _Hooks, inputs: dict, positions: Tensor) -> bool | None:
        """Whether the two agree; `None` where logits that aren't finite leave it open."""
        few, read = {name: _first_rows(value, 2) for name, value in inputs.items()}, positions[:2]
        checks: list[tuple[Tensor, _Narrowing]] = [(read, gather_positions)]
        if hooks.narrow:
            # NaN at all positions but the last (the first, in a second row) shows whether anything after the linear
            # layers mixes positions, which a comparison in half precision could overlook.
            ends = torch.tensor([[inputs[self.input_name].shape[1] - 1], [0]], device=read.device)
            checks.append((ends[: len(read)], _poison_others))
        with evaluation_mode(self.model):
            for where, narrowed in checks:
                if hooks.narrow:
                    expected = self._hooked(_Hooks(hooks.base, {}), few, where)
                else:
                    expected = gather_positions(self.model(**few).logits, where)
                if where is read and not bool(expected.isfinite().all()):
                    return None
                try:
                    hooked = self._hooked(hooks, few, where, narrowed)
                except Exception as error:  # whatever the model's own code raises on fewer positions
                    logger.info(f"{type(self.model).__name__}: chosen positions alone failed with {error!r}")
                    return False
                if not _agree(hooked, expected):
                    return False
        return True


def last_expansions(base: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers that widen their input, in the last module to have some, by name.

    In a transformer they lead into its last feed-forward network; a gated one has two. None where anything in `base`
    has hooks, which may look at positions that nothing else does.
    """
    found: dict[str, nn.Linear] = {}
    for name, module in base.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return {}
        inner = {f"{name}.{part}": child for part, child in module.named_children() if isinstance(child, nn.Linear)}
        found = {part: child for part, child in inner.items() if child.out_features > child.in_features} or found
    return found


def _poison_others(values: Tensor, positions: Tensor) -> Tensor:
    """`values` (N, T, D), NaN but at `positions` (N, P)."""
    others = torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)
    return values.masked_fill(others.scatter(1, positions.to(values.device), False)[..., None], torch.nan)


def _agree(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    scale = expected.abs().amax().clamp(min=1.0)
    return bool(((found - expected).abs().amax() / scale) <= _RELATIVE_TOLERANCE.get(expected.dtype, 1e-4))


def _first_rows(value: Any, count: int) -> Any:
    if isinstance(value, Tensor):
        return value[:count]
    if isinstance(value, tuple):
        return tuple(_first_rows(item, count) for item in value)
    return value
