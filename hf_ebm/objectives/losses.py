"""Losses as pure functions: of tokens (cross entropy, self-normalization), of candidates, and contrastive; log Z.

- cross entropy and self-normalization: of the logits of every step;
- expected costs of sequences (minimum risk over a candidate set, the policy gradient): of one log probability and one
  cost for each candidate of each row, (B, S), in nats;
- noise-contrastive estimation of a residual energy, with the base language model as the noise: Deng et al. 2020
  (residual energy-based models), section 3.1, equation 3; Ma and Collins 2018 for the conditional form;
- estimates from energies of a language model's own samples: Z is the mean of `exp(-E(x))` over them (Deng et al. 2020,
  section 3.2). They are computed in log space and float64, along the last dimension.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

IGNORED = -100


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float32 if it is of half precision, itself otherwise.

    Example:
        >>> at_least_float32(torch.zeros(2, dtype=torch.bfloat16)).dtype
        torch.float32
    """
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """Cross entropy in nats, summed over tokens: logits (B, T, V), labels (B, T) with -100 where ignored -> ().

    Of `smoothing` ε the target is `(1 - ε)` times the label plus `ε` times the uniform distribution over all V ids.

    Example:
        >>> cross_entropy_sum(torch.zeros(1, 3, 2), torch.tensor([[0, 1, -100]]))  # twice log 2
        tensor(1.3863)
    """
    return torch.nn.functional.cross_entropy(
        at_least_float32(logits).flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum",
        label_smoothing=smoothing,
    )  # fmt: skip


def num_tokens(labels: torch.Tensor) -> torch.Tensor:
    """How many labels aren't -100, ().

    Example:
        >>> num_tokens(torch.tensor([[0, 1, -100]]))
        tensor(2)
    """
    return (labels != IGNORED).sum()


class LogNormalizers(NamedTuple):
    """Sums over the scored tokens, from which mean and variance follow."""

    sum: torch.Tensor  # ()
    sum_of_squares: torch.Tensor  # ()


def log_normalizers(logits: torch.Tensor, labels: torch.Tensor) -> LogNormalizers:
    """Sums of the local log normalizer `log Z = logsumexp(logits)` and of its square, where labels aren't -100.

    `cross entropy + lambda * (log Z)^2`, summed over tokens, is the self-normalized objective (Goyal, Dyer and
    Berg-Kirkpatrick 2019, section 3.2.1): it makes unnormalized scores comparable with log-probabilities.

    Example:
        >>> log_normalizers(torch.zeros(1, 2, 2), torch.tensor([[0, -100]]))
        LogNormalizers(sum=tensor(0.6931), sum_of_squares=tensor(0.4805))
    """
    log_z = at_least_float32(logits).logsumexp(-1).masked_fill(labels == IGNORED, 0)
    return LogNormalizers(log_z.sum(), log_z.square().sum())


def length_normalized(log_probs: torch.Tensor, lengths: torch.Tensor, penalty: float) -> torch.Tensor:
    """Log probabilities of sequences, each divided by its length to the power of `penalty`; 0 leaves them as they are.

    Args:
        log_probs: in nats, of any shape.
        lengths: in tokens, of the same shape; below 1 counts as 1.

    Example:
        >>> length_normalized(torch.tensor([-6.0, -6.0]), torch.tensor([2, 3]), penalty=1.0)
        tensor([-3., -2.])
    """
    return log_probs / lengths.clamp_min(1).to(log_probs.dtype) ** penalty


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

    Example:
        >>> log_probs, costs = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.0, 1.0]])
        >>> minimum_risk(log_probs, costs, torch.ones(1, 2, dtype=torch.bool), sharpness=1.0)
        (tensor([0.5000]), tensor([[0.5000, 0.5000]]))
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

    Example:
        >>> log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
        >>> policy_gradient_loss(log_probs, torch.tensor([[0.0, 1.0]]), torch.tensor(0.5)).backward()
        >>> log_probs.grad  # the cheaper sample's log probability grows in a step against the gradient
        tensor([[-0.2500,  0.2500]])
    """
    return ((costs - baseline).detach() * log_probs).mean(-1)


def leave_one_out_baseline(costs: torch.Tensor) -> torch.Tensor:
    """The mean cost of a row's other samples, (B, S) for S >= 2: for each sample a baseline that doesn't depend on it.

    Kool, van Hoof and Welling 2019; RLOO of Ahmadian et al. 2024.

    Args:
        costs: of independent samples, (B, S).

    Example:
        >>> leave_one_out_baseline(torch.tensor([[0.0, 1.0, 3.0]]))
        tensor([[2.0000, 1.5000, 0.5000]])
    """
    return (costs.sum(-1, keepdim=True) - costs) / (costs.shape[-1] - 1)


def noise_contrastive_loss(real: torch.Tensor, generated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`softplus(E(x+))` of real and `softplus(-E(x-))` of generated sequences, in nats; same shapes as given.

    The loss of a row is the sum of the two. At its minimum `P_LM exp(-E)` is the distribution of the data: log Z is 0.

    Args:
        real, generated: energies of sequences of the data and of the language model, any shapes.

    Example:
        >>> real, generated = noise_contrastive_loss(torch.tensor([0.0]), torch.tensor([0.0]))
        >>> real + generated
        tensor([1.3863])
    """
    return softplus(real), softplus(-generated)


