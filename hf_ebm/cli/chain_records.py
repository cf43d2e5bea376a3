"""The output of a sampling run, chain by chain."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from hf_ebm.cli.run_records import RunRecords
from hf_ebm.sampling.sampler import kept_samples

if TYPE_CHECKING:
    from hf_ebm.sampling.configuration import ResolvedChainConfig


class ChainRecords(RunRecords):
    """Records of chains; while the run goes on, `<output>.state/` holds the chains' states.

    Args:
        output: path, or `-`.
        recipe: what the run is of; an output of another recipe is refused.
        config: the run's settings.
    """

    def __init__(self, output: str, recipe: dict, config: ResolvedChainConfig):
        super().__init__(output, recipe, ("prompt", "chain", "epoch"))
        self.config = config
        self.states = self.output.with_name(self.output.name + ".state")

    def missing(self, keys: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The chains of `keys` that don't have all their records yet."""
        counts: dict[tuple[int, int], int] = {}
        for record in self.read():
            prompt, chain, _ = self.key(record)
            key = prompt, chain
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

    def close(self, keys: list[tuple[int, int]]) -> None:
        """Ends a run: drops the states, makes the Parquet file. Raises `RuntimeError` if records are missing."""
        if self.printed is not None:
            return
        missing = self.missing(keys)
        if missing:
            raise RuntimeError(f"{self.output}: the chains {missing[:5]} have not been sampled; run the command again")
        shutil.rmtree(self.states, ignore_errors=True)
        self.finish()
