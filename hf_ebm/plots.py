"""Plots of chains, energies, fills, variants, perplexity bounds and training: matplotlib, extra `hf_ebm[plots]`.

Every function draws on the `axes` it is given, or on a new figure's, and returns them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_ebm.checks import as_whole
from hf_ebm.sampling.convergence import energy_diagnostics
from hf_ebm.sampling.run import ChainGenerationOutput

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from transformers import PreTrainedTokenizerBase

    from hf_ebm.models.energy.fill_energy import FillOutput

_ANNOTATED = 400  # tokens that a heat map still has room to name
_SUBSTITUTION = re.compile(r"(\D)(-?\d+)([^\d\s])")
_NAMED_CHAINS = 6  # chains whose names still leave the traces to be seen


def plot_energy_trace(output: ChainGenerationOutput, prompt: int = 0, axes: Axes | None = None) -> Axes:
    """Energy in nats after each epoch, a line for each chain of a prompt.

    The title has split R-hat and bulk effective sample size of the kept energies, where chains and samples suffice.

    Raises:
        ValueError: for a prompt without chains.
    """
    chosen = _chains_of(output, prompt)
    axes = _axes(axes)
    for chain in chosen.tolist():
        axes.plot(output.trace.energy[chain].tolist(), label=f"chain {int(output.chain_indices[chain])}")
    if len(output.kept_epochs) and output.kept_epochs[0] > 0:
        axes.axvline(output.kept_epochs[0], color="grey", linestyle=":", label="end of burn-in")
    kept = output.energies[chosen]
    if kept.shape[0] >= 2 and kept.shape[1] >= 4:
        found = energy_diagnostics(kept)
        axes.set_title(f"split R-hat {found.r_hat:.2f}, bulk ESS {found.ess_bulk:.0f}")
    _whole_numbers(axes, "epoch")
    axes.set_ylabel("energy, nats")
    if len(chosen) <= _NAMED_CHAINS:
        axes.legend(fontsize="small", ncols=2)
    return axes


def plot_acceptance(output: ChainGenerationOutput, axes: Axes | None = None) -> Axes:
    """Acceptance and novel rate by epoch, means over chains, with the block size on a second axis."""
    axes = _axes(axes)
    for name, label in (("acceptance_rate", "acceptance"), ("novel_rate", "novel")):
        axes.plot(getattr(output.trace, name).nanmean(0).tolist(), label=label)
    _whole_numbers(axes, "epoch")
    axes.set_ylabel("share of proposals")
    axes.set_ylim(0, 1.02)
    sizes = axes.twinx()
    sizes.step(range(output.trace.block_size.shape[1]), output.trace.block_size.nanmean(0).tolist(), "k:", where="mid")
    sizes.set_ylabel("block size (dotted)")
    sizes.set_ylim(bottom=0)
    axes.legend()
    return axes


def plot_token_changes(
    output: ChainGenerationOutput, tokenizer: PreTrainedTokenizerBase, chain: int = 0, axes: Axes | None = None
) -> Axes:
    """Which tokens of a chain changed from one kept sample to the next; a row for each sample, the first at the top.

    Tokens are named while there is room. Raises `ValueError` for a chain that there isn't, or without kept samples.
    """
    chain = as_whole("chain", chain)
    if not 0 <= chain < len(output.samples) or not output.samples.shape[1]:
        raise ValueError(
            f"chain must be below {len(output.samples)}, with kept samples; got {chain} with {output.samples.shape[1]}"
        )
    ids = output.samples[chain][:, output.attention_mask[chain].bool()]
    changed = torch.zeros(ids.shape)
    changed[1:] = (ids[1:] != ids[:-1]).float()
    axes = _axes(axes)
    axes.imshow(changed.tolist(), aspect="auto", cmap="Blues", vmin=0, vmax=1.5, interpolation="nearest")
    if ids.numel() <= _ANNOTATED:
        for row, sample in enumerate(ids.tolist()):
            for column, token in enumerate(tokenizer.convert_ids_to_tokens(sample)):
                axes.text(column, row, token, ha="center", va="center", fontsize=7)
    _whole_numbers(axes, "position")
    axes.set_ylabel("kept sample")
    return axes


def plot_energy_metric(
    energies: Sequence[float] | Tensor, metric: Sequence[float] | Tensor, label: str | None = None,
    axes: Axes | None = None,
) -> Axes:  # fmt: skip
    """A point for each sample: energy in nats and a metric of the task; the legend has Spearman's rank correlation.

    Raises:
        ValueError: for lists of unequal length or of fewer than two values.
    """
    energies, metric = (
        torch.as_tensor(values, dtype=torch.float64).flatten().tolist() for values in (energies, metric)
    )
    correlation = rank_correlation(energies, metric)
    axes = _axes(axes)
    name = f"{label}, " if label else ""
    axes.scatter(energies, metric, s=8, alpha=0.4, label=f"{name}rank correlation {correlation:+.2f}")
    axes.set_xlabel("energy, nats")
    axes.set_ylabel("metric")
    axes.legend()
    return axes


def plot_fills(output: FillOutput, text: int = 0, axes: Axes | None = None) -> Axes:
    """Probabilities of a text's fills as bars, the likeliest at the top; standard errors where chains found them.

    Raises:
        ValueError: for a text that there isn't.
    """
    if not 0 <= as_whole("text", text) < len(output.fills):
        raise ValueError(f"text must be below {len(output.fills)}, got {text}")
    axes, fills = _axes(axes), output.fills[text]
    errors = None if any(fill.error is None for fill in fills) else [fill.error for fill in fills]
    names = [" · ".join(fill.token_strs) for fill in fills]
    axes.barh(range(len(fills)), [fill.probability for fill in fills], xerr=errors)
    axes.set_yticks(range(len(fills)), names)
    axes.invert_yaxis()
    axes.set_xlabel("probability")
    return axes


def plot_substitutions(variants: Sequence[str], scores: Sequence[float] | Tensor, axes: Axes | None = None) -> Axes:
    """Scores of single substitutions as a heat map: a row for each new letter, a column for each position.

    Blue is above 0, where the model prefers the variant, red below; what has no score is grey, as the reference's own
    letter.

    Args:
        variants: as `A24G`.
        scores: one of each, as `score_variants` returns them.

    Raises:
        ValueError: for lists of unequal length or none, and another variant, naming its row.
    """
    values = torch.as_tensor(scores, dtype=torch.float64).tolist()
    if not len(variants) == len(values) > 0:
        raise ValueError(f"variants and scores must be equally many, got {len(variants)} and {len(values)}")
    found: dict[tuple[str, int], float] = {}
    own: dict[int, str] = {}
    for row, (variant, value) in enumerate(zip(variants, values, strict=True)):
        match = _SUBSTITUTION.fullmatch(variant)
        if match is None:
            raise ValueError(f"variants: row {row}: {variant!r} is no single substitution such as A24G")
        own[int(match[2])] = match[1]
        found[match[3], int(match[2])] = value
    letters, positions = sorted({letter for letter, _ in found}), sorted(own)
    axes = _axes(axes)
    most = max(map(abs, values)) or 1.0
    table = [[found.get((letter, position), float("nan")) for position in positions] for letter in letters]
    axes.set_facecolor("lightgrey")
    image = axes.imshow(table, aspect="auto", cmap="RdBu", vmin=-most, vmax=most, interpolation="none")
    axes.set_xticks(range(len(positions)), [f"{own[position]}\n{position}" for position in positions], fontsize=7)
    axes.set_yticks(range(len(letters)), letters, fontsize=7)
    axes.figure.colorbar(image, ax=axes, label="score, nats")
    return axes


def plot_perplexity_bounds(
    sizes: Sequence[int], lower: Sequence[float], upper: Sequence[float], axes: Axes | None = None
) -> Axes:
    """Both estimates of a residual model's perplexity by the number of samples.

    Args:
        sizes: numbers of samples, as `residual_perplexity(…, num_samples=sizes)` takes them.
        lower, upper: the estimate of each, as fields of its result.

    Raises:
        ValueError: for lists of unequal length or without values.
    """
    if not len(sizes) == len(lower) == len(upper) or not len(sizes):
        raise ValueError(f"sizes, lower and upper must be equally many, got {len(sizes)}, {len(lower)}, {len(upper)}")
    axes = _axes(axes)
    axes.plot(sizes, lower, marker="o", label="lower")
    axes.plot(sizes, upper, marker="o", label="upper")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("samples for each prefix")
    axes.set_ylabel("perplexity")
    axes.legend()
    return axes


def plot_reward_against_kl(
    log_history: Sequence[Mapping[str, Any]], label: str | None = None, axes: Axes | None = None
) -> Axes:
    """Mean reward against the KL divergence from the reference, a point for each log of training, in their order.

    A reward that grows no more while the divergence does is paid for by leaving the reference, and one that models give
    is soon fooled there.

    Args:
        log_history: `trainer.state.log_history` of GRPO with a reference, which logs `kl` (nats per token) beside
            `reward`, or of a cost `candidate_cost`, which is minus it.
        label: of the run, where several are drawn on the same axes.

    Raises:
        ValueError: for a history without such logs.
    """
    logs = [log for log in log_history if "kl" in log and ("reward" in log or "candidate_cost" in log)]
    if not logs:
        raise ValueError(
            "log_history must have a log with kl and reward or candidate_cost, as of GRPOTrainer with a reference; got "
            f"{len(log_history)} without"
        )
    divergences = [log["kl"] for log in logs]
    rewards = [log["reward"] if "reward" in log else -log["candidate_cost"] for log in logs]
    axes = _axes(axes)
    axes.plot(divergences, rewards, marker=".", label=label)
    for at in {0, len(logs) - 1}:
        axes.annotate(f"step {logs[at]['step']}", (divergences[at], rewards[at]), fontsize="small")
    axes.set_xlabel("KL from the reference, nats per token")
    axes.set_ylabel("reward")
    if label is not None:
        axes.legend()
    return axes


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation. Raises `ValueError` for lists of unequal length or of fewer than two values.

    Example:
        >>> round(rank_correlation([1.0, 2.0, 3.0], [10.0, 30.0, 20.0]), 2)
        0.5
    """
    from scipy.stats import spearmanr

    if len(first) != len(second) or len(first) < 2:
        raise ValueError(f"energies and metric must be equally many, two or more, got {len(first)} and {len(second)}")
    return float(spearmanr(first, second).statistic)


def _chains_of(output: ChainGenerationOutput, prompt: int) -> Tensor:
    chosen = output.prompt_indices.eq(prompt).nonzero()[:, 0]
    if not len(chosen):
        found = sorted(set(output.prompt_indices.tolist()))
        raise ValueError(f"prompt must be one of {found[:10]}, got {prompt!r}")
    return chosen


def _whole_numbers(axes: Axes, label: str) -> None:
    axes.set_xlabel(label)
    axes.locator_params(axis="x", integer=True)


def _axes(axes: Axes | None) -> Axes:
    if axes is not None:
        return axes
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("plots need the extra hf_ebm[plots]: pip install matplotlib") from error
    return pyplot.subplots()[1]
