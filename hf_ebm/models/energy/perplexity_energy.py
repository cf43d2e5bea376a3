"""`EnergyModel.perplexity`: texts under `exp(-E)` as a normalized distribution, between two estimates of log Z."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import ModelOutput, logging

from hf_ebm.checks import as_number, as_truth, as_whole, check_choice, check_tokenizer
from hf_ebm.model_modes import model_output
from hf_ebm.models.energy.chains import proposal_support
from hf_ebm.models.energy.encoding import EncodedText
from hf_ebm.models.energy.inputs import by_row, mask_id_of
from hf_ebm.models.energy.partition_energy import METHODS, NUM_CHAINS, NUM_EPOCHS
from hf_ebm.models.energy.scoring_energy import read_texts, term_lists
from hf_ebm.sampling.configuration import ChainGenerationConfig
from hf_ebm.sampling.constraints import at_least_away

if TYPE_CHECKING:
    from hf_ebm.models.energy.modeling_energy import EnergyModel
    from hf_ebm.sampling.configuration import ResolvedChainConfig

logger = logging.get_logger(__name__)

# Masked rows, as they are estimated, that are run without being asked for more.
ROW_LIMIT = 10_000_000
# Levels of inverse temperature that the estimate of rows counts with: how many there are is found by the way.
_LEVELS = 8


@model_output
class PerplexityOutput(ModelOutput):
    """Log probabilities of N texts, `-E(y)/τ - log Z`, in nats (float64), and what they say of all texts together.

    Args:
        energy: (N,) E(y)/τ.
        num_tokens: (N,) tokens of the text.
        frame: (N,) which of M sums each text's log Z is: texts of as many tokens, in the same context, share one.
        log_partition: (M,) log Z, or an estimate from below.
        error: (M,) its standard error.
        log_partition_upper: (M,) an estimate from above, NaN where none was asked for.
        upper_error: (M,) its standard error.
        num_masked_rows: masked rows run through the masked language model.
        left_out: numbers of the texts that were left out, as the distribution gives them probability 0.
    """

    energy: Tensor
    num_tokens: Tensor
    frame: Tensor
    log_partition: Tensor
    error: Tensor
    log_partition_upper: Tensor
    upper_error: Tensor
    num_masked_rows: int
    left_out: list[int]

    @property
    def log_probs(self) -> Tensor:
        """(N,) log probabilities with the estimates from below, which make them too large if anything."""
        return -self.energy - self.log_partition[self.frame]

    @property
    def lower(self) -> float:
        """Perplexity of a token with the estimates of log Z from below."""
        return self._perplexity(self.log_partition)

    @property
    def upper(self) -> float:
        """Perplexity of a token with the estimates of log Z from above."""
        return self._perplexity(self.log_partition_upper)

    @property
    def lower_sampling_error(self) -> float:
        """Standard error of the logarithm of `lower`."""
        return self._sampling_error(self.error)

    @property
    def upper_sampling_error(self) -> float:
        """Standard error of the logarithm of `upper`."""
        return self._sampling_error(self.upper_error)

    def _perplexity(self, log_partition: Tensor) -> float:
        return float(((self.energy + log_partition[self.frame]).sum() / self.num_tokens.sum()).exp())

    def _sampling_error(self, errors: Tensor) -> float:
        share = torch.bincount(self.frame, minlength=len(errors)) / self.num_tokens.sum()
        return float((share * errors).square().sum().sqrt())


@torch.no_grad()
def perplexity(
    model: EnergyModel,
    texts: Iterable[str] | str | os.PathLike,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prefixes: Iterable[str] | None = None,
    suffixes: Iterable[str] | None = None,
    separator: str = " ",
    encoder_texts: Iterable[str] | None = None,
    temperature: float = 1.0,
    method: str = "smc",
    upper: bool = True,
    num_particles: int = 64,
    num_runs: int = 4,
    num_moves: int = 1,
    num_chains: int | None = None,
    num_epochs: int | None = None,
    seed: int = 0,
    skip_unusable_rows: bool = False,
    row_limit: int = ROW_LIMIT,
    token_budget: int | None = None,
    further_inputs: Mapping[str, Any] | None = None,
    unknown_tokens: str = "warn",
) -> PerplexityOutput:
    """Perplexity of texts under `p(y) = exp(-E(y)/τ) / Z`, a distribution over all texts of as many tokens.

    Unlike pseudo-perplexity it is that of one distribution, which `generate` samples. It is given each text's number of
    tokens, and its context; log Z comes from `log_partition`, once for all texts that share both. Of the model's
    generation settings `suppress_tokens`, `allowed_tokens` and `avoid` count, which give texts probability 0.

    Args:
        texts, tokenizer, prefixes, suffixes, separator, encoder_texts: as for `score`.
        temperature: τ.
        method, upper, num_particles, num_runs, num_moves, num_chains, num_epochs: as for `log_partition`.
        seed: of all estimates of log Z, which don't depend on the other texts.
        skip_unusable_rows: whether texts of probability 0 are left out, and told: those without a token, with one that
            is never proposed ([UNK], say) or not there, or that `avoid` forbids. By default they are refused.
        row_limit: masked rows at most, as estimated before any work, with 8 levels of inverse temperature.
        token_budget, further_inputs, unknown_tokens: as for `score`.

    Returns:
        `PerplexityOutput`. In expectation the estimates of log Z, and so of the texts' surprisal, are not above the
        true ones with `lower`; what makes the upper ones bounds is told at `log_partition`.

    Raises:
        ValueError: before any work, for what `score` and `log_partition` refuse, for texts of probability 0, and for an
            estimate of rows above `row_limit`.

    Example:
        >>> from hf_ebm.assets import load_embedded
        >>> model, tokenizer = load_embedded()
        >>> texts, how = ["and he said", "said he and"], dict(num_particles=4, num_runs=2)
        >>> out = model.perplexity(texts, tokenizer, upper=False, **how)
        >>> out.log_probs.shape, out.log_partition.shape  # texts of as many tokens share log Z
        (torch.Size([2]), torch.Size([1]))
        >>> bool(out.log_probs[0] > out.log_probs[1])
        True
    """
    check_choice("method", method, METHODS)
    temperature, seed = as_number("temperature", temperature, above=0), as_whole("seed", seed, 0)
    skip, row_limit = as_truth("skip_unusable_rows", skip_unusable_rows), as_whole("row_limit", row_limit, 1)
    upper = as_truth("upper", upper)
    how: dict[str, Any] = {"num_particles": num_particles, "num_runs": num_runs, "num_moves": num_moves}
    how |= {"num_chains": num_chains, "num_epochs": num_epochs}
    how = {
        name: as_whole(name, value, 0 if name == "num_moves" else 1) for name, value in how.items() if value is not None
    }
    check_tokenizer("tokenizer", tokenizer)
    encoded, encoder_ids = read_texts(
        model, texts, tokenizer, prefixes, suffixes, separator, encoder_texts, unknown_tokens
    )
    inputs = by_row(further_inputs or {}, len(encoded), "texts")
    config = ChainGenerationConfig().resolved(model.generation_config, {})
    support = proposal_support(model, config.suppress_tokens).cpu()
    reasons = [_unusable(text, support, config, tokenizer) for text in encoded]
    left_out = [row for row, reason in enumerate(reasons) if reason]
    if left_out and not skip:
        row = left_out[0]
        raise ValueError(f"texts: row {row} {reasons[row]}, so it has probability 0; skip_unusable_rows leaves it out")
    kept = [row for row, reason in enumerate(reasons) if not reason]
    if not kept:
        raise ValueError(f"texts: none of {len(encoded)} has a probability above 0")
    for row in kept:
        _check_positions(row, encoded[row], config)
    rows_of_frames = _frames(encoded, encoder_ids, inputs, kept)
    lengths = [sum(encoded[rows[0]].scored) for rows in rows_of_frames]
    num_rows = sum(num_partition_rows(length, int(support.sum()), method, upper, **how) for length in lengths)
    told = (
        f"{len(lengths)} sums over texts of {min(lengths)} to {max(lengths)} tokens take about {num_rows:,} masked rows"
    )
    if num_rows > row_limit:
        raise ValueError(f"row_limit is {row_limit:,}, {told}; fewer lengths, particles or epochs take less")
    logger.info(told)
    found, frame = [], torch.zeros(len(encoded), dtype=torch.long)
    for number, rows in enumerate(logging.tqdm(rows_of_frames, desc="log Z", unit="sum", delay=2, leave=False)):
        frame[rows], row = number, rows[0]
        ids, free = torch.tensor([encoded[row].ids]), torch.tensor([encoded[row].scored])
        ids = ids.masked_fill(free, mask_id_of(model))
        context: dict[str, Any] = {name: own[row : row + 1] for name, own in inputs.items()}
        encoder = None if encoder_ids is None else torch.tensor([encoder_ids[row]])
        found.append(
            model.log_partition(
                ids, free_mask=free, encoder_input_ids=encoder, method=method, upper=upper, seed=seed,
                energy_temperature=temperature, token_budget=token_budget, protected_positions=[], **context, **how,
            )
        )  # fmt: skip
    texts_of = [encoded[row] for row in kept]
    sources = None if encoder_ids is None else [encoder_ids[row] for row in kept]
    of_rows = {name: own[kept] for name, own in inputs.items()}
    terms = term_lists(model, texts_of, sources, of_rows, "exact", 1, token_budget)
    num_tokens = torch.tensor([len(own) for own in terms])
    return PerplexityOutput(
        energy=torch.tensor([sum(own) for own in terms], dtype=torch.float64) / temperature,
        num_tokens=num_tokens,
        frame=frame[kept],
        log_partition=torch.cat([own.log_partition for own in found]),
        error=torch.cat([own.error for own in found]),
        log_partition_upper=torch.cat([own.upper for own in found]),
        upper_error=torch.cat([own.upper_error for own in found]),
        num_masked_rows=int(num_tokens.sum()) + sum(own.num_masked_rows for own in found),
        left_out=left_out,
    )


def num_partition_rows(
    length: int,
    num_tokens: int,
    method: str,
    upper: bool,
    num_particles: int,
    num_runs: int,
    num_moves: int,
    num_chains: int = NUM_CHAINS,
    num_epochs: int = NUM_EPOCHS,
) -> int:
    """Masked rows that log Z of `length` positions of so many tokens takes; but for `"exact"` about so many.

    Of particles these are a row for each position of the fill, of its energy, and of the energy of what a visit
    proposes; the same on the way back. Chains run before that, or, of stepping stones, at each level.

    Example:
        >>> num_partition_rows(3, 10, "exact", False, 1, 1, 1)
        300
        >>> num_partition_rows(3, 10, "smc", False, 64, 4, 1)
        24960
    """
    if method == "exact":
        return length * num_tokens ** (length - 1)
    annealing = num_particles * length * (2 + _LEVELS * num_moves * length)
    chains = num_runs * num_chains * length * (2 + num_epochs * length)
    below = annealing * (1 + num_runs) if method == "smc" else annealing + chains * _LEVELS
    return below + (annealing * num_runs + (chains if method == "smc" else 0) if upper else 0)


def frame_of(text: EncodedText) -> tuple[int, ...]:
    """A text's context, with -1 in the place of its own tokens: texts with the same share log Z.

    Example:
        >>> from hf_ebm.models.energy.encoding import EncodedText
        >>> frame_of(EncodedText(ids=[2, 7, 9, 3], scored=[False, True, True, False], words=[], spans=None, text=""))
        (2, -1, -1, 3)
    """
    return tuple(-1 if free else token for token, free in zip(text.ids, text.scored, strict=True))


def _unusable(
    text: EncodedText, support: Tensor, config: ResolvedChainConfig, tokenizer: PreTrainedTokenizerBase
) -> str | None:
    """Why a text has probability 0, if it has."""
    free = [position for position, scored in enumerate(text.scored) if scored]
    if not free:
        return "has no token"
    allowed = config.allowed_tokens or {}
    for position in free:
        token = text.ids[position]
        told = f"holds {tokenizer.convert_ids_to_tokens(token)!r}"
        if not bool(support[token]):
            return f"{told}, which is never proposed"
        if token not in allowed.get(position, [token]):
            return f"{told} at position {position}, where allowed_tokens has others"
    bounds = torch.tensor([0]), torch.tensor([len(text.ids)])
    away = at_least_away(config.avoid or [], config.min_distance, *bounds)
    near = away is not None and not bool(away(torch.tensor([text.ids])))
    return "is nearer than min_distance to a sequence of avoid" if near else None


def _check_positions(row: int, text: EncodedText, config: ResolvedChainConfig) -> None:
    """Raises `ValueError` for a position of the model's `allowed_tokens` that is none of a text's own."""
    for position in config.allowed_tokens or {}:
        if position >= len(text.ids) or not text.scored[position]:
            raise ValueError(f"allowed_tokens of the model: position {position} is none of the text of row {row}")


def _frames(
    encoded: list[EncodedText], encoder_ids: list[list[int]] | None, inputs: dict[str, Tensor], kept: list[int]
) -> list[list[int]]:
    """The rows of texts that share log Z: of as many tokens, and in the same context."""
    found: dict[tuple, list[int]] = {}
    for row in kept:
        further = [int(own[row]) for own in inputs.values()]
        found.setdefault(
            (*frame_of(encoded[row]), -2, *further, -2, *(encoder_ids or [[]] * (row + 1))[row]), []
        ).append(row)
    return list(found.values())
