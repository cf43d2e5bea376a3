"""Choosing softly: the next token, and the k best successors of a beam, each as a distribution over what there is.

- `token_weights`: weights over the vocabulary (Goyal, Dyer and Berg-Kirkpatrick 2017, section 3). The decoder's next
  input is `weights @ embedding`; hard choices are one-hot weights without a gradient.
- `soft_top_k`: the relaxed selection of beam search (Goyal, Neubig, Dyer and Berg-Kirkpatrick 2018; thesis, Goyal 2021,
  algorithm 2).
- schedules: the share of gold inputs, and the inverse temperature, which change in training.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from hf_ebm.checks import as_number, check_choice
from hf_ebm.objectives.losses import at_least_float32

INPUTS = ("argmax", "sample", "soft_argmax", "soft_sample")


def token_weights(
    scores: torch.Tensor, inputs: str, alpha: float = 1.0, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Weights over the vocabulary of one step's choice.

    - `argmax`: one-hot at the largest score; `sample`: one-hot at a draw from `softmax(scores)` (Bengio et al. 2015).
      Neither has a gradient.
    - `soft_argmax`: `softmax(alpha * scores)`. Tends to `argmax` as alpha grows, where the maximum is unique.
    - `soft_sample`: `softmax(alpha * (scores + G))`, G ~ Gumbel(0, 1), the Concrete relaxation of `sample`.

    Args:
        scores: logits or log-probabilities, (..., V), of a floating dtype.
        inputs: one of `INPUTS`.
        alpha: inverse temperature, above 0; hard choices don't use it.
        generator: source of the noise, on the device of `scores`.

    Returns:
        (..., V) of the dtype of `scores`, float32 for half precision; sums to 1.

    Raises:
        ValueError: for another name of `inputs` or `alpha` <= 0.

    Example:
        >>> scores = torch.tensor([0.0, 1.0])
        >>> token_weights(scores, "argmax"), token_weights(scores, "soft_argmax", alpha=2.0)
        (tensor([0., 1.]), tensor([0.1192, 0.8808]))
    """
    check_choice("inputs", inputs, INPUTS)
    if not alpha > 0:
        raise ValueError(f"alpha must be above 0, got {alpha}")
    scores = at_least_float32(scores)
    if inputs.endswith("sample"):
        scores = scores + gumbel_noise(scores, generator)
    if inputs.startswith("soft"):
        return (alpha * scores).softmax(-1)
    return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores.dtype)


