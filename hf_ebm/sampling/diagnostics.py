"""Diagnostics of chains by ArviZ."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import NamedTuple

from torch import Tensor


def import_arviz() -> ModuleType:
    """ArviZ, without the notice of its next major version that it prints when imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            import arviz
        except ImportError as error:  # hf_ebm depends on it, a checkpoint's own code needn't
            raise ImportError("diagnostics of chains need ArviZ: pip install 'arviz<1'") from error
    return arviz


class EnergyDiagnostics(NamedTuple):
    """Convergence of the energy over the chains of one prompt: split R-hat, bulk and tail effective sample size."""

    r_hat: float
    ess_bulk: float
    ess_tail: float


def energy_diagnostics(energies: Tensor) -> EnergyDiagnostics:
    """Diagnoses `energies` (chains, draws). Raises `ValueError` for fewer than 2 chains or 4 draws."""
    if energies.dim() != 2 or energies.shape[0] < 2 or energies.shape[1] < 4:
        raise ValueError(f"energies must have at least 2 chains and 4 draws, got shape {tuple(energies.shape)}")
    arviz = import_arviz()
    values = energies.double().cpu().numpy()
    return EnergyDiagnostics(
        float(arviz.rhat(values, method="split")),
        float(arviz.ess(values, method="bulk")),
        float(arviz.ess(values, method="tail")),
    )
