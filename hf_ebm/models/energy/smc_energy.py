"""`EnergyModel.sample_smc`: sequential Monte Carlo samples and log Z. A thin layer over `hf_ebm.sampling.smc`."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput, logging

from hf_ebm.checks import as_ids, as_number, as_whole, listed, number, shown
from hf_ebm.model_modes import evaluation_mode, model_output
from hf_ebm.models.energy.chains import Chains, build_chains, check_avoid, checked_keys, constrained, proposal_support
from hf_ebm.models.energy.generation_energy import model_target
from hf_ebm.models.energy.inputs import is_model_input
from hf_ebm.random_state import generator_of, stream_seed
from hf_ebm.sampling.configuration import ChainGenerationConfig
from hf_ebm.sampling.fill_estimates import LogPartition, estimated_log_partition
from hf_ebm.sampling.kernels import KERNELS
from hf_ebm.sampling.proposals import proposal_of
from hf_ebm.sampling.sampler import ChainKey
from hf_ebm.sampling.smc import Annealing, Levels, Particles, adaptive, fixed, log_mean_weight, systematic
from hf_ebm.sampling.target import EnergyFunction, ExtraEnergy, as_extra_energies
from hf_ebm.scoring.rows import BadLogitsError, attended_mask

if TYPE_CHECKING:
    from hf_ebm.models.energy.modeling_energy import EnergyModel
    from hf_ebm.sampling.configuration import ResolvedChainConfig

logger = logging.get_logger(__name__)

# Number of the seed of runs that choose ladders.
_PILOT = 0
# Settings of chains that annealed particles have no use for.
_OF_CHAINS_ALONE = (
    "decoder", "num_chains", "num_epochs", "burn_in", "thinning", "accept_all_epochs", "final_block_size", "replica_temperatures",
    "energy_temperature_decay", "min_energy_temperature", "warm_start",
)  # fmt: skip


@model_output
class SMCOutput(ModelOutput):
    """R runs of N particles each, a run's one after the other, for B prompts; all on the CPU.

    The mean of `exp(log_weights)` over a run's particles is its estimate of Z, and over all particles of a prompt that
    of the prompt; the weights of a prompt's particles, normalized, are those of samples of the target.

    Args:
        sequences: (R N, T) tokens of the particles, padded on the right with the pad token.
        attention_mask: (R N, T), 0 at padding.
        log_weights: (R, N) float64; minus infinity where constraints forbid a particle.
        energies: (R, N) energies in nats, extra energies included (float64).
        log_partition: by prompt its log Z, in nats, with the standard error over its runs (NaN for one run); that of
            `exp(-E/τ)` over all sequences that may be sampled.
        levels: β of each run at each of its levels (R, S), effective sample sizes, and where particles were resampled;
            see `hf_ebm.sampling.smc.Levels`.
        ancestors: (R, N) which of a run's first particles each comes from.
        prompt_indices, run_indices: (R,) prompt of each run and its number among that prompt's runs.
        num_masked_rows: masked rows run through the masked language model.
        seed: the seed used.
    """

    sequences: Tensor
    attention_mask: Tensor
    log_weights: Tensor
    energies: Tensor
    log_partition: dict[int, LogPartition]
    levels: Levels
    ancestors: Tensor
    prompt_indices: Tensor
    run_indices: Tensor
    num_masked_rows: int
    seed: int

    def surviving_ancestors(self) -> Tensor:
        """(R,) how many of a run's first particles have descendants of weight above 0."""
        alive = self.log_weights > -torch.inf
        return torch.tensor([len(own[which].unique()) for own, which in zip(self.ancestors, alive, strict=True)])

    def draw(self, count: int, prompt: int = 0, seed: int = 0) -> Tensor:
        """(count, T) equally weighted samples of a prompt, from all of its runs by systematic resampling.

        Raises:
            ValueError: for a prompt without runs, or whose particles all have weight 0.
        """
        which = self.prompt_indices == as_whole("prompt", prompt, 0)
        log_weights = self.log_weights[which].flatten()
        if not bool((log_weights > -torch.inf).any()):
            known = sorted(set(self.prompt_indices.tolist()))
            raise ValueError(f"prompt must be one of {known} that has particles of weight above 0, got {prompt}")
        uniform = torch.from_numpy(generator_of(as_whole("seed", seed, 0)).random(1))
        chosen = systematic(log_weights[None], uniform, as_whole("count", count, 1))[0]
        return self.sequences.view(*self.log_weights.shape, -1)[which].flatten(0, 1)[chosen]

    def mean_energy(self, prompt: int = 0) -> float:
        """The mean energy of the target, by the weighted particles of a prompt."""
        which = self.prompt_indices == prompt
        log_weights, energies = self.log_weights[which].flatten(), self.energies[which].flatten()
        alive = log_weights > -torch.inf
        return float((log_weights[alive].softmax(0) * energies[alive]).sum())


