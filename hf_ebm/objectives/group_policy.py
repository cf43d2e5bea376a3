"""Policy optimization by groups of samples (GRPO) as pure functions: advantages, clipped ratios, a KL estimate.

Shao et al. 2024 (DeepSeekMath); without the deviation and with a constant in place of lengths Dr. GRPO (Liu et al.
2025). Log probabilities are of single tokens, in nats; functions of tokens take any shape.
"""

from __future__ import annotations

import torch

_LEAST_DEVIATION = 1e-4  # added to deviations, so that rounding errors of equal rewards stay small


def group_advantages(rewards: torch.Tensor, scaled: bool) -> torch.Tensor:
    """Rewards less the mean of their row, and divided by the row's standard deviation where `scaled`, (B, S).

    Args:
        rewards: of the S >= 2 samples of each row, (B, S).
        scaled: as in GRPO; rows of a small deviation count for more then. Without it the expected gradient is
            (S - 1) / S of that of the expected reward (Dr. GRPO).

    Example:
        >>> group_advantages(torch.tensor([[0.0, 1.0, 2.0], [5.0, 5.0, 5.0]]), scaled=False)
        tensor([[-1.,  0.,  1.],
                [ 0.,  0.,  0.]])
    """
    advantages = rewards - rewards.mean(-1, keepdim=True)
    return advantages / (rewards.std(-1, keepdim=True) + _LEAST_DEVIATION) if scaled else advantages


def clipped_policy_loss(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, clip_range: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`-min(r A, clip(r, 1 - ε, 1 + ε) A)` with r = p / p_old of each token, and where the clipped term is the less.

    Where the policy has not changed r is 1 and the gradient `-A ∇ log p`; a clipped token has none.

    Args:
        log_probs: of tokens, with their gradient.
        old_log_probs: of the policy that drew them, of the same shape.
        advantages: of the sequence of each token, of the same shape.
        clip_range: ε.

    Returns:
        The losses, and bool, both of the shape given.

    Example:
        >>> log_probs, old = torch.tensor([0.5, 0.5]).log(), torch.tensor([0.25, 0.5]).log()
        >>> clipped_policy_loss(log_probs, old, torch.ones(2), clip_range=0.2)
        (tensor([-1.2000, -1.0000]), tensor([ True, False]))
    """
    ratios = (log_probs - old_log_probs).exp()
    plain, clipped = ratios * advantages, ratios.clamp(1 - clip_range, 1 + clip_range) * advantages
    return -torch.minimum(plain, clipped), clipped < plain


def kl_from_samples(log_probs: torch.Tensor, reference_log_probs: torch.Tensor) -> torch.Tensor:
    """`r - 1 - log r` with r = p_ref / p, never negative: over the policy's own tokens its mean is `KL(p || p_ref)`.

    The estimator k3 of Schulman 2020; Shao et al. 2024. Nats, of the shape given.

    Example:
        >>> kl_from_samples(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.5, 0.25]).log())
        tensor([0.0000, 0.1931])
    """
    log_ratios = reference_log_probs - log_probs
    return log_ratios.expm1() - log_ratios


def sequence_sums(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Sums over the tokens of each sequence, (N,).

    Args:
        values: of all tokens, sequence after sequence, (Σ T_n,).
        lengths: (N,).

    Example:
        >>> sequence_sums(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2, 1]))
        tensor([3., 3.])
    """
    return torch.nn.utils.rnn.pad_sequence(values.split(lengths.tolist()), batch_first=True).sum(1)
