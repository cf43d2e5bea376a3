"""`EnergyModel.fill`: the likeliest fills of all blanks of a text together. A thin layer over `hf_ebm.scoring`.

A method, a function each here, is chosen for each row: exact over the whole support, over candidate sets, or chains.
"""

from __future__ import annotations

import math
import os
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import ModelOutput, logging

from hf_ebm.checks import as_number, as_whole, check_choice, check_tokenizer, shown
from hf_ebm.model_modes import evaluation_mode, model_output
from hf_ebm.models.energy.blanks import BlankRow, Layout, as_rules, blank_rows
from hf_ebm.models.energy.encoding import check_same_mask
from hf_ebm.models.energy.generation_energy import chains_apart
from hf_ebm.models.energy.inputs import mask_id_of
from hf_ebm.random_state import generator_of
from hf_ebm.runtime import check_fits
from hf_ebm.sampling.convergence import energy_diagnostics
from hf_ebm.sampling.fill_estimates import (
    Draws,
    LeftOut,
    chain_estimate,
    drawn_fills,
    left_out,
    log_weights,
    slot_conditionals,
)
from hf_ebm.sampling.run import ChainGenerationOutput
from hf_ebm.sampling.target import EnergyFunction, ExtraEnergy, as_extra_energies
from hf_ebm.scoring.joint_fills import (
    FillSpace,
    FillSummary,
    Slot,
    fill_energies,
    independent_log_probs,
    independent_tables,
    joint_tables,
    num_joint_rows,
    num_sequential_rows,
    sequential_tables,
    summarized,
)
from hf_ebm.scoring.rows import BadLogitsError, Runner

if TYPE_CHECKING:
    from hf_ebm.models.energy.modeling_energy import EnergyModel

READINGS = ("joint", "independent", "sequential")
METHODS = ("auto", "exact", "candidates", "chains")
_NUMBERS = ("log_partition", "left_out", "left_out_error", "r_hat")
# Fills that are weighed at most by "auto", and where a function is called on each of them.
_MOST_FILLS, _MOST_CALLED = 2**25, 2**17
_DRAWS = 256  # that choose candidate sets, and as many that say what these leave out
# Where candidate sets leave out more than that share, "auto" runs chains.
_TOO_MUCH = 0.1
_CHAINS, _LEAST_EPOCHS, _CONDITIONED = 8, 40, 8


class Word(NamedTuple):
    """What may stand in a blank.

    Attributes:
        probability: its marginal probability.
        tokens: ids of its pieces.
        token_str: its text.
        error: the probability's standard error, with chains; else `None`.
    """

    probability: float
    tokens: list[int]
    token_str: str
    error: float | None


class Fill(NamedTuple):
    """A fill of all blanks.

    Attributes:
        probability: of the fill.
        energy: in nats, extra energies included; with the readings that have none, minus its log probability.
        tokens: of each blank the ids of its pieces.
        token_strs: of each blank the text.
        sequence: the text of the whole.
        error: the probability's standard error, with chains; else `None`.
    """

    probability: float
    energy: float
    tokens: list[list[int]]
    token_strs: list[str]
    sequence: str
    error: float | None


@model_output
class FillOutput(ModelOutput):
    """Joint fills of N texts, in the order of the texts.

    Args:
        fills: per text its likeliest fills, best first.
        marginals: per text and blank the likeliest words.
        method: per text, how they were found: `"exact"`, `"candidates"` or `"chains"`.
        log_partition: (N,) log Z of `exp(-E/τ)` over all fills (float64), an estimate but for `"exact"`; of the other
            readings, the log of the probability that they give to all fills that the rules allow.
        left_out: (N,) share of the probability that isn't of the fills looked at; an estimate, of the other readings a
            bound; 0 where all were looked at.
        left_out_error: (N,) its standard error.
        r_hat: (N,) split R-hat of the energies of the chains, NaN without any.
        num_masked_rows: masked rows run through the masked language model.
    """

    fills: list[list[Fill]]
    marginals: list[list[list[Word]]]
    method: list[str]
    log_partition: Tensor
    left_out: Tensor
    left_out_error: Tensor
    r_hat: Tensor
    num_masked_rows: int


