"""Outputs of models whose fields are always set."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # To type checkers a field without a default is required, and so never `None`.
    from dataclasses import dataclass as model_output
else:
    from dataclasses import dataclass

    def model_output(cls: type) -> type:
        """`dataclass` for a `ModelOutput`, which demands that every field has the default `None`."""
        for name in cls.__annotations__:
            setattr(cls, name, None)
        return dataclass(cls)


__all__ = ["model_output"]
