"""Choosing the next token softly (Goyal, Dyer and Berg-Kirkpatrick 2017, section 3): weights over the vocabulary.

The decoder's next input is `weights @ embedding`; hard choices are one-hot weights without a gradient.
"""

from __future__ import annotations

import torch

from hf_ebm.checks import check_choice
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
