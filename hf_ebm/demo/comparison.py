"""The same prompt under every kernel."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_ebm.demo.prompts import Prompt
from hf_ebm.models.energy import EnergyModel
from hf_ebm.sampling.output import ChainGenerationOutput
from hf_ebm.sampling.warm_start import DECODERS

CHAINS = 4  # of a sampling kernel: enough for a mean, few enough to wait for


@dataclass(frozen=True)
class KernelResult:
    """What a kernel made of a prompt; energies are local ones in nats.

    Attributes:
        ids: the T tokens of the first chain at its end.
        energy: their energy.
        energies: mean over chains of the energy at the start and after each epoch; `mask_predict` has the last alone.
        mean_energy: mean over the later half of the epochs.
        acceptance_rate, novel_rate: means over chains and epochs, `None` with `mask_predict`.
    """

    kernel: str
    ids: list[int]
    energy: float
    energies: list[float]
    mean_energy: float
    acceptance_rate: float | None
    novel_rate: float | None


def compare_kernels(
    model: EnergyModel, prompt: Prompt, settings: dict[str, dict], stop: threading.Event
) -> Iterator[KernelResult]:
    """Runs the kernels one after the other and yields the result of each.

    Args:
        settings: of `generate`, by kernel.
        stop: once set, the kernel at work ends after its epoch, and the others are left out.

    Raises:
        ValueError: what `generate` raises.
    """
    local = as_local(model)
    for kernel, own in settings.items():
        if stop.is_set():
            return
        if kernel in DECODERS:  # deterministic, so more chains would be copies; takes no criteria
            output = model.generate(prompt.ids, free_mask=prompt.free, **own)
            yield _result(kernel, output, _local_energies(local, model, prompt, output.samples, output.energies))
        else:
            start = _Start()
            criterion = lambda ids, scores: torch.full((len(ids),), stop.is_set(), device=ids.device)  # noqa: E731
            output = model.generate(
                prompt.ids, free_mask=prompt.free, num_chains=CHAINS, streamer=start, stopping_criteria=criterion, **own
            )
            states = torch.cat([start.ids[:, None], output.samples], 1)
            yield _result(kernel, output, _local_energies(local, model, prompt, states, output.energies))


def as_local(model: EnergyModel) -> EnergyModel:
    """The same masked language model with the local energy; the model itself if that is its energy."""
    if model.config.energy == "local":
        return model
    names = ("mask_token_id", "pad_token_id", "special_token_ids", "excluded_token_ids", "prefix_token_ids")
    fields = {name: getattr(model.config, name) for name in (*names, "suffix_token_ids")}
    return EnergyModel(model.mlm, energy="local", **fields)


def energy_points(kernel: str, energies: list[float], epochs: int) -> list[tuple[int, float]]:
    """Points (epoch, energy) of a curve, the start at 0; a decoder's one energy is a level line over all epochs."""
    if kernel in DECODERS and energies:
        return [(0, energies[0]), (epochs, energies[0])]
    return list(enumerate(energies))


class _Start:
    """A streamer that keeps the tokens (C, T) that the chains start from."""

    def put(self, ids: Tensor) -> None:
        self.ids = ids.clone()

    def put_draft(self, ids: Tensor) -> None:
        """The steps are not kept."""

    def end(self) -> None:
        """Nothing to do."""


def _local_energies(local: EnergyModel, model: EnergyModel, prompt: Prompt, states: Tensor, energies: Tensor) -> Tensor:
    """(C, n) local energies of states (C, n, T); `energies` (C, k) are the model's energies of the last k of them."""
    known = energies if local is model else energies[:, :0]
    rest = states[:, : states.shape[1] - known.shape[1]]
    if not rest.shape[1]:
        return known
    rows = rest.flatten(0, 1)
    with torch.no_grad():
        found = local(rows, free_mask=prompt.free.expand(rows.shape)).energy
    return torch.cat([found.double().cpu().view(rest.shape[:2]), known], 1)


def _result(kernel: str, output: ChainGenerationOutput, energies: Tensor) -> KernelResult:
    by_epoch = energies.mean(0)
    epochs = output.energies.shape[1]
    rates = (output.trace.acceptance_rate, output.trace.novel_rate)
    acceptance, novel = (None if kernel in DECODERS else float(rate.mean()) for rate in rates)
    return KernelResult(
        kernel=kernel,
        ids=output.sequences[0].tolist(),
        energy=float(energies[0, -1]),
        energies=by_epoch.tolist(),
        mean_energy=float(by_epoch[-(epochs - epochs // 2) :].mean()),
        acceptance_rate=acceptance,
        novel_rate=novel,
    )
