"""`EnergyTarget`: chains over any energy of token ids, without a masked language model.

Its target has no token terms, and its rows are answered with given logits. All else is what `EnergyModel.generate`
runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import LogitsProcessorList, StoppingCriteriaList

from hf_ebm.checks import (
    CONVERSION_ERRORS,
    as_callable,
    as_callables,
    as_ids,
    as_mask,
    as_whole,
    check_methods,
    listed,
    name_of,
    row_numbers,
    shown,
    wholes,
)
from hf_ebm.models.energy.chains import Chains, chains_of, checked_keys
from hf_ebm.models.energy.generation_energy import Criterion, Processor, Streamer, begun, going_on, run_job
from hf_ebm.models.energy.particles import AskedParticles, settings_of_particles
from hf_ebm.models.energy.partition_energy import LogPartitionOutput, found_partition, parted
from hf_ebm.models.energy.saved_runs import resumed
from hf_ebm.models.energy.smc_energy import SMCOutput, annealed
from hf_ebm.sampling.configuration import ChainGenerationConfig
from hf_ebm.sampling.run import ChainGenerationOutput
from hf_ebm.sampling.sampler import check_run_fits
from hf_ebm.sampling.target import EnergyFunction, ExtraEnergy, Target, as_extra_energies
from hf_ebm.scoring.rows import Index, MaskedRows, Reducer, Runner, Sequences, to_device

if TYPE_CHECKING:
    from hf_ebm.sampling.configuration import ResolvedChainConfig

# Ids (n, T), the positions that are read masked, to logits (n, T, V).
LogitsFunction = Callable[[Tensor], Tensor]
_NUMBERS_AT_ONCE = 2**24
# Arguments of `AskedParticles.of`.
_PARTICLES: dict[str, Any] = {"num_particles": 64, "num_runs": 4, "run_keys": None, "num_moves": 1}


class GivenLogits(Runner):
    """Answers masked rows of sequences of one length with given logits.

    Args:
        logits: (T, W), of each position, whatever the other tokens are; or what they are asked of.
        length: T.
        mask_id: what stands where rows are masked.
        allowed: (W,) bool, where the logits shall lie; those of other tokens are 0, and never used.
    """

    def __init__(self, logits: Tensor | LogitsFunction, length: int, mask_id: int, allowed: Tensor):
        self.logits, self.length, self._mask_id, self.allowed = logits, length, mask_id, allowed
        self.num_rows, self.dtype = 0, torch.float64

    @property
    def mask_id(self) -> int:
        return self._mask_id

    def parts(self, sequences: Sequences, rows: MaskedRows, reduce: Reducer) -> tuple[list[Tensor], list[NDArray]]:
        numbers = np.arange(len(rows.source))
        size = max(1, _NUMBERS_AT_ONCE // (rows.read.shape[1] * len(self.allowed)))
        order = [numbers[first : first + size] for first in range(0, len(numbers), size)]
        results = []
        for own in order:
            n: Index = slice(None) if len(order) == 1 else torch.from_numpy(own)
            results.append(reduce(self._of(sequences, rows.some(n)), n))
        return results, order

    def _of(self, sequences: Sequences, rows: MaskedRows) -> Tensor:
        """(n, P, W) logits at what rows read."""
        read = to_device(rows.read, self.allowed.device)
        if isinstance(self.logits, Tensor):
            return self.logits[read]
        ids = to_device(rows.shown(sequences, rows.source.numpy(), self._mask_id), self.allowed.device)
        self.num_rows += len(ids)
        given = fitted_logits(f"logits: {name_of(self.logits)}", self.logits(ids), (*ids.shape,), self.allowed)
        return given.gather(1, read[..., None].expand(-1, -1, given.shape[-1]))


def fitted_logits(place: str, given: object, shape: tuple[int, ...], allowed: Tensor) -> Tensor:
    """Logits (…, V) in float32 or better as (…, W), 0 but for the tokens of `allowed` (W,) bool, on its device.

    Raises:
        ValueError: naming the place, for anything but numbers of that shape (…) for each allowed token, one V for all.

    Example:
        >>> fitted_logits("logits", [1.0, -torch.inf, 3.0], (), torch.tensor([True, False, True, False]))
        tensor([1., 0., 3., 0.])
    """
    size, needed = len(allowed), int(allowed.nonzero().max()) + 1
    try:
        found = torch.as_tensor(given).to_dense().to(allowed.device)
        fits = not found.is_complex() and tuple(found.shape[:-1]) == shape and found.shape[-1] >= needed
    except CONVERSION_ERRORS:
        fits = False
    if not fits:
        told = ", ".join(map(str, (*shape, needed)))
        raise ValueError(f"{place} must be logits of shape ({told}) or of more tokens, got {shown(given)}")
    found = found.to(torch.promote_types(found.dtype, torch.float32))[..., :size]
    return nn.functional.pad(found, (0, size - found.shape[-1])).masked_fill(~allowed, 0)


class EnergyTarget:
    """Any energy of token ids as a target `exp(-E(y)/τ)`, sampled as `EnergyModel.generate` samples its own.

    Args:
        energy: `ids (n, T) -> energies (n,)` in nats, on `device`; infinity forbids.
        tokens: the different ids that a position may hold.
        length: T, the tokens of a sequence.
        logits: what tokens are proposed from: (V,) for all positions, or (T, V), as tensors or lists; or a callable
            from ids (n, T), positions masked, to (n, T, V), as a masked language model; by default all alike. Proposals
            change how fast chains move, not what they sample.
        mask_token_id: what callables of logits are shown at masked positions, and prompts hold where something is to
            be filled; by default one above the greatest of `tokens`.
        device: where the callables get ids.

    Raises:
        ValueError: for anything that is not as told.

    Example:
        >>> target = EnergyTarget(lambda ids: ids.sum(1).double(), tokens=range(3), length=4)
        >>> out = target.generate(num_chains=200, num_epochs=20, seed=0)
        >>> expected = sum(k * 2.718281828**-k for k in range(3)) / sum(2.718281828**-k for k in range(3))
        >>> abs(float(out.energies[:, -1].mean()) / 4 - expected) < 0.1
        True
    """

    def __init__(
        self,
        energy: EnergyFunction,
        tokens: Sequence[int],
        length: int,
        logits: Tensor | LogitsFunction | None = None,
        mask_token_id: int | None = None,
        device: torch.device | str = "cpu",
    ):
        self.energy, self.length = as_callable("energy", energy), as_whole("length", length, 1)
        ids = wholes(tokens)
        if not ids:
            raise ValueError(f"tokens must be a list of one or more token ids, got {shown(tokens)}")
        self.tokens = sorted(set(ids))
        self.mask_token_id = (
            self.tokens[-1] + 1 if mask_token_id is None else as_whole("mask_token_id", mask_token_id, 0)
        )
        if self.mask_token_id in self.tokens:
            raise ValueError(f"mask_token_id must be none of tokens, got {self.mask_token_id}")
        try:
            self.device = torch.empty(0, device=device).device
        except CONVERSION_ERRORS as error:
            raise ValueError(f"device {shown(device)} cannot be used: {error}") from error
        self.logits = logits
        self._runner(self._support(self.mask_token_id + 1))  # whose checks are to be made now

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor | None = None,
        free_mask: Tensor | None = None,
        generation_config: ChainGenerationConfig | None = None,
        logits_processor: LogitsProcessorList | Processor | Sequence[Processor] | None = None,
        stopping_criteria: StoppingCriteriaList | Criterion | Sequence[Criterion] | None = None,
        streamer: Streamer | None = None,
        *,
        extra_energies: Sequence[ExtraEnergy | EnergyFunction] | ExtraEnergy | EnergyFunction | None = None,
        chain_keys: Sequence[tuple[int, int]] | None = None,
        save_state_to: str | os.PathLike | None = None,
        resume_from: str | os.PathLike | None = None,
        **overrides: Any,
    ) -> ChainGenerationOutput:
        """Samples sequences from `exp(-E/τ)` by block Metropolis–Hastings: see `EnergyModel.generate`.

        Args:
            input_ids: (B, T) where chains start, or prompts with masks; without any, all positions are filled by the
                warm start. Fixed positions may hold other ids than `tokens`.
            free_mask: (B, T), true at the positions to sample.
            resume_from: folder to go on from. The energy, its weight 1, and extra energies are to be given again.
            overrides: settings by name.

        Returns:
            `ChainGenerationOutput`; its `num_masked_rows` counts the sequences that the energy was evaluated of, and
            those that a callable of logits was.

        Raises:
            ValueError: for what cannot be done as asked, before any work: settings that mean nothing here are
                `lengths`, `delayed_acceptance` (there are no token terms to decide on first), and kernels and decoders
                that sample no target. For energies and logits that are no numbers, when they appear.
        """
        asked = ChainGenerationConfig.asked(generation_config)
        if streamer is not None:
            check_methods("streamer", streamer, "put", "end")
        further = as_callables("logits_processor", logits_processor)
        criteria = as_callables("stopping_criteria", stopping_criteria)
        extra = as_extra_energies(extra_energies)
        weighted = (*extra, (1.0, self.energy))
        if resume_from is not None:
            given = {"input_ids": input_ids, "free_mask": free_mask, "chain_keys": chain_keys}
            names = [name for name, value in given.items() if value is not None]
            if names:
                raise ValueError(f"resume_from: the chains come from the saved run; leave out {', '.join(names)}")
            run, config = resumed(resume_from, asked, overrides, weighted, None)
            job = going_on(run, config, lambda rows: self._target(rows, config, extra))
        else:
            config = asked.resolved(ChainGenerationConfig(), overrides)
            _check_settings(config)
            config.draw_seed()
            chains = self._chains(config, input_ids, free_mask, chain_keys)
            job = begun(chains, config, lambda rows: self._target(rows, config, extra), weighted)
        return run_job(job, further, criteria, streamer, save_state_to)

    @torch.no_grad()
    def sample_smc(
        self,
        input_ids: Tensor | None = None,
        free_mask: Tensor | None = None,
        generation_config: ChainGenerationConfig | None = None,
        *,
        target_cess: float = 0.9,
        ladder: Sequence[float] | None = None,
        extra_energies: Sequence[ExtraEnergy | EnergyFunction] | ExtraEnergy | EnergyFunction | None = None,
        **overrides: Any,
    ) -> SMCOutput:
        """Samples by sequential Monte Carlo, and estimates log Z: see `EnergyModel.sample_smc`.

        Args:
            input_ids, free_mask, extra_energies: as for `generate`.
            generation_config, target_cess, ladder: as for `EnergyModel.sample_smc`.
            overrides: settings by name, and `num_particles`, `num_runs`, `run_keys` and `num_moves`.

        Raises:
            ValueError: before any work, for what can't be done as asked.

        Example:
            >>> target = EnergyTarget(lambda ids: ids.sum(1).double(), tokens=range(2), length=4)
            >>> out = target.sample_smc(num_particles=32, seed=0)
            >>> abs(float(out.log_partition[0]) - 4 * 0.3133) < 0.1  # log(1 + 1/e)
            True
        """
        asked = self._particles(input_ids, free_mask, generation_config, overrides, extra_energies)
        return annealed(asked, *asked.ladders(target_cess, ladder))

    @torch.no_grad()
    def log_partition(
        self,
        input_ids: Tensor | None = None,
        free_mask: Tensor | None = None,
        generation_config: ChainGenerationConfig | None = None,
        *,
        method: str = "smc",
        upper: bool = True,
        target_cess: float = 0.9,
        ladder: Sequence[float] | None = None,
        extra_energies: Sequence[ExtraEnergy | EnergyFunction] | ExtraEnergy | EnergyFunction | None = None,
        **overrides: Any,
    ) -> LogPartitionOutput:
        """log Z of the target, exact or estimated: see `EnergyModel.log_partition`.

        Args:
            input_ids, free_mask, extra_energies: as for `generate`.
            generation_config, method, upper, target_cess, ladder: as for `EnergyModel.log_partition`.
            overrides: settings by name, those of chains among them, and `num_particles`, `num_runs` and `num_moves`.

        Raises:
            ValueError: before any work, for what can't be done as asked.

        Example:
            >>> target = EnergyTarget(lambda ids: ids.sum(1).double(), tokens=range(2), length=4)
            >>> target.log_partition(method="exact").log_partition  # 4 log(1 + 1/e)
            tensor([1.2530], dtype=torch.float64)
        """
        of_chains, overrides = parted(method, upper, overrides)
        if "run_keys" in overrides:
            raise ValueError("run_keys has no place in log_partition; use sample_smc")
        asked = self._particles(input_ids, free_mask, generation_config, overrides, extra_energies)
        return found_partition(asked, method, upper, target_cess, ladder, of_chains)

    def _particles(
        self,
        input_ids: Tensor | None,
        free_mask: Tensor | None,
        generation_config: ChainGenerationConfig | None,
        overrides: Mapping[str, Any],
        extra_energies: object,
    ) -> AskedParticles:
        numbers = {**_PARTICLES, **{name: value for name, value in overrides.items() if name in _PARTICLES}}
        settings = {name: value for name, value in overrides.items() if name not in numbers}
        asked = ChainGenerationConfig.asked(generation_config)
        config = settings_of_particles(asked, ChainGenerationConfig(), settings, has_prompts=False)
        _check_settings(config)
        extra = as_extra_energies(extra_energies)

        def chains_of(config: ResolvedChainConfig, keys: list[tuple[int, int]]) -> Chains:
            return self._chains(config, input_ids, free_mask, keys)

        def target_of(chains: Chains, config: ResolvedChainConfig) -> Target:
            return self._target(chains, config, extra)

        prompts = 1 if input_ids is None else len(as_ids("input_ids", input_ids))
        return AskedParticles.of(config, prompts, self.length, chains_of, target_of, **numbers)

    def _chains(
        self,
        config: ResolvedChainConfig,
        input_ids: Tensor | None,
        free_mask: Tensor | None,
        chain_keys: Sequence[tuple[int, int]] | None,
    ) -> Chains:
        if input_ids is None and free_mask is not None:
            raise ValueError("free_mask was given without input_ids")
        ids = torch.full((1, self.length), self.mask_token_id) if input_ids is None else as_ids("input_ids", input_ids)
        if ids.shape[1] != self.length or bool((ids < 0).any()):
            raise ValueError(f"input_ids must be token ids of shape (batch, {self.length}), got {shown(input_ids)}")
        keys = checked_keys(chain_keys, len(ids), config.num_chains)
        check_run_fits(config, len(keys), self.length)
        which = torch.tensor([key.prompt for key in keys])
        ids, free = ids.cpu()[which], as_mask("free_mask", free_mask, ids).cpu()[which]
        bounds = torch.zeros(len(keys), dtype=torch.long), torch.full((len(keys),), self.length)
        return chains_of(config, keys, Sequences(ids, *bounds), free, free_mask is None, self.mask_token_id)

    def _target(self, chains: Chains, config: ResolvedChainConfig, extra: tuple[ExtraEnergy, ...]) -> Target:
        size = max(int(chains.ids.max()), self.mask_token_id) + 1
        support = self._support(size, config.suppress_tokens)
        runner = self._runner(self._support(size))
        name = f"energy: {name_of(self.energy)}"

        def energy(ids: Tensor) -> Tensor:
            runner.num_rows += len(ids)
            found = row_numbers(name, self.energy(ids), len(ids), torch.device("cpu"))
            if bool((found.isnan() | (found == -torch.inf)).any()):
                raise ValueError(f"{name} returned NaN or minus infinity")
            return found

        bounds = chains.free, chains.start, chains.stop
        return Target(runner, None, *bounds, support, extra=(*extra, (1.0, energy)))

    def _support(self, size: int, suppress_tokens: Sequence[int] | None = None) -> Tensor:
        """(W,) bool: the tokens a free position may hold."""
        kept = sorted(set(self.tokens) - set(suppress_tokens or ()))
        if not kept:
            raise ValueError("suppress_tokens: no token is left to propose")
        return torch.zeros(max(size, self.tokens[-1] + 1), dtype=torch.bool, device=self.device).index_fill(
            0, torch.tensor(kept, device=self.device), True
        )

    def _runner(self, allowed: Tensor) -> GivenLogits:
        logits = self.logits
        if logits is None:
            logits = torch.zeros(self.length, len(allowed), device=self.device)
        elif not callable(logits):
            rows = [listed(row) for row in listed(logits) or []]
            of_each = getattr(logits, "ndim", 1) == 2 or any(row is not None for row in rows)
            logits = fitted_logits("logits", logits, (self.length,) if of_each else (), allowed)
            logits = logits.expand(self.length, -1)
        if isinstance(logits, Tensor) and not bool(logits.isfinite().all()):
            raise ValueError("logits must be finite for each of tokens")
        return GivenLogits(logits, self.length, self.mask_token_id, allowed)


def _check_settings(config: ResolvedChainConfig) -> None:
    """Raises `ValueError` for settings that mean nothing for an energy of whole sequences."""
    if config.lengths is not None:
        raise ValueError("lengths has no effect with an EnergyTarget, whose sequences have its length")
    if not config.targets_energy:
        raise ValueError(f"{config.sampler} samples no stated target, so the energy would have no effect")
    if config.delayed_acceptance is not None:
        raise ValueError(
            "delayed_acceptance has no effect with an EnergyTarget: there are no token terms to decide on first"
        )
