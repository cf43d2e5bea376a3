"""Tables of the commands: JSON Lines, Parquet and text in, JSON Lines or Parquet out; all fields of all records stay.

Some commands take CSV, too, whose values are texts.

A field of the input keeps its name and its values. Where it has the name of one that a command adds, the command's is
called `hf_ebm_<name>`.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from hf_ebm.checks import SURROGATES, as_string
from hf_ebm.runtime import put_in_place

LINES = (".jsonl", ".ndjson", ".json")
# What pyarrow raises for values that no column can hold, and for those of a column that Python has no value for.
_UNFIT = (pyarrow.ArrowException, ArithmeticError, OSError, ValueError, TypeError)


class Records(ABC):
    """The records of an input.

    Attributes:
        path: where they are from, for errors.
        fields: the names of all fields.
    """

    path: str
    fields: list[str]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def column(self, name: str) -> list[Any]:
        """Every record's value of a field. Raises `ValueError` for a record that hasn't got it."""

    def texts(self, name: str) -> list[str]:
        """Every record's text in a field. Raises `ValueError` for a record that has none there, or no text."""
        return [as_string(f"{self.path}: {name!r} of record {row}", text) for row, text in enumerate(self.column(name))]

    @abstractmethod
    def first(self, count: int | None) -> Records:
        """The first so many records, or all."""

    @abstractmethod
    def without(self, name: str) -> Records:
        """The records without a field."""

    @abstractmethod
    def rows(self) -> list[dict]:
        """The records as dictionaries. Raises `ValueError` for a field whose values cannot be read."""

    @abstractmethod
    def table(self) -> pyarrow.Table:
        """The records as a table. Raises `ValueError` for a field that cannot be a column of Parquet."""

    def digest(self) -> str:
        """SHA-256 of what the records hold."""
        return hashlib.sha256("\n".join(map(to_json, self.rows())).encode()).hexdigest()


class LineRecords(Records):
    """Records that were lines; a field may lack in some of them."""

    def __init__(self, path: str, content: list[dict]):
        self.path, self._content = path, content
        self.fields = list(dict.fromkeys(name for record in content for name in record))

    def __len__(self) -> int:
        return len(self._content)

    def column(self, name: str) -> list[Any]:
        for number, record in enumerate(self._content):
            if name not in record:
                raise ValueError(f"{self.path}: record {number} has no {name!r}; it has {', '.join(record)}")
        return [record[name] for record in self._content]

    def first(self, count: int | None) -> LineRecords:
        return LineRecords(self.path, self._content[:count])

    def without(self, name: str) -> LineRecords:
        return LineRecords(self.path, [{key: one[key] for key in one if key != name} for one in self._content])

    def rows(self) -> list[dict]:
        return self._content

    def table(self) -> pyarrow.Table:
        return pyarrow.table({name: self._array(name) for name in self.fields})

    def _array(self, name: str) -> pyarrow.Array:
        values = [record.get(name) for record in self._content]
        try:
            column = pyarrow.array(values)
            if pyarrow.types.is_floating(column.type) and any(isinstance(value, bool) for value in values):
                raise ValueError("it holds numbers and truth values")
            pyarrow.parquet.write_table(pyarrow.table({name: column[:0]}), written := pyarrow.BufferOutputStream())
            pyarrow.parquet.read_schema(written.getvalue())  # what is nested too deeply can be written alone
        except _UNFIT as error:
            raise ValueError(
                f"{self.path}: the field {name!r} cannot be a column of Parquet: {error}; write .jsonl, which keeps it"
            ) from error
        return column


class ParquetRecords(Records):
    """Records of a table, whose columns keep their types."""

    def __init__(self, path: str, content: pyarrow.Table):
        self.path, self._content, self.fields = path, content, content.column_names
        twice = [name for name in self.fields if self.fields.count(name) > 1]
        if twice:
            raise ValueError(f"{path}: it has several columns {twice[0]!r}; rename them")

    def __len__(self) -> int:
        return len(self._content)

    def column(self, name: str) -> list[Any]:
        if name not in self.fields:
            raise ValueError(f"{self.path}: record 0 has no {name!r}; it has {', '.join(self.fields)}")
        values, nanoseconds = self._content.column(name), pyarrow.time64("ns")
        try:
            if values.type == nanoseconds:  # Python's times would be cut to microseconds
                values = values.cast(pyarrow.string())
            elif _holds(values.type, nanoseconds):
                raise ValueError(f"{values.type} holds times of nanoseconds, which Python has none for")
            return values.to_pylist()
        except _UNFIT as error:
            raise ValueError(f"{self.path}: the values of the field {name!r} cannot be read: {error}") from error

    def first(self, count: int | None) -> ParquetRecords:
        return ParquetRecords(self.path, self._content.slice(0, count))

    def without(self, name: str) -> ParquetRecords:
        return ParquetRecords(self.path, self._content.drop_columns([name])) if name in self.fields else self

    def rows(self) -> list[dict]:
        columns = [self.column(name) for name in self.fields]
        return [{name: own[row] for name, own in zip(self.fields, columns, strict=True)} for row in range(len(self))]

    def table(self) -> pyarrow.Table:
        return self._content