def gumbel_noise(like: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Independent Gumbel(0, 1) noise of the shape and dtype of `like`, without a gradient.

    `-log(-log u)`, which is three times faster on a CPU than drawing exponential variables. u is below 1 as drawn and
    kept above 0.

    Example:
        >>> noise = gumbel_noise(torch.empty(100_000), torch.Generator().manual_seed(0))
        >>> round(noise.mean().item(), 1)  # Euler's constant, 0.577
        0.6
    """
    uniform = torch.rand(like.shape, generator=generator, dtype=like.dtype, device=like.device)
    return uniform.clamp_min_(torch.finfo(like.dtype).tiny).log_().neg_().log_().neg_()


class SoftSelection(NamedTuple):
    """What `soft_top_k` selects, for k new beams."""

    scores: torch.Tensor  # (B, k): expected score under each selection
    beam_weights: torch.Tensor  # (B, k, k_old): soft backpointers; rows sum to 1
    token_weights: torch.Tensor  # (B, k, V): soft labels; rows sum to 1


def soft_top_k(scores: torch.Tensor, num_beams: int, alpha: float) -> SoftSelection:
    """Relaxes the selection of the `num_beams` best successors.

    With m_i the i-th largest of the k_old * V scores, new beam i weighs every successor by
    `p_i = softmax(-alpha * (scores - m_i) ** 2)`. As alpha grows, p_i tends to one-hot at the i-th best, where there
    are no ties; `alpha=inf` is that limit, without a gradient through the choice.

    The gradient flows through the scores and through m. Only the scores are kept for the backward pass: p is made again
    there, for few rows at a time, so that k distributions over k * V successors never exist for all rows at once.

    Args:
        scores: of each successor of each beam, (B, k_old, V), float32 or float64; finite (a forbidden successor has a
            large negative score, not -inf).
        num_beams: k, at most the number of successors.
        alpha: above 0; `inf` for the hard selection.

    Raises:
        ValueError: for `alpha` <= 0, half precision, or more beams than successors.

    Example:
        >>> found = soft_top_k(torch.tensor([[[3.0, 0.0], [1.0, 2.0]]]), num_beams=2, alpha=math.inf)
        >>> found.scores, found.beam_weights.argmax(-1), found.token_weights.argmax(-1)
        (tensor([[3., 2.]]), tensor([[0, 1]]), tensor([[0, 1]]))
    """
    rows, old_beams, vocab_size = scores.shape
    if not alpha > 0:
        raise ValueError(f"alpha must be above 0, got {alpha}")
    if scores.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"scores must be float32 or float64, got {scores.dtype}")
    if not 1 <= num_beams <= old_beams * vocab_size:
        raise ValueError(f"num_beams must be from 1 to the {old_beams * vocab_size} successors, got {num_beams}")
    flat = scores.reshape(rows, -1)
    best, indices = flat.topk(num_beams)
    if math.isinf(alpha):
        beams = torch.nn.functional.one_hot(indices // vocab_size, old_beams)
        tokens = torch.nn.functional.one_hot(indices % vocab_size, vocab_size)
        return SoftSelection(best, beams.to(scores.dtype), tokens.to(scores.dtype))
    return SoftSelection(*_SoftTopK.apply(flat, best, alpha, vocab_size))


# Numbers in p of the rows that are worked on together: on a CPU so few that they stay in its cache.
_AT_ONCE, _AT_ONCE_ON_CPU = 2**24, 2**18


def _weights(flat: torch.Tensor, best: torch.Tensor, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    """p_i and the distances to m_i, both (B, k, k_old * V)."""
    distance = flat[:, None] - best[..., None]
    return (distance * distance).mul_(-alpha).softmax(-1), distance


def _parts(best: torch.Tensor, successors: int) -> list[slice]:
    rows, beams = best.shape
    size = max(1, (_AT_ONCE_ON_CPU if best.device.type == "cpu" else _AT_ONCE) // (beams * successors))
    return [slice(start, start + size) for start in range(0, rows, size)]


class _SoftTopK(torch.autograd.Function):
    """Takes flat scores (B, k_old * V) and their largest values (B, k)."""

    @staticmethod
    def forward(
        ctx: Any, flat: torch.Tensor, best: torch.Tensor, alpha: float, vocab_size: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scores = torch.empty_like(best)
        beams = flat.new_empty(*best.shape, flat.shape[1] // vocab_size)
        tokens = flat.new_empty(*best.shape, vocab_size)
        for part in _parts(best, flat.shape[1]):
            p = _weights(flat[part], best[part], alpha)[0]
            by_beam = p.unflatten(-1, (-1, vocab_size))
            torch.sum(by_beam, 3, out=beams[part])
            torch.sum(by_beam, 2, out=tokens[part])
            torch.sum(p.mul_(flat[part, None]), -1, out=scores[part])
        ctx.save_for_backward(flat, best, scores, beams, tokens)
        ctx.alpha = alpha
        return scores, beams, tokens

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, scores_grad: torch.Tensor, beams_grad: torch.Tensor, tokens_grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        flat, best, scores, beams, tokens = ctx.saved_tensors
        # Of the gradient of p_i its mean under p_i, which what was found gives without another pass over successors.
        mean = scores_grad * scores + (beams_grad * beams).sum(-1) + (tokens_grad * tokens).sum(-1)
        centred, of_scores = (beams_grad - mean[..., None])[..., None], scores_grad[..., None]
        flat_grad, best_grad = torch.empty_like(flat), torch.empty_like(best)
        for part in _parts(best, flat.shape[1]):
            p, distance = _weights(flat[part], best[part], ctx.alpha)
            grad = (centred[part] + tokens_grad[part, :, None]).view_as(p)
            # Through the softmax, then through -alpha * distance^2, to the scores and to m_i.
            grad.addcmul_(flat[part, None], of_scores[part]).mul_(p).mul_(distance).mul_(-2 * ctx.alpha)
            best_grad[part] = -grad.sum(-1)
            torch.sum(grad.addcmul_(p, of_scores[part]), 1, out=flat_grad[part])
        return flat_grad, best_grad, None, None


LARGEST_ALPHA = 1e6
SCHEDULE_UNITS = ("epoch", "step", "percent")
TEACHER_FORCING_SCHEDULES = ("inverse_sigmoid", "linear", "constant", "always")


def teacher_forcing_probability(
    time: float, schedule: str, *, decay_strength: float = 10.0, probability: float = 0.5, last: float = 0
) -> float:
    """Probability that the decoder's next input is the gold token.

    Time is counted in epochs, steps or hundredths of the training, from 0; the first of them is all gold under every
    schedule but `always`.

    - `inverse_sigmoid`: `k / (k + exp(time / k))`, k = `decay_strength` (Bengio et al. 2015, section 2.4); larger k
      decays later and more gently, to 1/2 at `k log k` (23 for k = 10).
    - `linear`: from 1 at the start to `probability` at the time `last`.
    - `constant`: `probability`.
    - `always`: 0, the model's own choices from the start (table 3.2 of the thesis).

    Raises:
        ValueError: for another schedule, or a value out of range.

    Example:
        >>> [round(teacher_forcing_probability(time, "inverse_sigmoid"), 2) for time in (0, 10, 23, 60)]
        [1.0, 0.79, 0.5, 0.02]
    """
    decay_strength, probability = check_teacher_forcing(schedule, decay_strength, probability)
    if schedule == "always":
        return 0.0
    if time < 1:
        return 1.0
    if schedule == "inverse_sigmoid":
        # As 1 / (1 + exp(time / k - log k)), which cannot overflow for a small k.
        exponent = time / decay_strength - math.log(decay_strength)
        return math.exp(-exponent) / (1 + math.exp(-exponent)) if exponent > 0 else 1 / (1 + math.exp(exponent))
    if schedule == "linear":
        return 1 - (1 - probability) * min(1.0, time / max(1, last))
    return probability


def check_teacher_forcing(schedule: str, decay_strength: float, probability: float) -> tuple[float, float]:
    """The two numbers, plain. Raises `ValueError` for an unknown schedule or a value out of range.

    Example:
        >>> check_teacher_forcing("linear", decay_strength=10, probability=0.5)
        (10.0, 0.5)
    """
    check_choice("teacher_forcing_schedule", schedule, TEACHER_FORCING_SCHEDULES)
    return (
        as_number("decay_strength", decay_strength, above=0),
        as_number("teacher_forcing_probability", probability, least=0, most=1),
    )


def inverse_temperature(time: float, alpha: float, growth: float) -> float:
    """`alpha * growth ** time`: constant for growth 1, annealed towards the hard choice for growth above 1.

    At most `LARGEST_ALPHA`, where the choice is hard for all practical purposes and float32 doesn't overflow.

    Raises:
        ValueError: unless both are finite and above 0.

    Example:
        >>> round(inverse_temperature(2, alpha=1.0, growth=3.0), 4)
        9.0
    """
    alpha, growth = check_inverse_temperature(alpha, growth)
    exponent = math.log(alpha) + time * math.log(growth)
    return math.exp(min(exponent, math.log(LARGEST_ALPHA)))


def check_inverse_temperature(alpha: float, growth: float) -> tuple[float, float]:
    """Both as plain numbers. Raises `ValueError` unless they are finite and above 0.

    Example:
        >>> check_inverse_temperature(1, growth=2)
        (1.0, 2.0)
    """
    return as_number("alpha", alpha, above=0), as_number("alpha_growth", growth, above=0)
