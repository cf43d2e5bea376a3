"""Why 6.4 and 6.6 aren't seen: chains that run longer, on the words of these tables."""

from __future__ import annotations

import torch

from benchmarks.reproduction.conditional import BLOCKS, FINAL_NAMES, ConditionalCache, Sampling, decoders
from benchmarks.reproduction.report import Report

TIMES = 3  # as many epochs as in table 6.4
THESIS_EPOCHS = 1.65  # of 33, as many as in table 6.6, of 20
PARTS = ("first quarter", "rest of the first third", "last third")
BLOCK_COLUMNS = [f"{name}, {part}" for name in ("energy", "PER") for part in PARTS]
PREDICTED = "mask-predict (10 iterations)"


def table_blocks(experiments: ConditionalCache, report: Report) -> None:
    """Blocks and single sites at first and in the end.

    Chains of one target have one mean energy in the end, however they move. If blocks are below single sites at first
    and not in the end, they mix faster, and table 6.4's chains had mixed; if they are in the end too, single sites
    are stuck; if never, blocks bring nothing.
    """
    epochs = experiments.scale.num_epochs
    bounds = (0, max(1, epochs // 4)), (max(1, epochs // 4), epochs), ((TIMES - 1) * epochs, TIMES * epochs)
    for energy, name in (("local", "Norm"), ("raw", "Raw")):
        start = Sampling(energy).having(num_epochs=TIMES * epochs)
        for label, sampling in {"single sites": start, "blocks": start.having(**dict(BLOCKS))}.items():
            run = {metric: torch.tensor(experiments.run(sampling)[metric]) for metric in ("energy", "PER")}
            for part, (first, last) in zip(PARTS, bounds, strict=True):
                report.add(f"{name}, {label}", {
                    f"{metric}, {part}": values[:, first:last].mean(1).tolist() for metric, values in run.items()
                })  # fmt: skip
        for part in PARTS:
            column = f"energy, {part}"
            single, blocks = (f"{name}, {label}" for label in ("single sites", "blocks"))
            report.finding(f"{name}, {part}: blocks below single sites", (single, column), (blocks, column))
    report.notes.append(
        f"{TIMES * epochs} epochs, of which the first {epochs} are as many as table 6.4's; parts: epochs "
        f"{', '.join(f'{first + 1} to {last}' for first, last in bounds)}. Blocks shrink from three positions to one "
        "over all of them."
    )


def table_annealing(experiments: ConditionalCache, report: Report) -> None:
    """The thesis' annealing over the thesis' number of epochs: was the target still too warm?"""
    rows, epochs = decoders((0.02, 0.06)), experiments.scale.num_epochs
    longer = round(THESIS_EPOCHS * epochs)
    samplings = {PREDICTED: rows[PREDICTED]}
    for name in ("local energy", "raw energy"):
        energy, options = rows[name]
        samplings[f"{name}, {epochs} epochs"] = energy, options
        samplings[f"{name}, {longer} epochs"] = energy, {**options, "num_epochs": longer}
    for row, (energy, options) in samplings.items():
        final = experiments.run(Sampling(energy, tuple(options.items()), "test"))["final"]
        report.add(row, {name: final[name] for name in FINAL_NAMES})
    for name in ("local energy", "raw energy"):
        short, long = f"{name}, {epochs} epochs", f"{name}, {longer} epochs"
        report.finding(f"{name}: longer below shorter", (short, "PER"), (long, "PER"))
        report.finding(f"{name}: longer below mask-predict", (PREDICTED, "PER"), (long, "PER"))
    report.notes.append("Masked model, lengths given, test words; the target temperature falls by 0.02 an epoch.")
