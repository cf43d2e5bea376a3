"""Scores of substitutions in a reference sequence, by the schemes of the literature on variant effects.

A score is the sum of energy terms of the reference's tokens less those of the mutant's, in nats: with the local energy
a log ratio of probabilities, above 0 where the model prefers the mutant. Schemes differ in which terms these are and in
what else the model sees: each is a table of readings, of one token at one position of one masked row. A row that
several readings need runs once, whichever variants they are of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_ebm.scoring.energies import token_scores
from hf_ebm.scoring.joint_fills import FillSpace, Slot, joint_tables
from hf_ebm.scoring.rows import Context, MaskedRows, Runner, Sequences

# What one variant puts in the reference: (column, token), ascending columns.
Substitutions = tuple[tuple[int, int], ...]
# Rows that are laid out at a time.
_ROWS_AT_ONCE = 2**14


class Reading(NamedTuple):
    """An energy term of a scheme.

    Attributes:
        put: what is put in the reference.
        masked: columns that are masked then.
        column: where logits are read.
        token: whose energy term it is.
        sign: with which it counts.
    """

    put: Substitutions
    masked: tuple[int, ...]
    column: int
    token: int
    sign: int


class Scheme(NamedTuple):
    """A way to score substitutions.

    Attributes:
        readings: of one variant, given the reference's tokens; `None` for what isn't a sum of single readings.
        about: what it is, for help texts.
        rows: how many masked rows it takes, for help texts.
    """

    readings: Callable[[Substitutions, Sequence[int]], Iterator[Reading]] | None
    about: str
    rows: str


def _both(put: Substitutions, masked: tuple[int, ...], column: int, token: int, wild: int) -> Iterator[Reading]:
    """The reference's token and the mutant's at one position of one row."""
    yield Reading(put, masked, column, wild, 1)
    yield Reading(put, masked, column, token, -1)


def _masked_marginals(own: Substitutions, reference: Sequence[int]) -> Iterator[Reading]:
    for column, token in own:
        yield from _both((), (column,), column, token, reference[column])


def _masked_marginals_together(own: Substitutions, reference: Sequence[int]) -> Iterator[Reading]:
    columns = tuple(column for column, _ in own)
    for column, token in own:
        yield from _both((), columns, column, token, reference[column])


def _wild_type_marginals(own: Substitutions, reference: Sequence[int]) -> Iterator[Reading]:
    for column, token in own:
        yield from _both((), (), column, token, reference[column])


def _mutant_marginals(own: Substitutions, reference: Sequence[int]) -> Iterator[Reading]:
    for column, token in own:
        yield from _both(own, (), column, token, reference[column])


def _joint(own: Substitutions, reference: Sequence[int]) -> Iterator[Reading]:
    for column, token in own:
        yield Reading((), (column,), column, reference[column], 1)
        yield Reading(tuple(pair for pair in own if pair[0] != column), (column,), column, token, -1)


# Every scheme there is, the default first. An entry is all that a new one needs.
SCHEMES: dict[str, Scheme] = {
    "masked_marginals": Scheme(
        _masked_marginals, "each mutated site masked alone in the reference (Meier et al. 2021)", "one a mutated site"
    ),
    "masked_marginals_together": Scheme(
        _masked_marginals_together, "all mutated sites of a variant masked together", "one a set of sites"
    ),
    "wild_type_marginals": Scheme(_wild_type_marginals, "nothing masked, the reference read as it is", "one"),
    "mutant_marginals": Scheme(_mutant_marginals, "nothing masked, the mutant read as it is", "one a variant"),
    "joint": Scheme(
        _joint,
        "log ratio of mutant and reference in the joint distribution `exp(-E)` of the mutated sites given the others",
        "one a site, and one for each of a variant's sites",
    ),
    "joint_log_prob": Scheme(
        None,
        "log probability of the mutated sites in that joint distribution, normalized over all letters there",
        "m K^(m-1) a set of m sites with K letters",
    ),
    "sampled_joint_log_prob": Scheme(
        None,
        "the same with a standard error, its normalizer estimated from draws of the sites, one filled after the other",
        "at most 2 m a draw for a set of m sites, and m a variant",
    ),
    "pseudo_likelihood_ratio": Scheme(
        None, "energy of the reference minus energy of the mutant, all positions scored", "one a position of a variant"
    ),
}


def substitution_scores(
    runner: Runner,
    reference: Tensor,
    variants: Sequence[Substitutions],
    scheme: str,
    energy: str,
    context: Context | None = None,
) -> Tensor:
    """Scores (N,) of variants in nats, float64. Each masked row that is needed runs once.

    Args:
        reference: (T,) token ids, special tokens included.
        variants: what each puts in the reference; a variant of none scores 0.
        scheme: one of `SCHEMES` that has readings.
        context: what the model reads beside the tokens, of one sequence.

    Raises:
        BadLogitsError: naming a variant that needs the row.
    """
    readings_of, own = SCHEMES[scheme].readings, reference.tolist()
    if readings_of is None:
        raise ValueError(f"scheme: {scheme!r} is no sum of single readings")
    readings = [(number, reading) for number, put in enumerate(variants) for reading in readings_of(put, own)]
    totals = torch.zeros(len(variants), dtype=torch.float64)
    if not readings:
        return totals
    tokens = _numbered(reading.token for _, reading in readings)
    rows: dict[tuple[Substitutions, tuple[int, ...]], int] = {}
    users: list[int] = []  # of each row, a variant that needs it
    columns: list[dict[int, int]] = []  # of each row, the columns that are read, in order
    where = []
    for number, reading in readings:
        row = rows.setdefault((reading.put, reading.masked), len(rows))
        if row == len(columns):
            columns.append({})
            users.append(number)
        place = columns[row].setdefault(reading.column, len(columns[row]))
        where.append((row, place, tokens[reading.token]))
    values = torch.cat(
        [
            _terms(runner, reference, part, reads, list(tokens), energy, context, torch.tensor(of))
            for part, reads, of in _parts(list(rows), columns, users)
        ]
    )
    at = torch.tensor(where).unbind(1)
    signs = torch.tensor([reading.sign for _, reading in readings])
    return totals.index_add_(0, torch.tensor([number for number, _ in readings]), signs * values[at])


def _numbered(values: Iterable[int]) -> dict[int, int]:
    return {value: number for number, value in enumerate(dict.fromkeys(values))}


def _parts(rows: list, columns: list[dict[int, int]], users: list[int]) -> Iterator[tuple[list, list[list[int]], list]]:
    """Some rows at a time, with their columns made equally many by repeats."""
    width = max(map(len, columns))
    for first in range(0, len(rows), _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        yield rows[part], [_widened(own, width) for own in columns[part]], users[part]


def _widened(columns: Iterable[int], width: int) -> list[int]:
    own = list(columns)
    return own + own[-1:] * (width - len(own))


def _terms(
    runner: Runner,
    reference: Tensor,
    rows: list[tuple[Substitutions, tuple[int, ...]]],
    reads: list[list[int]],
    tokens: list[int],
    energy: str,
    context: Context | None,
    users: Tensor,
) -> Tensor:
    """Energy terms (R, P, K) of tokens at the columns that are read, float64 on the CPU."""
    device = reference.device
    ids = reference.repeat(len(rows), 1)
    put = [(row, column, token) for row, (own, _) in enumerate(rows) for column, token in own]
    if put:
        row, column, token = torch.tensor(put, device=device).unbind(1)
        ids[row, column] = token
    width = max(len(masked) for _, masked in rows)
    hidden = torch.tensor([_widened(masked, width) for _, masked in rows], dtype=torch.long, device=device)
    masked_rows = MaskedRows(torch.arange(len(rows), device=device), hidden, torch.tensor(reads, device=device))
    ends = torch.zeros(len(rows), dtype=torch.long), torch.full((len(rows),), len(reference))
    sequences = Sequences(ids, *ends, context and context.expanded(len(rows)), users.to(device))
    wanted = torch.tensor(tokens, device=device)
    return runner(sequences, masked_rows, lambda logits, n: -token_scores(logits, wanted, energy)).cpu().double()


def joint_space(columns: Sequence[int], reference: Tensor, letters: Tensor, context: Context | None) -> FillSpace:
    """All ways to put `letters` (K,) at some columns of the reference (T,).

    Example:
        >>> joint_space([1, 3], torch.tensor([1, 6, 7, 5, 2]), torch.tensor([5, 6, 7]), None).sizes
        [3, 3]
    """
    slots = (Slot(torch.tensor([column], device=reference.device), letters[:, None]) for column in columns)
    return FillSpace(reference, tuple(slots), context)


def joint_log_probs(runner: Runner, space: FillSpace, choices: Tensor, energy: str) -> Tensor:
    """Log probabilities (N,) of fills under `exp(-E)`, normalized over all fills of the space; float64.

    Args:
        choices: (N, m) which candidate each has at each site.
    """
    log_partition = torch.tensor(-torch.inf, dtype=torch.float64)
    energies = torch.empty(len(choices), dtype=torch.float64)
    first = 0
    for table in joint_tables(runner, space, energy, dtype=torch.float64):
        table = table.cpu()
        log_partition = torch.logaddexp(log_partition, (-table).flatten().logsumexp(0))
        here = (choices[:, 0] >= first) & (choices[:, 0] < first + len(table))
        at = choices[here]
        energies[here] = table[(at[:, 0] - first, *at[:, 1:].unbind(1))]
        first += len(table)
    return -energies - log_partition
