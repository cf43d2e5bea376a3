"""Checks of arguments by their kind: numbers, paths, callables, tokenizers, tensors, and what callables return.

Every error is a `ValueError` that names the argument, what was given and what is allowed. Numbers and paths are made
plain: ints and floats that JSON holds, and `Path`s. A number may be Python's, NumPy's, a tensor or an array without
dimensions, a `Fraction` or a `Decimal`. Truth values and texts are no numbers, and NaN is none.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import re
import reprlib
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from decimal import Decimal
from numbers import Rational, Real
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor
from transformers import BatchEncoding, PreTrainedTokenizerBase

CONVERSION_ERRORS = (TypeError, ValueError, RuntimeError, OverflowError)  # what `torch.as_tensor` raises
SURROGATES = re.compile("[\ud800-\udfff]")
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


def shown(value: object) -> str:
    """What was given, for an error: its kind where it is a tensor or an array, else a short form of it."""
    if isinstance(value, Tensor):
        kinds = ("" if value.layout == torch.strided else "sparse ") + ("" if value.device.type != "meta" else "meta ")
        return f"a {kinds}tensor of shape {_shape(value)} and {value.dtype}"
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and {value.dtype}"
    return _short.repr(value).replace("\n", " ")


def name_of(function: object) -> str:
    """How errors and logs call a callable."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def check_choice(name: str, value: object, allowed: Collection[str]) -> None:
    """Raises `ValueError` unless `value` is one of these texts."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {shown(value)}")


def as_truth(name: str, value: object) -> bool:
    """`value` as a bool. Raises `ValueError` for anything but True and False, Python's or NumPy's."""
    if not isinstance(value, (bool, np.bool_)):
        raise ValueError(f"{name} must be True or False, got {shown(value)}")
    return bool(value)


def as_string(name: str, value: object) -> str:
    """`value` itself. Raises `ValueError` unless it is a string of whole characters."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {shown(value)}")
    half = None if value.isascii() else SURROGATES.search(value)
    if half:
        raise ValueError(
            f"{name} holds half of a surrogate pair, U+{ord(half.group()):04X}, at character {half.start()}, which is "
            "no character; take it out"
        )
    return value


def as_list(name: str, given: object, of: str) -> list:
    """The members of a list, or of another iterable that has an order, which `of` names in the error."""
    # Of a text these would be its letters, of a mapping its keys.
    unfit = isinstance(given, (str, bytes, bytearray, Mapping, Set)) or getattr(given, "is_nested", False)
    if unfit or getattr(given, "ndim", 1) == 0 or not isinstance(given, Iterable):
        raise ValueError(f"{name} must be a list of {of}, got {shown(given)}")
    return list(given)


def as_callables(name: str, given: object) -> list[Callable[..., Any]]:
    """A callable on its own, or a list or tuple of several, or none (`None`), as a list. Classes are no callables."""
    if given is None:
        return []
    if not isinstance(given, (list, tuple)):
        return [as_callable(name, given)]
    return [as_callable(f"{name}: entry {number}", one) for number, one in enumerate(given)]


def as_callable(name: str, given: object) -> Callable[..., Any]:
    """`given` itself. Raises `ValueError` for what can't be called, and for a class, which makes objects."""
    if not callable(given) or isinstance(given, type):
        raise ValueError(f"{name} must be callable, got {shown(given)}{' itself' if isinstance(given, type) else ''}")
    return given


def check_methods(name: str, value: object, *methods: str) -> None:
    """Raises `ValueError` unless `value` is an object with these methods."""
    if isinstance(value, type) or not all(callable(getattr(value, method, None)) for method in methods):
        raise ValueError(f"{name} must be an object with the methods {' and '.join(methods)}, got {shown(value)}")


