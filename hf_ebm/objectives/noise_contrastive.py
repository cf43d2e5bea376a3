"""Noise-contrastive estimation of a residual energy, with the base language model as the noise.

Deng et al. 2020 (residual energy-based models), section 3.1, equation 3; Ma and Collins 2018 for the conditional form.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import softplus


def noise_contrastive_loss(real: torch.Tensor, generated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`softplus(E(x+))` of real and `softplus(-E(x-))` of generated sequences, in nats; same shapes as given.

    The loss of a row is the sum of the two. At its minimum `P_LM exp(-E)` is the distribution of the data: log Z is 0.

    Args:
        real, generated: energies of sequences of the data and of the language model, any shapes.
    """
    return softplus(real), softplus(-generated)


def log_self_normalizer(generated: torch.Tensor) -> torch.Tensor:
    """`log mean exp(-E)` over sequences of the language model, a scalar: an estimate of log Z, pooled over prefixes."""
    return (-generated.double().flatten()).logsumexp(0) - math.log(generated.numel())
