"""Weights that a checkpoint lacks are never made up."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import nn

Model = TypeVar("Model", bound=nn.Module)

# Contacts (ESM) and pooling play no part in energies or in next tokens.
_UNUSED = ("contact_head", "pooler")


def refuse_missing_weights(name: str | os.PathLike | None, info: dict) -> None:
    """Raises `ValueError` for a checkpoint that lacks weights, or has some of another shape.

    Args:
        name: of the checkpoint.
        info: what `from_pretrained(output_loading_info=True)` says of it.
    """
    of_other_shape = [entry[0] if isinstance(entry, tuple) else entry for entry in info.get("mismatched_keys") or ()]
    needed = sorted({*info["missing_keys"], *of_other_shape})
    needed = [key for key in needed if not any(unused in key for unused in _UNUSED)]
    if needed:
        shown = ", ".join(needed[:5]) + (", …" if len(needed) > 5 else "")
        raise ValueError(f"{name}: the checkpoint has no weights for {shown}, which would be random")


def keep_weights(modules: Iterable[nn.Module]) -> None:
    """`post_init` must not touch weights that are somebody's."""
    for module in modules:
        vars(module)["_is_hf_initialized"] = True


def load_whole(
    load: Callable[..., Model], name: str | os.PathLike | None, *args: Any, **kwargs: Any
) -> tuple[Model, dict]:
    """What a `from_pretrained` loads, and its loading info; `ValueError` for weights that the checkpoint lacks."""
    loaded: Any = load(name, *args, output_loading_info=True, **kwargs)  # annotated as the model alone
    model, info = loaded
    refuse_missing_weights(name, info)
    return model, info
