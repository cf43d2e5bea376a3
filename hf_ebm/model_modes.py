"""Running a model in evaluation mode and leaving it as it was."""

from __future__ import annotations

from contextlib import contextmanager

from torch import nn


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
