"""Metropolis–Hastings on the embedded model, one position a step: `generate` against a plain and a careful loop.

The law is the same; masked rows a step and steps a second. `benchmarks.mixing` says what they are worth.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers.utils import logging

from benchmarks.common import describe_machine, print_table
from benchmarks.loops import CarefulLoop, PlainLoop
from hf_ebm.assets import load_embedded
from hf_ebm.models.energy.chains import proposal_support

CHAINS = 16


def steps_per_second(model, length: int, epochs: int) -> list[list]:
    """A row for each of the three programs."""
    support = proposal_support(model, None)
    start = model.generate(lengths=length, num_chains=CHAINS, num_epochs=1, seed=0).sequences
    steps, rows = epochs * length, {}
    for name, loop, per_step in (
        ("plain loop", PlainLoop, 2 * length + 1),
        ("careful loop", CarefulLoop, length + 1),
    ):
        program = loop(model.mlm, model.config.mask_token_id, length, support)
        began = time.perf_counter()
        program.run(start, CHAINS * per_step * steps)
        rows[name] = (program.rows / CHAINS / steps, steps / (time.perf_counter() - began))
    # The rows of the start's energies (CHAINS * length) are left out of the counts of all three.
    began = time.perf_counter()
    out = model.generate(input_ids=start, num_epochs=epochs, seed=1, block_size=1)
    took = time.perf_counter() - began
    rows["hf_ebm"] = ((out.num_masked_rows - CHAINS * length) / CHAINS / steps, steps / took)
    ours = rows["hf_ebm"][1]
    return [[length, name, per_step, speed, ours / speed] for name, (per_step, speed) in rows.items()]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="*", default=[12, 32], help="free positions")
    parser.add_argument("--epochs", type=int, default=1, help="epochs timed")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.disable_progress_bar()
    model, _ = load_embedded()
    print(describe_machine())
    print(f"\nThe same law, one position a step, {CHAINS} chains:")
    rows = (row for length in arguments.lengths for row in steps_per_second(model, length, arguments.epochs))
    print_table(["free positions", "program", "masked rows/step/chain", "steps/s", "hf_ebm is faster by"], rows)


if __name__ == "__main__":
    main()
