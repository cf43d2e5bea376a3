"""What `generate` returns, and diagnostics of chains by ArviZ."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers.utils import ModelOutput, logging

from hf_ebm.model_modes import model_output
from hf_ebm.sampling.run import ChainRun, Trace
from hf_ebm.scoring.rows import attended_mask

if TYPE_CHECKING:
    from hf_ebm.sampling.configuration import ResolvedChainConfig
    from hf_ebm.sampling.sampler import ChainKey

    # Transformers demands what the code of a checkpoint imports, but for what it tries to import.
    try:  # noqa: SIM105
        from arviz import InferenceData
    except ImportError:
        pass

logger = logging.get_logger(__name__)


@model_output
class ChainGenerationOutput(ModelOutput):
    """C chains and what is known about them, all on the CPU: those of the first prompt, then those of the second, …

    Args:
        sequences: (C, T) tokens after the last epoch, padded on the right with the pad token.
        attention_mask: (C, T), 0 at padding.
        samples: (C, kept, T) tokens kept after burn-in and thinning.
        energies: (C, kept) their energies in nats, extra energies included (float64).
        satisfied: (C, kept) bool, whether they meet the constraints: extra energies that are infinite where they don't.
        trace: per chain and epoch, see `Trace`.
        kept_epochs: numbers of the epochs the samples were kept after.
        prompt_indices, chain_indices: (C,) prompt of each chain and its number among that prompt's chains.
        mean_log_probabilities: (C,) with a decoder, mean log probability of the filled tokens (float64); else `None`.
        num_masked_rows: masked rows run through the masked language model.
        seed: the seed used.
        run: the run itself; `run.save(folder)` writes a state that `generate(resume_from=folder)` goes on from.
    """

    sequences: Tensor
    attention_mask: Tensor
    samples: Tensor
    energies: Tensor
    satisfied: Tensor
    trace: Trace
    kept_epochs: tuple[int, ...]
    prompt_indices: Tensor
    chain_indices: Tensor
    mean_log_probabilities: Tensor | None
    num_masked_rows: int
    seed: int
    run: ChainRun

    def to_inference_data(self) -> InferenceData:
        """The kept energies as `arviz.InferenceData`: variable `energy` with dimensions (chain, draw, prompt).

        `arviz.rhat(data, method="split")` and `arviz.ess(data, method="bulk")` (or `"tail"`) then diagnose each prompt.

        Raises:
            ValueError: if prompts have different numbers of chains, or nothing was kept.
        """
        prompts, counts = self.prompt_indices.unique(return_counts=True)
        if self.energies.shape[1] == 0 or len(counts.unique()) != 1:
            raise ValueError("to_inference_data needs kept samples and the same number of chains for every prompt")
        kept = torch.tensor(self.kept_epochs)

        def by_prompt(values: Tensor) -> np.ndarray:
            chains = [values[self.prompt_indices == prompt] for prompt in prompts]
            return torch.stack(chains, -1).numpy()  # (chain, draw, prompt)

        stats = {name: by_prompt(getattr(self.trace, name)[:, kept]) for name in ("acceptance_rate", "novel_rate")}
        names = ("energy", *stats)
        return import_arviz().from_dict(
            posterior={"energy": by_prompt(self.energies)},
            sample_stats=stats,
            coords={"prompt": prompts.tolist()},
            dims={name: ["prompt"] for name in names},
        )


def output_of(
    run: ChainRun, config: ResolvedChainConfig, keys: list[ChainKey], mean_log_probabilities: Tensor | None
) -> ChainGenerationOutput:
    """What a run with these settings and chains returns; with a decoder also its mean log probabilities (C,)."""
    attended = attended_mask(run.start, run.stop, run.state.ids.shape[1])
    kept = tuple(range(config.burn_in, run.epoch, config.thinning)) if mean_log_probabilities is None else (0,)
    return ChainGenerationOutput(
        sequences=run.state.ids.to("cpu", copy=True),
        attention_mask=attended.long(),
        samples=run.samples[:, : run.kept],
        energies=run.sample_energies[:, : run.kept],
        satisfied=run.sample_energies[:, : run.kept] < torch.inf,
        trace=run.trace.first(run.epoch),
        kept_epochs=kept,
        prompt_indices=torch.tensor([key.prompt for key in keys]),
        chain_indices=torch.tensor([key.chain for key in keys]),
        mean_log_probabilities=mean_log_probabilities,
        num_masked_rows=run.num_masked_rows,
        seed=config.seed,
        run=run,
    )


def warn_of_poor_samples(output: ChainGenerationOutput, config: ResolvedChainConfig) -> None:
    """Warns where there are no samples, or some that a constraint forbids."""
    epochs = output.run.epoch
    if not output.samples.shape[1]:
        logger.warning(f"No sample was kept: the run ended after epoch {epochs}, burn_in is {config.burn_in}.")
    chains = (~output.satisfied).any(1)
    if bool(chains.any()):
        logger.warning(
            f"{int(chains.sum())} of {len(chains)} chains have samples of infinite energy, which the constraints among "
            "extra_energies forbid: they have not met them by then. See `satisfied` in the output; more epochs, a "
            "start that meets them or a finite penalty may help."
        )


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
    """Diagnoses `energies` (chains, draws). Raises `ValueError` for fewer than 2 chains or 4 draws.

    Example:
        >>> import torch
        >>> stuck = torch.tensor([[0.0, 0.1, 0.0, 0.1], [9.0, 9.1, 9.0, 9.1]])  # two chains, each in a mode of its own
        >>> energy_diagnostics(stuck).r_hat > 1.1
        True
    """
    if energies.dim() != 2 or energies.shape[0] < 2 or energies.shape[1] < 4:
        raise ValueError(f"energies must have at least 2 chains and 4 draws, got shape {tuple(energies.shape)}")
    arviz = import_arviz()
    values = energies.double().cpu().numpy()
    return EnergyDiagnostics(
        float(arviz.rhat(values, method="split")),
        float(arviz.ess(values, method="bulk")),
        float(arviz.ess(values, method="tail")),
    )
