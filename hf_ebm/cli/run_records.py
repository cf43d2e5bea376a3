"""The output of a long run, of chains say: whole records appended as they come, nothing lost or doubled by a kill."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet
from filelock import FileLock, Timeout

from hf_ebm.cli.tables import Output, is_stream, to_json
from hf_ebm.runtime import put_in_place
from hf_ebm.sampling.configuration import ChainGenerationConfig
from hf_ebm.sampling.sampler import kept_samples
from hf_ebm.sampling.warm_start import DECODERS

if TYPE_CHECKING:
    from hf_ebm.sampling.configuration import ResolvedChainConfig

# Names of places, which the checksums in a run config make needless to compare.
_NOTED_ALONE = ("model", "revision")
_LONGEST = 40  # characters of a setting that an error shows


class RunRecords:
    """Records of a run in a JSON Lines file (or standard output, `-`, which cannot be continued).

    Beside the output lies `<output>.run.json`, which says what the run is of. A Parquet output is collected as JSON
    Lines and converted at the end, when its records get the fields of the input's. While the run goes on, one of its
    processes holds `<output>.run.lock`; who appends holds `<output>.lock`.

    Args:
        output: where records go.
        key_fields: the fields, whole numbers, that tell records of a run apart.
        numbers: for each value of the first of these fields, the input's record that it belongs to; by default the
            record of that number.

    Raises:
        ValueError: for a pipe or a device, which cannot be continued.
    """

    def __init__(self, output: Output, key_fields: tuple[str, ...], numbers: Sequence[int] | None = None):
        if output.path != "-" and is_stream(output.path):
            raise ValueError(f"output: {output.path} must be a file, as a run is continued there; or '-'")
        self.output, self.key_fields, self._numbers = output, key_fields, numbers
        self.printed: list[dict] | None = [] if output.path == "-" else None
        self.path = Path(output.path)
        self.lines = self._beside(".partial.jsonl") if output.is_parquet else self.path
        self.config_file, self.states = self._beside(".run.json"), self._beside(".state")
        self._known: set[tuple[int, ...]] = set()
        self._known_up_to = 0
        self._goes_on = FileLock(self._beside(".run.lock"), timeout=0)
        self._turn = FileLock(self._beside(".lock"))

    def open(self, run_config: dict[str, Any]) -> None:
        """Starts the output, or checks that it is this run's and cuts off a record that a kill left half-written.

        Args:
            run_config: what the run is of: values by name, a dictionary of more under `settings`, checksums under
                `checksums`.

        Raises:
            ValueError: if the output exists and is not of this run; it says what differs. A run that ended before it
                had anything to keep is forgotten.
        """
        if self.printed is not None:
            return
        with suppress(Timeout):  # another process holds it
            self._goes_on.acquire()
        try:
            self._begin(json.loads(to_json(run_config)))
        except BaseException:
            self._release()
            raise

    def _begin(self, run_config: dict) -> None:
        there = self.config_file.exists()
        if there and not self._kept_nothing():
            self._check_config(run_config)
        elif not there and (self.path.exists() or self.lines.exists()):
            raise ValueError(f"output: {self.path} exists and is not a run of this command; nothing is overwritten")
        else:
            with put_in_place(self.config_file) as file:
                file.write_text(json.dumps(run_config, indent=2, ensure_ascii=False), encoding="utf-8")
        if not self._is_converted():
            with self._turn, open(self.lines, "a+b") as file:
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        self.read()

    def _release(self) -> None:
        if self._goes_on.is_locked:
            _remove_file_of(self._goes_on)
            self._goes_on.release()

    def _beside(self, ending: str) -> Path:
        return self.path.with_name(self.path.name + ending)

    def _is_converted(self) -> bool:
        return self.output.is_parquet and self.path.exists()

    def _kept_nothing(self) -> bool:
        """Whether the run that began this output has ended before it had anything to keep."""
        kept = self._is_converted() or (self.lines.exists() and self.lines.stat().st_size) or self.states.exists()
        return not kept and self._goes_on.is_locked  # by this process, so by no other

    def _check_config(self, run_config: dict) -> None:
        mine = [self._beside(ending) for ending in ("", ".run.json", ".partial.jsonl", ".state")]
        advice = f"choose another output, or remove {', '.join(str(path) for path in mine if path.exists())}"
        there = self.noted_config()
        if "checksums" not in there:
            raise ValueError(
                f"output: {self.path} may be of another model, as {self.config_file.name} has no checksums (earlier "
                f"versions wrote none), so the run cannot go on; {advice}"
            )
        differing = _differences(there, run_config)
        if differing:
            raise ValueError(f"output: {self.path} holds a run with other {', '.join(differing)}; {advice}")

    def noted_config(self) -> dict[str, Any]:
        """What the run that is there is of; nothing where that can't be read."""
        try:
            there = json.loads(self.config_file.read_text(encoding="utf-8"))
        except ValueError:
            there = None
        return there if isinstance(there, dict) else {}

    def read(self) -> list[dict]:
        """All records so far, without what they have of the input's."""
        if self.printed is not None:
            return self.printed
        if self._is_converted():
            there = pyarrow.parquet.read_schema(self.path).names  # earlier versions wrote fewer fields
            names = [name for name in self.output.names.values() if name in there]
            table = pyarrow.parquet.read_table(self.path, columns=names, partitioning=None)
            return [self._own(record) for record in table.to_pylist()]
        with open(self.lines, encoding="utf-8") as file:
            try:
                records = [self._read(line) for line in file]
                for record in records:
                    self.key(record)
                return records
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"output: {self.lines} holds a line that is no record of this command") from error

    def _read(self, line: str | bytes) -> dict:
        record = json.loads(line)
        return record if self.output.is_parquet else self._own(record)

    def _own(self, record: dict) -> dict:
        return {name: record[own] for name, own in self.output.names.items() if own in record}

    def _number(self, record: dict) -> int:
        key = record[self.key_fields[0]]
        return key if self._numbers is None else self._numbers[key]

    def _line(self, record: dict) -> str:
        return to_json(record) if self.output.is_parquet else self.output.line(self._number(record), record)

    def key(self, record: dict) -> tuple[int, ...]:
        """What tells records of a run apart."""
        return tuple(record[name] for name in self.key_fields)

    def append(self, records: list[dict]) -> None:
        """Appends records that are not there yet, in one write; processes take turns."""
        if self.printed is not None:
            self.printed.extend(records)
            for record in records:  # a write each: other processes' come between lines, never into one
                sys.stdout.write(f"{self._line(record)}\n")  # print makes two of a line where nothing is buffered
                sys.stdout.flush()
            return
        with self._turn, open(self.lines, "a+b") as file:
            file.seek(self._known_up_to)  # what other processes have appended since this one looked
            self._known |= {self.key(self._read(line)) for line in file}
            new = [record for record in records if self.key(record) not in self._known]
            file.write("".join(f"{self._line(record)}\n" for record in new).encode())
            file.flush()
            os.fsync(file.fileno())
            self._known |= set(map(self.key, new))
            self._known_up_to = file.tell()

    @contextmanager
    def filling(self) -> Iterator[None]:
        """While records are made: an interruption says how the run goes on."""
        try:
            yield
        except KeyboardInterrupt as interrupt:
            how = "repeat the command to continue" if self.printed is None else "with a file as --output it could go on"
            raise KeyboardInterrupt(how) from interrupt
        finally:
            self._release()

    def finish(self) -> None:
        """Ends a run that has all its records: makes its Parquet file."""
        if self.output.is_parquet:
            if not self._is_converted():
                records = sorted(self.read(), key=self.key)
                self.output.write(records, [self._number(record) for record in records])
            self.lines.unlink(missing_ok=True)  # a kill may have left it
        with self._turn:
            _remove_file_of(self._turn)


