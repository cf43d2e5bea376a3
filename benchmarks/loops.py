"""Baselines: Metropolis–Hastings on a masked language model as people write it, all chains in one batch.

Both are correct and sample the same law as `hf_ebm` with one position a step, random order, no warps. They apply the
head to every position, as a plain `model(input_ids).logits` does.
"""

from __future__ import annotations

import torch
from torch import Tensor


class PlainLoop:
    """2 L + 1 masked rows a step: proposes from one row, evaluates the energies of both states.

    Args:
        mlm: masked language model.
        columns: the free positions; a number is that many between one special token on each side.
        support: (V,) bool, tokens that may be proposed.
    """

    carries_energy = False

    def __init__(self, mlm, mask_token_id: int, columns: int | list[int], support: Tensor, seed: int = 0):
        self.mlm, self.mask_token_id, self.support = mlm, mask_token_id, support
        self.columns = torch.tensor(range(1, columns + 1) if isinstance(columns, int) else columns)
        self.length = len(self.columns)
        self.generator = torch.Generator().manual_seed(seed)
        self.rows = 0

    def logits(self, ids: Tensor) -> Tensor:
        self.rows += len(ids)
        return self.mlm(input_ids=ids).logits

    def energy(self, ids: Tensor) -> Tensor:
        """(C,) local energies, one masked row per position."""
        copies = ids.repeat_interleave(self.length, 0)
        position = self.columns.repeat(len(ids))
        each = torch.arange(len(copies))
        tokens = copies[each, position]
        copies[each, position] = self.mask_token_id
        scores = self.logits(copies)[each, position].log_softmax(-1)
        return -scores[each, tokens].double().view(len(ids), self.length).sum(1)

    @torch.no_grad()
    def run(self, ids: Tensor, row_budget: int) -> tuple[Tensor, Tensor, int]:
        """Runs epochs until the budget is spent: `(energies (C, epochs), states (C, epochs, T), tokens changed)`."""
        ids = ids.clone()
        each = torch.arange(len(ids))
        energy = self.energy(ids)
        trace, states, changed = [], [], 0
        self.rows = 0
        while self.rows < row_budget:
            order = self.columns[torch.rand(len(ids), self.length, generator=self.generator).argsort(1)]
            for step in range(self.length):
                position = order[:, step]
                masked = ids.clone()
                masked[each, position] = self.mask_token_id
                logits = self.logits(masked)[each, position].masked_fill(~self.support, -torch.inf)
                log_q = logits.log_softmax(-1)
                token = torch.multinomial(log_q.exp(), 1, generator=self.generator)[:, 0]
                proposed = ids.clone()
                proposed[each, position] = token
                if not self.carries_energy:
                    energy = self.energy(ids)
                new_energy = self.energy(proposed)
                back, forth = log_q[each, ids[each, position]], log_q[each, token]
                ratio = energy - new_energy + back.double() - forth.double()
                accept = torch.rand(len(ids), generator=self.generator, dtype=torch.float64).log() < ratio
                changed += int((accept & (token != ids[each, position])).sum())
                ids = torch.where(accept[:, None], proposed, ids)
                energy = torch.where(accept, new_energy, energy)
            trace.append(energy)
            states.append(ids)
        return torch.stack(trace, 1), torch.stack(states, 1), changed


class CarefulLoop(PlainLoop):
    """L + 1 masked rows a step: the energy of the current state is carried."""

    carries_energy = True
