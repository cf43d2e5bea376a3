"""What a model is made of, to be compared before and after something that must leave it alone."""

import torch
from torch import nn


def state_of(model: nn.Module) -> dict:
    """Attributes, submodules, buffers and weights of every module, and the configurations, by name.

    Numbers, strings and tensors by their value, everything else by its identity; what is compared is kept alive.
    """
    found = {}
    for name, module in model.named_modules():
        for part in (vars(module), module._modules, module._buffers, module._parameters):
            for key, value in part.items():
                found[f"{name}.{key}"] = _comparable(value)
        config = getattr(module, "config", None)
        if hasattr(config, "to_dict"):
            found[f"{name}.config"] = repr(config.to_dict())
    return found


def _comparable(value):
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    return value if isinstance(value, (int, float, str, bool, type(None))) else (type(value), id(value), _Kept(value))


class _Kept:
    """Holds a value, so that no other gets its identity; equal to all."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, _Kept)

    __hash__ = None
