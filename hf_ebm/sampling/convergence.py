"""How far chains have converged: R-hat, effective sample sizes, and modes.

R-hat and effective sample sizes are those of Vehtari et al. 2021 ("Rank-normalization, folding, and localization: an
improved R-hat for assessing convergence of MCMC", Bayesian Analysis 16), of two numbers of each kept sample: its
energy, and at how many positions it differs from the chains' likeliest sample.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

# The fewest samples of a chain, and chains, that R-hat can be computed of.
LEAST_SAMPLES, LEAST_CHAINS = 4, 2
# Samples of a chain, evenly among all, that are looked at for modes.
_LOOKED_AT = 100


class Diagnostics(NamedTuple):
    """Convergence of a number of each sample over chains of one prompt; NaN where it can't be told.

    Attributes:
        r_hat: rank-normalised split R-hat, the larger of that of the values and that of their distances from the
            median.
        ess_bulk, ess_tail: effective sample sizes of the bulk, and of the worse of the 5% and 95% quantiles.
    """

    r_hat: float
    ess_bulk: float
    ess_tail: float


EnergyDiagnostics = Diagnostics  # as it was called when energies were all that was diagnosed


class Modes(NamedTuple):
    """Where chains have been: how many modes were visited by several chains, and how many by one alone."""

    shared: int
    alone: int


def import_arviz() -> ModuleType:
    """ArviZ, without the notice of its next major version that it prints when imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            import arviz
        except ImportError as error:  # hf_ebm depends on it, a checkpoint's own code needn't
            raise ImportError("diagnostics of chains need ArviZ: pip install 'arviz<1'") from error
    return arviz


def diagnosed(values: Tensor) -> Diagnostics:
    """Diagnoses `values` (chains, draws): NaN for fewer than 4 draws, and where all are the same.

    Of one chain there is no R-hat. Infinite values count as the largest. Chains that each stay at a value of their own
    have an infinite R-hat.

    Example:
        >>> import torch
        >>> stuck = torch.tensor([[0.0, 0.1, 0.0, 0.1], [9.0, 9.1, 9.0, 9.1]])  # two chains, each in a mode of its own
        >>> diagnosed(stuck).r_hat > 1.1, diagnosed(torch.zeros(2, 9))
        (True, Diagnostics(r_hat=nan, ess_bulk=nan, ess_tail=nan))
    """
    chains, draws = values.shape
    found = _without_infinities(values.double().cpu()).numpy()
    if not chains or draws < LEAST_SAMPLES or bool((found == found[0, 0]).all()):
        return Diagnostics(math.nan, math.nan, math.nan)
    arviz = import_arviz()
    with np.errstate(divide="ignore", invalid="ignore"):  # of chains that stay where they are
        return Diagnostics(
            float(arviz.rhat(found, method="rank")) if chains >= LEAST_CHAINS else math.nan,
            float(arviz.ess(found, method="bulk")),
            float(arviz.ess(found, method="tail")),
        )


def energy_diagnostics(energies: Tensor) -> Diagnostics:
    """Diagnoses `energies` (chains, draws). Raises `ValueError` for fewer than 2 chains or 4 draws.

    Example:
        >>> import torch
        >>> stuck = torch.tensor([[0.0, 0.1, 0.0, 0.1], [9.0, 9.1, 9.0, 9.1]])  # two chains, each in a mode of its own
        >>> energy_diagnostics(stuck).r_hat > 1.1
        True
    """
    if energies.dim() != 2 or energies.shape[0] < LEAST_CHAINS or energies.shape[1] < LEAST_SAMPLES:
        raise ValueError(f"energies must have at least 2 chains and 4 draws, got shape {tuple(energies.shape)}")
    return diagnosed(_in_thousandths(energies))


def _in_thousandths(energies: Tensor) -> Tensor:
    """Energies to a thousandth of a nat: rounding of floats would tell samples of the same text apart, as ranks do."""
    return energies.double().cpu().round(decimals=3)


def _without_infinities(values: Tensor) -> Tensor:
    """Values with what is infinite farther above the others than they are apart: R-hat and ESS look at ranks alone."""
    finite = values[values.isfinite()]
    if not len(finite) or len(finite) == values.numel():
        return values if len(finite) else torch.zeros_like(values)
    return values.masked_fill(values.isinf(), float(2 * finite.max() - finite.min()) + 1.0)


def pilot_of(samples: Tensor, energies: Tensor) -> Tensor:
    """(T,) the sample that others are compared with: of `samples` (C, N, T) the one of the least energy (C, N).

    Of several that of the first chain, and of the first of its epochs.

    Example:
        >>> import torch
        >>> pilot_of(torch.tensor([[[5, 6], [5, 7]], [[8, 7], [8, 6]]]), torch.tensor([[2.0, 1.0], [3.0, 1.0]]))
        tensor([5, 7])
    """
    return samples.flatten(0, 1)[int(energies.flatten().argmin())]


