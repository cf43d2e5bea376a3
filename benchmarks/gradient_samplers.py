"""Samplers of the literature that read the energy's gradient: proposals, with the Metropolis–Hastings step of both.

A state is tokens (C, L), numbers below W. The gradient (C, L, W) is of the energy, by their one-hot vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# Tokens (C, L) to energies (C,) and their gradients (C, L, W), float64.
EnergyAndGradient = Callable[[Tensor], tuple[Tensor, Tensor]]


class State(NamedTuple):
    """Tokens (C, L) with their energies (C,) and gradients (C, L, W)."""

    tokens: Tensor
    energy: Tensor
    gradient: Tensor


class GradientProposal(Protocol):
    """Where to go from a state, and how likely that was."""

    def draw(self, gradient: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor: ...

    def log_probability(self, gradient: Tensor, tokens: Tensor, proposed: Tensor) -> Tensor: ...


def promised_gain(gradient: Tensor, tokens: Tensor) -> Tensor:
    """How much less energy each token at each position would have, to first order: (C, L, W), 0 of the tokens there.

    Example:
        >>> promised_gain(torch.tensor([[[1.0, 3.0]]]), torch.tensor([[1]]))
        tensor([[[2., 0.]]])
    """
    return gradient.gather(-1, tokens[..., None]) - gradient


class GibbsWithGradients:
    """One token changes: position and token are drawn together, by half of what is promised (Grathwohl et al. 2021)."""

    def log_moves(self, gradient: Tensor, tokens: Tensor) -> Tensor:
        """(C, L W) log probabilities of a position with its new token."""
        gain = promised_gain(gradient, tokens) / 2
        return gain.scatter(-1, tokens[..., None], -torch.inf).flatten(1).log_softmax(-1)

    def draw(self, gradient: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor:
        """(C, L) tokens, of which one differs."""
        move = torch.multinomial(self.log_moves(gradient, tokens).exp(), 1, generator=generator)
        size = gradient.shape[-1]
        return tokens.scatter(1, move // size, move % size)

    def log_probability(self, gradient: Tensor, tokens: Tensor, proposed: Tensor) -> Tensor:
        """(C,) of going from one to the other, which differ at one position."""
        position = (tokens != proposed).long().argmax(1, keepdim=True)
        move = position * gradient.shape[-1] + proposed.gather(1, position)
        return self.log_moves(gradient, tokens).gather(1, move)[:, 0]


class DiscreteLangevin:
    """All positions are drawn at once, each by itself (DMALA, Zhang et al. 2022).

    A token's logit is half of the gain it promises less `|e_v - e_y|² / 2 α` for its one-hot vector, `1 / α` if it is
    another token.

    Args:
        step: α, the greater the more tokens change.
    """

    def __init__(self, step: float):
        self.step = step

    def log_tokens(self, gradient: Tensor, tokens: Tensor) -> Tensor:
        """(C, L, W) log probabilities of each position's token."""
        stays = torch.zeros_like(gradient).scatter(-1, tokens[..., None], 1 / self.step)
        return (promised_gain(gradient, tokens) / 2 + stays).log_softmax(-1)

    def draw(self, gradient: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor:
        """(C, L) tokens."""
        flat = self.log_tokens(gradient, tokens).exp().flatten(0, 1)
        return torch.multinomial(flat, 1, generator=generator).view_as(tokens)

    def log_probability(self, gradient: Tensor, tokens: Tensor, proposed: Tensor) -> Tensor:
        """(C,) of going from one to the other."""
        return self.log_tokens(gradient, tokens).gather(-1, proposed[..., None])[..., 0].sum(1)


def state_at(tokens: Tensor, evaluate: EnergyAndGradient) -> State:
    """The state of tokens (C, L)."""
    return State(tokens, *evaluate(tokens))


def step(
    state: State, evaluate: EnergyAndGradient, proposal: GradientProposal, generator: torch.Generator
) -> tuple[State, Tensor]:
    """One Metropolis–Hastings step of the law `exp(-E)`: the next state, and (C,) bool which chains accepted."""
    tokens = proposal.draw(state.gradient, state.tokens, generator)
    new = state_at(tokens, evaluate)
    ratio = state.energy - new.energy
    ratio += proposal.log_probability(new.gradient, tokens, state.tokens)
    ratio -= proposal.log_probability(state.gradient, state.tokens, tokens)
    accepted = torch.rand(len(tokens), generator=generator, dtype=torch.float64).log() < ratio
    taken = (torch.where(accepted.view(-1, *[1] * (a.dim() - 1)), b, a) for a, b in zip(state, new, strict=True))
    return State(*taken), accepted