@torch.no_grad()
def fill(
    model: EnergyModel,
    texts: Iterable[str] | str | os.PathLike | Tensor,
    tokenizer: PreTrainedTokenizerBase,
    top_k: int = 10,
    *,
    reading: str = "joint",
    method: str = "auto",
    temperature: float = 1.0,
    words: Sequence[str] | Sequence[Sequence[str] | None] | None = None,
    pieces: int | tuple[int, int] | list[int | tuple[int, int] | None] | None = None,
    equal: Sequence[int] | Sequence[Sequence[int]] | None = None,
    different: Sequence[int] | Sequence[Sequence[int]] | None = None,
    pattern: str | None = None,
    extra_energies: Sequence[ExtraEnergy | EnergyFunction] | ExtraEnergy | EnergyFunction | None = None,
    attention_mask: Tensor | None = None,
    encoder_texts: Iterable[str] | None = None,
    row_limit: int = 16_384,
    seed: int = 0,
    token_budget: int | None = None,
    further_inputs: Mapping[str, Any] | None = None,
    unknown_tokens: str = "warn",
) -> FillOutput:
    """The likeliest fills of all masks of a text together, and the marginal distribution of each.

    The target is that of `generate` without the model's settings: `exp(-E/τ)`, E the energy of what fills the masks,
    given the rest. Of m blanks of K candidates each `m K^(m-1)` masked rows give the energies of all `K^m` fills.

    Args:
        texts: with mask tokens, each a blank; or token ids (B, T).
        tokenizer: the model's tokenizer.
        top_k: fills that are returned, and words of each blank.
        reading: `"joint"`; or one of two others of the same model: `"independent"`, the product of what it says of each
            blank while all are masked, or `"sequential"`, blanks filled from left to right. Over several numbers of
            pieces, these give all of them the same probability.
        method: `"exact"` lists all fills; `"candidates"` those of the likeliest words of each blank, as many as
            `row_limit` allows, and estimates what is left out; `"chains"` samples, with marginals that are
            Rao–Blackwellised. `"auto"` takes the first that `row_limit` allows, and chains where candidate sets leave
            out more than a tenth, for single tokens.
        temperature: τ of the target.
        words: that may fill the blanks; a list for each blank, or `None`, where they differ. A word is tokenized where
            the blank is, and may have several pieces.
        pieces: how many tokens a blank stands for: a number, or a pair (least, most); a list has one for each blank.
            The fill is a word then, where tokens tell: its first piece begins one, the others go on. By default a
            blank is one token, any that may be proposed, or what `words` have. The numbers compete by `exp(-E/τ)`.
        equal, different: numbers of blanks, from 0, that hold the same word, or different ones; or several such groups.
        pattern: a regular expression that is found in the text of the result.
        extra_energies: as for `generate`, for the joint reading.
        attention_mask: with ids, (B, T), 0 at padding.
        encoder_texts: per text, what an encoder-decoder model conditions on (required there).
        row_limit: masked rows of a text, for `"auto"`, and the size of candidate sets and of chains.
        seed: of draws and chains, which are the same for a text whatever the others are.
        token_budget: tokens per forward pass; by default from free memory.
        further_inputs: what else the model reads, by name: a number for each text, or one for all.
        unknown_tokens: as for `score`.

    Raises:
        ValueError: before any work, naming row and blank, for what can't be filled as asked; where no fill is allowed.

    Example:
        >>> from hf_ebm.assets import load_embedded
        >>> model, tokenizer = load_embedded()
        >>> out = model.fill("the king of [MASK] and the king of [MASK]", tokenizer, words=["israel", "judah", "bread"])
        >>> out.fills[0][0].sequence, out.method, len(out.fills[0])
        ('the king of judah and the king of judah', ['exact'], 9)
    """
    top_k, row_limit = as_whole("top_k", top_k, 1), as_whole("row_limit", row_limit, 1)
    seed, temperature = as_whole("seed", seed, 0), as_number("temperature", temperature, above=0)
    check_choice("reading", reading, READINGS)
    check_choice("method", method, METHODS)
    check_tokenizer("tokenizer", tokenizer)
    check_same_mask(tokenizer, mask_id_of(model))
    rules = as_rules(words, pieces, equal, different, pattern)
    extra = as_extra_energies(extra_energies)
    if reading != "joint" and (extra or temperature != 1 or method == "chains"):
        raise ValueError(f"extra_energies, temperature and chains have no effect with reading={reading!r}")
    runner = model.masked_batch_runner(token_budget)
    with evaluation_mode(model):
        rows = blank_rows(model, texts, tokenizer, rules, attention_mask, encoder_texts, further_inputs, unknown_tokens)
        tasks = []
        for row, own in enumerate(rows):
            how = (reading, temperature, top_k, row_limit, seed)
            if method == "chains" and not own.can_be_chained:
                raise ValueError(
                    f"method: chains move one token at a time, which row {row} doesn't let them: its blanks are equal, "
                    "have several numbers of pieces, or words of several pieces; 'candidates' lists the likeliest fills"
                )
            tasks.append(_FillTask(model, tokenizer, runner, own, extra, *how))
        found = []
        for row, task in enumerate(logging.tqdm(tasks, desc="Filling", unit="text", delay=2, leave=False)):
            try:
                found.append(_filled(task, method))
            except BadLogitsError as error:
                raise BadLogitsError(row, error.position, "texts: row") from error
            if not found[-1].fills:
                raise ValueError(f"texts: no fill of row {row} is allowed by the rules and extra_energies")
    numbers = {name: torch.tensor([getattr(own, name) for own in found], dtype=torch.float64) for name in _NUMBERS}
    num_rows = runner.num_rows + sum(own.rows_of_chains for own in found)
    fills, marginals, methods = ([getattr(own, name) for own in found] for name in ("fills", "marginals", "method"))
    return FillOutput(fills=fills, marginals=marginals, method=methods, **numbers, num_masked_rows=num_rows)


