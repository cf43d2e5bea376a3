"""Joint energies of texts (`ResidualEnergyModel.score`), and perplexity of residual and of language models on rows.

A residual model's perplexity lies between two estimates (Deng et al. 2020, section 3.2). A row is a prefix and a
continuation that ends with an end token or is stopped at `max_new_tokens`; the distribution is one over such
continuations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput, logging

from hf_ebm.checks import as_truth, as_whole, check_tokenizer, listed
from hf_ebm.model_modes import evaluation_mode, model_output, state_kept
from hf_ebm.models.residual.candidates import (
    SamplingParameters,
    candidate_energies,
    check_continuations,
    check_continuations_fit,
    check_prefixes,
    clamped_energies,
    lm_of,
    log_partition_of_last_token,
    sample_continuations,
)
from hf_ebm.objectives.completions import completion_token_log_probs
from hf_ebm.objectives.losses import (
    LogPartitionBounds,
    check_energies,
    effective_sample_size,
    log_importance_weights,
    log_partition_bounds,
)
from hf_ebm.random_state import stream_seed
from hf_ebm.texts import as_texts, plain_ids, prompt_encoder, report_unknown

if TYPE_CHECKING:
    from hf_ebm.models.residual.modeling_residual import ResidualEnergyModel

BATCH_SIZE = 64


@model_output
class ResidualScoreOutput(ModelOutput):
    """Joint energies of N texts, in the order of the texts.

    Args:
        energy: (N,) `E(prefix, x) - log P_LM(x | prefix)` in nats, float64: minus the log probability up to log Z,
            which texts of one prefix share.
        residual_energy: (N,) E.
        lm_log_prob: (N,) log P_LM.
        num_tokens: (N,) tokens of the text in the language model's tokens, an end token among them.
    """

    energy: Tensor
    residual_energy: Tensor
    lm_log_prob: Tensor
    num_tokens: Tensor


@torch.no_grad()
def score(
    model: ResidualEnergyModel,
    texts: Iterable[str] | str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prefixes: Iterable[str] | None = None,
    ended: bool = True,
    unknown_tokens: str = "warn",
) -> ResidualScoreOutput:
    """Joint energies of texts: one row in, one row out, in order. Nothing is cut.

    Args:
        texts: strings.
        tokenizer: the language model's tokenizer.
        prefixes: what each text continues; tokenized apart from it. With a byte-level tokenizer a text that begins
            with a new word must begin with its space.
        ended: whether texts are whole, so that an end token stands after them.
        unknown_tokens: what is done where a text holds something the tokenizer, or that of the encoder, has no
            token for: `"warn"` (one warning that names the rows), `"error"` or `"ignore"`.

    Raises:
        ValueError: before any work, naming the row, for an empty text that isn't ended, texts that are too long or
            no strings; for NaN energies.
    """
    check_tokenizer("tokenizer", tokenizer)
    ended = as_truth("ended", ended)
    rows = as_texts("texts", texts)
    before = [""] * len(rows) if prefixes is None else as_texts("prefixes", prefixes)
    if len(before) != len(rows):
        raise ValueError(f"prefixes has {len(before)} rows, texts has {len(rows)}; they must be equal")
    if ended and not model.end_ids:
        raise ValueError("ended must be False: the language model has no eos_token_id")
    end = model.end_ids[:1] if ended else []
    found = [torch.tensor([*ids, *end]) for ids in plain_ids(tokenizer, rows)] if rows else []
    for row, ids in enumerate(found):
        inner = set(ids[: len(ids) - len(end)].tolist()) & set(model.end_ids)
        if inner:
            raise ValueError(f"texts: row {row} holds the end token {tokenizer.convert_ids_to_tokens(min(inner))!r}")
        if not len(ids):
            raise ValueError(f"texts: row {row} has no token, and ended is False")
    starts = prompt_encoder(tokenizer, end[0] if end else -1)(before) if rows else []
    pairs = [(check_prefixes(model, [start], len(ids))[0], ids) for start, ids in zip(starts, found, strict=True)]
    theirs: Any = model.encoder_tokenizer if model.config.retokenize else None
    for name, own in (("texts", rows), ("prefixes", before)):
        told = report_unknown(tokenizer, name, own, unknown_tokens)
        if theirs is not None and not told:
            report_unknown(theirs, f"{name}, for the encoder", own, unknown_tokens)
    energies = torch.zeros(len(rows), dtype=torch.float64)
    log_probs = torch.zeros(len(rows), dtype=torch.float64)
    by_length = sorted(range(len(rows)), key=lambda row: sum(map(len, pairs[row])))
    with evaluation_mode(model):
        for at in range(0, len(rows), BATCH_SIZE):
            batch = by_length[at : at + BATCH_SIZE]
            values = joint_terms(model, [pairs[row][0] for row in batch], [pairs[row][1] for row in batch])
            energies[batch], log_probs[batch] = values
    check_energies(energies)
    num_tokens = torch.tensor([len(ids) for ids in found], dtype=torch.long)
    return ResidualScoreOutput(energies - log_probs, energies, log_probs, num_tokens)


def joint_terms(
    model: ResidualEnergyModel, prefixes: list[Tensor], continuations: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Residual energies and log probabilities under the language model, (N,) float64 each, on the CPU."""
    ids, mask = model.encoder_rows(
        [torch.cat([a.cpu(), b.cpu()]) for a, b in zip(prefixes, continuations, strict=True)]
    )
    energies = model(input_ids=ids, attention_mask=mask).energy.cpu().double()
    lm = lm_of(model)
    device = lm.device
    before, after = ([ids.to(device) for ids in rows] for rows in (prefixes, continuations))
    with state_kept(lm):
        terms = completion_token_log_probs(lm, before, after, model.config.lm_pad_token_id)
    return energies, terms.cpu().double().sum(1)