def _remove_file_of(lock: FileLock) -> None:
    """Removes the file of a lock that is held. Windows doesn't let it be while it is open, but when it is released."""
    with suppress(OSError):
        os.unlink(lock.lock_file)


class ChainRecords(RunRecords):
    """Records of chains; while the run goes on, `<output>.state/` holds the states of chains that aren't done.

    Args:
        output: where records go; those of a prompt get the fields of the input's record of its number.
        config: the run's settings.
    """

    def __init__(self, output: Output, config: ResolvedChainConfig):
        super().__init__(output, ("prompt", "chain", "epoch"))
        self.config = config

    def noted_config(self) -> dict[str, Any]:
        """As the base; in earlier versions a decoder was a kernel."""
        there = super().noted_config()
        settings = there.get("settings")
        if isinstance(settings, dict) and settings.get("kernel") in DECODERS:
            now = {"kernel": ChainGenerationConfig.defaults["kernel"], "decoder": settings["kernel"]}
            there = {**there, "settings": settings | now}
        return there

    def missing(self, keys: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The chains of `keys` that don't have all their records yet."""
        counts: dict[tuple[int, int], int] = {}
        for record in self.read():
            prompt, chain, _ = self.key(record)
            key = prompt, chain
            counts[key] = counts.get(key, 0) + 1
        if self.config.target_rhat is not None:
            return self._missing_prompts(keys, counts)
        return [key for key in keys if counts.get(key, 0) < self._records_per_chain()]

    def _missing_prompts(self, keys: list[tuple[int, int]], counts: dict[tuple[int, int], int]) -> list:
        """Where the run decides how long it goes on: all chains of each prompt that has no more than some records.

        A prompt's state is kept until all of them are there.
        """
        missing = []
        for _, chains in groupby(keys, key=lambda key: key[0]):
            own = list(chains)
            folder, numbers = self.state_folder(own), {counts.get(key, 0) for key in own}
            if len(numbers) > 1 or 0 in numbers or (folder is not None and folder.exists()):
                missing += own
        return missing

    def _records_per_chain(self) -> int:
        if self.config.decoder is not None:
            return 1
        return kept_samples(self.config.num_epochs, self.config.burn_in, self.config.thinning)

    def state_folder(self, batch: list[tuple[int, int]]) -> Path | None:
        """Where the state of a batch of chains is kept while it runs."""
        if self.printed is not None:
            return None
        return self.states / hashlib.sha256(json.dumps(batch).encode()).hexdigest()[:16]

    def append_batch(self, batch: list[tuple[int, int]], records: list[dict]) -> None:
        """Appends the records of a batch of chains, which then needs its state no more."""
        self.append(records)
        folder = self.state_folder(batch)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self, keys: list[tuple[int, int]]) -> None:
        """Ends a run: drops the states, makes the Parquet file. Raises `RuntimeError` if records are missing."""
        if self.printed is not None:
            return
        missing = self.missing(keys)
        if missing:
            raise RuntimeError(f"{self.path}: the chains {missing[:5]} have not been sampled; run the command again")
        shutil.rmtree(self.states, ignore_errors=True)
        self.finish()


def _differences(there: dict, here: dict) -> list[str]:
    """What differs between two run configs, with the values where they are short."""
    found: list[str] = []
    for name in dict.fromkeys([*here, *there]):
        one, other = there.get(name), here.get(name)
        if name in _NOTED_ALONE or one == other:
            continue
        if isinstance(one, dict) and isinstance(other, dict):
            found += _differences(one, other) if name != "checksums" else [k for k in other if one.get(k) != other[k]]
        else:
            shown = f" ({one!r} there, {other!r} here)"
            found.append(name + (shown if len(shown) < 2 * _LONGEST else ""))
    return found
