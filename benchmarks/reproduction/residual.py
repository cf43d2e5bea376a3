"""Residual energy models: table 1 and figures 1 to 3 of Deng et al. 2020, on verses."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.reproduction.report import Report, pyplot_without_display, save_figure
from benchmarks.reproduction.residual_runs import (
    MAX_NEW_TOKENS,
    QUICK_RESIDUAL,
    ROWS_AT_ONCE,
    ResidualCache,
    ResidualRunConfig,
    ResidualScale,
)
from hf_ebm.models.residual.scoring_residual import bounds_by_size, lm_log_probs, position_log_probs
from hf_ebm.objectives.losses import effective_sample_size, log_importance_weights
from hf_ebm.plots import plot_perplexity_bounds

SPLITS = ("validation", "test")
# Rates were chosen in four short runs of one seed, by the loss on validation verses.
MODELS = {
    "base LM (5 M)": ResidualRunConfig("base"),
    "base LM, trained on (5 M)": ResidualRunConfig("trained_on"),
    "RALM (base + 6 M)": ResidualRunConfig("ralm"),
    "BALM (10 M)": ResidualRunConfig("balm"),
    "joint UNIT (base + 5 M)": ResidualRunConfig("unit", 1e-4),
    "joint BIT (base + 5 M)": ResidualRunConfig("bit"),
}
BASE, UNIT, BIT = "base LM (5 M)", "joint UNIT (base + 5 M)", "joint BIT (base + 5 M)"
COLUMNS = [*(f"{split} {side}" for split in SPLITS for side in ("lower", "upper")), "gain, nats a verse", "ESS, %"]
DRAWS = 8  # samples of each prefix, for figures 2 (right) and 3


def table_1(experiments: ResidualCache, report: Report) -> None:
    """Perplexity ranges."""
    for name, run in MODELS.items():
        seeds = _seeds(experiments, run)
        for split in SPLITS:
            ranges = [_perplexity(experiments, run, seed, split) for seed in seeds]
            report.add(name, {f"{split} lower": [r[0] for r in ranges], f"{split} upper": [r[1] for r in ranges]})
        report.add(name, {"gain, nats a verse": [float(_gains(experiments, run, s).mean()) for s in seeds]})
        if run.has_energy:
            report.add(name, {"ESS, %": [_effective_share(experiments, run, seed) for seed in seeds]})
    report.notes += [
        f"Continuations of up to {MAX_NEW_TOKENS} tokens behind ten; {experiments.scale.held_out} verses a split. "
        f"Ranges from {experiments.scale.samples} samples of the base model for each prefix. The gain is the mean, on "
        "test, of the log probability of a continuation less that under the base model, in the middle of its range.",
        "Residual models have three seeds (heads, order, choice of negatives, dropout); language models have one, as "
        "theirs all start at the base model and differ by order and dropout alone.",
        _spread_note(experiments),
    ]
    column = "gain, nats a verse"
    report.rows[BASE][column] = [0.0] * len(experiments.scale.seeds)
    for better, worse in ((UNIT, BASE), (BIT, BASE), (BIT, UNIT)):
        report.finding(f"{better} below {worse} in perplexity", (better, column), (worse, column))


def _seeds(experiments: ResidualCache, run: ResidualRunConfig) -> tuple[int, ...]:
    return experiments.scale.seeds if run.has_energy else experiments.scale.seeds[:1]


def _perplexity(experiments: ResidualCache, run: ResidualRunConfig, seed: int, split: str) -> tuple[float, float]:
    """Lower and upper estimate; twice the exact value for a language model."""
    low, high = _nats(experiments, run, seed, split)
    tokens = (~experiments.log_probs(MODELS[BASE], 0, split).isnan()).sum()
    return float((low.sum() / tokens).exp()), float((high.sum() / tokens).exp())


def _nats(experiments, run: ResidualRunConfig, seed: int, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Minus the log probability of each continuation, (N,) twice."""
    if not run.has_energy:
        nats = -experiments.log_probs(run, 0 if run.kind == "base" else seed, split).nansum(1)
        return nats, nats
    energies = experiments.energies(run, seed, split)
    bounds = bounds_by_size(energies["sampled"], [energies["sampled"].shape[1]])
    nats = energies["real"] - experiments.log_probs(MODELS[BASE], 0, split).nansum(1)
    return nats + bounds.lower[:, 0], nats + bounds.upper[:, 0]