@model_output
class ResidualPerplexity(ModelOutput):
    """What is known of N rows from samples, in nats and float64; S numbers of samples.

    Args:
        num_samples: (S,) how many samples each estimate uses, ascending.
        lm_log_prob: (N,) log P_LM of the continuations.
        energy: (N,) their energies.
        num_tokens: (N,) their tokens.
        log_partition_lower, log_partition_upper: (N, S) estimates of log Z of the prefixes.
        effective_sample_size: (N,) of the weights of all samples.
    """

    num_samples: Tensor
    lm_log_prob: Tensor
    energy: Tensor
    num_tokens: Tensor
    log_partition_lower: Tensor
    log_partition_upper: Tensor
    effective_sample_size: Tensor

    @property
    def base_perplexity(self) -> float:
        """Perplexity of the language model."""
        return float((-self.lm_log_prob.sum() / self.num_tokens.sum()).exp())

    @property
    def lower(self) -> Tensor:
        """(S,) lower estimates of the perplexity."""
        return self._perplexity(self.log_partition_lower)

    @property
    def upper(self) -> Tensor:
        """(S,) upper estimates of the perplexity."""
        return self._perplexity(self.log_partition_upper)

    @property
    def sampling_error(self) -> float:
        """Standard error of the perplexity that comes of finite samples, for the largest number of them.

        The gap between the two estimates falls with their number, this with its root only: it is the larger one. A
        row's log Z has the variance `1 / ESS - 1 / n` (delta method); errors of rows are independent.
        """
        variances = (1 / self.effective_sample_size - 1 / self.num_samples[-1]).clamp(min=0)
        return float(self.lower[-1] * variances.sum().sqrt() / self.num_tokens.sum())

    def _perplexity(self, log_partition: Tensor) -> Tensor:
        nats = (self.energy - self.lm_log_prob)[:, None] + log_partition
        return (nats.sum(0) / self.num_tokens.sum()).exp()


