"""The output of a sampling run, chain by chain."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from hf_ebm.cli.run_records import RunRecords
from hf_ebm.cli.tables import Output
from hf_ebm.sampling.sampler import kept_samples
from hf_ebm.sampling.warm_start import DECODERS

if TYPE_CHECKING:
    from hf_ebm.sampling.configuration import ResolvedChainConfig


class ChainRecords(RunRecords):
    """Records of chains; while the run goes on, `<output>.state/` holds the states of chains that aren't done.

    Args:
        output: where records go; those of a prompt get the fields of the input's record of its number.
        config: the run's settings.
    """

    def __init__(self, output: Output, config: ResolvedChainConfig):
        super().__init__(output, ("prompt", "chain", "epoch"))
        self.config = config

    def missing(self, keys: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The chains of `keys` that don't have all their records yet."""
        counts: dict[tuple[int, int], int] = {}
        for record in self.read():
            prompt, chain, _ = self.key(record)
            key = prompt, chain
            counts[key] = counts.get(key, 0) + 1
        return [key for key in keys if counts.get(key, 0) < self._records_per_chain()]

    def _records_per_chain(self) -> int:
        if self.config.kernel in DECODERS:
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
