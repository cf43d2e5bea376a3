"""Running a model in another mode, or with other generation settings, and leaving it as it was."""

from __future__ import annotations

from contextlib import contextmanager

from torch import nn
from transformers import GenerationConfig


@contextmanager
def evaluation_mode(model: nn.Module):
    """Evaluation mode inside; afterwards every module is in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def own_generation_config(model: nn.Module, config: GenerationConfig):
    """`config` in place of the model's own inside, which `generate` would take what `config` leaves open from."""
    owners = [(module, module.generation_config) for module in model.modules() if "generation_config" in vars(module)]
    for module, _ in owners:
        module.generation_config = config
    try:
        yield
    finally:
        for module, own in owners:
            module.generation_config = own