@torch.no_grad()
def sample_smc(
    model: EnergyModel,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    free_mask: Tensor | None = None,
    generation_config: ChainGenerationConfig | None = None,
    *,
    num_particles: int = 64,
    num_runs: int = 4,
    run_keys: Sequence[tuple[int, int]] | None = None,
    target_cess: float = 0.9,
    ladder: Sequence[float] | None = None,
    num_moves: int = 1,
    encoder_input_ids: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    extra_energies: Sequence[ExtraEnergy | EnergyFunction] | ExtraEnergy | EnergyFunction | None = None,
    token_budget: int | None = None,
    **overrides: Any,
) -> SMCOutput:
    """Samples from `exp(-E/τ)` by sequential Monte Carlo over inverse temperatures, with an estimate of log Z.

    Del Moral, Doucet & Jasra (2006). Particles fill all free positions one at a time, in a random order, by the model's
    conditionals, and get the weight `exp(-β E/τ) / q`, q being the fill's probability. Then β rises to 1; where their
    effective number falls below half they are resampled (systematically), and all move by epochs of a kernel. A run's
    estimate of Z is unbiased: without a `ladder` a pilot run of each prompt, which counts for nothing else, chooses β
    (Zhou, Johansen & Aston 2016).

    Args:
        input_ids, attention_mask, free_mask: as for `generate`; what stands at free positions doesn't matter.
        generation_config: settings of the kernel and its blocks, over which those among `overrides` go.
        num_particles: N, of each run.
        num_runs: independent runs of each prompt, which say how far log Z can be trusted.
        run_keys: pairs (prompt, run) of the runs to do; by default `num_runs` for every prompt. A run is the same
            whichever others are done beside it, so runs can be divided over calls and processes.
        target_cess: conditional effective sample size of each step, as a share of the particles.
        ladder: rising inverse temperatures above 0, the last of them 1, of all runs.
        num_moves: epochs of the kernel after each step.
        encoder_input_ids, encoder_attention_mask, extra_energies, token_budget: as for `generate`. Particles that break
            `avoid` or get an infinite energy weigh nothing.
        overrides: settings by name, and what else the model reads, as for `generate`.

    Returns:
        `SMCOutput`, all of it on the CPU.

    Raises:
        ValueError: before any work, for what can't be done as asked: settings of chains alone, kernels that sample no
            stated target, `max_changes`, which counts from a start, and lengths that are drawn, which have no one Z.

    Example:
        >>> from hf_ebm.assets import load_embedded
        >>> model, tokenizer = load_embedded()
        >>> prompt = tokenizer("and [MASK] said unto [MASK],", return_tensors="pt")
        >>> out = model.sample_smc(**prompt, num_particles=8, num_runs=2, seed=0)
        >>> out.log_weights.shape, out.draw(3).shape[0], len(out.log_partition)
        (torch.Size([2, 8]), 3, 1)
    """
    inputs = {
        "input_ids": input_ids, "attention_mask": attention_mask, "free_mask": free_mask,
        "encoder_input_ids": encoder_input_ids, "encoder_attention_mask": encoder_attention_mask,
    }  # fmt: skip
    with evaluation_mode(model):
        asked = asked_particles(
            model, inputs, generation_config, overrides, num_particles, num_runs, run_keys, num_moves,
            extra_energies, token_budget,
        )  # fmt: skip
        return asked.sampled(*asked.ladders(target_cess, ladder))


