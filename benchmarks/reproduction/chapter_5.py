"""Thesis chapter 5: global normalization, self-normalized starts, label bias (tables 5.1 to 5.6)."""

from __future__ import annotations

from benchmarks.reproduction.chapter_4 import BEAMS, converged_start, final_alpha, soft_beam, trained_on
from benchmarks.reproduction.experiment_cache import Decoding, ExperimentCache, RunConfig
from benchmarks.reproduction.report import Report
from benchmarks.reproduction.tasks import LENGTHS

LOG_Z_WEIGHT = 0.5
TRAINED_ON = "pretrain-beam, trained on"
METRIC = {"stress": "accuracy", "g2p": "bleu"}


def start(experiments: ExperimentCache, task: str, self_normalized: bool, bidirectional: bool = True) -> RunConfig:
    """Either warm start."""
    return converged_start(experiments, task, bidirectional, LOG_Z_WEIGHT if self_normalized else 0.0)


def table_5_1(experiments: ExperimentCache, report: Report) -> None:
    """log Z of models trained by cross entropy and self-normalized."""
    for task in ("stress", "g2p"):
        for name, normalized in (("CE", False), ("L2", True)):
            run = start(experiments, task, normalized)
            logs = [experiments.training_logs(run, seed) for seed in experiments.scale.seeds]
            train = [next(log for log in reversed(seed) if "loss" in log) for seed in logs]
            columns = {"train mean": [log["log_z_mean"] for log in train]}
            columns["train var"] = [log["log_z_variance"] for log in train]
            columns["dev mean"] = [seed[-1]["eval_log_z_mean"] for seed in logs]
            columns["dev var"] = [seed[-1]["eval_log_z_variance"] for seed in logs]
            columns["accuracy/BLEU"] = experiments.each_seed(run, "test", Decoding(BEAMS), METRIC[task])
            report.add(f"{task} {name}", columns)
    report.notes.append(
        f"log Z in nats, λ = {LOG_Z_WEIGHT}, bidirectional encoders, beam {BEAMS}; training means are those of the "
        "last epoch. The logits' common shift is free under cross entropy: where log Z then lies is up to the start."
    )


def _normalizations(experiments: ExperimentCache, task: str, begin: RunConfig) -> dict[str, tuple[RunConfig, Decoding]]:
    """The four rows of tables 5.2 to 5.4; searched models decode softly at their last α, as in the thesis."""
    rows = {"pretrain-greedy": (begin, Decoding()), "pretrain-beam": (begin, Decoding(BEAMS))}
    rows["pretrain-beam, unnormalized scores"] = (begin, Decoding(BEAMS, "global"))
    rows[TRAINED_ON] = (trained_on(experiments, begin), Decoding(BEAMS))
    for normalization in ("local", "global"):
        run = soft_beam(experiments, begin, METRIC[task], normalization=normalization)
        alpha = final_alpha(run)
        rows[f"{normalization}ly normalized"] = (run, Decoding(BEAMS, normalization, alpha))
        rows[f"{normalization}ly normalized, hard beam"] = (run, Decoding(BEAMS, normalization))
    return rows


def _tagging(experiments: ExperimentCache, report: Report, self_normalized: bool) -> None:
    for name, bidirectional in (("unidirectional", False), ("bidirectional", True)):
        begin = start(experiments, "stress", self_normalized, bidirectional)
        for row, (run, decoding) in _normalizations(experiments, "stress", begin).items():
            for metric, label in (("accuracy", ""), ("sequence_accuracy", ", whole words")):
                runs = experiments.each_seed(run, "test", decoding, metric)
                report.add(row, {f"{name}{label}": runs})
    report.notes.append(
        f"Stress tagging, test accuracy on vowels and of whole words, fixed attention, zero start, k = {BEAMS}; "
        "searched models decode by soft beam search at the α of their last epoch, as in the paper, or by hard beam "
        "search."
    )
    local, best = "locally normalized", "globally normalized"
    for name in ("unidirectional", "bidirectional"):
        report.finding(f"{name}: local search above pretrain-beam", (local, name), ("pretrain-beam", name))
        report.finding(f"{name}: local search above pretraining as long", (local, name), (TRAINED_ON, name))
        report.finding(f"{name}: global above pretraining as long", (best, name), (TRAINED_ON, name))
        report.finding(f"{name}: global above local", (best, name), (local, name))


