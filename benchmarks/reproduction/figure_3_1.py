"""Thesis figure 3.1: scheduled sampling's objective along a line in parameter space, hard and soft.

The line goes through a trained tagger in a random direction, each weight's step of the size of its tensor's spread.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch

from benchmarks.reproduction.experiment_cache import ExperimentCache, RunConfig, Scale
from benchmarks.reproduction.report import pyplot_without_display, save_figure
from hf_ebm.objectives.losses import cross_entropy_sum
from hf_ebm.relaxations.stepwise import StepwiseDecoder
from hf_ebm.trainers.stepwise import scheduled_sampling_logits

ALPHAS = (1.0, 5.0, 20.0)
QUICK, QUICK_POINTS = Scale(4_000, 200), 101


@torch.no_grad()
def objective_along_line(model, batch: dict, direction: list[torch.Tensor], points: torch.Tensor) -> dict:
    """Mean cross entropy with all inputs the model's, at `weights + point * direction`, by kind of input.

    The model begins at, and is given back with, its weights.
    """
    decoder = StepwiseDecoder(model)
    kinds = {"hard argmax": ("argmax", 1.0), **{f"soft, α = {a:g}": ("soft_argmax", a) for a in ALPHAS}}
    use_gold = torch.zeros_like(batch["labels"], dtype=torch.bool)
    tokens = int((batch["labels"] != -100).sum())
    curves = {name: [] for name in kinds}
    weights = [parameter.clone() for parameter in model.parameters()]
    for point in points:
        for parameter, weight, change in zip(model.parameters(), weights, direction, strict=True):
            parameter.copy_(weight + point * change)
        for name, (inputs, alpha) in kinds.items():
            logits = scheduled_sampling_logits(decoder, batch, use_gold, inputs, alpha)
            curves[name].append(float(cross_entropy_sum(logits, batch["labels"])) / tokens)
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.copy_(weight)
    return curves


def draw(results: Path, quick: bool, folder: Path) -> Path:
    """Trains a small tagger, walks along the line, and draws the curves. Returns the image's path."""
    experiments = ExperimentCache(QUICK if quick else Scale(20_000, 200), folder)
    task = experiments.task("stress")
    model = experiments.model(RunConfig("stress", "cross-entropy", 8, 4e-3, False), 1)
    rows = [row for row in task.encoded["train"] if len(row["labels"]) == 11][:4]
    batch = {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "attention_mask", "labels")}
    generator = torch.Generator().manual_seed(1)
    direction = [torch.randn(p.shape, generator=generator) * p.std().detach() for p in model.parameters()]
    points = torch.linspace(-1, 1, QUICK_POINTS if quick else 2001)
    curves = objective_along_line(model, batch, direction, points)
    figure, axes = pyplot_without_display().subplots(figsize=(7, 4))
    for name, values in curves.items():
        hard = name.startswith("hard")
        axes.plot(points, values, "." if hard else "-", label=name, markersize=2, color="red" if hard else None)
    axes.set_xlabel("step along a random direction from trained weights")
    axes.set_ylabel("cross entropy, nats per token")
    axes.legend()
    largest = {name: max(abs(a - b) for a, b in pairwise(v)) for name, v in curves.items()}
    raw = {"points": points.tolist(), "curves": curves, "largest_jump": largest}
    return save_figure(results, "thesis-figure-3.1", figure, raw)
