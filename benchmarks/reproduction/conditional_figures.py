"""Figures 6.2 to 6.4 of the thesis, from the runs of its tables, and how energy and metric go together."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.reproduction.conditional import (
    BLOCKS,
    QUICK_CONDITIONAL,
    ConditionalCache,
    ConditionalScale,
    Sampling,
    annealed,
    gibbs,
)
from benchmarks.reproduction.report import pyplot_without_display, save_figure
from hf_ebm.plots import plot_energy_metric, rank_correlation

SAMPLERS = {"MH, raw": Sampling("raw"), "MH, norm": Sampling(), "degenerate Gibbs": gibbs()}


def draw_epochs(results: Path, quick: bool, folder: Path) -> Path:
    """Figures 6.2 (single sites), 6.3 (blocks) and 6.4 (annealed): means over words and chains by epoch."""
    panels = {
        "figure 6.2": (SAMPLERS, ("energy", "PER")),
        "figure 6.3": ({name: sampling.having(**dict(BLOCKS)) for name, sampling in SAMPLERS.items()}, ("accept",)),
        "figure 6.4": (
            {"raw, annealed": annealed("raw", 0.02), "norm, annealed": annealed("local", 0.02)},
            ("accept", "energy", "PER"),
        ),
    }
    labels = {"energy": "local energy, nats a word", "PER": "phoneme error rate, %", "accept": "acceptance rate"}
    experiments = _experiments(quick, folder)
    figure, axes = pyplot_without_display().subplots(2, 3, figsize=(15, 8))
    places, raw = iter(axes.flat), {}
    for number, (samplers, names) in panels.items():
        for name in names:
            place = next(places)
            for sampler, sampling in samplers.items():
                by_chain = torch.tensor(experiments.run(sampling)[name])
                raw.setdefault(number, {}).setdefault(name, {})[sampler] = by_chain.tolist()
                epochs, mean, deviation = range(1, by_chain.shape[1] + 1), by_chain.mean(0), by_chain.std(0)
                (line,) = place.plot(epochs, mean, label=sampler)
                place.fill_between(epochs, mean - deviation, mean + deviation, color=line.get_color(), alpha=0.2)
            place.set_xlabel("epoch")
            place.set_ylabel(f"{labels[name]} ({number})")
            place.legend()
    return save_figure(results, "thesis-figures-6.2-6.3-6.4", figure, {**_scale(experiments), **raw})


def draw_correlation(results: Path, quick: bool, folder: Path) -> Path:
    """Local energy a phoneme against phoneme error, of every different sample that the chains of a sampler visited."""
    experiments = _experiments(quick, folder)
    figure, panels = pyplot_without_display().subplots(1, len(SAMPLERS), figsize=(15, 4.5))
    raw = {}
    for place, (sampler, sampling) in zip(panels, SAMPLERS.items(), strict=True):
        found = {name: torch.tensor(values) for name, values in experiments.run(sampling)["samples"].items()}
        energy, errors = found["energy"] / found["length"], found["edits"] / found["length"]
        plot_energy_metric(energy, errors, sampler, place)
        place.set_xlabel("local energy, nats a phoneme")
        place.set_ylabel("phoneme error rate")
        within = []
        for word in found["word"].unique():
            own = found["word"] == word
            if len(errors[own].unique()) > 1:
                within.append(rank_correlation(energy[own].tolist(), errors[own].tolist()))
        raw[sampler] = {
            "samples": len(energy),
            "rank correlation": rank_correlation(energy.tolist(), errors.tolist()),
            "mean rank correlation within a word": sum(within) / max(1, len(within)),
            "words with samples of different error": len(within),
        }
    return save_figure(results, "energy-and-metric", figure, {**_scale(experiments), **raw})


def _experiments(quick: bool, folder: Path) -> ConditionalCache:
    return ConditionalCache(QUICK_CONDITIONAL if quick else ConditionalScale(), folder)


def _scale(experiments: ConditionalCache) -> dict:
    scale = experiments.scale
    return {"words": scale.words, "epochs": scale.num_epochs, "chains": scale.seeds}
