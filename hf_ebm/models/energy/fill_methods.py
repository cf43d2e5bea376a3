"""How a row's blanks are filled: every fill listed, those of candidate sets, or chains. Each is one function here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hf_ebm.checks import shown
from hf_ebm.models.energy.blanks import Layout
from hf_ebm.random_state import generator_of
from hf_ebm.runtime import check_fits
from hf_ebm.sampling.fill_estimates import (
    Draws,
    LeftOut,
    chain_estimate,
    drawn_fills,
    left_out,
    log_weights,
    slot_conditionals,
)
from hf_ebm.sampling.output import ChainGenerationOutput, energy_diagnostics
from hf_ebm.sampling.target import ExtraEnergy, Target
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
from hf_ebm.scoring.rows import Runner

if TYPE_CHECKING:
    from hf_ebm.models.energy.modeling_energy import EnergyModel

# Fills that are weighed at most by "auto", and where a function is called on each of them.
_MOST_FILLS, _MOST_CALLED = 2**25, 2**17
# Draws that choose candidate sets, and as many that say what these leave out.
_DRAWS = 256
# Where candidate sets leave out more than that share, "auto" runs chains.
_TOO_MUCH = 0.1
_CHAINS, _LEAST_EPOCHS, _CONDITIONED = 8, 40, 8


def further_energies(
    model: EnergyModel, runner: Runner, extra: tuple[ExtraEnergy, ...], layout: Layout
) -> Callable[[Tensor], Tensor] | None:
    """Extra energies and a layout's conditions as one function of ids; `None` where there are none."""
    extra = (*extra, *((1.0, condition) for condition in layout.conditions))
    if not extra:
        return None
    ids = layout.space.ids[None]
    nothing = torch.zeros(1, dtype=torch.long)
    free = torch.zeros_like(ids, dtype=torch.bool)
    return Target(runner, model.config.energy, free, nothing, nothing, free[0], None, extra).extra_energy


