"""Metropolis–Hastings on the embedded model: `generate` against a plain and a careful loop.

1. Same law, one position a step: masked rows a step and steps a second.
2. Equal budgets of masked rows: effective samples of the energy and tokens changed, per row and per second, for the
   careful loop and for settings of `generate` that have the same target. The mean energies must agree. Beside them the
   share of tokens still there after so many rows, a measure with less noise than effective sample sizes this small.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator

import torch
from transformers.utils import logging

from benchmarks.common import describe_machine, print_table
from benchmarks.loops import CarefulLoop, PlainLoop
from hf_ebm.assets import load_embedded
from hf_ebm.models.energy.chains import proposal_support
from hf_ebm.sampling.run import energy_diagnostics

CHAINS = 16
LAG = 2_000  # masked rows a chain after which tokens are compared
_BLOCKS = {"block_fill": "sequential", "block_layout": "contiguous"}
SETTINGS = {
    "single site": {},
    "single site, delayed w=1": {"delayed_acceptance": 1},
    "single site, exclude_current": {"exclude_current": True},
    "3 scattered, parallel": {"block_size": 3},
    "3 contiguous, sequential": {"block_size": 3, **_BLOCKS},
    "5 contiguous, sequential": {"block_size": 5, **_BLOCKS},
    "1 and 3, sequential": {"block_size": [1, 3], **_BLOCKS},
    "2, 4 and 6, sequential": {"block_size": [2, 4, 6], **_BLOCKS},
    "2 contiguous, sequential, delayed w=1": {"block_size": 2, "delayed_acceptance": 1, **_BLOCKS},
    "3 contiguous, sequential, delayed w=1": {"block_size": 3, "delayed_acceptance": 1, **_BLOCKS},
    "1 and 3, sequential, delayed w=1": {"block_size": [1, 3], "delayed_acceptance": 1, **_BLOCKS},
    "2, 4 and 6, sequential, delayed w=1": {"block_size": [2, 4, 6], "delayed_acceptance": 1, **_BLOCKS},
}


def steps_per_second(model, length: int, epochs: int) -> list[list]:
    """Part 1: a row for each of the three programs."""
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


def equal_rows(model, length: int, row_budget: int, names: list[str], seed: int) -> Iterator[list]:
    """Part 2: a row for the careful loop and for each setting."""
    support = proposal_support(model, None)
    start = model.generate(lengths=length, num_chains=CHAINS, num_epochs=1, seed=seed).sequences
    loop = CarefulLoop(model.mlm, model.config.mask_token_id, length, support, seed)
    began = time.perf_counter()
    found = loop.run(start, row_budget)
    base = _measures("careful loop, single site", *found, loop.rows, time.perf_counter() - began)
    yield [length, *base, 1.0, 1.0]
    for name in names:
        began = time.perf_counter()
        found = _spend(model, start, row_budget, seed + 1, SETTINGS[name])
        row = _measures(name, *found, time.perf_counter() - began)
        yield [length, *row, row[6] / base[6], row[7] / base[7]]


def _spend(model, start, row_budget: int, seed: int, settings: dict):
    """Runs until the budget of rows is spent: energies, states and changes as a loop's `run`, and rows."""
    states, rows = [], 0

    class Spent:
        def __call__(self, ids, scores):
            states.append(ids.clone())
            done = rows >= row_budget
            return torch.full((len(ids),), done, dtype=torch.bool)

    def count(module, args, kwargs):
        nonlocal rows
        rows += len(kwargs["input_ids"])

    hook = model.mlm.register_forward_pre_hook(count, with_kwargs=True)
    out = model.generate(input_ids=start, num_epochs=100_000, seed=seed, stopping_criteria=[Spent()], **settings)
    hook.remove()
    return out.trace.energy, torch.stack(states, 1), int(out.trace.tokens_changed.sum()), out.num_masked_rows


def _measures(name: str, energies, states, changed: int, rows: int, took: float) -> list:
    burn_in = energies.shape[1] // 4
    kept = energies[:, burn_in:]
    found = energy_diagnostics(kept)
    share = kept.shape[1] / energies.shape[1]
    mean = f"{float(kept.mean()):.2f} ± {float(kept.mean(1).std() / CHAINS**0.5):.2f}"
    return [
        name, rows, energies.shape[1], took, mean, found.r_hat,
        1000 * found.ess_bulk / (rows * share), found.ess_bulk / (took * share), 1000 * changed / rows, changed / took,
        tokens_kept(states[:, burn_in:, 1:-1], round(LAG * CHAINS * energies.shape[1] / rows)),
    ]  # fmt: skip


def tokens_kept(states: torch.Tensor, lag: int) -> float:
    """Share of the tokens of `states` (C, epochs, L) still there `lag` epochs later, above chance.

    Chance is how often two chains agree: 0 says that the tokens are forgotten, 1 that none has moved.
    """
    if lag >= states.shape[1]:
        return math.nan
    chains = len(states)
    same = sum(float((states == other).double().mean()) for other in states)  # each with itself among them
    chance = (same - 1) / (chains - 1)
    kept = float((states[:, lag:] == states[:, :-lag]).double().mean())
    return (kept - chance) / (1 - chance)


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="*", default=[12, 32], help="free positions in part 1")
    parser.add_argument("--epochs", type=int, default=1, help="epochs timed in part 1")
    parser.add_argument("--efficiency_lengths", type=int, nargs="*", default=[12], help="free positions in part 2")
    parser.add_argument("--rows", type=int, default=120_000, help="masked rows per setting in part 2")
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), help="of part 2")
    parser.add_argument("--seed", type=int, default=0, help="of part 2")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.disable_progress_bar()
    model, _ = load_embedded()
    print(describe_machine())
    print(f"\nThe same law, one position a step, {CHAINS} chains:")
    rows = (row for length in arguments.lengths for row in steps_per_second(model, length, arguments.epochs))
    print_table(["free positions", "program", "masked rows/step/chain", "steps/s", "hf_ebm is faster by"], rows)
    print(f"\nThe same target, about {arguments.rows} masked rows each, {CHAINS} chains:")
    header = ["free positions", "program and settings", "rows", "epochs", "s", "mean energy ± s.e.", "split R-hat"]
    header += ["ESS/1000 rows", "ESS/s", "changes/1000 rows", "changes/s"]
    header += [f"tokens kept after {LAG} rows a chain", "ESS/row vs careful", "ESS/s vs careful"]
    rows = (
        row
        for length in arguments.efficiency_lengths
        for row in equal_rows(model, length, arguments.rows, arguments.settings, arguments.seed)
    )
    print_table(header, rows)


if __name__ == "__main__":
    main()