def check_not_input(path: str, records: Records) -> None:
    """Raises `ValueError` for an output that is the records' own file."""
    if path != "-" and _same_file(path, records.path):
        raise ValueError(f"output: {path} is the input itself; choose another file")


class Output:
    """Where records go: those of an input with fields added. What cannot be written is refused as this is made.

    Args:
        path: as `check_writable` has it.
        carried: the input's records; `None` where there is no input.
        added: the fields that the command adds, with their types.

    Attributes:
        names: what the added fields are called.
        is_parquet: whether it is a Parquet file.

    Raises:
        ValueError: for the input's own path, a field that the format cannot hold, and an added field whose name and
            other name are taken.
    """

    def __init__(self, path: str, carried: Records | None, added: dict[str, pyarrow.DataType]):
        self.path, self._types = path, added
        if carried is not None:
            check_not_input(path, carried)
        self.is_parquet = path != "-" and Path(path).suffix.lower() == ".parquet"
        taken = [] if carried is None else carried.fields
        self.names = {name: f"hf_ebm_{name}" if name in taken else name for name in added}
        for name, own in self.names.items():
            if own in taken:
                raise ValueError(f"input: there are fields {name!r} and {own!r} already; rename one of them")
        self._table = carried.table() if carried is not None and self.is_parquet else None
        self._rows = carried.rows() if carried is not None and not self.is_parquet else None
        for row in self._rows or []:
            to_json(row)

    def line(self, number: int, record: dict) -> str:
        """A line of JSON: the fields of the input's record of this number, then those that are added."""
        own = {self.names[name]: value for name, value in record.items()}
        return to_json({**self._rows[number], **own} if self._rows is not None else own)

    def write(self, records: list[dict], numbers: Sequence[int] | None = None) -> None:
        """Writes all records; a file is replaced atomically.

        Args:
            records: the added fields.
            numbers: of the input's records that they go with; by default all of them, in order.
        """
        numbers = range(len(records)) if numbers is None else numbers
        lines = self._lines(records, numbers)
        target = Path(self.path).resolve()  # through links, so that a link stays one
        if self.path == "-":
            sys.stdout.writelines(lines)
            return
        if is_stream(self.path):  # it cannot be replaced
            with open(target, "w", encoding="utf-8") as file:
                file.writelines(lines)
            return
        with put_in_place(target) as temporary:
            if self.is_parquet:
                pyarrow.parquet.write_table(self._with_added(records, numbers), temporary)
            else:
                with open(temporary, "w", encoding="utf-8") as file:
                    file.writelines(lines)

    def _lines(self, records: list[dict], numbers: Sequence[int]) -> Iterator[str]:
        """Lines of JSON or, with numbers as Python writes them, of CSV."""
        if Path(self.path).suffix.lower() != ".csv":
            yield from (f"{self.line(number, record)}\n" for number, record in zip(numbers, records, strict=True))
            return
        carried, shown = self._rows or [], StringIO()
        names = list(dict.fromkeys(name for row in carried for name in row))
        writer = csv.writer(shown, lineterminator="\n")
        writer.writerow([*names, *self.names.values()])
        for number, record in zip(numbers, records, strict=True):
            own = [carried[number].get(name) for name in names] if carried else []
            writer.writerow([*own, *(record.get(name) for name in self.names)])
        yield from shown.getvalue().splitlines(keepends=True)

    def _with_added(self, records: list[dict], numbers: Sequence[int]) -> pyarrow.Table:
        table = pyarrow.table({}) if self._table is None else self._table
        columns, schema = table.columns, table.schema
        if len(numbers) != len(table) or any(at != row for row, at in enumerate(numbers)):
            columns = [_taken(column, numbers) for column in columns]
        for name, own in self.names.items():
            if not records or any(name in record for record in records):
                columns.append(pyarrow.array([record.get(name) for record in records], self._types[name]))
                schema = schema.append(pyarrow.field(own, self._types[name]))
        return pyarrow.Table.from_arrays(columns, schema=schema)


