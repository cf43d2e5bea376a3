"""Replica exchange (Geyer 1991): replicas of a chain at several temperatures, which neighbours swap.

Each replica is a row of its own: row `r C + c` is replica r of chain c. Rows swap temperatures and not states, so that
what is known of a row's state stays there. Swaps are deterministic even-odd ones, and a ladder of temperatures can be
fitted to how often they are rejected (Syed et al. 2021). All of that depends on nothing but the chain.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from hf_ebm.sampling.kernels import extra_difference
from hf_ebm.sampling.target import ChainState

# How hot a fitted ladder is at most, where it starts, and how often its swaps are rejected at most.
_HOTTEST, _REJECTION = 2.0, 0.5
LEAST_TO_FIT = 30  # epochs: rounds of 2, 4, 8 and 16


class Replicas(NamedTuple):
    """The R replicas of C chains: their temperatures, and what they did.

    Attributes:
        ladder: (C, R) temperatures from the coldest, 1, up, as multiples of the chain's; float64.
        level: (C, R) the place in the ladder that each replica has.
        energy: (C, R, epochs) energy in nats of each place in the ladder after each epoch, float64.
        levels: (C, R, epochs) `level` after each epoch.
    """

    ladder: Tensor
    level: Tensor
    energy: Tensor
    levels: Tensor

    @classmethod
    def begin(cls, temperatures: int | list[float], chains: int) -> Self:
        """Replicas that have done nothing: with a ladder, or so many with one that is to be fitted."""
        if isinstance(temperatures, int):
            temperatures = np.geomspace(1.0, _HOTTEST, temperatures).tolist()
        ladder = torch.tensor(temperatures, dtype=torch.float64).repeat(chains, 1)
        level = torch.arange(ladder.shape[1]).repeat(chains, 1)
        return cls(ladder, level, ladder.new_empty(*ladder.shape, 0), level.new_empty(*level.shape, 0))

    def with_room(self, epochs: int) -> Self:
        """The replicas with room for so many epochs in all."""
        missing = (*self.level.shape, max(0, epochs - self.energy.shape[2]))
        energy, levels = self.energy.new_full(missing, torch.nan), self.levels.new_zeros(missing)
        return self._replace(energy=torch.cat([self.energy, energy], 2), levels=torch.cat([self.levels, levels], 2))

    def first(self, epochs: int) -> Self:
        """The replicas with what they did in the first `epochs` epochs."""
        return self._replace(energy=self.energy[..., :epochs], levels=self.levels[..., :epochs])

    @property
    def rows(self) -> Tensor:
        """(C, R) the row at each place in the ladder."""
        return self.level.argsort(1) * len(self.level) + torch.arange(len(self.level))[:, None]

    def temperatures(self, temperature: float) -> Tensor:
        """(R C,) temperature of each row, where the chains' is `temperature`."""
        return temperature * self.ladder.gather(1, self.level).T.flatten()

    def swapped(self, state: ChainState, temperature: float, uniforms: Tensor, epoch: int) -> Self:
        """Swaps of neighbours in the ladder: of (0, 1), (2, 3), … after an epoch of even number, else of (1, 2), …

        Args:
            state: of all rows.
            temperature: the chains'.
            uniforms: (C, R - 1) numbers in [0, 1), float64.
        """
        beta, places = 1 / (temperature * self.ladder), torch.arange(self.level.shape[1])
        own, extra = state.token_energies.sum(1)[self.rows], state.extra_energy[self.rows]
        swap = (uniforms.log() < swap_log_ratios(beta, own, extra)) & (places[:-1] % 2 == epoch % 2)
        up = torch.nn.functional.pad(swap.long(), (0, 1))
        moved = places + up - up.roll(1, 1)  # where what is at each place goes
        return self._replace(level=moved.gather(1, self.level))

    def after_epoch(self, state: ChainState, temperature: Tensor, epoch: int, fit_from: int, fit_to: int) -> Self:
        """Notes an epoch, and fits the ladder if it ends a round between the epochs `fit_from` and `fit_to`.

        Args:
            state: of all rows.
            temperature: (C, epochs or more) the chains'.
        """
        # Written where there is room but no epoch yet, so an interruption leaves it as it was.
        self.energy[..., epoch], self.levels[..., epoch] = state.energy[self.rows], self.level
        length = round_ended(epoch + 1 - fit_from) if epoch < fit_to else 0
        if not length:
            return self
        which = slice(epoch + 1 - length, epoch + 1)
        rejection = rejection_rates(self.ladder, temperature[:, which], self.energy[..., which])
        return self._replace(ladder=fitted_ladder(self.ladder, rejection))


def swap_log_ratios(beta: Tensor, energy: Tensor, extra: Tensor | float = 0.0) -> Tensor:
    """(C, R - 1) by which factor, as a logarithm, a swap of neighbours changes the product of `exp(-β_k E_k)`.

    It is `(β_k - β_k+1) (E_k - E_k+1)`; a swap is accepted with that probability. Between two states that violate a
    hard constraint the extra energies don't count.

    Args:
        beta: (C, R) inverse temperatures, in the order of the ladder.
        energy: (C, R) energies in nats of the states at these, in the same order.
        extra: (C, R) extra energies of these states, which may be infinite.

    Example:
        >>> swap_log_ratios(torch.tensor([[1.0, 0.5]]), torch.tensor([[4.0, 2.0]]))
        tensor([[1.]])
    """
    extra = torch.as_tensor(extra).expand_as(energy)
    return (beta[:, :-1] - beta[:, 1:]) * (
        energy[:, :-1] - energy[:, 1:] + extra_difference(extra[:, 1:], extra[:, :-1])
    )


