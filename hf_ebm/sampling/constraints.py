"""What sequences a chain may hold: the target is `exp(-E/τ)` restricted to those, everything else has probability 0.

Constraints are pure functions of the ids of all chains. A proposal that breaks one is the state itself
(`BlockProposal`), so every kernel keeps them without knowing of any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from hf_ebm.scoring.rows import MaskedRows, to_device

# Ids (C, T) of all chains to whether each chain may be there (C,) bool, on the CPU.
Constraint = Callable[[Tensor], Tensor]


def hamming_distances(ids: Tensor, others: Tensor) -> Tensor:
    """(n, m) at how many positions each of `ids` (n, T) differs from each of `others` (m, T).

    Example:
        >>> hamming_distances(torch.tensor([[5, 6, 7]]), torch.tensor([[5, 6, 7], [5, 7, 6]]))
        tensor([[0, 2]])
    """
    return torch.cdist(ids.double(), others.double(), p=0).long()


def at_most_changes(start: Tensor, most: int) -> Constraint:
    """At most so many positions of a chain differ from where it starts, `start` (C, T).

    Example:
        >>> near = at_most_changes(torch.tensor([[5, 6, 7]] * 2), 1)
        >>> near(torch.tensor([[5, 8, 7], [8, 8, 7]]))
        tensor([ True, False])
    """
    most = min(most, start.shape[1])  # a tensor holds no number of any size
    return lambda ids: (ids != start).sum(1) <= most


def at_least_away(avoid: Sequence[Sequence[int]], least: int, start: Tensor, stop: Tensor) -> Constraint | None:
    """A chain differs from each of some sequences at `least` positions or more; `None` where none has a chain's length.

    Args:
        avoid: sequences; those of another number of tokens are as far away as can be.
        start, stop: (C,) bounds of the chains' sequences.

    Example:
        >>> away = at_least_away([[5, 6], [5, 6, 7]], 2, torch.zeros(2).long(), torch.tensor([3, 3]))
        >>> away(torch.tensor([[5, 6, 8], [8, 8, 7]]))
        tensor([False,  True])
    """
    lengths, groups = stop - start, []
    for length in lengths.unique().tolist():
        others = [row for row in avoid if len(row) == length]
        if others:
            chains = (lengths == length).nonzero()[:, 0]
            groups.append((chains, start[chains, None] + torch.arange(length), torch.tensor(others)))

    def away(ids: Tensor) -> Tensor:
        allowed = torch.ones(len(ids), dtype=torch.bool)
        for chains, columns, others in groups:
            allowed[chains] = hamming_distances(ids[chains].gather(1, columns), others).amin(1) >= min(
                least, ids.shape[1] + 1
            )
        return allowed

    return away if groups else None


class PositionTokens(NamedTuple):
    """The tokens that each position may hold, where these are not the same for all.

    Attributes:
        number: (C, T) which of the sets is a position's, on the CPU.
        sets: (S, V) bool, on the CPU.
        others: (S, V) bool, the tokens that are in none, where the model is.
    """

    number: Tensor
    sets: Tensor
    others: Tensor

    @classmethod
    def narrowed(cls, support: Tensor, allowed: Mapping[int, Sequence[int]], start: Tensor, columns: int) -> Self:
        """Those of `support` (V,), but at some positions, counted from `start` (C,), of sets of their own.

        Example:
            >>> tokens = PositionTokens.narrowed(torch.tensor([False, True, True]), {1: [2]}, torch.tensor([0, 1]), 3)
            >>> tokens.number
            tensor([[0, 1, 0],
                    [0, 0, 1]])
            >>> tokens.sets.int()
            tensor([[0, 1, 1],
                    [0, 0, 1]], dtype=torch.int32)
        """
        number = torch.zeros(len(start), columns, dtype=torch.long)
        sets = support.cpu().repeat(1 + len(allowed), 1)
        for place, (position, tokens) in enumerate(allowed.items(), 1):
            number[torch.arange(len(start)), start + position] = place
            sets[place] &= torch.zeros_like(sets[0]).index_fill(0, torch.tensor(tokens), True)
        return cls(number, sets, (~sets).to(support.device))

    def hold(self, ids: Tensor) -> Tensor:
        """(C, T) bool: whether each token of `ids` (C, T) may stand where it does."""
        return self.sets[self.number, ids]

    def forbidden(self, rows: MaskedRows, device: torch.device) -> Tensor:
        """(n P, V) bool, on a device: the tokens that the positions that rows (n) read may not hold."""
        number = self.number[rows.source[:, None], rows.read].flatten()
        return self.others.to(device)[to_device(number, device)]