def bounds_by_size(energies: Tensor, sizes: Sequence[int]) -> LogPartitionBounds:
    """Bounds from the first samples of each row, (N, S) each, of energies (N, n).

    Example:
        >>> bounds = bounds_by_size(torch.tensor([[0.0, 1.0, 2.0, 3.0]], dtype=torch.float64), [2, 4])
        >>> bool((bounds.lower <= bounds.upper).all()), bounds.lower.shape
        (True, torch.Size([1, 2]))
    """
    found = [log_partition_bounds(energies[:, :size]) for size in sizes]
    return LogPartitionBounds(*(torch.stack(values, 1) for values in zip(*found, strict=True)))


@torch.no_grad()
def residual_perplexity(
    model: ResidualEnergyModel,
    prefixes: Sequence[Tensor | Sequence[int]],
    continuations: Sequence[Tensor | Sequence[int]],
    *,
    max_new_tokens: int,
    num_samples: int | Sequence[int] = 1000,
    candidates_at_once: int = 256,
    seed: int = 0,
    first_row: int = 0,
) -> ResidualPerplexity:
    """The range of a residual model's perplexity on rows.

    Args:
        prefixes, continuations: ids of the language model, one list or tensor a row.
        max_new_tokens: the length at which continuations are stopped.
        num_samples: samples of the language model for each prefix; of several numbers each gives an estimate, from the
            first of the samples, to see how far estimates have settled.
        candidates_at_once: rows run together. Draws depend on it.
        first_row: the number of the first row, where these are a part of all: samples of a row depend on its number.

    Raises:
        ValueError: before any work, naming the row, for rows that are no such continuations or too long, and for fewer
            than two samples; for NaN energies when they appear.
    """
    several = listed(num_samples)
    sizes = [num_samples] if several is None else several or [0]
    sizes = sorted({as_whole("num_samples", size, 2) for size in sizes})
    candidates_at_once = as_whole("candidates_at_once", candidates_at_once, 1)
    max_new_tokens, seed = as_whole("max_new_tokens", max_new_tokens, 1), as_whole("seed", seed, 0)
    first_row = as_whole("first_row", first_row, 0)
    check_continuations_fit("num_samples", sizes[-1], max_new_tokens)
    lm, before = lm_of(model), check_prefixes(model, prefixes, max_new_tokens)
    after = check_continuations(model, continuations, max_new_tokens, len(before))
    table = lm_log_probs(lm, before, after, model.config.lm_pad_token_id, candidates_at_once)
    sampling = SamplingParameters(max_new_tokens, tuple(model.end_ids))
    energy, lower, upper, sample_sizes = [], [], [], []
    for row in logging.tqdm(range(len(before)), desc="Perplexity", unit="row", delay=2, leave=False):
        seeds = stream_seed(seed, first_row + row)
        drawn = sample_continuations(lm, [before[row]], sizes[-1], sampling, seeds, candidates_at_once)[0]
        try:
            own = candidate_energies(model, before[row], [after[row].cpu(), *drawn], candidates_at_once)
            sample_size = effective_sample_size(log_importance_weights(own[1:]))
        except ValueError as error:
            raise ValueError(f"row {row}, candidate: {error}") from error
        bounds = bounds_by_size(own[None, 1:], sizes)
        energy.append(own[0])
        lower.append(bounds.lower[0])
        upper.append(bounds.upper[0])
        sample_sizes.append(sample_size)
    return ResidualPerplexity(
        num_samples=torch.tensor(sizes),
        lm_log_prob=table.nansum(1),
        energy=torch.stack(energy),
        num_tokens=torch.tensor([len(ids) for ids in after]),
        log_partition_lower=torch.stack(lower),
        log_partition_upper=torch.stack(upper),
        effective_sample_size=torch.stack(sample_sizes),
    )


@torch.no_grad()
def lm_log_probs(
    lm: PreTrainedModel, prefixes: Sequence[Tensor], continuations: Sequence[Tensor], pad_id: int, batch_size: int
) -> Tensor:
    """(N, T) log probability of each token of continuations, NaN after their end, float64, on the CPU."""
    table = torch.full((len(prefixes), max(map(len, continuations))), torch.nan, dtype=torch.float64)
    with evaluation_mode(lm):
        for at in range(0, len(prefixes), batch_size):
            before, after = prefixes[at : at + batch_size], continuations[at : at + batch_size]
            with state_kept(lm):
                found = completion_token_log_probs(lm, before, after, pad_id).cpu().double()
            for row, (values, prefix, ids) in enumerate(zip(found, before, after, strict=True), at):
                table[row, : len(ids)] = values[len(prefix) - 1 :][: len(ids)]
    return table


