"""What the host alone allows: steps and masked rows a second when the model's forward costs nothing.

Logits come from a table of random ones, by the row's tokens and the position read, so chains are the same however rows
are batched. Time is this process's CPU time, without what the table itself takes. Two runs of different numbers of
epochs are subtracted, which leaves out the start; rows that the cache knows are not run, and not counted.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import BertConfig, BertForMaskedLM

from benchmarks.common import begin_timing, print_table
from hf_ebm import EnergyModel
from hf_ebm.scoring.masked_batches import MaskedBatchRunner

VOCABULARY = 32
TOKEN_BUDGET = 262_144  # as on a card
SETTINGS = {
    "single site": {},
    "pairs": {"block_size": 2, "block_fill": "sequential", "block_layout": "contiguous", "delayed_acceptance": 1},
}


class TableOfLogits:
    """Stands where `PositionLogits` does, and notes its own time and the rows it has answered."""

    def __init__(self, model):
        self.model, self.seconds, self.rows = model, 0.0, 0
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(4093, VOCABULARY, generator=generator) * 0.3
        self.factors = torch.randint(1, 4093, (64,), generator=generator)

    def together(self, passes):
        """Logits of each pass."""
        began = time.process_time()
        found = []
        for one in passes:
            number = (one.input_ids * self.factors[: one.input_ids.shape[1]]).sum(1, keepdim=True)
            found.append(self.table[(number + one.positions) % len(self.table)])
            self.rows += len(one.input_ids)
        self.seconds += time.process_time() - began
        return found


def energy_model() -> tuple[EnergyModel, TableOfLogits]:
    """An energy model whose logits are a table's, and the table."""
    config = BertConfig(vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    roles = {"mask_token_id": 3, "pad_token_id": 0, "special_token_ids": [0, 1, 2], "excluded_token_ids": [4]}
    model = EnergyModel(BertForMaskedLM(config).eval(), prefix_token_ids=[1], suffix_token_ids=[2], **roles)
    table = TableOfLogits(model.mlm)
    model.masked_batch_runner = lambda token_budget=None: MaskedBatchRunner(table, 3, VOCABULARY, TOKEN_BUDGET)
    return model, table


def speeds(model, table: TableOfLogits, chains: int, length: int, settings: dict, epochs: int) -> tuple[float, float]:
    """Steps and rows a second of so many epochs."""
    took, rows = [], []
    for count in (1, 1 + epochs):
        seconds, answered, began = table.seconds, table.rows, time.process_time()
        model.generate(lengths=length, num_chains=chains, num_epochs=count, seed=0, burn_in=count - 1, **settings)
        took.append(time.process_time() - began - (table.seconds - seconds))
        rows.append(table.rows - answered)
    alone, steps = took[1] - took[0], epochs * -(-length // settings.get("block_size", 1))
    return steps / alone, (rows[1] - rows[0]) / alone


def main() -> None:
    """Prints a row for each setting, length and number of chains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chains", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--lengths", type=int, nargs="+", default=[12, 32], help="free positions")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--epochs", type=int, default=4, help="epochs timed")
    arguments = begin_timing(parser, repeats=3)
    model, table = energy_model()

    def measured():
        for name in arguments.settings:
            for length in arguments.lengths:
                for chains in arguments.chains:
                    epochs = max(1, arguments.epochs * 16 // max(16, chains // 4))
                    found = [
                        speeds(model, table, chains, length, SETTINGS[name], epochs) for _ in range(arguments.repeats)
                    ]
                    yield [name, length, chains, *map(statistics.median, zip(*found, strict=True))]

    print_table(["settings", "free positions", "chains", "steps/s", "rows/s"], measured())


if __name__ == "__main__":
    main()
