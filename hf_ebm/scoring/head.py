"""Logits of a masked language model at chosen positions, without running its head anywhere else.

The head of a masked language model (hidden size times vocabulary) is often as expensive as its encoder, and an energy
reads one position per masked copy. A forward hook on the base model keeps only the hidden states at those positions,
so the model's own forward applies its own head to them. Whether that equals the full forward is checked on first use.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput, logging

from hf_ebm.model_modes import evaluation_mode

logger = logging.get_logger(__name__)

# Rounding differs between a matrix product of many rows and one of few; this is what is allowed for it, per dtype,
# relative to the largest logit.
_RELATIVE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def gather_positions(values: Tensor, positions: Tensor) -> Tensor:
    """`values` (N, T, D) at `positions` (N, P) → (N, P, D)."""
    return values.gather(1, positions.to(values.device)[..., None].expand(-1, -1, values.shape[-1]))


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
        if positions.shape[1] >= input_ids.shape[1] or not self._hook_holds(base, inputs, positions) or base is None:
            return gather_positions(self.model(**inputs).logits, positions)
        return self._hooked(base, inputs, positions)

    @property
    def base(self) -> nn.Module | None:
        """The encoder under the head, or `None` where the model doesn't name one."""
        base = getattr(self.model, getattr(self.model, "base_model_prefix", "") or "-", None)
        return base if isinstance(base, nn.Module) and base is not self.model else None

    def _hooked(self, base: nn.Module, inputs: dict, positions: Tensor) -> Tensor:
        def keep_positions(module: nn.Module, args: tuple, output: ModelOutput) -> ModelOutput:
            first = next(iter(output.keys()))
            output[first] = gather_positions(output[first], positions)
            return output

        handle = base.register_forward_hook(keep_positions)
        try:
            return self.model(**inputs).logits
        finally:
            handle.remove()

    def _hook_holds(self, base: nn.Module | None, inputs: dict, positions: Tensor) -> bool:
        """Compares the hooked forward with the full one, once per dtype and device, on at most two rows."""
        device = inputs[self.input_name].device.type
        key = (next(self.model.parameters()).dtype, device, torch.is_autocast_enabled(device))
        if key not in self._verified:
            verdict = base is not None and self._verify(base, inputs, positions)
            if verdict is None:
                return False
            self._verified[key] = verdict
            if not self._verified[key]:
                logger.warning(
                    f"{type(self.model).__name__}: applying the head to chosen positions does not reproduce its full "
                    "forward; the head is applied to every position instead (slower, same values)."
                )
        return self._verified[key]

    @torch.no_grad()
    def _verify(self, base: nn.Module, inputs: dict, positions: Tensor) -> bool | None:
        """Whether the two agree; `None` where logits that aren't finite leave it open."""
        few = {name: _first_rows(value, 2) for name, value in inputs.items()}
        with evaluation_mode(self.model):
            full = gather_positions(self.model(**few).logits, positions[:2])
            if not bool(full.isfinite().all()):
                return None
            try:
                hooked = self._hooked(base, few, positions[:2])
            except Exception as error:  # whatever the model's own code raises on fewer positions
                logger.info(f"{type(self.model).__name__}: head at chosen positions failed with {error!r}")
                return False
        if hooked.shape != full.shape:
            return False
        scale = full.abs().amax().clamp(min=1.0)
        return bool(((hooked - full).abs().amax() / scale) <= _RELATIVE_TOLERANCE.get(full.dtype, 1e-4))


def _first_rows(value: Any, count: int) -> Any:
    if isinstance(value, Tensor):
        return value[:count]
    if isinstance(value, tuple):
        return tuple(_first_rows(item, count) for item in value)
    return value