def _gains(experiments, run: ResidualRunConfig, seed: int) -> torch.Tensor:
    """Log probability of each test continuation less the base model's, (N,)."""
    low, high = _nats(experiments, run, seed, "test")
    return _nats(experiments, MODELS[BASE], seed, "test")[0] - (low + high) / 2


def _spread_note(experiments) -> str:
    """Gains with their standard errors over verses; of several seeds the mean gain of each verse."""
    parts = []
    for name, run in MODELS.items():
        gains = torch.stack([_gains(experiments, run, seed) for seed in _seeds(experiments, run)]).mean(0)
        parts.append(f"{name} {float(gains.mean()):+.3f} ± {float(gains.std()) / len(gains) ** 0.5:.3f}")
    return f"Gain and its standard error over verses: {'; '.join(parts)}."


def _effective_share(experiments, run: ResidualRunConfig, seed: int) -> float:
    weights = log_importance_weights(experiments.energies(run, seed, "test")["sampled"])
    return float(100 * effective_sample_size(weights).mean() / weights.shape[1])


def draw(results: Path, quick: bool, folder: Path) -> Path:
    """Figures 1, 2 and 3, from the models of the table's first seed."""
    experiments = ResidualCache(QUICK_RESIDUAL if quick else ResidualScale(), folder)
    figure, panels = pyplot_without_display().subplots(2, 2, figsize=(13, 9))
    raw = {
        "positions (figure 1)": _draw_positions(experiments, panels[0][0], 1 if quick else 40),
        "number of samples (figure 2, left)": _draw_sizes(experiments, panels[0][1]),
        "unique n-grams (figure 2, right)": _draw_ngrams(experiments, panels[1][0]),
        "log probabilities (figure 3)": _draw_densities(experiments, panels[1][1]),
    }
    return save_figure(results, "residual-figures-1-2-3", figure, {"seed": experiments.scale.seeds[0], **raw})


def _draw_positions(experiments, axes, count: int) -> dict:
    """Figure 1: perplexity gain of BIT at each position over the base model, and by enumeration at the last."""
    seed, rows = experiments.scale.seeds[0], experiments.rows("test")[:count]

    def compute():
        return position_log_probs(
            experiments.model(MODELS[BIT], seed), [row["prefix_ids"] for row in rows],
            [row["continuation_ids"] for row in rows], max_new_tokens=MAX_NEW_TOKENS,
            num_samples=experiments.scale.samples, candidates_at_once=ROWS_AT_ONCE, enumerate_last=True,
        ).to_tuple()  # fmt: skip

    lm, lower, upper, last = experiments.kept("positions", (MODELS[BIT], seed, count), compute)
    perplexities = {
        name: (-values.nanmean(0)).exp().tolist() for name, values in (("lm", lm), ("low", upper), ("high", lower))
    }
    gains = {
        side: [a - b for a, b in zip(perplexities["lm"], perplexities[side], strict=True)] for side in ("low", "high")
    }
    positions = range(1, len(gains["low"]) + 1)
    axes.fill_between(positions, gains["high"], gains["low"], alpha=0.4, label="BIT, between estimates")
    whole = ~last.isnan()
    exact = float((-lm[whole, -1].mean()).exp() - (-last[whole].mean()).exp())
    at_last = [float((-lm[whole, -1].mean()).exp() - (-side[whole, -1].mean()).exp()) for side in (lower, upper)]
    axes.plot([MAX_NEW_TOKENS], [exact], "k*", label="by enumeration")
    axes.axhline(0, color="grey", linewidth=0.5)
    axes.set_xlabel(f"position ({count} test verses)")
    axes.set_ylabel("perplexity gain (figure 1)")
    axes.legend()
    return {"gain": gains, "last": {"enumerated": exact, "estimated": at_last, "verses": int(whole.sum())}}


