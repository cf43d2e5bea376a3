"""Lines of JSON, read and written."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable
from typing import Any

from hf_ebm.checks import SURROGATES

_LINES = "; a record stands on a line of its own"


def from_lines(path: str, lines: Iterable[str]) -> list[dict]:
    """Records of lines, empty ones passed over. Raises `ValueError` with `path` and the line's number."""
    records = []
    try:
        for number, line in enumerate(lines, 1):
            text = line.removeprefix("\ufeff") if number == 1 else line
            if not text.strip():
                continue
            try:
                record = json.loads(text, object_pairs_hook=_without_twice)
            except RecursionError as error:
                raise ValueError(f"{path}: line {number} is nested too deeply") from error
            except ValueError as error:
                raise ValueError(f"{path}: line {number} is not JSON: {error}{_LINES}") from error
            if not isinstance(record, dict):
                raise ValueError(f"{path}: line {number} must be a JSON object, got {type(record).__name__}{_LINES}")
            records.append(record)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}") from error
    return records


def _without_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return found


def to_json(record: dict) -> str:
    """One line of JSON. What JSON doesn't have becomes null (NaN, infinities), base64 (bytes) or text (dates, say).

    Raises:
        ValueError: for a record that is nested too deeply.
    """
    try:
        line = json.dumps(_finite(record), ensure_ascii=False, allow_nan=False, default=_as_text)
        # Half of a surrogate pair can be written in JSON, but not in UTF-8.
        return line if line.isascii() or not SURROGATES.search(line) else json.dumps(_finite(record), default=_as_text)
    except RecursionError as error:
        raise ValueError("a record is nested too deeply to be written as JSON") from error


def _as_text(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