def token_distances(samples: Tensor, pilot: Tensor) -> Tensor:
    """(C, N) float64: at how many positions `samples` (C, N, T) differ from `pilot` (T,), the Hamming distance.

    Example:
        >>> import torch
        >>> token_distances(torch.tensor([[[5, 6, 7], [5, 7, 8]]]), torch.tensor([5, 6, 7]))
        tensor([[0., 2.]], dtype=torch.float64)
    """
    return (samples != pilot).sum(-1).double()


def energy_and_tokens(samples: Tensor, energies: Tensor) -> tuple[Diagnostics, Diagnostics]:
    """Diagnostics of the energies (C, N) of samples (C, N, T) of one prompt, and of their tokens.

    Example:
        >>> import torch
        >>> samples = torch.tensor([[[5, 6]] * 8, [[7, 8]] * 8])  # two chains, each at a text, energies alike
        >>> energy, tokens = energy_and_tokens(samples, torch.tensor([[1.0, 2.0] * 4] * 2))
        >>> energy.r_hat < 1, tokens.r_hat
        (True, inf)
    """
    energies = _in_thousandths(energies)
    if not samples.numel():
        return diagnosed(energies), diagnosed(energies)
    return diagnosed(energies), diagnosed(token_distances(samples, pilot_of(samples, energies)))


def worst_r_hat(found: Sequence[Diagnostics]) -> float:
    """The largest R-hat; NaN if there is none.

    Example:
        >>> worst_r_hat([Diagnostics(1.2, 9.0, 9.0), Diagnostics(float("nan"), 9.0, 9.0)])
        1.2
    """
    return max((own.r_hat for own in found if not math.isnan(own.r_hat)), default=math.nan)


def has_nothing_to_mix(samples: Tensor, energies: Tensor, acceptance_rate: Tensor) -> bool:
    """Whether all chains have one text that is allowed, and no proposal of another was rejected.

    R-hat is undefined then, not missed. Where proposals were rejected chains may be stuck at where they all began.

    Args:
        samples, energies, acceptance_rate: (C, N, T), (C, N) and (C, N).

    Example:
        >>> import torch
        >>> samples, energies = torch.full((2, 4, 5), 7), torch.ones(2, 4)
        >>> [has_nothing_to_mix(samples, energies, torch.full((2, 4), rate)) for rate in (1.0, 0.9)]
        [True, False]
    """
    chains, draws = energies.shape
    enough = chains >= LEAST_CHAINS and draws >= LEAST_SAMPLES
    return enough and bool((samples == samples[0, 0]).all() & energies.isfinite().all() & (acceptance_rate == 1).all())


def r_hats_of(samples: Tensor, energies: Tensor, acceptance_rate: Tensor, prompts: Tensor) -> dict[int, float]:
    """For each prompt the larger R-hat of its energies and tokens; infinite where none can be told.

    It is NaN where there is nothing to mix.

    Args:
        samples, energies, acceptance_rate: (C, N, T), (C, N) and (C, N).
        prompts: (C,) the prompt of each chain.

    Example:
        >>> import torch
        >>> rates, prompts = torch.ones(2, 4), torch.tensor([7, 7])
        >>> r_hats_of(torch.zeros(2, 4, 5), torch.zeros(2, 4), rates, prompts)
        {7: nan}
        >>> r_hats_of(torch.zeros(2, 3, 5), torch.zeros(2, 3), rates[:, :3], prompts)  # three samples are too few
        {7: inf}
    """
    found = {}
    for prompt in prompts.unique().tolist():
        own = prompts == prompt
        worst = worst_r_hat(energy_and_tokens(samples[own], energies[own]))
        is_told = not math.isnan(worst) or has_nothing_to_mix(samples[own], energies[own], acceptance_rate[own])
        found[prompt] = worst if is_told else math.inf
    return found


def modes_of(samples: Tensor, energies: Tensor) -> Modes:
    """Modes of samples (C, N, T) with energies (C, N), and how many chains have been there.

    A mode is a chain's sample of the least energy, with all samples that have the same token at more than half of the
    positions at which samples differ at all. Of chains whose least ones are in one mode, it counts once.

    Example:
        >>> import torch
        >>> samples = torch.tensor([[[5, 5, 5], [5, 5, 6]], [[5, 5, 6], [5, 5, 5]], [[8, 8, 8], [8, 8, 9]]])
        >>> modes_of(samples, torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.5, 2.0]]))
        Modes(shared=1, alone=1)
    """
    if not samples.numel():
        return Modes(0, 0)
    samples = samples[..., (samples != samples[0, 0]).flatten(0, 1).any(0)].int()
    width = max(1, samples.shape[-1])
    lowest = energies.min(1)
    own = samples[torch.arange(len(samples)), lowest.indices]
    found: list[Tensor] = []
    for one in own[lowest.values.argsort(stable=True)]:
        if all(2 * int((one != mode).sum()) >= width for mode in found):
            found.append(one)
    looked = torch.cat([own[:, None], samples[:, :: -(-samples.shape[1] // _LOOKED_AT)]], 1)
    visitors = [int((2 * token_distances(looked, mode) < width).any(1).sum()) for mode in found]
    shared = sum(count > 1 for count in visitors)
    return Modes(shared, len(found) - shared)
