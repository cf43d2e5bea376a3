"""The output of a long run: whole records appended as they come, nothing lost or doubled by a kill."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pyarrow.parquet

from hf_ebm.cli.common import to_json, write_records


class RunRecords:
    """Records of a run in a JSON Lines file (or standard output, `-`, which cannot be continued).

    Beside the output lies `<output>.run.json`, which says what the run is of. A Parquet output is collected as JSON
    Lines and converted at the end.

    Args:
        output: path, or `-`.
        recipe: what the run is of; an output of another recipe is refused.
        key_fields: the fields, whole numbers, that tell records of a run apart.
    """

    def __init__(self, output: str, recipe: dict, key_fields: tuple[str, ...]):
        self.recipe, self.key_fields = json.loads(to_json(recipe)), key_fields
        self.printed: list[dict] | None = [] if output == "-" else None
        self.output = Path(output)
        self.is_parquet = output.lower().endswith(".parquet")
        self.lines = self.output.with_name(self.output.name + ".partial.jsonl") if self.is_parquet else self.output
        self.recipe_file = self.output.with_name(self.output.name + ".run.json")
        self._known: set[tuple[int, ...]] = set()
        self._known_up_to = 0

    def open(self) -> None:
        """Starts the output, or checks that it is this run's and cuts off a record that a kill left half-written.

        Raises:
            ValueError: if the output exists and is not of this run.
        """
        if self.printed is not None:
            return
        if self.recipe_file.exists():
            if self._recipe_there() != self.recipe:
                raise ValueError(
                    f"output: {self.output} holds a run with another model, data or settings (see "
                    f"{self.recipe_file.name}); choose another output or remove both files"
                )
        elif self.output.exists() or self.lines.exists():
            raise ValueError(f"output: {self.output} exists and is not a run of this command; nothing is overwritten")
        else:
            temporary = self.recipe_file.with_name(self.recipe_file.name + ".tmp")
            temporary.write_text(json.dumps(self.recipe, indent=2, ensure_ascii=False), encoding="utf-8")
            os.replace(temporary, self.recipe_file)
        if not (self.is_parquet and self.output.exists()):
            with open(self.lines, "a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        self.read()

    def _recipe_there(self) -> dict | None:
        try:
            return json.loads(self.recipe_file.read_text(encoding="utf-8"))
        except ValueError:
            return None

    def read(self) -> list[dict]:
        """All records so far."""
        if self.printed is not None:
            return self.printed
        if self.is_parquet and self.output.exists():
            return pyarrow.parquet.read_table(self.output).to_pylist()
        with open(self.lines, encoding="utf-8") as file:
            try:
                records = [json.loads(line) for line in file]
                for record in records:
                    self.key(record)
                return records
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"output: {self.lines} holds a line that is no record of this command") from error

    def key(self, record: dict) -> tuple[int, ...]:
        """What tells records of a run apart."""
        return tuple(record[name] for name in self.key_fields)

    def append(self, records: list[dict]) -> None:
        """Appends records that are not there yet, in one write; processes take turns."""
        if self.printed is not None:
            self.printed.extend(records)
            print("\n".join(map(to_json, records)), flush=True)
            return
        with open(self.lines, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(self._known_up_to)  # what other processes have appended since this one looked
            self._known |= {self.key(json.loads(line)) for line in file}
            new = [record for record in records if self.key(record) not in self._known]
            file.write("".join(f"{to_json(record)}\n" for record in new).encode())
            file.flush()
            os.fsync(file.fileno())
            self._known |= set(map(self.key, new))
            self._known_up_to = file.tell()

    def finish(self) -> None:
        """Makes the Parquet file of a run that has all its records."""
        if self.is_parquet and not self.output.exists():
            write_records(str(self.output), sorted(self.read(), key=self.key))
            self.lines.unlink()
