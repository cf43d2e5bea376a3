"""The distribution a chain is after: `exp(-E/τ)` over the free positions, within supported tokens and constraints."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor

from hf_ebm.checks import as_callable, name_of, number, row_numbers, shown
from hf_ebm.renamed import renamed_attributes
from hf_ebm.sampling.constraints import Constraint, PositionTokens
from hf_ebm.scoring.energies import energy_terms
from hf_ebm.scoring.rows import Context, Index, MaskedRows, Runner, Sequences

# A further energy: its weight and a callable from token ids (n, T) to energies (n,) in nats.
EnergyFunction = Callable[[Tensor], Tensor]
ExtraEnergy = tuple[float, EnergyFunction]


def as_extra_energies(given: object) -> tuple[ExtraEnergy, ...]:
    """Pairs of a weight and a callable, from several or one of such; a callable alone has weight 1, `None` is none.

    Raises:
        ValueError: for anything else, naming the entry, and for a weight that isn't finite.

    Example:
        >>> as_extra_energies(len), as_extra_energies([(2, len)])
        (((1.0, <built-in function len>),), ((2.0, <built-in function len>),))
    """
    if given is None:
        return ()
    if callable(given) or _is_one_pair(given):
        given = [given]
    if not isinstance(given, (tuple, list)):
        raise ValueError(f"extra_energies must be a list of pairs (finite weight, callable), got {shown(given)}")
    checked = []
    for place, entry in enumerate(given):
        own, function = (1.0, entry) if callable(entry) else entry if _has_two(entry) else (None, None)
        weight = number(own)
        if weight is None or math.isinf(weight):
            raise ValueError(
                f"extra_energies: entry {place} must be a pair (finite weight, callable), got {shown(entry)}"
            )
        checked.append((weight, as_callable(f"extra_energies: the second of entry {place}", function)))
    return tuple(checked)


def _is_one_pair(given: object) -> bool:
    """Whether it is a weight and a callable and not two entries."""
    return _has_two(given) and callable(given[1]) and not (callable(given[0]) or isinstance(given[0], (tuple, list)))


def _has_two(given: object) -> TypeGuard[tuple | list]:
    return isinstance(given, (tuple, list)) and len(given) == 2


class ChainState(NamedTuple):
    """State of C chains, on the CPU as everything about chains but what the model reads beside their tokens.

    Attributes:
        ids: (C, T) token ids.
        token_energies: (C, T) the model's energy terms at the free positions, 0 elsewhere, float64.
        extra_energy: (C,) weighted sum of the extra energies, float64.
    """

    ids: Tensor
    token_energies: Tensor
    extra_energy: Tensor

    @property
    def energy(self) -> Tensor:
        """(C,) energy in nats, float64. Always summed anew from its terms, so that no rounding builds up."""
        return self.token_energies.sum(1) + self.extra_energy


@dataclass
class Target:
    """Energy of the sequences of C chains.

    Args:
        runner: runs masked rows through the masked language model.
        energy: a name of `hf_ebm.scoring.energies.ENERGIES`; `None` if the extra energies are all.
        free: (C, T) bool, the free positions.
        start, stop: (C,) bounds of each sequence, on the CPU.
        support: (V,) bool, the tokens a free position may hold, where the model is.
        context: what the model reads of each chain beside its tokens, where the model is.
        extra: further energies, of ids where the model is. A hard constraint returns infinity where it is violated.
        position_tokens: where positions may not all hold the same tokens, those that each may.
        constraints: what all chains keep from their start on, which cost no rows: see `hf_ebm.sampling.constraints`.
    """

    runner: Runner
    energy: str | None
    free: Tensor
    start: Tensor
    stop: Tensor
    support: Tensor
    context: Context | None = None
    extra: Sequence[ExtraEnergy] = field(default_factory=tuple)
    position_tokens: PositionTokens | None = None
    constraints: Sequence[Constraint] = ()

    @property
    def is_constrained(self) -> bool:
        """Whether there is anything to keep beside the supported tokens."""
        return bool(self.constraints) or self.position_tokens is not None

    def holdable(self, ids: Tensor) -> Tensor:
        """(C, T) bool: whether a free position may hold each of `ids` (C, T)."""
        return self.support.cpu()[ids] if self.position_tokens is None else self.position_tokens.hold(ids)

    def allows(self, ids: Tensor) -> Tensor:
        """(C,) bool: whether states `ids` (C, T) keep the constraints."""
        kept = torch.ones(len(ids), dtype=torch.bool)
        if self.position_tokens is not None:
            kept = (self.position_tokens.hold(ids) | ~self.free).all(1)
        for constraint in self.constraints:
            kept &= constraint(ids)
        return kept

    def forbidden(self, rows: MaskedRows, n: Index, device: torch.device) -> Tensor | None:
        """(n P, V) bool: tokens that may not stand where some of the rows read; `None` if unsupported ones are all."""
        return None if self.position_tokens is None else self.position_tokens.forbidden(rows.some(n), device)

    @cached_property
    def _bounds(self) -> Sequences:
        return Sequences(self.start.new_empty(len(self.start), 0), self.start, self.stop, self.context)

    def sequences(self, ids: Tensor) -> Sequences:
        """States `ids` (C, T) of the chains as sequences."""
        return self._bounds.with_ids(ids)

    def terms(self, ids: Tensor, wanted: Tensor) -> Tensor:
        """Energy terms (C, T) of `ids` at `wanted` (C, T), 0 elsewhere, float64. One masked row per term."""
        (source, column), result = wanted.numpy().nonzero(), np.zeros(ids.shape)
        if len(source) and self.energy is not None:
            where = torch.from_numpy(source), torch.from_numpy(column)
            terms = energy_terms(self.runner, self.sequences(ids), *where, self.energy)
            result[source, column] = terms.detach().numpy()
        return torch.from_numpy(result)

    def extra_energy(self, ids: Tensor, wanted: Tensor | None = None) -> Tensor:
        """(C,) weighted sum of the extra energies of `ids` (C, T), float64; those of weight 0 are left out.

        Args:
            wanted: (C,) bool, the chains they are evaluated of, by default all; 0 of the others.

        Raises:
            ValueError: naming the entry, for anything but a number for each row, NaN, minus infinity, and a finite
                number that its weight makes infinite.
        """
        total = torch.zeros(len(ids), dtype=torch.float64)
        if not any(weight for weight, _ in self.extra):
            return total
        which = torch.ones_like(total, dtype=torch.bool) if wanted is None else wanted
        if not bool(which.any()):
            return total
        asked = ids[which]
        for index, (weight, function) in enumerate(self.extra):
            if not weight:
                continue
            place = f"extra_energies: entry {index} ({name_of(function)})"
            value = row_numbers(place, function(self.copied(asked)), len(asked), ids.device)
            term = weight * value
            wrong = term.isnan() | (term == -torch.inf) | (term.isinf() & value.isfinite())
            if bool(wrong.any()):
                raise ValueError(
                    f"{place} returned {float(value[wrong][0])}, which times its weight {weight} must be no NaN, no "
                    "minus infinity, and infinite only if it is"
                )
            total[which] += term
        return total

    def copied(self, ids: Tensor) -> Tensor:
        """What functions of the user get of `ids`: a copy where the model is."""
        return ids.to(self.support.device, copy=True)

    def shown(self, ids: Tensor, rows: MaskedRows) -> Tensor:
        """What the model is shown of rows of one length (n, L) of states `ids` (C, T)."""
        return rows.shown(self.sequences(ids), rows.source.numpy(), self.runner.mask_id)

    def unknown_state(self, ids: Tensor) -> ChainState:
        """A state at `ids` (C, T) whose energies are not evaluated yet (NaN)."""
        terms = torch.full(ids.shape, torch.nan, dtype=torch.float64)
        return ChainState(ids, terms, torch.full((len(ids),), torch.nan, dtype=torch.float64))

    def state(self, ids: Tensor) -> ChainState:
        """The state of all chains at `ids` (C, T), every term evaluated."""
        return ChainState(ids, self.terms(ids, self.free), self.extra_energy(ids))


__getattr__ = renamed_attributes(__name__, {"TextEnergy": "hf_ebm.texts:TextEnergy"})
