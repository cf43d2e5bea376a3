"""Joint fills of several blanks: energies of all of them from few masked rows, reduced as they come.

With context fixed, an energy is a sum over the free positions alone, and a term doesn't depend on the token that stands
at its own position. So with m blanks of K candidates each, `m K^(m-1)` masked rows, each read at all K candidates, give
the energies of all `K^m` fills. Two other readings of the same model are laid out as energies, `-log q` of a fill: the
product of what the model says of each blank while all are masked ("independent"), and filling from left to right
("sequential").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_ebm.scoring.energies import ENERGIES, energy_terms, token_scores
from hf_ebm.scoring.rows import Context, Index, MaskedRows, Runner, Sequences

# Energies that are held at once: a quarter of a GiB of float32.
TABLE_ENTRIES = 2**26
# Contexts that are laid out at a time, and fills that are weighed at a time.
_CONTEXTS_AT_ONCE, _FILLS_AT_ONCE = 2**14, 2**21


class Slot(NamedTuple):
    """Positions that one choice fills, and what it may fill them with.

    Attributes:
        positions: (n,) columns, ascending.
        candidates: (K, n) tokens, different rows.
    """

    positions: Tensor
    candidates: Tensor

    def some(self, which: Tensor) -> Slot:
        """With some of the candidates."""
        return Slot(self.positions, self.candidates[which])


class FillSpace(NamedTuple):
    """All fills of a sequence: one candidate for each slot.

    Attributes:
        ids: (T,) the sequence, with masks at the slots' positions.
        slots: m of them, that share no position.
        context: what the model reads beside the tokens, of one sequence.
    """

    ids: Tensor
    slots: tuple[Slot, ...]
    context: Context | None = None

    @property
    def sizes(self) -> list[int]:
        """Candidates of each slot."""
        return [len(slot.candidates) for slot in self.slots]

    def some(self, kept: Sequence[Tensor]) -> FillSpace:
        """With some of each slot's candidates."""
        return self._replace(slots=tuple(slot.some(own) for slot, own in zip(self.slots, kept, strict=True)))

    def filled(self, choices: Tensor, slots: Sequence[int] | None = None) -> Tensor:
        """(N, T) sequences with the candidates `choices` (N, s) of s slots, by default all, filled in."""
        numbers = range(len(self.slots)) if slots is None else slots
        ids = self.ids.repeat(len(choices), 1)
        for column, number in enumerate(numbers):
            ids[:, self.slots[number].positions] = self.slots[number].candidates[choices[:, column]]
        return ids

    def sequences(self, ids: Tensor) -> Sequences:
        """`ids` (N, T) with the context, which is not copied."""
        ends = torch.zeros(len(ids), dtype=torch.long), torch.full((len(ids),), ids.shape[1])
        return Sequences(ids, *ends, self.context and self.context.expanded(len(ids)))


def num_sequential_rows(space: FillSpace) -> int:
    """Masked rows that fill slots from left to right in all ways: of a slot for each filling of the earlier ones.

    Example:
        >>> one = torch.arange(5)[:, None]
        >>> num_sequential_rows(FillSpace(torch.zeros(3), (Slot(torch.tensor([0]), one), Slot(torch.tensor([1]), one))))
        6
    """
    sizes = space.sizes
    return sum(
        math.prod(sizes[:number]) * len(_rests(slot, piece, earlier=True).first)
        for number, slot in enumerate(space.slots)
        for piece in range(len(slot.positions))
    )