def check_tokenizer(name: str, tokenizer: object) -> None:
    """Raises `ValueError` unless `tokenizer` is a tokenizer of Transformers."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        held = isinstance(getattr(tokenizer, "tokenizer", None), PreTrainedTokenizerBase)
        advice = "; pass its .tokenizer" if held else ""
        raise ValueError(f"{name} must be a tokenizer of Transformers, got {shown(tokenizer)}{advice}")


def is_dense(value: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor with values that can be read: neither sparse, nor nested, nor on the device "meta"."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not (value.is_meta or value.is_nested)


def as_ids(name: str, ids: object) -> Tensor:
    """Token ids (B, T) as int64. Raises `ValueError` for anything but a dense tensor of one id or more."""
    if not is_dense(ids) or ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"{name} must be a tensor of token ids of shape (batch, length), got {shown(ids)}{advice_on_ids(ids)}"
        )
    if ids.numel() == 0:
        raise ValueError(f"{name} must hold at least one token, got {shown(ids)}")
    return ids.long()


def advice_on_ids(given: object) -> str:
    """What someone who gave no tensor of ids may have forgotten, for the end of an error."""
    if isinstance(given, Tensor):
        return ""
    unpacked = ", and is given by its names: **batch" if isinstance(given, (Mapping, BatchEncoding)) else ""
    return f'; a tokenizer gives tensors with return_tensors="pt"{unpacked}'


def as_mask(name: str, mask: object, ids: Tensor) -> Tensor:
    """A mask of the shape of `ids` as bool on their device; all true for `None`.

    Raises:
        ValueError: for anything but a dense tensor of truth values, or of numbers that are all 0 or 1: the additive
            masks of attention (0 and minus infinity) say the opposite.

    Example:
        >>> as_mask("free_mask", torch.tensor([[0, 1]]), torch.tensor([[5, 6]]))
        tensor([[False,  True]])
    """
    if mask is None:
        return torch.ones_like(ids, dtype=torch.bool)
    if not is_dense(mask) or mask.is_complex() or tuple(mask.shape) != tuple(ids.shape):
        raise ValueError(f"{name} must be a tensor of the ids' shape {_shape(ids)}, got {shown(mask)}")
    found = mask.to(ids.device).double()  # float8 has no comparisons
    wrong = (found != 0) & (found != 1)
    if bool(wrong.any()):
        raise ValueError(f"{name} must hold 0 and 1 (or truth values) alone, got {float(found[wrong][0])}")
    return found.bool()


def as_numbers_of(name: str, numbers: object, ids: Tensor) -> Tensor:
    """Whole numbers of the shape of `ids`, on their device. Raises `ValueError` for anything else."""
    whole = is_dense(numbers) and numbers.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    if not isinstance(numbers, Tensor) or not whole or numbers.shape != ids.shape:
        raise ValueError(
            f"{name} must be a tensor of whole numbers of the ids' shape {_shape(ids)}, got {shown(numbers)}"
        )
    return numbers.to(ids.device)


def as_whole_numbers(name: str, numbers: object) -> Tensor:
    """A whole number, or a tensor or list of such, as int64 on the CPU. Raises `ValueError` for anything else."""
    try:
        found = torch.as_tensor(numbers).to("cpu").to_dense()
        fits = not (found.is_complex() or found.is_floating_point())
    except (*CONVERSION_ERRORS, NotImplementedError):
        fits = False
    if not fits:
        raise ValueError(f"{name} must be a whole number, or a tensor or list of such, got {shown(numbers)}")
    return found.long()


def row_numbers(place: str, returned: object, rows: int, device: torch.device) -> Tensor:
    """What a callable returned as (rows,) float64; `place` is what the error names.

    Example:
        >>> row_numbers("extra_energy", [0, 1.5], 2, torch.device("cpu"))
        tensor([0.0000, 1.5000], dtype=torch.float64)
    """
    try:
        found = returned if isinstance(returned, Tensor) else torch.as_tensor(returned, dtype=torch.float64)
        fits = tuple(found.shape) == (rows,) and not (found.is_complex() or found.is_meta)
        found = found.to_dense().to(device, torch.float64)
    except CONVERSION_ERRORS:
        fits = False
    if not fits:
        raise ValueError(f"{place} returned {shown(returned)}, must return a number for each row, of shape ({rows},)")
    return found


def row_truths(place: str, returned: object, rows: int) -> Tensor:
    """What a callable returned as (rows,) bool on the CPU, from a truth value for each row or one for all."""
    try:
        found = torch.as_tensor(returned).cpu()
        fits = found.dtype == torch.bool and tuple(found.shape) in ((), (rows,))
        found = found.to_dense().expand(rows) if fits else found
    except CONVERSION_ERRORS:
        fits = False
    if not fits:
        raise ValueError(
            f"{place} returned {shown(returned)}, must return a truth value for each row, of shape ({rows},)"
        )
    return found


def _shape(tensor: Tensor) -> str:
    return "(nested)" if tensor.is_nested else str(tuple(tensor.shape))


def whole(value: object) -> int | None:
    """`value` as an int, `None` where it is no whole number. A float is none, whatever its value.

    Example:
        >>> whole(np.int64(3)), whole(torch.tensor(3)), whole(3.0), whole(True)
        (3, 3, None, None)
    """
    found = _scalar(value)
    if isinstance(found, Rational) and found.denominator == 1:
        found = found.numerator
    try:
        return operator.index(found)
    except (TypeError, RuntimeError):
        return None


def number(value: object) -> float | None:
    """`value` as a float, maybe an infinite one; `None` where it is no number.

    Example:
        >>> number(torch.tensor(0.5)), number(np.float32(2)), number("2"), number(math.nan)
        (0.5, 2.0, None, None)
    """
    found = _scalar(value)
    if not isinstance(found, (Real, Decimal)) and not hasattr(found, "__index__"):
        return None
    try:
        found = float(found)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return None if math.isnan(found) else found


def listed(value: Any) -> list | None:
    """The members of a list, an array, a column or the like; `None` for anything else, texts, dicts and sets too.

    Example:
        >>> listed(np.array([1, 2])), listed(range(2)), listed("ab"), listed({1, 2})
        ([1, 2], [0, 1], None, None)
    """
    if isinstance(value, (str, bytes, Mapping, Set)) or getattr(value, "ndim", None) == 0:
        return None
    if hasattr(value, "ndim"):
        try:
            return value.tolist()
        except (AttributeError, RuntimeError):  # a table, a sparse tensor, one on the meta device
            return None
    return list(value) if isinstance(value, Iterable) else None


def wholes(value: object, least: int = 0) -> list[int] | None:
    """The members of a list as ints, `None` unless all are whole numbers from `least` up.

    Example:
        >>> wholes(np.array([4, 2])), wholes([4, -2]), wholes([4.0])
        ([4, 2], None, None)
    """
    members = listed(value)
    found = [whole(member) for member in members or []]
    plain = [member for member in found if member is not None and member >= least]
    return plain if members is not None and len(plain) == len(members) else None


def as_whole(name: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """`value` as an int. Raises `ValueError`, naming it, unless it is a whole number from `least` to `most`.

    Example:
        >>> as_whole("beam_size", np.int64(4), least=1)
        4
        >>> as_whole("beam_size", 0, least=1)
        Traceback (most recent call last):
        ValueError: beam_size must be a whole number from 1 up, got 0
    """
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
    """`value` as a finite float. Raises `ValueError`, naming it, unless it is one within these bounds.

    Example:
        >>> as_number("temperature", torch.tensor(0.5), above=0)
        0.5
        >>> as_number("temperature", 0, above=0)
        Traceback (most recent call last):
        ValueError: temperature must be a number above 0, got 0
    """
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
