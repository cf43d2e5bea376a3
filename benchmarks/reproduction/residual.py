"""Residual energy models: table 1 and figures 1 to 3 of Deng et al. 2020, on verses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.reproduction.report import Report, pyplot_without_display, save_figure
from benchmarks.reproduction.residual_runs import (
    MAX_NEW_TOKENS,
    QUICK_RESIDUAL,
    RATES,
    ROWS_AT_ONCE,
    ResidualCache,
    ResidualRunConfig,
    ResidualScale,
)
from hf_ebm.models.residual.scoring_residual import bounds_by_size, lm_log_probs, position_log_probs
from hf_ebm.objectives.losses import effective_sample_size, log_importance_weights
from hf_ebm.plots import plot_perplexity_bounds

SPLITS = ("validation", "test")
KINDS = {
    "base LM (5 M)": "base",
    "base LM, trained on (5 M)": "trained_on",
    "RALM (base + 6 M)": "ralm",
    "BALM (10 M)": "balm",
    "joint UNIT (base + 5 M)": "unit",
    "joint BIT (base + 5 M)": "bit",
}
BASE, TRAINED_ON, RALM, BALM, UNIT, BIT = KINDS
GAIN = "gain, nats a verse"
COLUMNS = [*(f"{split} {side}" for split in SPLITS for side in ("lower", "upper")), GAIN, "ESS, %"]
SCALE_COLUMNS = [GAIN, "standard error", "ESS, %"]
DRAWS = 8  # samples of each prefix, for figures 2 (right) and 3
TIMES = (0.5, 1, 2, 4)  # of `ResidualScale.trial_train` verses, or two negatives
SCALED_EPOCHS = 4  # of the runs on few verses, in which more than one of a verse's negatives is met


def table_starts(experiments: ResidualCache, report: Report) -> None:
    """The converged models of verses: how long they were trained, and what another epoch would bring."""
    more = {"causal": experiments.chosen("trained_on"), "masked": replace(experiments.masked_run, kind="masked_on")}
    more["masked"] = replace(more["masked"], epochs=1, learning_rate=RATES[-1], max_train=experiments.scale.max_train)
    curves = {}
    for name, run in (("causal", experiments.base_run), ("masked", experiments.masked_run)):
        curve = [log["eval_loss"] for log in experiments.training_logs(run, 0) if "eval_loss" in log]
        after = experiments.training_logs(more[name], experiments.scale.seeds[0])[-1]["eval_loss"]
        curves[name] = curve[:-1]  # the last is that of the weights that were kept
        report.add(name, {
            "epochs": [float(len(curve) - 1)],
            "loss": curve[-1:],
            "trained on": [after],
            "gain": [curve[-1] - after],
        })  # fmt: skip
    report.seeds = [0]
    report.raw["curves"] = curves
    report.notes.append(
        "Nats a token (of the masked model: a masked token) of validation verses. From the embedded models, over at "
        f"most {experiments.scale.most_epochs} epochs of {experiments.scale.corpus} verses, the epoch of the lowest "
        f"loss; trained on: another of {experiments.scale.max_train} verses."
    )


def table_1(experiments: ResidualCache, report: Report) -> None:
    """Perplexity ranges."""
    scale = experiments.scale
    runs = {name: experiments.chosen(kind) for name, kind in KINDS.items()}
    for name, run in runs.items():
        for split in SPLITS:
            ranges = [_perplexity(experiments, run, seed, split) for seed in scale.seeds]
            report.add(name, {f"{split} lower": [r[0] for r in ranges], f"{split} upper": [r[1] for r in ranges]})
        report.add(name, {GAIN: [float(_gains(experiments, run, seed).mean()) for seed in scale.seeds]})
        if run.has_energy:
            report.add(name, {"ESS, %": [_effective_share(experiments, run, seed) for seed in scale.seeds]})
    report.notes += [
        f"Continuations of up to {MAX_NEW_TOKENS} tokens after ten; {scale.held_out} verses a split. Ranges from "
        f"{scale.samples} samples of the base for each prefix. The gain is the mean, on test, of the log probability "
        "of a continuation less that under the base, in the middle of its range.",
        f"All models but the base: one epoch of {scale.max_train} verses from the base (see starts-verses), BIT's "
        f"encoder from the masked model; {scale.trials} trials of each (learning rate, dropout; one seed, "
        f"{scale.trial_train} verses).",
        _spread_note(experiments, runs),
    ]
    claims = [(UNIT, BASE), (BIT, BASE), (BIT, UNIT), (UNIT, RALM), (BIT, BALM), (TRAINED_ON, BASE)]
    for better, worse in claims:
        report.finding(f"{better} below {worse} in perplexity", (better, GAIN), (worse, GAIN))


def table_scale(experiments: ResidualCache, report: Report) -> None:
    """Gains of UNIT and BIT by the size of the corpus, and of BIT by the number of negatives; one seed."""
    seed, scale = experiments.scale.seeds[0], experiments.scale
    for kind, name in (("unit", "UNIT"), ("bit", "BIT")):
        for times in TIMES:
            run = replace(experiments.chosen(kind), max_train=round(times * scale.corpus / max(TIMES)))
            report.add(f"{name}, {times:g} x {scale.corpus // max(TIMES)} verses", _gain_cells(experiments, run, seed))
    for times in TIMES:
        run = replace(experiments.chosen("bit"), max_train=scale.trial_train, negatives=max(1, round(times * 2)),
                      epochs=SCALED_EPOCHS)  # fmt: skip
        report.add(f"BIT, {times:g} x 2 negatives", _gain_cells(experiments, run, seed))
    report.seeds = [seed]
    report.notes.append(
        f"One epoch with {scale.negatives} negatives a verse; or {SCALED_EPOCHS} epochs of {scale.trial_train} verses, "
        "in each of which one of a verse's negatives is drawn. Settings as chosen for residual-1. One seed; the "
        "standard error is that over the test verses."
    )


def draw_scale(results: Path, quick: bool, folder: Path) -> Path:
    """The gains of `table_scale`, drawn."""
    experiments = ResidualCache(QUICK_RESIDUAL if quick else ResidualScale(), folder)
    report = Report("", "", SCALE_COLUMNS)
    table_scale(experiments, report)
    figure, panels = pyplot_without_display().subplots(1, 2, figsize=(11, 4), sharey=True)
    for axes, what in zip(panels, ("verses", "negatives"), strict=True):
        lines: dict[str, list[tuple[float, float]]] = {}
        for row, cells in report.rows.items():
            if row.endswith(what):
                lines.setdefault(row.split(",")[0], []).append((cells[GAIN][0], cells["standard error"][0]))
        for name, points in lines.items():
            axes.errorbar(TIMES, *zip(*points, strict=True), marker="o", capsize=3, label=name)
        axes.set_xscale("log", base=2)
        axes.set_xlabel(f"times as many {what}")
        axes.set_ylabel(GAIN)
        axes.axhline(0, color="grey", linewidth=0.5)
        axes.legend()
    return save_figure(results, "residual-figure-scale", figure, {"rows": report.rows, "notes": report.notes})


def _gain_cells(experiments: ResidualCache, run: ResidualRunConfig, seed: int) -> dict[str, list[float]]:
    gains = _gains(experiments, run, seed)
    error = float(gains.std()) / len(gains) ** 0.5
    return {
        GAIN: [float(gains.mean())],
        "standard error": [error],
        "ESS, %": [_effective_share(experiments, run, seed)],
    }


def _perplexity(experiments: ResidualCache, run: ResidualRunConfig, seed: int, split: str) -> tuple[float, float]:
    """Lower and upper estimate; twice the exact value for a language model."""
    low, high = experiments.nats(run, seed, split)
    tokens = (~experiments.log_probs(experiments.base_run, 0, split).isnan()).sum()
    return float((low.sum() / tokens).exp()), float((high.sum() / tokens).exp())


def _gains(experiments: ResidualCache, run: ResidualRunConfig, seed: int) -> torch.Tensor:
    """Log probability of each test continuation less the base's, (N,)."""
    low, high = experiments.nats(run, seed, "test")
    return experiments.nats(experiments.base_run, 0, "test")[0] - (low + high) / 2