def _draw_sizes(experiments, axes) -> dict:
    """Figure 2, left: the range by the number of samples."""
    energies = experiments.energies(MODELS[BIT], experiments.scale.seeds[0], "test")
    sizes = [2**power for power in range(1, 20) if 2**power <= energies["sampled"].shape[1]]
    nats = energies["real"] - experiments.log_probs(MODELS[BASE], 0, "test").nansum(1)
    tokens = (~experiments.log_probs(MODELS[BASE], 0, "test").isnan()).sum()
    bounds = bounds_by_size(energies["sampled"], sizes)
    found = {
        side: ((nats[:, None] + values).sum(0) / tokens).exp().tolist()
        for side, values in (("lower", bounds.lower), ("upper", bounds.upper))
    }
    plot_perplexity_bounds(sizes, found["lower"], found["upper"], axes)
    axes.set_ylabel("perplexity of BIT, test (figure 2)")
    return {"samples": sizes, **found}


def _drawn(experiments) -> dict[str, list[list[int]]]:
    """For each prefix its numbers of `DRAWS` samples: of the base model, and chosen by their weights under BIT."""
    energies = experiments.energies(MODELS[BIT], experiments.scale.seeds[0], "test")["sampled"]
    generator = torch.Generator().manual_seed(0)
    weights = log_importance_weights(energies).exp()
    joint = torch.multinomial(weights, DRAWS, replacement=True, generator=generator)
    base = torch.randint(energies.shape[1], joint.shape, generator=generator)
    return {"base LM": base.tolist(), "joint BIT": joint.tolist()}


def _draw_ngrams(experiments, axes) -> dict:
    """Figure 2, right: share of different n-grams among those of one continuation of each prefix."""
    rows, samples = experiments.rows("test"), experiments.samples("test")
    real = [[row["continuation_ids"] for row in rows]]
    sets = {"verses": real} | {
        name: [[samples[row][own[draw]].tolist() for row, own in enumerate(chosen)] for draw in range(DRAWS)]
        for name, chosen in _drawn(experiments).items()
    }
    found = {
        name: [sum(_unique_share(texts, n) for texts in own) / len(own) for n in (2, 3, 4)]
        for name, own in sets.items()
    }
    for place, (name, shares) in enumerate(found.items()):
        axes.bar([n + 0.25 * (place - 1) for n in (2, 3, 4)], shares, width=0.25, label=name)
    axes.set_xticks([2, 3, 4])
    axes.set_ylim(0.9 * min(map(min, found.values())), 100)
    axes.set_xlabel("n")
    axes.set_ylabel("unique n-grams, % (figure 2)")
    axes.legend()
    return found


def _unique_share(texts: list[list[int]], n: int) -> float:
    grams = [tuple(ids[at : at + n]) for ids in texts for at in range(len(ids) - n + 1)]
    return 100 * len(set(grams)) / len(grams)


def _draw_densities(experiments, axes) -> dict:
    """Figure 3: log probabilities of verses and of a model's own samples, under that model."""
    seed = experiments.scale.seeds[0]
    rows, samples = experiments.rows("test"), experiments.samples("test")
    energies = experiments.energies(MODELS[BIT], seed, "test")
    log_z = bounds_by_size(energies["sampled"], [energies["sampled"].shape[1]]).lower[:, 0]
    real = experiments.log_probs(MODELS[BASE], 0, "test").nansum(1)
    found = {"base LM": {"verses": real}, "joint BIT": {"verses": real - energies["real"] - log_z}}
    for name, chosen in _drawn(experiments).items():
        pairs = [(row, number) for row, own in enumerate(chosen) for number in own]
        prefixes = [torch.tensor(rows[row]["prefix_ids"]) for row, _ in pairs]
        after = [samples[row][number] for row, number in pairs]
        own = lm_log_probs(experiments.base, prefixes, after, 0, ROWS_AT_ONCE).nansum(1)
        if name == "joint BIT":
            own = own - torch.stack([energies["sampled"][row, number] + log_z[row] for row, number in pairs])
        found[name]["its samples"] = own
    result = {}
    for name, own in found.items():
        gap = float(own["verses"].mean() - own["its samples"].mean())
        result[name] = {"mean of verses": float(own["verses"].mean()), "gap of means": gap}
        for kind, values in own.items():
            axes.hist(values.tolist(), bins=40, density=True, histtype="step", label=f"{name}: {kind}")
    axes.set_xlabel("log probability of a continuation, nats (figure 3)")
    axes.legend()
    return result