@dataclass
class _FillTask:
    """One row, and how it is filled."""

    model: EnergyModel
    tokenizer: PreTrainedTokenizerBase
    runner: Runner
    row: BlankRow
    extra: tuple[ExtraEnergy, ...]
    reading: str
    temperature: float
    top_k: int
    row_limit: int
    seed: int

    def further(self, layout: Layout) -> Callable[[Tensor], Tensor] | None:
        """The extra energies and conditions of a layout as one function; `None` where there are none."""
        return layout.further(self.runner, self.model.config.energy, self.extra)

    def num_rows(self, space: FillSpace) -> int:
        """Masked rows for all fills of a space."""
        if self.reading == "joint":
            return num_joint_rows(space)
        return num_sequential_rows(space) if self.reading == "sequential" else len(space.slots)

    def fits(self, layout: Layout, space: FillSpace) -> bool:
        """Whether all fills of a space can be listed."""
        called = self.extra or layout.texts_are_read
        share = len(self.row.layouts)
        most, fills = (_MOST_CALLED if called else _MOST_FILLS) // share, math.prod(space.sizes)
        return fills <= most and self.num_rows(space) <= max(1, self.row_limit // share)

    def word(self, tokens: list[int], probability: float, error: float | None = None) -> Word:
        """A word as it is returned."""
        return Word(probability, tokens, str(self.tokenizer.decode(tokens)).strip(), error)

    def fill(self, layout: Layout, ids: Tensor, probability: float, energy: float, error: float | None = None) -> Fill:
        """A fill as it is returned."""
        words = [self.word(ids[blank.positions].tolist(), probability) for blank in layout.blanks]
        text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
        return Fill(probability, energy, [own.tokens for own in words], [own.token_str for own in words], text, error)


class _Part(NamedTuple):
    """What was found of a layout: its fills, its log Z over those that were listed, and the ratio left out."""

    layout: Layout
    space: FillSpace
    summary: FillSummary
    rest: LeftOut


class _Found(NamedTuple):
    """What was found of a row, as `FillOutput` has it; `rows_of_chains` were run by a runner of their own."""

    fills: list[Fill]
    marginals: list[list[Word]]
    method: str
    log_partition: float
    left_out: float
    left_out_error: float
    r_hat: float = math.nan
    rows_of_chains: int = 0


def _filled(task: _FillTask, method: str) -> _Found:
    """Fills one row by a method, or the best one that is affordable."""
    if method == "chains":
        return _by_chains(task)
    fits = all(task.fits(layout, layout.space) for layout in task.row.layouts)
    if method == "exact" or (method == "auto" and fits):
        return _listed(task, "exact", [_exact(task, layout) for layout in task.row.layouts])
    found = _listed(task, "candidates", [_by_candidates(task, n, layout) for n, layout in enumerate(task.row.layouts)])
    chained = method == "auto" and task.reading == "joint" and task.row.can_be_chained
    return _by_chains(task) if chained and found.left_out > _TOO_MUCH else found


def _tables(task: _FillTask, space: FillSpace, kept: list[Tensor]) -> Iterable[Tensor]:
    if task.reading == "sequential":
        return sequential_tables(task.runner, space, kept)
    if task.reading == "independent":
        return independent_tables(independent_log_probs(task.runner, space), kept)
    dtype = torch.float64 if task.model.dtype == torch.float64 else torch.float32
    return joint_tables(task.runner, space.some(kept), task.model.config.energy, dtype)


def _summary(task: _FillTask, layout: Layout, kept: list[Tensor]) -> tuple[FillSummary, LeftOut]:
    """Of the fills of kept candidates, and for the other readings what is left out, by that they are normalized."""
    space = layout.space.some(kept)
    groups, further = [blank.slots for blank in layout.blanks], task.further(layout)
    tables = _tables(task, layout.space, kept)
    if task.reading == "joint":
        return summarized(iter(tables), space, task.temperature, task.top_k, groups, further), LeftOut(0.0, 0.0)
    listed = list(tables)
    summary = summarized(iter(listed), space, 1.0, task.top_k, groups, further)
    whole = summary if further is None else summarized(iter(listed), space, 1.0, 1, [], None)
    return summary, LeftOut(max(0.0, float(1 - whole.log_partition.exp())) / float(summary.log_partition.exp()), 0.0)


def _exact(task: _FillTask, layout: Layout) -> _Part:
    sizes, device = layout.space.sizes, layout.space.ids.device
    row = math.prod(sizes[1:])
    check_fits(12 * row, f"method: of {shown(row)} fills each word of the first blank has, energies and weights take")
    kept = [torch.arange(size, device=device) for size in sizes]
    return _Part(layout, layout.space, _summary(task, layout, kept)[0], LeftOut(0.0, 0.0))


def _by_candidates(task: _FillTask, number: int, layout: Layout) -> _Part:
    """The fills of the likeliest candidates of each slot, as many as may be, and an estimate of what they leave out."""
    space, slots = layout.space, range(len(layout.space.slots))
    if task.reading != "joint":
        kept = _largest(task, layout, independent_log_probs(task.runner, space))
        return _Part(layout, space.some(kept), *_summary(task, layout, kept))
    rounds = [_drawn(task, number, n, layout, order) for n, order in enumerate((slots, slots[::-1], slots))]
    kept = _largest(task, layout, _scores(rounds[:2]))
    summary, _ = _summary(task, layout, kept)
    draws, weights = rounds[2]  # which the sets don't depend on
    inside = torch.stack([torch.isin(draws.choices[:, n], own) for n, own in enumerate(kept)]).all(0)
    return _Part(layout, space.some(kept), summary, left_out(weights, inside, summary.log_partition))


def _drawn(task: _FillTask, number: int, key: int, layout: Layout, order: Sequence[int]) -> tuple[Draws, Tensor]:
    """Draws of a layout's fills with their log weights."""
    space, slots = layout.space, len(layout.space.slots)
    count = max(64, min(_DRAWS, task.row_limit // (8 * slots)))
    uniforms = torch.from_numpy(generator_of(task.seed, number, key).random((count, slots))).to(space.ids.device)
    draws, energy = drawn_fills(task.runner, space, uniforms, order), task.model.config.energy
    return draws, log_weights(task.runner, space, draws, energy, task.temperature, task.further(layout))


def _scores(rounds: list[tuple[Draws, Tensor]]) -> list[Tensor]:
    """(K,) of each slot: how likely a candidate is by what was drawn from, and by the target, of which draws tell."""
    found = []
    for draws, weights in rounds:
        shares = weights.softmax(0).nan_to_num()  # all may be forbidden
        slots = zip(draws.means, draws.choices.T, strict=True)
        found.append([means.index_add(0, choices, shares) for means, choices in slots])
    return [torch.stack(own).sum(0) for own in zip(*found, strict=True)]


def _largest(task: _FillTask, layout: Layout, scores: list[Tensor]) -> list[Tensor]:
    """The most candidates of each slot, the same number of all that have so many, that can be listed."""

    def best(count: int) -> list[Tensor]:
        return [own.topk(min(count, len(own))).indices.sort().values for own in scores]

    def is_too_much(count: int) -> bool:
        return not task.fits(layout, layout.space.some(best(count)))

    return best(1 + bisect(range(2, max(layout.space.sizes) + 1), False, key=is_too_much))


def _listed(task: _FillTask, method: str, parts: list[_Part]) -> _Found:
    """What was found of a row's layouts together, which compete by their log Z."""
    logs = torch.stack([part.summary.log_partition for part in parts])
    rests = torch.tensor([part.rest.ratio for part in parts], dtype=torch.float64, device=logs.device)
    whole = (logs + rests.log1p()).logsumexp(0)
    shares = (logs - whole).exp()
    errors = torch.tensor([part.rest.error for part in parts], dtype=torch.float64, device=logs.device)
    fills: list[tuple[Layout, Tensor, float, float]] = []
    for part in parts:
        ids, energies = part.space.filled(part.summary.choices), part.summary.energies
        probabilities = (-energies / task.temperature - whole).exp()
        fills += [(part.layout, *own) for own in zip(ids, probabilities.tolist(), energies.tolist(), strict=True)]
    inside = float(shares.sum())
    return _Found(
        [task.fill(*own) for own in sorted(fills, key=lambda own: -own[2])[: task.top_k]],
        [_words(task, parts, blank, shares) for blank in range(len(parts[0].layout.blanks))],
        method,
        float(whole),
        max(0.0, 1 - inside) if bool(rests.any()) else 0.0,
        float((shares * errors).square().sum().sqrt() * inside),
    )


def _words(task: _FillTask, parts: list[_Part], number: int, shares: Tensor) -> list[Word]:
    """A blank's likeliest words, whatever the numbers of pieces of the others are."""
    alone = len({len(part.layout.blanks[number].positions) for part in parts}) == len(parts)
    by_length: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for part, share in zip(parts, shares, strict=True):
        blank, marginal = part.layout.blanks[number], part.summary.marginals[number] * share
        best = marginal.flatten().topk(min(task.top_k, marginal.numel()) if alone else marginal.numel())
        choices = torch.stack(torch.unravel_index(best.indices, marginal.shape), 1)
        tokens = part.space.filled(choices, blank.slots)[:, blank.positions]
        by_length.setdefault(tokens.shape[1], []).append((tokens, best.values))
    found: list[tuple[list[int], float]] = []
    for own in by_length.values():
        tokens, which = torch.cat([one[0] for one in own]).unique(dim=0, return_inverse=True)
        sums = shares.new_zeros(len(tokens)).index_add(0, which, torch.cat([one[1] for one in own]))
        best = sums.topk(min(task.top_k, len(sums)))
        rows = zip(tokens[best.indices].tolist(), best.values.tolist(), strict=True)
        found += [(word, probability) for word, probability in rows if probability > 0]
    return [task.word(*own) for own in sorted(found, key=lambda own: -own[1])[: task.top_k]]


def _by_chains(task: _FillTask) -> _Found:
    """Samples of independent chains, Rao–Blackwellised over each slot."""
    layout = task.row.layouts[0]
    space, energy, further, count = layout.space, task.model.config.energy, task.further(layout), len(layout.blanks)
    draws, weights = _drawn(task, 0, 2, layout, range(count))
    allowed = draws.choices[weights > -torch.inf]
    if not len(allowed):
        raise ValueError("method: no draw meets the rules and extra_energies; 'candidates' lists the likeliest fills")
    starts = space.filled(allowed[torch.arange(_CHAINS, device=allowed.device) % len(allowed)])
    out = _chains(task, layout, starts)
    # The conditionals get as many rows as the chains had.
    width = min(_CONDITIONED, max(space.sizes))
    most = max(4, task.row_limit // (2 * _CHAINS * count * (1 + width * (count - 1))))
    step = -(-out.samples.shape[1] // most)
    samples = out.samples[:, ::step].to(space.ids.device)
    chains = torch.arange(_CHAINS, device=samples.device).repeat_interleave(samples.shape[1])
    samples = samples.flatten(0, 1)
    found = [
        slot_conditionals(task.runner, space, slot, samples, energy, task.temperature, width, further)
        for slot in range(count)
    ]
    shares = torch.cat([own.weights for own in found], 1) / count
    fills = chain_estimate(torch.cat([own.ids for own in found], 1), shares, chains).first(task.top_k)
    energies = fill_energies(task.runner, space, fills.ids, energy)
    energies = energies if further is None else energies + further(fills.ids)
    words = [
        chain_estimate(own.ids[..., blank.positions], own.weights, chains).first(task.top_k)
        for blank in layout.blanks
        for own in [found[blank.slots[0]]]
    ]
    numbers = zip(fills.ids, fills.probabilities.tolist(), energies.tolist(), fills.errors.tolist(), strict=True)
    return _Found(
        [task.fill(layout, *own) for own in numbers],
        [[task.word(*own) for own in zip(*map(Tensor.tolist, word), strict=True)] for word in words],
        "chains",
        float(weights.logsumexp(0) - math.log(len(weights))),
        0.0,
        0.0,
        energy_diagnostics(out.energies).r_hat,
        out.num_masked_rows,
    )


def _chains(task: _FillTask, layout: Layout, starts: Tensor) -> ChainGenerationOutput:
    """Single-site chains of a layout's fills, from `starts` (C, T) that are allowed.

    They share one support; that a slot may hold less is a condition.
    """
    space = layout.space
    union = torch.zeros(task.model.vocab_size, dtype=torch.bool, device=space.ids.device)
    union[torch.cat([slot.candidates[:, 0] for slot in space.slots])] = True
    narrower = [slot for slot in space.slots if len(slot.candidates) < int(union.sum())]
    conditions = [*layout.conditions, *(_one_of(slot, len(union)) for slot in narrower)]
    epochs = max(_LEAST_EPOCHS, task.row_limit // (2 * _CHAINS * len(space.slots) ** 2))
    settings = dict(
        num_epochs=epochs, burn_in=epochs // 4, energy_temperature=task.temperature, seed=task.seed,
        proposal_temperature=task.temperature, suppress_tokens=(~union).nonzero()[:, 0].tolist(),
    )  # fmt: skip
    inputs = {"input_ids": starts, "free_mask": (space.ids == task.runner.mask_id).expand_as(starts)}
    if task.row.source is not None:
        inputs["encoder_input_ids"] = task.row.source.repeat(_CHAINS, 1)
    which = [(0, chain) for chain in range(_CHAINS)], range(_CHAINS)
    extra = (*task.extra, *((1.0, condition) for condition in conditions))
    return chains_apart(task.model, settings, inputs, task.row.further_inputs, which, extra)


def _one_of(slot: Slot, vocab_size: int) -> Callable[[Tensor], Tensor]:
    """A condition: a slot of one position holds one of its candidates."""
    position, tokens = int(slot.positions), slot.candidates[:, 0]
    allowed = torch.zeros(vocab_size, dtype=torch.bool, device=tokens.device).index_fill(0, tokens, True)
    return lambda ids: torch.where(allowed[ids[:, position]], 0.0, torch.inf)
