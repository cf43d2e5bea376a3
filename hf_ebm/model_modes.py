"""Running a model in another mode, or with other generation settings, and leaving it as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import GenerationConfig


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every module is in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def decoded(model: nn.Module, **inputs: Any) -> Tensor:
    """The ids that a model's `generate` returns. Raises `ValueError` for a model that has none."""
    generate: Callable[..., Tensor] | None = getattr(model, "generate", None)
    if generate is None:
        raise ValueError(f"model: {type(model).__name__} cannot generate")
    return generate(**inputs)


@contextmanager
def own_generation_config(model: nn.Module, config: GenerationConfig) -> Iterator[None]:
    """`config` in place of the model's own inside, which `generate` would take what `config` leaves open from."""
    owners = [vars(module) for module in model.modules() if "generation_config" in vars(module)]
    before = [attributes["generation_config"] for attributes in owners]
    for attributes in owners:
        attributes["generation_config"] = config
    try:
        yield
    finally:
        for attributes, own in zip(owners, before, strict=True):
            attributes["generation_config"] = own