def _spread_note(experiments: ResidualCache, runs: dict[str, ResidualRunConfig]) -> str:
    """Gains with their standard errors over verses, of the mean gain of each verse over the seeds."""
    parts = []
    for name, run in runs.items():
        gains = torch.stack([_gains(experiments, run, seed) for seed in experiments.scale.seeds]).mean(0)
        parts.append(f"{name} {float(gains.mean()):+.3f} ± {float(gains.std()) / len(gains) ** 0.5:.3f}")
    return f"Gain and its standard error over verses: {'; '.join(parts)}."


def _effective_share(experiments: ResidualCache, run: ResidualRunConfig, seed: int) -> float:
    weights = log_importance_weights(experiments.energies(run, seed, "test")["sampled"])
    return float(100 * effective_sample_size(weights).mean() / weights.shape[1])


def draw(results: Path, quick: bool, folder: Path) -> Path:
    """Figures 1, 2 and 3, from the models of the table's first seed."""
    experiments = ResidualCache(QUICK_RESIDUAL if quick else ResidualScale(), folder)
    figure, panels = pyplot_without_display().subplots(2, 2, figsize=(13, 9))
    raw = {
        "positions (figure 1)": _draw_positions(experiments, panels[0][0], 1 if quick else 100),
        "number of samples (figure 2, left)": _draw_sizes(experiments, panels[0][1]),
        "unique n-grams (figure 2, right)": _draw_ngrams(experiments, panels[1][0]),
        "log probabilities (figure 3)": _draw_densities(experiments, panels[1][1]),
    }
    return save_figure(results, "residual-figures-1-2-3", figure, {"seed": experiments.scale.seeds[0], **raw})


def _draw_positions(experiments, axes, count: int) -> dict:
    """Figure 1: perplexity gain of BIT at each position over the base model, and by enumeration at the last."""
    seed, rows, bit = experiments.scale.seeds[0], experiments.rows("test")[:count], experiments.chosen("bit")

    def compute():
        return position_log_probs(
            experiments.model(bit, seed), [row["prefix_ids"] for row in rows],
            [row["continuation_ids"] for row in rows], max_new_tokens=MAX_NEW_TOKENS,
            num_samples=experiments.scale.samples, candidates_at_once=ROWS_AT_ONCE, enumerate_last=True,
        ).to_tuple()  # fmt: skip

    lm, lower, upper, last = experiments.kept("positions", bit, seed, compute, count)
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
    energies = experiments.energies(experiments.chosen("bit"), experiments.scale.seeds[0], "test")
    sizes = [2**power for power in range(1, 20) if 2**power <= energies["sampled"].shape[1]]
    nats = energies["real"] - experiments.log_probs(experiments.base_run, 0, "test").nansum(1)
    tokens = (~experiments.log_probs(experiments.base_run, 0, "test").isnan()).sum()
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
    energies = experiments.energies(experiments.chosen("bit"), experiments.scale.seeds[0], "test")["sampled"]
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
    energies = experiments.energies(experiments.chosen("bit"), seed, "test")
    log_z = bounds_by_size(energies["sampled"], [energies["sampled"].shape[1]]).lower[:, 0]
    real = experiments.log_probs(experiments.base_run, 0, "test").nansum(1)
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