@model_output
class PositionLogProbs(ModelOutput):
    """Log probabilities of each token of N continuations given those before it, in nats; NaN after their end.

    Args:
        lm: (N, T) under the language model.
        lower, upper: (N, T) estimates under the residual model.
        last: (N,) of the token at `max_new_tokens` under the residual model, by enumeration of the vocabulary; NaN for
            a row that ends earlier, or where it wasn't asked for.
    """

    lm: Tensor
    lower: Tensor
    upper: Tensor
    last: Tensor


@torch.no_grad()
def position_log_probs(
    model: ResidualEnergyModel,
    prefixes: Sequence[Tensor | Sequence[int]],
    continuations: Sequence[Tensor | Sequence[int]],
    *,
    max_new_tokens: int,
    num_samples: int = 100,
    candidates_at_once: int = 256,
    seed: int = 0,
    enumerate_last: bool = False,
) -> PositionLogProbs:
    """`log P(x_t | x_<t) = log P_LM + log Z(x_<=t) - log Z(x_<t)` (equation 5), each Z from samples of what may follow.

    Args: as for `residual_perplexity`; `num_samples` for each position; `enumerate_last` runs the whole vocabulary
        through the encoder for each row that is stopped at `max_new_tokens`.
    """
    enumerate_last = as_truth("enumerate_last", enumerate_last)
    num_samples = as_whole("num_samples", num_samples, 2)
    candidates_at_once = as_whole("candidates_at_once", candidates_at_once, 1)
    max_new_tokens, seed = as_whole("max_new_tokens", max_new_tokens, 1), as_whole("seed", seed, 0)
    check_continuations_fit("num_samples", num_samples, max_new_tokens)
    lm, before = lm_of(model), check_prefixes(model, prefixes, max_new_tokens)
    after = check_continuations(model, continuations, max_new_tokens, len(before))
    table = lm_log_probs(lm, before, after, model.config.lm_pad_token_id, candidates_at_once)
    lower, upper = torch.full_like(table, torch.nan), torch.full_like(table, torch.nan)
    last = torch.full((len(before),), torch.nan, dtype=torch.float64)
    for row in logging.tqdm(range(len(before)), desc="Positions", unit="row", delay=2, leave=False):
        prefix, ids = before[row], after[row]
        partitions = [
            _log_partition_after(
                model, prefix, ids[:length], num_samples, max_new_tokens, stream_seed(seed, row, length),
                candidates_at_once,
            )
            for length in range(len(ids) + 1)
        ]  # fmt: skip
        low, high = (torch.stack(values) for values in zip(*partitions, strict=True))
        lower[row, : len(ids)] = table[row, : len(ids)] + low[1:] - high[:-1]
        upper[row, : len(ids)] = table[row, : len(ids)] + high[1:] - low[:-1]
        if enumerate_last and len(ids) == max_new_tokens:
            exact = log_partition_of_last_token(model, prefix, ids[:-1], candidates_at_once)
            last[row] = table[row, len(ids) - 1] + low[-1] - exact
    return PositionLogProbs(table, lower, upper, last)


def _log_partition_after(
    model: ResidualEnergyModel,
    prefix: Tensor,
    start: Tensor,
    num_samples: int,
    max_new_tokens: int,
    seed: int,
    batch_size: int,
) -> LogPartitionBounds:
    """log Z of what may follow a beginning; exact, twice the same, for a whole continuation."""
    energies = clamped_energies(model, prefix, [start], num_samples, max_new_tokens, seed, batch_size)[0]
    if len(energies) == 1:
        return LogPartitionBounds(-energies[0], -energies[0])
    return log_partition_bounds(energies)