def log_self_normalizer(generated: torch.Tensor) -> torch.Tensor:
    """`log mean exp(-E)` over sequences of the language model, a scalar: an estimate of log Z, pooled over prefixes.

    Example:
        >>> log_self_normalizer(torch.tensor([0.0, 0.0]))
        tensor(0., dtype=torch.float64)
    """
    return (-generated.double().flatten()).logsumexp(0) - math.log(generated.numel())


class LogPartitionBounds(NamedTuple):
    """Two estimates of log Z in nats, float64, of the leading shape of the energies.

    In expectation, and for enough samples, `lower <= log Z <= upper`; a single pair need not enclose it.
    """

    lower: Tensor
    upper: Tensor


def log_partition_bounds(energies: Tensor) -> LogPartitionBounds:
    """`T_n` and `(2n - 1) T_n - 2 (n - 1) T̄_{n-1}`, with `T_n = log mean exp(-E)` and T̄ its leave-one-out mean.

    Deng et al. 2020, theorem 2 (which prints Z for log Z); Nowozin 2018. `lower` is never above `upper`. An energy of
    infinity is a sample of weight 0.

    Args:
        energies: (…, n) energies of samples, n >= 2.

    Raises:
        ValueError: for fewer than two samples, and for NaN or minus infinity.

    Example:
        >>> bounds = log_partition_bounds(torch.tensor([0.0, 1.0, 0.5]))
        >>> bool(bounds.lower < bounds.upper)
        True
        >>> log_partition_bounds(torch.zeros(4)).lower  # all energies 0: log Z is 0
        tensor(0., dtype=torch.float64)
    """
    check_energies(energies)
    count = energies.shape[-1]
    if count < 2:
        raise ValueError(f"energies: the bounds need at least 2 samples, got {count}")
    log_weights = -energies.double()
    total = log_weights.logsumexp(-1, keepdim=True)
    lower = total[..., 0] - math.log(count)
    # total - log of the sum of the others is -log1p(-share), which is inaccurate for the one sample that can have
    # more than half of the weight; for that one the others are summed.
    shares = (log_weights - total).exp()
    largest = log_weights.argmax(-1, keepdim=True)
    others = log_weights.scatter(-1, largest, -math.inf).logsumexp(-1, keepdim=True)
    gaps = -torch.log1p(-shares.scatter(-1, largest, 0.0))
    gaps = gaps.scatter(-1, largest, total - others)
    upper = lower + 2 * (count - 1) * (gaps.mean(-1) + math.log1p(-1 / count))
    nothing = lower == -math.inf
    return LogPartitionBounds(lower, torch.where(nothing, lower, torch.maximum(upper, lower)))


def log_importance_weights(energies: Tensor) -> Tensor:
    """Normalized log weights `log softmax(-E)` of samples, (…, n) float64.

    Raises:
        ValueError: for NaN or minus infinity, and for rows that are all infinite.

    Example:
        >>> log_importance_weights(torch.tensor([0.0, torch.inf])).exp()
        tensor([1., 0.], dtype=torch.float64)
    """
    check_energies(energies)
    if bool(energies.isinf().all(-1).any()):
        raise ValueError("energies: all samples of a row have infinite energy, so none can be chosen")
    return (-energies.double()).log_softmax(-1)


def effective_sample_size(log_weights: Tensor) -> Tensor:
    """`(Σ w)² / Σ w²` of log weights (…, n), from 1 to n.

    Example:
        >>> effective_sample_size(torch.tensor([[0.0, 0.0], [0.0, -torch.inf]]))
        tensor([2., 1.])
    """
    return (2 * log_weights.logsumexp(-1) - (2 * log_weights).logsumexp(-1)).exp()


def check_energies(energies: Tensor) -> None:
    """Raises `ValueError` for NaN or minus infinity among energies, naming the place of the first.

    Example:
        >>> check_energies(torch.tensor([0.0, torch.nan]))
        Traceback (most recent call last):
            ...
        ValueError: energies: row 1 has the energy nan
    """
    wrong = energies.isnan() | (energies == -math.inf)
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        value = float(energies[tuple(place)])
        raise ValueError(f"energies: row {', '.join(map(str, place))} has the energy {value}")