@dataclass
class FillTask:
    """One row, and how it is filled."""

    model: EnergyModel
    runner: Runner
    layouts: list[Layout]
    extra: tuple[ExtraEnergy, ...]
    encoder: Tensor | None
    further_inputs: dict[str, Any]
    reading: str
    temperature: float
    top_k: int
    row_limit: int
    seed: int

    def further(self, layout: Layout) -> Callable[[Tensor], Tensor] | None:
        """The extra energies and conditions of a layout as one function; `None` where there are none."""
        return further_energies(self.model, self.runner, self.extra, layout)

    def num_rows(self, space: FillSpace) -> int:
        """Masked rows for all fills of a space."""
        if self.reading == "joint":
            return num_joint_rows(space)
        return num_sequential_rows(space) if self.reading == "sequential" else len(space.slots)

    def fits(self, layout: Layout, space: FillSpace) -> bool:
        """Whether all fills of a space can be listed."""
        called = self.extra or layout.texts_are_read
        share = len(self.layouts)
        most, fills = (_MOST_CALLED if called else _MOST_FILLS) // share, math.prod(space.sizes)
        return fills <= most and self.num_rows(space) <= max(1, self.row_limit // share)


class _Part(NamedTuple):
    """What was found of a layout: its fills, its log Z over those that were listed, and the ratio left out."""

    layout: Layout
    space: FillSpace
    summary: FillSummary
    rest: LeftOut


class FoundFill(NamedTuple):
    """A fill: its probability, with a standard error if it has one, its energy, all ids, and where each blank is."""

    probability: float
    error: float | None
    energy: float
    ids: Tensor
    positions: list[Tensor]


class FoundWord(NamedTuple):
    """What may stand in a blank: its probability, with a standard error if it has one, and its tokens."""

    probability: float
    error: float | None
    tokens: list[int]


class Found(NamedTuple):
    """What was found of a row, the likeliest first; `rows_of_chains` were run by a runner of their own."""

    fills: list[FoundFill]
    marginals: list[list[FoundWord]]
    method: str
    log_partition: float
    left_out: float
    left_out_error: float
    r_hat: float
    rows_of_chains: int


def filled(task: FillTask, method: str) -> Found:
    """Fills one row by a method, or the best one that is affordable."""
    if method == "chains":
        return _by_chains(task)
    fits = all(task.fits(layout, layout.space) for layout in task.layouts)
    if method == "exact" or (method == "auto" and fits):
        return _listed(task, "exact", [_exact(task, layout) for layout in task.layouts])
    found = _listed(task, "candidates", [_by_candidates(task, n, layout) for n, layout in enumerate(task.layouts)])
    chained = method == "auto" and task.reading == "joint" and can_be_chained(task.layouts)
    return _by_chains(task) if chained and found.left_out > _TOO_MUCH else found


def _tables(task: FillTask, space: FillSpace, kept: list[Tensor]) -> Iterable[Tensor]:
    if task.reading == "sequential":
        return sequential_tables(task.runner, space, kept)
    if task.reading == "independent":
        return independent_tables(independent_log_probs(task.runner, space), kept)
    dtype = torch.float64 if task.model.dtype == torch.float64 else torch.float32
    return joint_tables(task.runner, space.some(kept), task.model.config.energy, dtype)


def _summary(task: FillTask, layout: Layout, kept: list[Tensor]) -> tuple[FillSummary, LeftOut]:
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


def _exact(task: FillTask, layout: Layout) -> _Part:
    sizes, device = layout.space.sizes, layout.space.ids.device
    row = math.prod(sizes[1:])
    check_fits(12 * row, f"method: of {shown(row)} fills each word of the first blank has, energies and weights take")
    kept = [torch.arange(size, device=device) for size in sizes]
    return _Part(layout, layout.space, _summary(task, layout, kept)[0], LeftOut(0.0, 0.0))


def _by_candidates(task: FillTask, number: int, layout: Layout) -> _Part:
    """The fills of the likeliest candidates of each slot, as many as may be, and an estimate of what they leave out."""
    space, slots = layout.space, range(len(layout.space.slots))
    if task.reading != "joint":
        kept = _largest(task, layout, independent_log_probs(task.runner, space))
        return _Part(layout, space.some(kept), *_summary(task, layout, kept))
    rounds = [_drawn(task, number, n, layout, order) for n, order in enumerate((slots, slots[::-1], slots))]
    kept = _largest(task, layout, _scores(space, rounds[:2]))
    summary, _ = _summary(task, layout, kept)
    draws, weights = rounds[2]  # which the sets don't depend on
    inside = torch.stack([torch.isin(draws.choices[:, n], own) for n, own in enumerate(kept)]).all(0)
    return _Part(layout, space.some(kept), summary, left_out(weights, inside, summary.log_partition))


def _drawn(task: FillTask, number: int, key: int, layout: Layout, order: Sequence[int]) -> tuple[Draws, Tensor]:
    """Draws of a layout's fills with their log weights."""
    space, slots = layout.space, len(layout.space.slots)
    count = max(64, min(_DRAWS, task.row_limit // (8 * slots)))
    uniforms = torch.from_numpy(generator_of(task.seed, number, key).random((count, slots))).to(space.ids.device)
    draws = drawn_fills(task.runner, space, uniforms, order)
    energy = task.model.config.energy
    return draws, log_weights(task.runner, space, draws, energy, task.temperature, task.further(layout))


def _scores(space: FillSpace, rounds: list[tuple[Draws, Tensor]]) -> list[Tensor]:
    """(K,) of each slot: how likely a candidate is by what was drawn from, and by the target, of which draws tell."""
    scores = []
    for slot, size in enumerate(space.sizes):
        found = torch.zeros(size, dtype=torch.float64, device=space.ids.device)
        for draws, weights in rounds:
            shares = weights.softmax(0).nan_to_num()  # all may be forbidden
            found += draws.means[slot].index_add(0, draws.choices[:, slot], shares)
        scores.append(found)
    return scores


def _largest(task: FillTask, layout: Layout, scores: list[Tensor]) -> list[Tensor]:
    """The most candidates of each slot, the same number of all that have so many, that can be listed."""

    def best(count: int) -> list[Tensor]:
        return [own.topk(min(count, len(own))).indices.sort().values for own in scores]

    low, high = 1, max(layout.space.sizes)
    while low < high:
        middle = (low + high + 1) // 2
        if task.fits(layout, layout.space.some(best(middle))):
            low = middle
        else:
            high = middle - 1
    return best(low)


def _listed(task: FillTask, method: str, parts: list[_Part]) -> Found:
    """What was found of a row's layouts together, which compete by their log Z."""
    logs = torch.stack([part.summary.log_partition for part in parts])
    rests = torch.tensor([part.rest.ratio for part in parts], dtype=torch.float64, device=logs.device)
    whole = (logs + rests.log1p()).logsumexp(0)
    shares = (logs - whole).exp()
    errors = torch.tensor([part.rest.error for part in parts], dtype=torch.float64, device=logs.device)
    fills: list[FoundFill] = []
    for part in parts:
        ids, energies = part.space.filled(part.summary.choices), part.summary.energies
        probabilities = (-energies / task.temperature - whole).exp().tolist()
        positions = [blank.positions for blank in part.layout.blanks]
        fills += [
            FoundFill(probability, None, energy, own, positions)
            for probability, energy, own in zip(probabilities, energies.tolist(), ids, strict=True)
        ]
    inside = float(shares.sum())
    return Found(
        sorted(fills, key=lambda one: -one.probability)[: task.top_k],
        [_words(parts, blank, shares, task.top_k) for blank in range(len(parts[0].layout.blanks))],
        method,
        float(whole),
        max(0.0, 1 - inside) if bool(rests.any()) else 0.0,
        float((shares * errors).square().sum().sqrt() * inside),
        math.nan,
        0,
    )


def _words(parts: list[_Part], number: int, shares: Tensor, top_k: int) -> list[FoundWord]:
    """A blank's likeliest words, whatever the numbers of pieces of the others are."""
    alone = len({len(part.layout.blanks[number].positions) for part in parts}) == len(parts)
    by_length: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for part, share in zip(parts, shares, strict=True):
        blank, marginal = part.layout.blanks[number], part.summary.marginals[number] * share
        best = marginal.flatten().topk(min(top_k, marginal.numel()) if alone else marginal.numel())
        choices = torch.stack(torch.unravel_index(best.indices, marginal.shape), 1)
        tokens = part.space.filled(choices, blank.slots)[:, blank.positions]
        by_length.setdefault(tokens.shape[1], []).append((tokens, best.values))
    found = []
    for own in by_length.values():
        tokens, which = torch.cat([one[0] for one in own]).unique(dim=0, return_inverse=True)
        sums = shares.new_zeros(len(tokens)).index_add(0, which, torch.cat([one[1] for one in own]))
        best = sums.topk(min(top_k, len(sums)))
        rows = zip(best.values.tolist(), tokens[best.indices].tolist(), strict=True)
        found += [FoundWord(probability, None, word) for probability, word in rows if probability > 0]
    return sorted(found, key=lambda one: -one.probability)[:top_k]


def can_be_chained(layouts: list[Layout]) -> bool:
    """Whether chains of single tokens can move: one layout, a slot for each position."""
    return len(layouts) == 1 and all(len(slot.positions) == 1 for slot in layouts[0].space.slots)


def _by_chains(task: FillTask) -> Found:
    """Samples of independent chains, Rao–Blackwellised over each slot."""
    layout = task.layouts[0]
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
    positions = [blank.positions for blank in layout.blanks]
    numbers = zip(fills.probabilities.tolist(), fills.errors.tolist(), energies.tolist(), fills.ids, strict=True)
    return Found(
        [FoundFill(*own, positions) for own in numbers],
        [
            [FoundWord(*own) for own in zip(w.probabilities.tolist(), w.errors.tolist(), w.ids.tolist(), strict=True)]
            for w in words
        ],
        "chains",
        float(weights.logsumexp(0) - math.log(len(weights))),
        0.0,
        0.0,
        energy_diagnostics(out.energies).r_hat,
        out.num_masked_rows,
    )


def _chains(task: FillTask, layout: Layout, starts: Tensor) -> ChainGenerationOutput:
    """Single-site chains of a layout's fills, from `starts` (C, T) that are allowed.

    They share one support; that a slot may hold less is a condition.
    """
    space = layout.space
    union = torch.zeros(task.model.vocab_size, dtype=torch.bool, device=space.ids.device)
    union[torch.cat([slot.candidates[:, 0] for slot in space.slots])] = True
    narrower = [slot for slot in space.slots if len(slot.candidates) < int(union.sum())]
    conditions = [*layout.conditions, *(_one_of(slot, len(union)) for slot in narrower)]
    epochs = max(_LEAST_EPOCHS, task.row_limit // (2 * _CHAINS * len(space.slots) ** 2))
    settings: dict[str, Any] = dict(
        kernel="metropolis_hastings", num_epochs=epochs, burn_in=epochs // 4, thinning=1,
        block_size=1, accept_all_epochs=0, energy_temperature=task.temperature, energy_temperature_decay=0.0,
        proposal_temperature=task.temperature,
        suppress_tokens=(~union).nonzero()[:, 0].tolist(), seed=task.seed,
    )  # fmt: skip
    free = (space.ids == task.runner.mask_id).expand_as(starts)
    return task.model.generate(
        starts,
        free_mask=free,
        chain_keys=[(0, chain) for chain in range(_CHAINS)],
        chain_rows=range(_CHAINS),
        encoder_input_ids=None if task.encoder is None else task.encoder.repeat(_CHAINS, 1),
        extra_energies=(*task.extra, *((1.0, condition) for condition in conditions)),
        **settings,
        **task.further_inputs,
    )


def _one_of(slot: Slot, vocab_size: int) -> Callable[[Tensor], Tensor]:
    """A condition: a slot of one position holds one of its candidates."""
    position, tokens = int(slot.positions), slot.candidates[:, 0]
    allowed = torch.zeros(vocab_size, dtype=torch.bool, device=tokens.device).index_fill(0, tokens, True)
    return lambda ids: torch.where(allowed[ids[:, position]], 0.0, torch.inf)
