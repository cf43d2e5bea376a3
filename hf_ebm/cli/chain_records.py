"""The output of a sampling run: whole records appended as they come, nothing lost or doubled by a kill."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path

import pyarrow.parquet

from hf_ebm.cli.common import to_json, write_records
from hf_ebm.sampling.configuration import ChainGenerationConfig
from hf_ebm.sampling.sampler import kept_samples


class ChainRecords:
    """Records of a run in a JSON Lines file (or standard output, `-`, which cannot be continued).

    Beside the output lies `<output>.run.json`, which says what the run is of, and while it goes on
    `<output>.state/` with the chains' states. A Parquet output is collected as JSON Lines and converted at the end.

    Args:
        output: path, or `-`.
        recipe: what the run is of; an output of another recipe is refused.
        config: the run's settings.
    """

    def __init__(self, output: str, recipe: dict, config: ChainGenerationConfig):
        self.recipe, self.config = json.loads(to_json(recipe)), config
        self.printed: list[dict] | None = [] if output == "-" else None
        self.output = Path(output)
        self.is_parquet = output.endswith(".parquet")
        self.lines = self.output.with_name(self.output.name + ".partial.jsonl") if self.is_parquet else self.output
        self.recipe_file = self.output.with_name(self.output.name + ".run.json")
        self._known: set[tuple[int, int, int]] = set()
        self._known_up_to = 0
        self.states = self.output.with_name(self.output.name + ".state")

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
                    f"output: {self.output} holds a run with another model, prompts or settings (see "
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
                    _key(record)
                return records
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"output: {self.lines} holds a line that is no record of this command") from error

    def missing(self, keys: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The chains of `keys` that don't have all their records yet."""
        counts: dict[tuple[int, int], int] = {}
        for record in self.read():
            key = _key(record)[:2]
            counts[key] = counts.get(key, 0) + 1
        return [key for key in keys if counts.get(key, 0) < self._records_per_chain()]

    def _records_per_chain(self) -> int:
        if self.config.kernel == "mask_predict":
            return 1
        return kept_samples(self.config.num_epochs, self.config.burn_in, self.config.thinning)

    def state_folder(self, batch: list[tuple[int, int]]) -> Path | None:
        """Where the state of a batch of chains is kept while it runs."""
        if self.printed is not None:
            return None
        return self.states / hashlib.sha256(json.dumps(batch).encode()).hexdigest()[:16]

    def append(self, records: list[dict]) -> None:
        """Appends records that are not there yet, in one write; processes take turns."""
        if self.printed is not None:
            self.printed.extend(records)
            print("\n".join(map(to_json, records)), flush=True)
            return
        with open(self.lines, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(self._known_up_to)  # what other processes have appended since this one looked
            self._known |= {_key(json.loads(line)) for line in file}
            new = [record for record in records if _key(record) not in self._known]
            file.write("".join(f"{to_json(record)}\n" for record in new).encode())
            file.flush()
            os.fsync(file.fileno())
            self._known |= set(map(_key, new))
            self._known_up_to = file.tell()

    def close(self, keys: list[tuple[int, int]]) -> None:
        """Ends a run: drops the states, makes the Parquet file. Raises `RuntimeError` if records are missing."""
        if self.printed is not None:
            return
        missing = self.missing(keys)
        if missing:
            raise RuntimeError(f"{self.output}: the chains {missing[:5]} have not been sampled; run the command again")
        shutil.rmtree(self.states, ignore_errors=True)
        if self.is_parquet and not self.output.exists():
            write_records(str(self.output), sorted(self.read(), key=_key))
            self.lines.unlink()


def _key(record: dict) -> tuple[int, int, int]:
    """What tells records of a run apart."""
    return record["prompt"], record["chain"], record["epoch"]