def num_joint_rows(space: FillSpace) -> int:
    """Masked rows that give all energies: of each slot the contexts of the others', for each rest of its own pieces.

    Example:
        >>> one = torch.arange(5)[:, None]
        >>> num_joint_rows(FillSpace(torch.zeros(3), (Slot(torch.tensor([0]), one), Slot(torch.tensor([1]), one))))
        10
    """
    total = math.prod(space.sizes)
    return sum(
        len(_rests(slot, piece).tokens) * (total // len(slot.candidates))
        for slot in space.slots
        for piece in range(len(slot.positions))
    )


class _Rests(NamedTuple):
    """Candidates of a slot by what stands at its other pieces: U different rests of at most G candidates each.

    Attributes:
        first: (U,) a candidate that has the rest.
        members: (U, G) the candidates that have it, the first repeated where there are fewer.
        counts: (U, G) bool, false at repeats.
        tokens: (U, G) the members' tokens at the piece.
    """

    first: Tensor
    members: Tensor
    counts: Tensor
    tokens: Tensor


def _rests(slot: Slot, piece: int, earlier: bool = False) -> _Rests:
    """Rests of one piece: what stands at the others, or at the earlier ones alone."""
    number = torch.arange(len(slot.positions), device=slot.positions.device)
    rest = slot.candidates * (number < piece if earlier else number != piece)
    _, group, size = rest.unique(dim=0, return_inverse=True, return_counts=True)
    order = group.argsort(stable=True)
    start = size.cumsum(0) - size
    column = torch.arange(int(size.max()), device=rest.device)
    counts = column < size[:, None]
    members = order[(start[:, None] + torch.where(counts, column, 0))]
    return _Rests(members[:, 0], members, counts, slot.candidates[members, piece])


def joint_tables(
    runner: Runner, space: FillSpace, energy: str, dtype: torch.dtype = torch.float32, entries: int = TABLE_ENTRIES
) -> Iterator[Tensor]:
    """Energies in nats of all fills: tables (n, K_2, …, K_m), whose first axes go through the first slot's candidates.

    Where one table holds everything, `num_joint_rows` rows are run; else the rows of the first slot, which no table
    has all columns of, are run once a table.

    Args:
        entries: of a table, at most, but for what one candidate of the first slot takes.
    """
    sizes = space.sizes
    height = max(1, min(sizes[0], entries // math.prod(sizes[1:])))
    for first in range(0, sizes[0], height):
        which = torch.arange(first, min(first + height, sizes[0]), device=space.ids.device)
        part = space._replace(slots=(space.slots[0].some(which), *space.slots[1:]))
        table = torch.zeros(part.sizes, dtype=dtype, device=space.ids.device)
        for number, slot in enumerate(part.slots):
            for piece in range(len(slot.positions)):
                _add_terms(runner, part, number, piece, energy, table)
        yield table
        del table  # before the next one is made


def slot_terms(runner: Runner, space: FillSpace, number: int, energy: str) -> Tensor:
    """Energy terms in nats, float64, of one slot's own positions in all fills: (K_1, …, K_m)."""
    table = torch.zeros(space.sizes, dtype=torch.float64, device=space.ids.device)
    for piece in range(len(space.slots[number].positions)):
        _add_terms(runner, space, number, piece, energy, table)
    return table


def _add_terms(runner: Runner, space: FillSpace, number: int, piece: int, energy: str, table: Tensor) -> None:
    """Adds the terms of one piece of one slot to the energies of all fills."""
    sizes, slot = space.sizes, space.slots[number]
    rests = _rests(slot, piece)
    before, after = math.prod(sizes[:number]), math.prod(sizes[number + 1 :])
    # The slot's own axis stays; of the others' each context is a row for each rest.
    view = table.view(before, sizes[number], after)
    total = before * len(rests.first) * after
    one_group, whole = len(rests.first) == 1, bool(rests.counts.all())
    for start in range(0, total, _CONTEXTS_AT_ONCE):
        flat = torch.arange(start, min(start + _CONTEXTS_AT_ONCE, total), device=table.device)
        left, rest, right = flat // (len(rests.first) * after), flat // after % len(rests.first), flat % after
        fill = (left * sizes[number] + rests.first[rest]) * after + right
        rows = torch.arange(len(fill), device=table.device)
        position = slot.positions[piece].expand(len(fill), 1)

        def add(logits: Tensor, n: Index) -> Tensor:
            group, here, there = rest[n], left[n], right[n]  # noqa: B023
            if one_group:
                terms = -token_scores(logits[:, 0], rests.tokens[0], energy).to(table.dtype)
                columns = rests.members[0]
                if before == 1:
                    view[0, columns[:, None], there] += terms.T
                else:
                    view[here[:, None], columns, there[:, None]] += terms
            else:
                terms = ENERGIES[energy].term(logits[:, 0], rests.tokens[group]).to(table.dtype)
                terms = terms.masked_fill(~rests.counts[group], 0)
                at = here[:, None].expand_as(terms), rests.members[group], there[:, None].expand_as(terms)
                if whole:
                    view[at] += terms
                else:
                    view.index_put_(at, terms, accumulate=True)
            return logits.new_zeros(len(logits))

        ids = space.filled(_choices(fill, sizes))
        runner(space.sequences(ids), MaskedRows(rows, position, position), add)


def _choices(fills: Tensor, sizes: Sequence[int]) -> Tensor:
    """Numbers of fills (N,), counted with the last slot's candidates running fastest, as choices (N, m)."""
    base = [math.prod(sizes[number + 1 :]) for number in range(len(sizes))]
    return torch.stack([fills // step % size for step, size in zip(base, sizes, strict=True)], 1)


def independent_log_probs(runner: Runner, space: FillSpace) -> list[Tensor]:
    """Log probabilities (K,) of each slot's candidates, all slots masked and within a slot a product: a row a slot."""
    numbers = range(len(space.slots))
    return [parallel_log_probs(runner, space, space.ids[None], number, numbers)[0] for number in numbers]


def parallel_log_probs(runner: Runner, space: FillSpace, ids: Tensor, number: int, masked: Sequence[int]) -> Tensor:
    """As `slot_log_probs`, but with all pieces of the slot masked in one row, and their product."""
    slot, rows = space.slots[number], torch.arange(len(ids), device=ids.device)
    hidden = torch.cat([space.slots[other].positions for other in masked]).expand(len(ids), -1)

    def product(logits: Tensor, n: Index) -> Tensor:
        pieces = logits.double().log_softmax(-1).unbind(1)
        parts = (own[:, tokens] for own, tokens in zip(pieces, slot.candidates.unbind(1), strict=True))
        return sum(parts, start=logits.new_zeros((), dtype=torch.float64))

    read = slot.positions.expand(len(ids), -1)
    return runner(space.sequences(ids), MaskedRows(rows, hidden, read), product).log_softmax(-1)


def slot_log_probs(runner: Runner, space: FillSpace, ids: Tensor, number: int, masked: Sequence[int]) -> Tensor:
    """Log probabilities (N, K) of a slot's candidates in sequences `ids` (N, T), its pieces filled from left to right.

    They are normalized over the candidates. A slot of one position takes one row a sequence.

    Args:
        number: of the slot.
        masked: numbers of all slots that are masked, itself among them.
    """
    slot = space.slots[number]
    hidden = torch.cat([space.slots[other].positions for other in masked])
    total = torch.zeros(len(ids), len(slot.candidates), dtype=torch.float64, device=ids.device)
    for piece in range(len(slot.positions)):
        rests = _rests(slot, piece, earlier=True)
        for rest in range(len(rests.first)):
            # Earlier pieces hold the rest's own tokens; the others are masked.
            part = ids.clone()
            part[:, slot.positions[:piece]] = slot.candidates[rests.first[rest], :piece]
            positions = torch.cat([hidden[~torch.isin(hidden, slot.positions)], slot.positions[piece:]])
            positions = positions.expand(len(ids), -1)
            read = slot.positions[piece].expand(len(ids), 1)
            members = rests.members[rest][rests.counts[rest]]
            tokens = slot.candidates[members, piece]
            rows = MaskedRows(torch.arange(len(ids), device=ids.device), positions, read)
            total[:, members] += runner(
                space.sequences(part),
                rows,
                lambda logits, n: token_scores(logits[:, 0].double(), tokens, "local"),  # noqa: B023
            )
    return total.log_softmax(-1)


def independent_tables(
    log_probs: Sequence[Tensor], kept: Sequence[Tensor], entries: int = TABLE_ENTRIES
) -> Iterator[Tensor]:
    """`-log q` of the fills of kept candidates, as `joint_tables`, by `independent_log_probs`.

    Example:
        >>> log_probs = [torch.tensor([0.75, 0.25]).log(), torch.tensor([0.5, 0.5]).log()]
        >>> [(-table).exp() for table in independent_tables(log_probs, [torch.tensor([0, 1]), torch.tensor([1])])]
        [tensor([[0.3750],
                [0.1250]])]
    """
    parts = [own[which] for own, which in zip(log_probs, kept, strict=True)]
    height = max(1, entries // math.prod(map(len, parts[1:])))
    for first in parts[0].split(height):
        table = -first
        for own in parts[1:]:
            table = table[..., None] - own
        yield table


def sequential_tables(
    runner: Runner, space: FillSpace, kept: Sequence[Tensor], entries: int = TABLE_ENTRIES
) -> Iterator[Tensor]:
    """`-log q` of the fills of kept candidates, as `joint_tables`, slots filled in order, later ones masked.

    For slots of one position these are `1 + K_1 + K_1 K_2 + …` rows, K being the numbers that are kept.
    """
    part, numbers = space.some(kept), range(len(space.slots))
    sizes = part.sizes
    begin = slot_log_probs(runner, space, space.ids[None], 0, numbers)[0, kept[0]]
    height = max(1, entries // math.prod(sizes[1:]))
    for first in torch.arange(sizes[0], device=space.ids.device).split(height):
        table = -begin[first].view(-1, *[1] * (len(sizes) - 1)).expand(len(first), *sizes[1:]).clone()
        for number in numbers[1:]:
            view = table.view(len(first) * math.prod(sizes[1:number]), sizes[number], -1)
            for some in torch.arange(len(view), device=first.device).split(_CONTEXTS_AT_ONCE):
                choices = _choices(some, [len(first), *sizes[1:number]])
                choices[:, 0] += first[0]
                ids = part.filled(choices, range(number))
                view[some] -= slot_log_probs(runner, space, ids, number, numbers[number:])[:, kept[number], None]
        yield table


class FillSummary(NamedTuple):
    """What is known of all fills of a space.

    Attributes:
        log_partition: log Z of `exp(-E/τ)` over them, float64; minus infinity where all are forbidden.
        choices: (k, m) the likeliest fills, best first.
        energies: (k,) theirs in nats, float64.
        marginals: of each group of slots the probabilities of its candidates together, one axis a slot.
    """

    log_partition: Tensor
    choices: Tensor
    energies: Tensor
    marginals: list[Tensor]


def summarized(
    tables: Iterator[Tensor],
    space: FillSpace,
    temperature: float,
    top_k: int,
    groups: Sequence[Sequence[int]],
    further: Callable[[Tensor], Tensor] | None = None,
) -> FillSummary:
    """Reduces tables of energies, one after the other, to log Z, the likeliest fills and marginals.

    Args:
        tables: of all fills of the space.
        groups: the slots whose candidates' marginal probabilities are wanted together.
        further: ids (n, T) to energies (n,) that are added, infinite where a fill is forbidden.

    Example:
        >>> words = torch.tensor([[7], [8]])
        >>> space = FillSpace(torch.tensor([0, 0]), (Slot(torch.tensor([0]), words), Slot(torch.tensor([1]), words)))
        >>> energies = torch.tensor([[0.0, 1.0], [2.0, 3.0]])  # of 7 7, 7 8, 8 7, 8 8
        >>> found = summarized(iter([energies]), space, temperature=1.0, top_k=2, groups=[[0], [1]])
        >>> space.filled(found.choices).tolist(), found.energies.tolist()
        ([[7, 7], [7, 8]], [0.0, 1.0])
        >>> [[round(share, 3) for share in marginal.tolist()] for marginal in found.marginals]
        [[0.881, 0.119], [0.731, 0.269]]
    """
    device, sizes = space.ids.device, space.sizes
    rest = math.prod(sizes[1:])
    scale = torch.tensor(-torch.inf, dtype=torch.float64, device=device)
    masses = [torch.zeros([sizes[slot] for slot in own], dtype=torch.float64, device=device) for own in groups]
    total = torch.zeros((), dtype=torch.float64, device=device)
    best = torch.empty(0, dtype=torch.float64, device=device)
    where = torch.empty(0, dtype=torch.long, device=device)
    first = 0
    for table in tables:
        for chunk in table.split(max(1, _FILLS_AT_ONCE // rest)):
            energies = chunk.double()
            if further is not None:
                energies = energies + further_of_fills(further, space, first * rest, energies.numel()).view_as(energies)
            weights = -energies / temperature
            top = weights.flatten().topk(min(top_k, weights.numel()))
            best, kept = torch.cat([best, top.values]).topk(min(top_k, len(best) + len(top.values)))
            where = torch.cat([where, top.indices + first * rest])[kept]
            if best[0] > -torch.inf:
                factor = (scale - best[0]).exp()
                scale = best[0].clone()
                weights = (weights - scale).exp_()
                total = total * factor + weights.sum()
                for own, mass in zip(groups, masses, strict=True):
                    mass *= factor
                    here = mass.narrow(own.index(0), first, len(chunk)) if 0 in own else mass
                    here += _summed(weights, own)
            first += len(chunk)
        del table, chunk, energies, weights  # before the next table is made
    kept = best > -torch.inf
    marginals = [mass / total if kept.any() else mass for mass in masses]
    return FillSummary(total.log() + scale, _choices(where[kept], sizes), -best[kept] * temperature, marginals)


def _summed(weights: Tensor, own: Sequence[int]) -> Tensor:
    """Sums over all axes but `own`, which are in the order given."""
    others = [axis for axis in range(weights.dim()) if axis not in own]
    left = weights.sum(others) if others else weights
    return left.permute([sorted(own).index(axis) for axis in own])


def further_of_fills(further: Callable[[Tensor], Tensor], space: FillSpace, start: int, count: int) -> Tensor:
    """What a function of ids (n, T) says of some fills (count,), counted with the last slot running fastest."""
    fills = torch.arange(start, start + count, device=space.ids.device)
    return torch.cat([further(space.filled(_choices(part, space.sizes))) for part in fills.split(_CONTEXTS_AT_ONCE)])


def fill_energies(runner: Runner, space: FillSpace, ids: Tensor, energy: str) -> Tensor:
    """Energies (N,) in nats, float64, of fills `ids` (N, T): a masked row for each position of each."""
    positions = torch.cat([slot.positions for slot in space.slots])
    source = torch.arange(len(ids), device=ids.device).repeat_interleave(len(positions))
    terms = energy_terms(runner, space.sequences(ids), source, positions.repeat(len(ids)), energy)
    return terms.double().view(len(ids), -1).sum(1)
