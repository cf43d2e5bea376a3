"""`EnergyModel.log_partition`: log Z of prompts or lengths, exact or estimated, with an estimate from above."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from hf_ebm.checks import as_number, as_truth, check_choice, shown
from hf_ebm.model_modes import evaluation_mode, model_output
from hf_ebm.models.energy.chains import Chains
from hf_ebm.models.energy.generation_energy import begun, run_job
from hf_ebm.models.energy.particles import AskedParticles, by_prompt, named_rows
from hf_ebm.models.energy.smc_energy import annealed, particles_of
from hf_ebm.random_state import stream_seed
from hf_ebm.runtime import check_fits, where_float64_is
from hf_ebm.sampling.configuration import ChainGenerationConfig
from hf_ebm.sampling.constraints import at_least_away
from hf_ebm.sampling.fill_estimates import LogPartition
from hf_ebm.sampling.run import ChainGenerationOutput
from hf_ebm.sampling.sampler import ChainKey, check_run_fits
from hf_ebm.sampling.smc import falling, fixed, log_mean_weight, reweighting, stepping_stones
from hf_ebm.sampling.target import EnergyFunction, ExtraEnergy, Target
from hf_ebm.scoring.joint_fills import FillSpace, Slot, independent_tables, joint_tables, summarized
from hf_ebm.scoring.logits_cache import SparingRunner

if TYPE_CHECKING:
    from hf_ebm.models.energy.modeling_energy import EnergyModel
    from hf_ebm.sampling.configuration import ResolvedChainConfig

METHODS = ("exact", "smc", "stepping_stone")
# Sequences that "exact" weighs at most.
_MOST_SEQUENCES = 2**30
# Numbers of the seed of chains, and of the particles that start at their samples.
_CHAINS, _REVERSE = 1, 2
# Settings of the chains, where none are given, and which may be.
NUM_CHAINS, NUM_EPOCHS = 8, 64
_OF_CHAINS = ("num_chains", "num_epochs", "burn_in", "thinning", "replica_temperatures")


@model_output
class LogPartitionOutput(ModelOutput):
    """log Z of `exp(-E/τ)` of B prompts, over all sequences that may be sampled, in nats (float64).

    Args:
        log_partition: (B,) log Z, or an estimate; that of `"smc"` isn't above it in expectation.
        error: (B,) its standard error over independent runs; 0 where it is exact, NaN for one run.
        upper: (B,) an estimate that isn't below log Z in expectation where the chains' samples are those of the target,
            NaN where none was asked for; log Z where that is exact.
        upper_error: (B,) its standard error.
        method: how they were found.
        num_masked_rows: masked rows run through the masked language model.
        seed: the seed used.
    """

    log_partition: Tensor
    error: Tensor
    upper: Tensor
    upper_error: Tensor
    method: str
    num_masked_rows: int
    seed: int

    @property
    def gap(self) -> Tensor:
        """(B,) `upper - log_partition`: how far the two estimates are apart."""
        return self.upper - self.log_partition


@torch.no_grad()
def log_partition(
    model: EnergyModel,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    free_mask: Tensor | None = None,
    generation_config: ChainGenerationConfig | None = None,
    *,
    method: str = "smc",
    upper: bool = True,
    num_particles: int = 64,
    num_runs: int = 4,
    target_cess: float = 0.9,
    ladder: Sequence[float] | None = None,
    num_moves: int = 1,
    encoder_input_ids: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    extra_energies: Sequence[ExtraEnergy | EnergyFunction] | ExtraEnergy | EnergyFunction | None = None,
    token_budget: int | None = None,
    **overrides: Any,
) -> LogPartitionOutput:
    """log Z of each prompt: the logarithm of the sum of `exp(-E/τ)` over all that `generate` may put at free positions.

    With it, `-E(y)/τ - log Z` is the log probability of a text y of that prompt, or length.

    Args:
        input_ids, attention_mask, free_mask: prompts as for `generate`; without any, `lengths=` says how many tokens.
        generation_config: as for `sample_smc`.
        method: `"exact"` enumerates: `m K^(m-1)` masked rows for m free positions of K tokens each. `"smc"` anneals, as
            `sample_smc` does: the mean of `num_runs` estimates of Z, which are unbiased, so that its logarithm is below
            log Z in expectation (Jensen's inequality). `"stepping_stone"` (Xie et al. 2011) starts at the fill's
            estimate at the ladder's first β and multiplies means of `exp(-Δβ E/τ)` over chains at each β, which are
            replicas of each other; it is no bound.
        upper: whether an estimate from above is made (bidirectional Monte Carlo, Grosse, Ghahramani & Adams 2015): the
            same annealing backwards, started at samples of chains, estimates 1/Z. It is a bound in expectation if those
            are samples of the target. Chains give such in the long run only: where they miss a mode it is too low, and
            a small gap says no more than that both found the same modes. `num_chains` (of each run), `num_epochs`,
            `burn_in`, `thinning` and `replica_temperatures` are settings of these chains.
        num_particles, num_runs, target_cess, ladder, num_moves: as for `sample_smc`.
        encoder_input_ids, encoder_attention_mask, extra_energies, token_budget, overrides: as for `sample_smc`.

    Raises:
        ValueError: before any work, for what `sample_smc` refuses, settings that a method has no use for, and too many
            sequences to enumerate.

    Example:
        >>> from hf_ebm.assets import load_embedded
        >>> model, tokenizer = load_embedded()
        >>> prompt = tokenizer("and [MASK] said unto him", return_tensors="pt")
        >>> exact = model.log_partition(**prompt, method="exact")
        >>> found = model.log_partition(**prompt, num_particles=16, num_chains=2, num_epochs=8, seed=0)
        >>> bool(exact.error == 0), found.log_partition.shape, found.method
        (True, torch.Size([1]), 'smc')
    """
    inputs = {
        "input_ids": input_ids, "attention_mask": attention_mask, "free_mask": free_mask,
        "encoder_input_ids": encoder_input_ids, "encoder_attention_mask": encoder_attention_mask,
    }  # fmt: skip
    of_chains, overrides = parted(method, upper, overrides)
    with evaluation_mode(model):
        asked = particles_of(
            model, inputs, generation_config, overrides, extra_energies, token_budget,
            num_particles=num_particles, num_runs=num_runs, run_keys=None, num_moves=num_moves,
        )  # fmt: skip
        return found_partition(asked, method, upper, target_cess, ladder, of_chains)


def parted(method: object, upper: object, overrides: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of the chains alone, complete, and the others. Raises `ValueError` for such that can't be.

    Those that are given where a method runs no chains are refused.
    """
    check_choice("method", method, METHODS)
    given = {name: value for name, value in overrides.items() if value is not None}
    of_chains = {name: value for name, value in given.items() if name in _OF_CHAINS}
    if of_chains and (method == "exact" or (method == "smc" and not as_truth("upper", upper))):
        raise ValueError(f"{next(iter(of_chains))} has no effect without chains; leave it unset")
    if method == "stepping_stone" and "replica_temperatures" in of_chains:
        raise ValueError("replica_temperatures: with 'stepping_stone' they are those of the ladder; give ladder")
    settings = {"num_chains": NUM_CHAINS, "num_epochs": NUM_EPOCHS} | ChainGenerationConfig(**of_chains).settings()
    settings.setdefault("burn_in", settings["num_epochs"] // 2)
    return ChainGenerationConfig(**settings).settings(), {
        name: value for name, value in given.items() if name not in of_chains
    }


def found_partition(
    asked: AskedParticles,
    method: str,
    upper: bool,
    target_cess: float,
    ladder: Sequence[float] | None,
    of_chains: dict[str, Any],
) -> LogPartitionOutput:
    """log Z of the prompts of particles by a method: see `log_partition`."""
    upper = as_truth("upper", upper)
    as_number("target_cess", target_cess, above=0, below=1)
    if method == "exact":
        if ladder is not None:
            raise ValueError("ladder has no effect with method='exact'; leave it unset")
        return _output(method, asked, *_enumerated(asked))
    if upper or method == "stepping_stone":
        config = _config_of_chains(asked, of_chains)
        check_run_fits(config, len(asked.keys) * config.num_chains, asked.length)
    ladders, num_rows = asked.ladders(target_cess, ladder)
    above = LogPartition(*torch.full((2, asked.num_prompts), torch.nan, dtype=torch.float64))
    samples: list[Tensor] = []
    if method == "smc":
        out = annealed(asked, ladders, num_rows)
        found, num_rows = LogPartition(out.log_partition, out.error), out.num_masked_rows
        if upper:
            chains = _chains(asked, asked.keys, of_chains)
            samples, num_rows = _of_runs(chains.samples, len(asked.keys)), num_rows + chains.num_masked_rows
    else:
        found, samples, more = _stepping_stones(asked, ladders, of_chains)
        num_rows += more
    if upper:
        above, more = _from_above(asked, ladders, samples)
        num_rows += more
    return _output(method, asked, found, above, num_rows)


def _output(
    method: str, asked: AskedParticles, found: LogPartition, upper: LogPartition, num_rows: int
) -> LogPartitionOutput:
    return LogPartitionOutput(
        log_partition=found.value, error=found.error, upper=upper.value, upper_error=upper.error,
        method=method, num_masked_rows=num_rows, seed=asked.config.seed,
    )  # fmt: skip


def _chains(asked: AskedParticles, keys: Sequence[ChainKey], of_chains: Mapping[str, Any]) -> ChainGenerationOutput:
    """Chains of some runs, which have as many each."""
    config = _config_of_chains(asked, of_chains)
    number = config.num_chains
    chains = asked.chains_of(config, [(key.prompt, key.chain * number + own) for key in keys for own in range(number)])
    job = begun(chains, config, lambda rows: asked.target_of(rows, config), ())
    return run_job(job, [], [], None, None)


def _config_of_chains(asked: AskedParticles, of_chains: Mapping[str, Any]) -> ResolvedChainConfig:
    config = ChainGenerationConfig(**of_chains).resolved(asked.config, {})
    config.seed = stream_seed(asked.config.seed, _CHAINS)
    return config


def _of_runs(values: Tensor, runs: int) -> list[Tensor]:
    """What chains (C, n, …) say of their runs: (C / R n, …) of each."""
    return list(values.reshape(runs, -1, *values.shape[2:]))


def _stepping_stones(
    asked: AskedParticles, ladders: Tensor, of_chains: Mapping[str, Any]
) -> tuple[LogPartition, list[Tensor], int]:
    """Estimates from fills and chains at each β of the ladders, with samples of each run, and the rows that took."""
    annealing, chains = asked.prepared(asked.keys, asked.config.seed)
    with named_rows(annealing):
        fills = annealing.filled(chains.ids)
    tau, num_rows = asked.config.energy_temperature, annealing.target.runner.num_rows
    logs = log_mean_weight(fills.log_weights + reweighting(ladders[:, 0], fills.energies / tau))
    samples: dict[int, Tensor] = {}
    for prompt in dict.fromkeys(key.prompt for key in asked.keys):
        rows = [row for row, key in enumerate(asked.keys) if key.prompt == prompt]
        betas = ladders[rows[0]].unique()
        replicas = {"replica_temperatures": (1 / betas).flip(0).tolist()} if len(betas) > 1 else {}
        out = _chains(asked, [asked.keys[row] for row in rows], {**of_chains, **replicas})
        if out.replicas is not None:
            energies = out.replicas.energies[..., torch.tensor(out.kept_epochs)].flip(1).transpose(1, 2)
            logs[rows] += stepping_stones(betas, torch.stack(_of_runs(energies, len(rows))) / tau)
        samples |= dict(zip(rows, _of_runs(out.samples, len(rows)), strict=True))
        num_rows += out.num_masked_rows
    return by_prompt(logs, asked.keys, asked.num_prompts), [samples[row] for row in range(len(asked.keys))], num_rows


def _from_above(asked: AskedParticles, ladders: Tensor, samples: list[Tensor]) -> tuple[LogPartition, int]:
    """Estimates by annealing from samples (n, T) of each run to the fill, and the masked rows that took."""
    annealing, chains = asked.prepared(asked.keys, stream_seed(asked.config.seed, _REVERSE))
    ids = chains.ids.clone()
    for own, start in zip(samples, ids.split(asked.num_particles), strict=True):
        start[:, : own.shape[1]] = own[torch.arange(len(start)) * len(own) // len(start)]
    with named_rows(annealing):
        particles, _ = annealing.annealed(annealing.started(ids), 1.0, 0.0, fixed(falling(ladders)))
        particles = annealing.back_to_fill(particles)
    found = by_prompt(log_mean_weight(particles.log_weights), asked.keys, asked.num_prompts)
    return found._replace(value=-found.value), annealing.target.runner.num_rows


def _enumerated(asked: AskedParticles) -> tuple[LogPartition, LogPartition, int]:
    """log Z of each prompt by enumeration, twice, and the masked rows that took."""
    keys = [ChainKey(prompt, 0) for prompt in range(asked.num_prompts)]
    annealing, chains = replace(asked, num_particles=1).prepared(keys, 0)
    target, runner = annealing.target, annealing.target.runner
    while isinstance(runner, SparingRunner):  # no two rows are alike, and they are of no particles
        runner = runner.runner
    spaces = [_space(target, chains, prompt) for prompt in range(asked.num_prompts)]
    dtype = torch.float64 if runner.dtype == torch.float64 else torch.float32
    found = LogPartition(*torch.zeros(2, asked.num_prompts, dtype=torch.float64))
    for prompt, space in enumerate(spaces):
        if target.energy is None:  # there are no terms of tokens
            every = [torch.arange(size, device=space.ids.device) for size in space.sizes]
            tables = independent_tables([own.double() * 0 for own in every], every)
        else:
            tables = joint_tables(runner, space, target.energy, dtype)
        further = _further(asked, target, chains, prompt)
        summary = summarized(tables, space, asked.config.energy_temperature, 1, [], further)
        found.value[prompt] = summary.log_partition
    return found, found, runner.num_rows


def _space(target: Target, chains: Chains, row: int) -> FillSpace:
    """All that may stand at the free positions of one prompt. Raises `ValueError` for too many sequences."""
    columns = slice(int(chains.start[row]), int(chains.stop[row]))
    device = where_float64_is(target.support.device)
    support, slots = target.support.cpu(), []
    for position in target.free[row, columns].nonzero():
        tokens = target.position_tokens
        own = support if tokens is None else tokens.sets[tokens.number[row, columns][position]][0]
        slots.append(Slot(position.to(device), own.nonzero().to(device)))
    sizes = [len(slot.candidates) for slot in slots]
    number, table = math.prod(sizes), math.prod(sizes[1:])
    if number > _MOST_SEQUENCES:
        raise ValueError(
            f"method: prompt {row} has {shown(number)} sequences, 'exact' enumerates up to {_MOST_SEQUENCES}; "
            "'smc' estimates"
        )
    check_fits(12 * table, f"method: of {shown(table)} sequences each first token has, energies and weights take")
    context = chains.context
    if context is not None:
        which = torch.tensor([row])
        context = context.rows(which, which)
        context = context._replace(by_token={name: own[:, columns] for name, own in context.by_token.items()})
    return FillSpace(chains.ids[row, columns].to(device), tuple(slots), context)


def _further(asked: AskedParticles, target: Target, chains: Chains, row: int) -> Callable[[Tensor], Tensor] | None:
    """Extra energies of a prompt's sequences (n, L), infinite where `avoid` forbids one."""
    avoid, columns = asked.config.avoid, slice(int(chains.start[row]), int(chains.stop[row]))
    if not target.extra and avoid is None:
        return None

    def further(ids: Tensor) -> Tensor:
        whole = chains.ids[row].repeat(len(ids), 1)
        whole[:, columns] = ids.cpu()
        added = target.extra_energy(whole)
        if avoid is not None:
            ends = torch.full((len(ids),), columns.start), torch.full((len(ids),), columns.stop)
            away = at_least_away(avoid, asked.config.min_distance, *ends)
            added = added if away is None else added.masked_fill(~away(whole), torch.inf)
        return added.to(ids.device)

    return further