@dataclass(frozen=True)
class AskedParticles:
    """What arguments of `sample_smc` ask for, checked: how particles are made, and of which runs."""

    model: EnergyModel
    inputs: dict[str, Tensor | None]
    further_inputs: dict[str, Any]
    config: ResolvedChainConfig
    extra: tuple[ExtraEnergy, ...]
    keys: list[ChainKey]
    num_particles: int
    num_moves: int
    token_budget: int | None

    def prepared(self, keys: list[ChainKey], seed: int) -> tuple[Annealing, Chains]:
        """The annealing of some runs with a seed of their own, and the chains that are their particles."""
        config, own = copy.copy(self.config), range(self.num_particles)
        config.seed = seed
        chain_keys = [(prompt, run * self.num_particles + number) for prompt, run in keys for number in own]
        support = proposal_support(self.model, config.suppress_tokens)
        chains = build_chains(self.model, config, chain_keys, self.inputs, None, self.further_inputs)
        target = model_target(self.model, chains, config, support, self.extra, self.token_budget)
        target = constrained(target, config, chains.keys, chains.ids)
        proposal = proposal_of(config, support)
        return Annealing(keys, self.num_particles, config, target, proposal, self.num_moves), chains

    def ladders(self, target_cess: float, ladder: Sequence[float] | None) -> tuple[Tensor, int]:
        """The β of each run (R, S), and the masked rows that it took to find them.

        Without a given ladder a pilot run for each prompt, which is used for nothing else, finds them: chosen by the
        particles that they weigh, β would favour small estimates.
        """
        schedule, given = adaptive(as_number("target_cess", target_cess, above=0, below=1)), as_ladder(ladder)
        if given is not None:
            return given.expand(len(self.keys), -1), 0
        pilots = [ChainKey(prompt, 0) for prompt in dict.fromkeys(key.prompt for key in self.keys)]
        annealing, chains = self.prepared(pilots, stream_seed(self.config.seed, _PILOT))
        with named_rows(annealing):
            _, levels = annealing.annealed(annealing.filled(chains.ids), 0.0, 1.0, schedule)
        found = levels.beta.where(levels.beta.isfinite(), 1.0)  # a run that is done stays at 1
        found = found if found.shape[1] else torch.ones(len(pilots), 1, dtype=torch.float64)
        number = {pilot.prompt: row for row, pilot in enumerate(pilots)}
        return found[[number[key.prompt] for key in self.keys]], annealing.target.runner.num_rows

    def sampled(self, ladders: Tensor, num_rows: int) -> SMCOutput:
        """Anneals from the fill to the target along ladders (R, S), which took `num_rows`."""
        annealing, chains = self.prepared(self.keys, self.config.seed)
        with named_rows(annealing):
            particles, levels = annealing.annealed(annealing.filled(chains.ids), 0.0, 1.0, fixed(ladders))
        _warn_of_dead_runs(particles)
        return SMCOutput(
            sequences=particles.state.ids,
            attention_mask=attended_mask(chains.start, chains.stop, chains.ids.shape[1]).long(),
            log_weights=particles.log_weights,
            energies=particles.energies,
            log_partition=by_prompt(log_mean_weight(particles.log_weights), self.keys),
            levels=levels,
            ancestors=particles.ancestors,
            prompt_indices=torch.tensor([key.prompt for key in self.keys]),
            run_indices=torch.tensor([key.chain for key in self.keys]),
            num_masked_rows=num_rows + annealing.target.runner.num_rows,
            seed=self.config.seed,
        )