def _taken(column: pyarrow.ChunkedArray, numbers: Sequence[int]) -> pyarrow.ChunkedArray | pyarrow.Array:
    try:
        return column.take(pyarrow.array(numbers, pyarrow.int64()))
    except pyarrow.ArrowNotImplementedError:  # views of texts, in some versions
        values = column.to_pylist()
        return pyarrow.array([values[number] for number in numbers], column.type)


def _holds(kind: pyarrow.DataType, inner: pyarrow.DataType) -> bool:
    return kind == inner or any(_holds(kind.field(number).type, inner) for number in range(kind.num_fields))


def read_records(path: str, column: str) -> Records:
    """Records from JSON Lines (`.jsonl`, `.ndjson`, `.json`, `-` for standard input), Parquet (`.parquet`) or text
    (`.txt`, one `column` a line).

    Raises:
        ValueError: for another ending, for what isn't JSON (with its line), for a record without `column`.
    """
    check_readable(path)
    ending = Path(path).suffix.lower()
    records: Records
    if ending == ".parquet" and path != "-":
        try:
            if os.path.isdir(path):  # of files; with partitioning the folder's own name could become a column
                content = pyarrow.parquet.read_table(path, partitioning=None)
            else:
                content = pyarrow.parquet.ParquetFile(path).read()
            records = ParquetRecords(path, content)
        except pyarrow.ArrowException as error:
            raise ValueError(f"{path}: not Parquet: {error}") from error
    elif path == "-":
        records = LineRecords(path, from_lines(path, sys.stdin))
    else:
        lines = _lines(path)
        content = [{column: line.rstrip("\r\n")} for line in lines] if ending == ".txt" else from_lines(path, lines)
        records = LineRecords(path, content)
    records.column(column)
    return records


def read_csv(path: str) -> LineRecords:
    """Records as they stand: no cell is taken for a number or for a missing value.

    Raises:
        ValueError: for what isn't CSV in UTF-8, and for a row of more or fewer cells than the header, with its line.
    """
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, strict=True)
            header = next(rows, [])
            records = []
            for row in rows:
                if row and len(row) != len(header):
                    raise ValueError(f"{path}: line {rows.line_num} has {len(row)} cells, the header {len(header)}")
                records += [dict(zip(header, row, strict=True))] if row else []
            return LineRecords(path, records)
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not CSV in UTF-8: {error}") from error


def read_table(path: str, column: str) -> Records:
    """`read_records`, of CSV too (`.csv`)."""
    if Path(path).suffix.lower() != ".csv":
        return read_records(path, column)
    records = read_csv(path)
    records.column(column)
    return records


def _lines(path: str) -> Iterator[str]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}: line {number} is not UTF-8: {error}") from error


def check_readable(path: str) -> None:
    """Raises `ValueError` for an input of an ending that isn't read here."""
    if path != "-" and Path(path).suffix.lower() not in (*LINES, ".parquet", ".txt"):
        raise ValueError(f"input: {path} must end in {', '.join(LINES)}, .parquet or .txt, or be '-'")


def check_writable(path: str, *others: str) -> None:
    """Raises `ValueError` unless a file of a known ending can be made at `path`, or it is `-`, a pipe or a device.

    Args:
        others: endings that the command knows beside JSON Lines and Parquet.
    """
    target = Path(path).resolve()
    if path == "-" or is_stream(path):
        return
    if target.is_dir():
        raise ValueError(f"output: {path} is a folder")
    if Path(path).suffix.lower() not in (*LINES, *others, ".parquet"):
        raise ValueError(f"output: {path} must end in {', '.join([*LINES, *others])} or .parquet, or be '-'")
    if not (target.parent.is_dir() and os.access(target.parent, os.W_OK)):
        raise ValueError(f"output: {path} cannot be written; its folder does not exist or is not writable")


def _same_file(one: str, other: str) -> bool:
    return os.path.exists(one) and os.path.exists(other) and not is_stream(one) and os.path.samefile(one, other)


def is_stream(path: str) -> bool:
    """Whether there is something at `path` that is neither a file nor a folder: a pipe, a device."""
    target = Path(path)
    return target.exists() and not (target.is_file() or target.is_dir())


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
