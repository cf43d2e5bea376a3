"""Minimum Bayes risk: of a row's candidates the one that costs least on average against samples of the model.

Eikema and Aziz 2022 (sampling-based decoding): the samples are candidates and, all or some of them, references. Costs
are utilities with the other sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hf_ebm.objectives.costs import SequenceCost


class MBRChoice(NamedTuple):
    """Of each row which candidate was chosen, (…,), and the mean utility of all, (…, K), -inf where nothing counted."""

    chosen: torch.Tensor
    expected: torch.Tensor


def mbr_choice(utilities: torch.Tensor, counted: torch.Tensor) -> MBRChoice:
    """The candidate with the largest mean utility over the references that count for it; of equal ones the first.

    Args:
        utilities: of K candidates under N references, (…, K, N).
        counted: which references count for which candidate, of the same shape, bool.

    Example:
        >>> utilities = torch.tensor([[1.0, 0.2, 0.4], [0.2, 1.0, 0.6], [0.4, 0.6, 1.0]])
        >>> mbr_choice(utilities, ~torch.eye(3, dtype=torch.bool))
        MBRChoice(chosen=tensor(2), expected=tensor([0.3000, 0.4000, 0.5000]))
    """
    number = counted.sum(-1)
    expected = utilities.masked_fill(~counted, 0).sum(-1) / number
    expected = expected.masked_fill(number == 0, -torch.inf)
    return MBRChoice(expected.argmax(-1), expected)


def pairwise_costs(
    cost: SequenceCost, candidates: Sequence[Sequence[str] | Sequence[list[int]]], num_references: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Costs of K candidates of each row against the first N of them, (B, K, N) float32, and which count.

    The n-th reference doesn't count for the n-th candidate, which was drawn with it: what is left estimates the
    expected cost without bias, where samples are independent. An empty reference counts for none. Equal pairs are
    computed once.

    Args:
        candidates: K texts or lists of ids for each of B rows, as the cost reads.

    Example:
        >>> from hf_ebm.objectives.sequence_costs import COSTS
        >>> costs, counted = pairwise_costs(COSTS["edit_distance"], [[[5, 6], [5, 7]]], num_references=2)
        >>> costs, counted
        (tensor([[[0.0000, 0.5000],
                 [0.5000, 0.0000]]]), tensor([[[False,  True],
                 [ True, False]]]))
    """
    found: dict[tuple, int] = {}
    places = [
        [[found.setdefault(_key(one, other), len(found)) if len(other) else -1 for other in row[:num_references]]
         for one in row] for row in candidates
    ]  # fmt: skip
    pairs = [(one if isinstance(one, str) else list(one), other if isinstance(other, str) else list(other))
             for one, other in found]  # fmt: skip
    values = cost([one for one, _ in pairs], [other for _, other in pairs]) if pairs else torch.zeros(0)
    index = torch.tensor(places)
    costs = torch.cat([values.cpu(), torch.zeros(1)])[index]
    own = torch.eye(index.shape[1], num_references, dtype=torch.bool)
    return costs, (index >= 0) & ~own


def _key(one: str | list[int], other: str | list[int]) -> tuple:
    return tuple(text.strip() if isinstance(text, str) else tuple(text) for text in (one, other))