def table_5_2(experiments: ExperimentCache, report: Report) -> None:
    """Tagging from a cross-entropy start."""
    _tagging(experiments, report, self_normalized=False)


def table_5_3(experiments: ExperimentCache, report: Report) -> None:
    """Tagging from a self-normalized start."""
    _tagging(experiments, report, self_normalized=True)


def table_5_4(experiments: ExperimentCache, report: Report) -> None:
    """Transcription from both starts."""
    for name, normalized in (("regular", False), ("self-normalized", True)):
        rows = _normalizations(experiments, "g2p", start(experiments, "g2p", normalized))
        for row, (run, decoding) in rows.items():
            for metric, label in (("bleu", "BLEU"), ("phoneme_error_rate", "PER"), ("word_accuracy", "words")):
                report.add(row, {f"{name} {label}": experiments.each_seed(run, "test", decoding, metric)})
    report.notes.append(
        f"Grapheme-to-phoneme, test, bidirectional encoder, additive attention, k = {BEAMS}. BLEU and whole words are "
        "better higher, PER (phoneme error rate) lower."
    )
    regular, normal = "regular BLEU", "self-normalized BLEU"
    local, best, raw = "locally normalized", "globally normalized", "pretrain-beam, unnormalized scores"
    for column in (regular, normal):
        report.finding(f"{column}: local search above pretrain-beam", (local, column), ("pretrain-beam", column))
        report.finding(f"{column}: local search above pretraining as long", (local, column), (TRAINED_ON, column))
    report.finding("self-normalized start: global above pretraining as long", (best, normal), (TRAINED_ON, normal))
    report.finding("self-normalized start: global above pretrain-beam", (best, normal), ("pretrain-beam", normal))
    report.finding("self-normalized start: global above local", (best, normal), (local, normal))
    report.finding("global: self-normalized start above regular", (best, normal), (best, regular))
    report.finding("unnormalized decoding: self-normalized above regular", (raw, normal), (raw, regular))
    report.finding("unnormalized decoding loses, regular", ("pretrain-beam", regular), (raw, regular))
    report.finding("unnormalized decoding loses, self-normalized", ("pretrain-beam", normal), (raw, normal))


def _self_normalized_rows(experiments: ExperimentCache) -> dict[str, tuple[RunConfig, Decoding]]:
    rows = _normalizations(experiments, "g2p", start(experiments, "g2p", True))
    return {name: rows[name] for name in ("pretrain-beam", TRAINED_ON, "locally normalized", "globally normalized")}


def table_5_5(experiments: ExperimentCache, report: Report) -> None:
    """n-gram overlap and length."""
    for row, (run, decoding) in _self_normalized_rows(experiments).items():
        metrics = [*(f"precision_{n}" for n in range(1, 5)), "length_ratio"]
        report.add(row, {m: experiments.each_seed(run, "validation", decoding, m) for m in metrics})
    report.notes.append("Grapheme-to-phoneme, dev, self-normalized start; precisions per cent, clipped as in BLEU.")
    for column in ("precision_4", "length_ratio"):
        report.finding(f"{column}: global above local", ("globally normalized", column), ("locally normalized", column))


def table_5_6(experiments: ExperimentCache, report: Report) -> None:
    """BLEU by the length of the input."""
    for row, (run, decoding) in _self_normalized_rows(experiments).items():
        columns = {f"{low}-{high - 1} letters": f"bleu {low}-{high - 1}" for low, high in LENGTHS}
        report.add(row, {c: experiments.each_seed(run, "validation", decoding, m) for c, m in columns.items()})
    report.notes.append("Grapheme-to-phoneme, dev BLEU by the number of letters, self-normalized start.")
    for low, high in LENGTHS:
        column = f"{low}-{high - 1} letters"
        report.finding(f"{column}: global above local", ("globally normalized", column), ("locally normalized", column))
