"""Expected costs of sequences under the model: minimum risk over a candidate set, and the policy gradient.

All take one log probability and one cost for each candidate of each row, (B, S), in nats.
"""

from __future__ import annotations

import torch


def minimum_risk(
    log_probs: torch.Tensor, costs: torch.Tensor, valid: torch.Tensor, sharpness: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Risk of each row, `Σ_y q(y) c(y)` with `q(y) ∝ p(y)^α` over the row's candidates.

    Shen et al. 2016; Welleck and Cho 2020, equation 6. The candidates of a row must differ.

    Args:
        log_probs: log p of each candidate, (B, S), with its gradient.
        costs: (B, S).
        valid: (B, S) bool, False where a row has fewer candidates; at least one a row.
        sharpness: α > 0.

    Returns:
        The risk, (B,) float32 or better, and q, (B, S), 0 where not valid.
    """
    scores = (sharpness * log_probs).masked_fill(~valid, -torch.inf)
    weights = torch.softmax(scores, -1)
    return (weights * costs.masked_fill(~valid, 0)).sum(-1), weights


def policy_gradient_loss(log_probs: torch.Tensor, costs: torch.Tensor, baseline: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient is the policy-gradient estimate `mean_s (c(y_s) - b) ∇ log p(y_s)` of each row, (B,).

    Welleck and Cho 2020, equations 5 and 8. Unbiased if the log probabilities are those of the distribution that was
    drawn from (a forced token has none) and the baseline doesn't depend on the samples.

    Args:
        log_probs: of samples, (B, S), with their gradient.
        costs: (B, S).
        baseline: broadcastable to (B, S).
    """
    return ((costs - baseline).detach() * log_probs).mean(-1)
