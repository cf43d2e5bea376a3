"""Minimal pairs, as of BLiMP (Warstadt et al. 2020): which of two sentences a model prefers, and how often by group."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hf_ebm.checks import as_number, as_whole
from hf_ebm.random_state import generator_of

if TYPE_CHECKING:
    from hf_ebm.models.energy.scoring_energy import ScoreOutput


class Accuracy(NamedTuple):
    """A share of pairs with the interval that bootstrapped shares lie in.

    Attributes:
        accuracy, low, high: from 0 to 1.
        pairs: how many there are.
    """

    accuracy: float
    low: float
    high: float
    pairs: int


def accuracy_of(
    wins: Sequence[float], *, level: float = 0.95, num_resamples: int = 2000, seed: int = 0, name: str = ""
) -> Accuracy:
    """The mean of wins with its bootstrap interval, of percentiles (Efron 1979); it has no width where all are alike.

    Args:
        wins: of each pair 1, 0, or 0.5 for a tie.
        level: the share of bootstrapped means that lie in the interval.
        name: of the group, whose random numbers don't depend on what other groups there are.

    Example:
        >>> accuracy_of([1, 1, 0, 1, 0.5, 1, 1, 1, 0, 1])
        Accuracy(accuracy=0.75, low=0.5, high=1.0, pairs=10)
    """
    level = as_number("level", level, least=0, most=1)
    count = as_whole("num_resamples", num_resamples, 1)
    if not wins:
        raise ValueError("wins must hold a pair, got none")
    values, frequency = np.unique(np.asarray(wins, dtype=np.float64), return_counts=True)
    # A resample has of each value a number that is multinomial.
    generator = generator_of(as_whole("seed", seed, 0), zlib.crc32(name.encode()))
    means = generator.multinomial(len(wins), frequency / len(wins), size=count) @ values / len(wins)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Accuracy(float(np.mean(wins)), float(low), float(high), len(wins))


def accuracies_of(wins: Sequence[float], groups: Sequence[str], **how: Any) -> dict[str, Accuracy]:
    """`accuracy_of` of each group, in the order in which they come; further arguments as there.

    Example:
        >>> found = accuracies_of([1, 0, 1], ["anaphora", "anaphora", "islands"])
        >>> {name: own.accuracy for name, own in found.items()}
        {'anaphora': 0.5, 'islands': 1.0}
    """
    by_group: dict[str, list[float]] = {}
    for win, group in zip(wins, groups, strict=True):
        by_group.setdefault(group, []).append(win)
    return {group: accuracy_of(own, name=group, **how) for group, own in by_group.items()}


def differing(good: Sequence[str], bad: Sequence[str]) -> tuple[list[int], list[int]]:
    """Where two lists of tokens differ: positions in each that the other has no counterpart of.

    Example:
        >>> differing(["the", "cats", "run"], ["the", "cat", "s", "run"])
        ([1], [1, 2])
    """
    spans = [span for span in SequenceMatcher(None, good, bad, autojunk=False).get_opcodes() if span[0] != "equal"]
    own = [place for _, start, stop, _, _ in spans for place in range(start, stop)]
    return own, [place for _, _, _, start, stop in spans for place in range(start, stop)]


def compared_pairs(good: ScoreOutput, bad: ScoreOutput) -> list[dict[str, Any]]:
    """A record for each pair: energies in nats, who wins, and of each its tokens that the other hasn't, with terms.

    `win` is 1 where the good sentence has the lower energy and 0.5 where both have the same tokens.
    """
    records = []
    for row, tokens in enumerate(zip(good.tokens, bad.tokens, strict=True)):
        energies = float(good.energy[row]), float(bad.energy[row])
        # The same tokens in another batch have the same energy only up to rounding, which must not decide who wins.
        tie = tokens[0] == tokens[1] or energies[0] == energies[1]
        record: dict[str, Any] = {"energy_good": energies[0], "energy_bad": energies[1]}
        record["win"] = 0.5 if tie else float(energies[0] < energies[1])
        terms = good.token_energies[row], bad.token_energies[row]
        for name, own, values, places in zip(("good", "bad"), tokens, terms, differing(*tokens), strict=True):
            record[f"tokens_{name}"] = [own[place] for place in places]
            record[f"token_energies_{name}"] = [values[place] for place in places]
        records.append(record)
    return records
