"""Costs of an output that are sums over its positions, as direct loss and margins need them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hf_ebm.checks import as_list, is_dense, shown
from hf_ebm.plain_values import as_number

# labels (B, T), vocabulary size V -> the cost of every token (B, T, V), or of any token but the label (B, T)
DecomposableCost = Callable[[torch.Tensor, int], torch.Tensor]


class HammingCost:
    """1 for every token that isn't the label, times the weight of the token that was predicted.

    A weight of 2 for the label `O` punishes missed entities twice (Goyal et al. 2018, section 5.1).

    Args:
        token_weights: weight of each *predicted* token, V non-negative numbers; default 1.

    Raises:
        ValueError: for a weight that is negative or no number; when called, for another number of weights than tokens.
    """

    def __init__(self, token_weights: Sequence[float] | None = None):
        self.token_weights = None
        if token_weights is not None:
            weights = as_list("token_weights", token_weights, "numbers")
            self.token_weights = [as_number("token_weights", weight, least=0) for weight in weights]

    def __call__(self, labels: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """(B, T) for equal weights (1 everywhere), (B, T, V) otherwise."""
        if self.token_weights is None:
            return torch.ones_like(labels, dtype=torch.float32)
        if len(self.token_weights) != vocab_size:
            raise ValueError(
                f"token_weights must have one weight for each of {vocab_size} tokens, got {len(self.token_weights)}"
            )
        weights = torch.tensor(self.token_weights, device=labels.device).expand(*labels.shape, -1)
        return weights.scatter(2, labels.clamp_min(0)[..., None], 0.0)


def cost_of_tokens(costs: torch.Tensor, labels: torch.Tensor, step: int, vocab_size: int) -> torch.Tensor:
    """d_t of one step, (B, V), from costs (B, T, V) or (B, T), see `DecomposableCost`."""
    if costs.dim() == 3:
        return costs[:, step]
    of_step = costs[:, step, None].expand(-1, vocab_size)
    return of_step.scatter(1, labels[:, step, None].clamp_min(0), 0.0)


def check_costs(costs: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The costs a `DecomposableCost` returned, without a gradient.

    Raises:
        ValueError: for another shape than (B, T) or (B, T, V), or a value that isn't finite.
    """
    shapes = (tuple(labels.shape), (*labels.shape, vocab_size))
    if not is_dense(costs) or not costs.is_floating_point() or tuple(costs.shape) not in shapes:
        raise ValueError(f"cost must return a tensor of floats of shape {shapes[0]} or {shapes[1]}, got {shown(costs)}")
    if not bool(torch.isfinite(costs).all()):
        raise ValueError("cost must return finite numbers, got inf or nan")
    return costs.detach()
