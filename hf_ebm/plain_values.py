"""Numbers and paths as the ecosystem gives them, made plain: ints and floats that JSON holds, and `Path`s.

A number may be Python's, NumPy's, a tensor or an array without dimensions, a `Fraction` or a `Decimal`. Truth values
and texts are no numbers, and NaN is none.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Iterable, Mapping, Set
from decimal import Decimal
from numbers import Rational, Real
from pathlib import Path
from typing import Any


def whole(value: object) -> int | None:
    """`value` as an int, `None` where it is no whole number. A float is none, whatever its value."""
    found = _scalar(value)
    if isinstance(found, Rational) and found.denominator == 1:
        found = found.numerator
    try:
        return operator.index(found)
    except (TypeError, RuntimeError):
        return None


def number(value: object) -> float | None:
    """`value` as a float, maybe an infinite one; `None` where it is no number."""
    found = _scalar(value)
    if not isinstance(found, (Real, Decimal)) and not hasattr(found, "__index__"):
        return None
    try:
        found = float(found)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return None if math.isnan(found) else found


def listed(value: Any) -> list | None:
    """The members of a list, an array, a column or the like; `None` for anything else, texts, dicts and sets too."""
    if isinstance(value, (str, bytes, Mapping, Set)) or getattr(value, "ndim", None) == 0:
        return None
    if hasattr(value, "ndim"):
        try:
            return value.tolist()
        except (AttributeError, RuntimeError):  # a table, a sparse tensor, one on the meta device
            return None
    return list(value) if isinstance(value, Iterable) else None


def wholes(value: object, least: int = 0) -> list[int] | None:
    """The members of a list as ints, `None` unless all are whole numbers from `least` up."""
    members = listed(value)
    found = [whole(member) for member in members or []]
    plain = [member for member in found if member is not None and member >= least]
    return plain if members is not None and len(plain) == len(members) else None


def as_whole(name: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """`value` as an int. Raises `ValueError`, naming it, unless it is a whole number from `least` to `most`."""
    found = whole(value)
    if found is None or (least is not None and found < least) or (most is not None and found > most):
        bounds = "" if least is None else f" from {least} up" if most is None else f" from {least} to {most}"
        raise ValueError(f"{name} must be a whole number{bounds}, got {value!r}")
    return found


def as_number(
    name: str,
    value: object,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> float:
    """`value` as a finite float. Raises `ValueError`, naming it, unless it is one within these bounds."""
    found = number(value)
    if (
        found is None
        or math.isinf(found)
        or (least is not None and found < least)
        or (above is not None and found <= above)
        or (most is not None and found > most)
        or (below is not None and found >= below)
    ):
        rising = "from {} up" if most is None else "from {}"
        falling = "up to {}" if least is None else "to {}"
        ends = {rising: least, "above {}": above, falling: most, "below {}": below}
        told = [text.format(f"{Decimal(str(end)):f}") for text, end in ends.items() if end is not None]
        kind = f"a number {' and '.join(told).replace(' and to ', ' to ')}" if told else "a finite number"
        raise ValueError(f"{name} must be {kind}, got {value!r}")
    return found


def as_text(name: str, value: object) -> str:
    """A name or a path as text. Raises `ValueError`, naming it, unless it is text or an `os.PathLike` of text."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise ValueError(f"{name} must be a name or a path, as text or a Path, got {value!r}")
    return text


def as_path(name: str, value: object) -> Path:
    """`as_text` as a path."""
    return Path(as_text(name, value))


def _scalar(value: object) -> Any:
    """What an array or a tensor without dimensions holds, else `value`; `None` for what can't be a number."""
    dimensions = getattr(value, "ndim", None)
    if dimensions == 0 and hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, ValueError):  # a tensor on the meta device holds nothing
            return None
    elif dimensions:  # PyTorch takes one element for a number, however many dimensions there are
        return None
    return None if isinstance(value, bool) else value