def asked_particles(
    model: EnergyModel,
    inputs: dict[str, Tensor | None],
    generation_config: ChainGenerationConfig | None,
    overrides: dict[str, Any],
    num_particles: int,
    num_runs: int,
    run_keys: Sequence[tuple[int, int]] | None,
    num_moves: int,
    extra_energies: object,
    token_budget: int | None,
) -> AskedParticles:
    """Checks arguments of `sample_smc`."""
    num_particles = as_whole("num_particles", num_particles, 2)
    num_runs, num_moves = as_whole("num_runs", num_runs, 1), as_whole("num_moves", num_moves, 0)
    further = {name: value for name, value in overrides.items() if is_model_input(model.mlm, name)}
    settings, ids = {name: value for name, value in overrides.items() if name not in further}, inputs["input_ids"]
    config = _settings(model, ChainGenerationConfig.asked(generation_config), settings, ids is not None)
    check_avoid(model, config)
    lengths = len(config.lengths) if isinstance(config.lengths, list) else 1
    keys = checked_keys(run_keys, lengths if ids is None else len(as_ids("input_ids", ids)), num_runs, "run")
    extra = as_extra_energies(extra_energies)
    return AskedParticles(model, inputs, further, config, extra, keys, num_particles, num_moves, token_budget)


def _settings(
    model: EnergyModel, asked: ChainGenerationConfig, overrides: dict[str, Any], has_prompts: bool
) -> ResolvedChainConfig:
    """Complete settings, those of chains alone at their defaults. Raises `ValueError` for such that are asked for."""
    own = asked.settings() | {name: value for name, value in overrides.items() if value is not None}
    idle = [name for name in _OF_CHAINS_ALONE if name in own]
    if idle:
        raise ValueError(f"{idle[0]} has no effect with annealed particles; leave it unset")
    if has_prompts and "lengths" in own:
        raise ValueError("lengths was given together with input_ids; it is for sampling from nothing")
    base = {name: value for name, value in model.generation_config.settings().items() if name not in _OF_CHAINS_ALONE}
    config = asked.resolved(ChainGenerationConfig(**base), overrides)
    if not KERNELS[config.kernel].leaves_invariant:
        raise ValueError(f"kernel {config.kernel!r} samples no stated target, so there is nothing to anneal to")
    if config.max_changes is not None:
        raise ValueError("max_changes counts from where a chain starts; particles fill all free positions anew")
    if has_prompts:
        config.lengths = None
    if isinstance(config.lengths, dict):
        raise ValueError("lengths: those that are drawn have no one Z; give a list, with a prompt for each length")
    config.num_epochs = 1  # of what is kept
    config.draw_seed()
    return config


def as_ladder(ladder: object) -> Tensor | None:
    """Inverse temperatures (S,), float64. Raises `ValueError` unless they rise from above 0 to 1."""
    if ladder is None:
        return None
    numbers = [number(own) for own in listed(ladder) or []]
    found = [own for own in numbers if own is not None]
    rising = all(one < other for one, other in zip([0.0, *found], found, strict=False))
    if not found or len(found) < len(numbers) or not rising or found[-1] != 1:
        raise ValueError(f"ladder must be rising numbers above 0, the last of them 1, got {shown(ladder)}")
    return torch.tensor(found, dtype=torch.float64)


def by_prompt(logs: Tensor, keys: Sequence[ChainKey]) -> dict[int, LogPartition]:
    """Of each prompt the logarithm of the mean of `exp(logs)` (R,) over its runs, and its standard error."""
    found = {}
    for prompt in dict.fromkeys(key.prompt for key in keys):
        own = logs[torch.tensor([key.prompt == prompt for key in keys])]
        if len(own) == 1 or not bool((own > -torch.inf).any()):
            found[prompt] = LogPartition(float(own.logsumexp(0)) - math.log(len(own)), math.nan)
        else:
            found[prompt] = estimated_log_partition(own)
    return found


@contextmanager
def named_rows(annealing: Annealing) -> Iterator[None]:
    """Errors of logits say whose they are."""
    try:
        yield
    except BadLogitsError as error:
        key = annealing.keys[error.row // annealing.num_particles]
        raise BadLogitsError(error.row, error.position, f"prompt {key.prompt}, run {key.chain}: row") from error


def _warn_of_dead_runs(particles: Particles) -> None:
    dead = (particles.log_weights == -torch.inf).all(1)
    if bool(dead.any()):
        logger.warning(
            f"{int(dead.sum())} of {len(dead)} runs have no particle that the constraints allow: their estimate of Z "
            "is 0. More particles, or a finite penalty in place of a constraint, may help."
        )