def round_ended(epochs: int) -> int:
    """How many epochs the round has that ends with epoch `epochs`, counted from 1; 0 if none does.

    Rounds of a fit double (Syed et al. 2021): 2, 4, 8, …

    Example:
        >>> [round_ended(epochs) for epochs in range(1, 15)]
        [0, 2, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 8]
    """
    return (epochs + 2) // 2 if epochs > 0 and (epochs + 2).bit_count() == 1 else 0


def rejection_rates(ladder: Tensor, temperature: Tensor, energy: Tensor) -> Tensor:
    """(C, R - 1) how often neighbours' swaps are rejected in expectation, from the energies of some epochs.

    Args:
        ladder: (C, R) temperatures as multiples of the chain's.
        temperature: (C, n) the chain's.
        energy: (C, R, n) energies at each place in the ladder.

    Example:
        >>> rejection_rates(torch.tensor([[1.0, 2.0]]), torch.ones(1, 2), torch.tensor([[[1.0, 5.0], [5.0, 5.0]]]))
        tensor([[0.4323]])
    """
    beta = 1 / (ladder[..., None] * temperature[:, None])
    ratios = swap_log_ratios(beta, torch.zeros_like(energy), energy)
    return 1 - ratios.clamp(max=0).exp().mean(2)


def fitted_ladder(ladder: Tensor, rejection: Tensor) -> Tensor:
    """(C, R) the ladder whose swaps are all rejected alike (Syed et al. 2021, alg. 2), half of the time at most.

    The communication barrier between the coldest replica and an inverse temperature is the sum of the rejection rates
    up to there, linear between those of the ladder, and beyond as before. The new ones lie at equal parts of it. The
    hottest is 2, at which proposals from the model's own conditionals still fit, or where the barrier is (R - 1) / 2 if
    that comes before: R replicas are best for that much.

    Args:
        ladder: (C, R) temperatures as multiples of the chain's.
        rejection: (C, R - 1) how often swaps of neighbours were rejected.

    Example:
        >>> fitted_ladder(torch.tensor([[1.0, 1.25, 2.0]] * 2), torch.tensor([[0.5, 0.75], [0.1, 0.3]]))
        tensor([[1.0000, 1.2500, 1.6667],
                [1.0000, 1.4286, 2.0000]])
    """
    fitted = []
    for temperatures, rates in zip(ladder.double().numpy(), rejection.double().clamp(min=1e-3).numpy(), strict=True):
        beta, barrier = 1 / temperatures, np.append(0.0, rates.cumsum())
        beyond = rates[-1] / (beta[-2] - beta[-1]) * (beta[-1] - 1 / _HOTTEST)
        beta, barrier = np.append(beta, 1 / _HOTTEST), np.append(barrier, barrier[-1] + beyond)
        parts = np.linspace(0.0, min(_REJECTION * len(rates), barrier[-1]), len(temperatures))
        fitted.append(1 / np.interp(parts, barrier, beta))
    return torch.from_numpy(np.stack(fitted)).to(ladder.dtype)


class ReplicaReport(NamedTuple):
    """What the R replicas of C chains did; places in the ladder are numbered from the coldest, 0.

    Attributes:
        temperatures: (C, R) the ladder, as multiples of the chains' temperature; float64.
        swap_rates: (C, R - 1) share of the swaps between neighbours that were accepted after burn-in; float64, NaN
            where none was tried.
        round_trips: (C,) how often a replica went from the coldest temperature to the hottest and back after burn-in.
        energies: (C, R, epochs) energy in nats at each temperature after each epoch, float64.
        levels: (C, R, epochs) place in the ladder of each replica after each epoch.
    """

    temperatures: Tensor
    swap_rates: Tensor
    round_trips: Tensor
    energies: Tensor
    levels: Tensor

    @classmethod
    def of(cls, replicas: Replicas, first: int) -> Self:
        """What replicas without room did, swaps and round trips from epoch `first` on."""
        levels = replicas.levels
        rates = swap_rates(levels, first)
        return cls(replicas.ladder, rates, round_trips(levels[..., first:]), replicas.energy, levels)


def swap_rates(levels: Tensor, first: int) -> Tensor:
    """(C, R - 1) share of the swaps tried from epoch `first` on that were accepted, by pair of neighbours.

    Args:
        levels: (C, R, epochs) place in the ladder of each replica after each epoch.

    Example:
        >>> swap_rates(torch.tensor([[[1, 1, 0], [0, 0, 1]]]), 0)  # swaps after epochs 0 and 2
        tensor([[1.]], dtype=torch.float64)
    """
    replicas, epochs = levels.shape[1:]
    at = torch.cat([torch.arange(replicas).expand(len(levels), -1)[..., None], levels.argsort(1)], 2)
    swapped = (at[:, 1:, :-1] == at[:, :-1, 1:])[..., first:]  # who is at a place was above it
    tried = (torch.arange(first, epochs) - torch.arange(replicas - 1)[:, None]) % 2 == 0
    return (swapped & tried).sum(2).double() / tried.sum(1)


def round_trips(levels: Tensor) -> Tensor:
    """(C,) how often replicas went from the coldest temperature to the hottest and back.

    Args:
        levels: (C, R, epochs) place in the ladder of each replica after each epoch.

    Example:
        >>> round_trips(torch.tensor([[[0, 1, 0, 0, 1, 0], [1, 0, 1, 1, 0, 1]]]))
        tensor([3])
    """
    been_cold = torch.zeros(levels.shape[:2], dtype=torch.bool)
    been_hot, trips = been_cold, torch.zeros(len(levels), dtype=torch.long)
    for now in levels.unbind(2):
        cold, hot = now == 0, now == levels.shape[1] - 1
        trips += (cold & been_hot).sum(1)
        been_cold, been_hot = been_cold | cold, (been_hot | (hot & been_cold)) & ~cold
    return trips
