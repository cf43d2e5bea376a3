"""Welleck and Cho 2020: parameter search for the task loss, on completion of verses and on transcription."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.reproduction.chapter_4 import RATES, converged_start, trained_on
from benchmarks.reproduction.completion import (
    QUICK_COMPLETION,
    CompletionCache,
    CompletionRunConfig,
    CompletionScale,
)
from benchmarks.reproduction.experiment_cache import Decoding, ExperimentCache, RunConfig
from benchmarks.reproduction.report import Report, pyplot_without_display, save_figure

START, TRAINED_ON = CompletionRunConfig(), CompletionRunConfig("likelihood")
ALPHAS = (0.1, 1.0, 10.0)
METRICS = {
    "LM": "lm", "Edit": "edit", "Nonterm": "nonterm", "Repetition": "repetition", "Avg. len": "length",
    "Perplexity": "perplexity",
}  # fmt: skip


def mgs_lm(alpha: float = 1.0, **options) -> CompletionRunConfig:
    """Cost: minus the log probability under the embedded model."""
    return CompletionRunConfig("mgs", "lm", options=(("alpha", alpha), *sorted(options.items())))


MGS_EDIT = CompletionRunConfig("mgs", "edit_distance", options=(("alpha", 10.0),))
MODELS = {"MLE": START, "MLE, trained on": TRAINED_ON, "MGS-LM": mgs_lm(), "MGS-edit": MGS_EDIT}
PROPOSALS = {"mixture": mgs_lm(), "zero only": mgs_lm(mixture=1.0), "MLE only": mgs_lm(mixture=0.0)}


def _completions(experiments: CompletionCache, report: Report, split: str) -> None:
    for name, run in MODELS.items():
        report.add(name, {c: experiments.each_seed(run, split, metric) for c, metric in METRICS.items()})
    human = experiments.humans(split)
    report.add("Human", {c: [human[metric]] for c, metric in METRICS.items() if metric in human})
    report.notes.append(
        f"Greedy completions of verses from ten tokens, {split}; nontermination by {experiments.scale.max_new_tokens} "
        f'tokens. All start at the embedded model ("MLE") and train for {experiments.scale.steps} steps of 16 verses; '
        '"trained on" is maximum likelihood for as many steps. Lower is better, but for the length.'
    )
    for name in ("MGS-LM", "MGS-edit"):
        for column in ("LM", "Edit", "Nonterm", "Repetition"):
            report.finding(f"{column}: {name} below MLE", ("MLE", column), (name, column))
            report.finding(f"{column}: {name} below MLE trained on", ("MLE, trained on", column), (name, column))
        report.finding(f"Perplexity: {name} above MLE", (name, "Perplexity"), ("MLE", "Perplexity"))
    report.finding("LM: MGS-LM below MGS-edit", ("MGS-edit", "LM"), ("MGS-LM", "LM"))
    report.finding("Edit: MGS-edit below MGS-LM", ("MGS-LM", "Edit"), ("MGS-edit", "Edit"))


def table_1(experiments: CompletionCache, report: Report) -> None:
    """Completions of the test split."""
    _completions(experiments, report, "test")


def table_6(experiments: CompletionCache, report: Report) -> None:
    """Completions of the validation split."""
    _completions(experiments, report, "validation")


def table_7(experiments: CompletionCache, report: Report) -> None:
    """Which part of the proposal does what."""
    columns = {"Cost": "lm", "Nonterm": "nonterm", "PPL": "perplexity"}
    for name, run in PROPOSALS.items():
        report.add(name, {c: experiments.each_seed(run, "validation", m) for c, m in columns.items()})
    report.notes.append("LM cost, validation: the proposal around both centres, around the present parameters alone "
                        "(π = 1), and around the likelihood step alone (π = 0).")  # fmt: skip
    for name in ("zero only", "MLE only"):
        report.finding(f"Cost: mixture below {name}", (name, "Cost"), ("mixture", "Cost"))


def table_figure_4(experiments: CompletionCache, report: Report) -> None:
    """How sharply candidates are weighted."""
    seed = experiments.scale.seeds[0]
    for alpha in ALPHAS:
        columns = {"Cost": "lm", "Nonterm": "nonterm", "PPL": "perplexity"}
        found = experiments.scores(mgs_lm(alpha), seed, "validation")
        report.add(f"α = {alpha:g}", {column: [found[metric]] for column, metric in columns.items()})
    report.seeds = [seed]
    report.notes.append("LM cost, validation, by α; one seed, so differences between rows say little.")


# name: (objective, its settings, the one that is chosen beside the rate)
TRANSCRIPTION = {
    "MGS-SBLEU": ("mgs", {"cost": "sentence_bleu"}, {"alpha": (100.0, 10.0)}),
    "MGS-edit": ("mgs", {"cost": "phoneme_error"}, {"alpha": (100.0, 10.0)}),
    "MRT": ("minimum-risk", {"cost": "sentence_bleu", "num_candidates": 4}, {"sharpness": (1.0, 0.1)}),
    "PG": (
        "policy-gradient",
        {"cost": "sentence_bleu", "num_candidates": 4},
        {"baseline": ("self_critical", "running_mean")},
    ),
}


def for_cost(experiments: ExperimentCache, start: RunConfig, name: str, metric: str) -> RunConfig:
    """A method of `TRANSCRIPTION` from a start, its rate and own setting chosen."""
    objective, options, own = TRANSCRIPTION[name]
    run = start.then(objective, experiments.scale.search_epochs, RATES[0], **options)
    return experiments.chosen(run.varied(learning_rate=RATES, **own), Decoding(), metric)


def table_4(experiments: ExperimentCache, report: Report) -> None:
    """Transcription: MGS, minimum risk and policy gradient from a trained model."""
    start = converged_start(experiments, "g2p")
    models: dict[str, RunConfig] = {"MLE": start, "MLE, trained on": trained_on(experiments, start)}
    models |= {name: for_cost(experiments, start, name, "sentence_bleu") for name in TRANSCRIPTION}
    metrics = {"SBLEU": "sentence_bleu", "MET.": "meteor_without_synonyms", "PER": "phoneme_error_rate"}
    for name, run in models.items():
        for split in ("validation", "test"):
            report.add(name, {f"BLEU {split}": experiments.each_seed(run, split, Decoding(5), "bleu")})
            for column, metric in metrics.items():
                report.add(name, {f"{column} {split}": experiments.each_seed(run, split, Decoding(), metric)})
    report.notes.append(
        "Grapheme-to-phoneme; BLEU with beam search of width 5, the others greedily, as they were trained. PER (phoneme"
        " error rate) lower, the others higher is better. All but MLE train for "
        f"{experiments.scale.search_epochs} more epochs from it. METEOR is without synonyms, sentence BLEU is smoothed."
        " Learning rate, α of MGS, sharpness of MRT and baseline of PG were chosen."
    )
    for name in TRANSCRIPTION:
        for reference in ("MLE", "MLE, trained on"):
            report.finding(f"SBLEU test: {name} above {reference}", (name, "SBLEU test"), (reference, "SBLEU test"))
            report.finding(f"PER test: {name} below {reference}", (reference, "PER test"), (name, "PER test"))


def draw_training(results: Path, quick: bool, folder: Path) -> Path:
    """Figures 1, 2 and 3: cost by proposal, spread of the weights, and weight of the likelihood candidates."""
    experiments = CompletionCache(QUICK_COMPLETION if quick else CompletionScale(), folder)
    seeds = experiments.scale.seeds
    window = max(1, experiments.scale.steps // 12)
    curves = {
        "C(θ), nats (figure 1)": {name: (run, "cost") for name, run in PROPOSALS.items()},
        "standard deviation of weights (figure 2)": {f"α = {a:g}": (mgs_lm(a), "weight_std") for a in ALPHAS},
        "weight of likelihood candidates (figure 3)": {f"α = {a:g}": (mgs_lm(a), "likelihood_weight") for a in ALPHAS},
    }
    figure, panels = pyplot_without_display().subplots(1, 3, figsize=(15, 4))
    raw: dict[str, dict] = {}
    for axes, (title, lines) in zip(panels, curves.items(), strict=True):
        raw[title] = {}
        for name, (run, key) in lines.items():
            chosen = seeds if "figure 1" in title else seeds[:1]  # α is swept with one seed
            runs = [[log[key] for log in experiments.training_logs(run, seed)] for seed in chosen]
            raw[title][name] = runs
            means = [statistics.fmean(step) for step in zip(*runs, strict=True)]
            smooth = [statistics.fmean(means[max(0, i - window + 1) : i + 1]) for i in range(len(means))]
            axes.plot(smooth, label=name)
        axes.set_xlabel(f"step (mean of {len(runs)} seed(s) and the last {window} steps)")
        axes.set_ylabel(title)
        axes.legend()
    return save_figure(results, "mgs-figures-1-2-3", figure, {"seeds": seeds, "curves": raw})
