"""`EnergyModel.sample_smc`: sequential Monte Carlo samples and log Z. A thin layer over `hf_ebm.sampling.smc`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput, logging

from hf_ebm.checks import as_ids, as_whole
from hf_ebm.model_modes import evaluation_mode, model_output
from hf_ebm.models.energy.chains import Chains, build_chains, check_avoid, longest_of, proposal_support
from hf_ebm.models.energy.generation_energy import model_target
from hf_ebm.models.energy.inputs import is_model_input
from hf_ebm.models.energy.particles import AskedParticles, by_prompt, named_rows, settings_of_particles
from hf_ebm.random_state import generator_of
from hf_ebm.sampling.configuration import ChainGenerationConfig
from hf_ebm.sampling.smc import Levels, fixed, log_mean_weight, systematic
from hf_ebm.sampling.target import EnergyFunction, ExtraEnergy, Target, as_extra_energies
from hf_ebm.scoring.logits_cache import EachRowOnce
from hf_ebm.scoring.rows import attended_mask

if TYPE_CHECKING:
    from hf_ebm.models.energy.modeling_energy import EnergyModel
    from hf_ebm.sampling.configuration import ResolvedChainConfig

logger = logging.get_logger(__name__)


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
        log_partition: (B,) estimates of log Z of `exp(-E/τ)` over all sequences that may be sampled, in nats (float64);
            NaN for a prompt without runs here.
        error: (B,) its standard error over independent runs, NaN for one run.
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
    log_partition: Tensor
    error: Tensor
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
        which, log_weights = self._of_prompt(prompt)
        uniform = torch.from_numpy(generator_of(as_whole("seed", seed, 0)).random(1))
        chosen = systematic(log_weights[None], uniform, as_whole("count", count, 1))[0]
        return self.sequences.view(*self.log_weights.shape, -1)[which].flatten(0, 1)[chosen]

    def mean_energy(self, prompt: int = 0) -> float:
        """The mean energy of the target, by the weighted particles of a prompt.

        Raises:
            ValueError: as `draw`.
        """
        which, log_weights = self._of_prompt(prompt)
        energies, alive = self.energies[which].flatten(), log_weights > -torch.inf
        return float((log_weights[alive].softmax(0) * energies[alive]).sum())

    def _of_prompt(self, prompt: int) -> tuple[Tensor, Tensor]:
        """Which runs are a prompt's, and the log weights of their particles."""
        which = self.prompt_indices == as_whole("prompt", prompt, 0)
        log_weights = self.log_weights[which].flatten()
        if not bool((log_weights > -torch.inf).any()):
            known = sorted(set(self.prompt_indices.tolist()))
            raise ValueError(f"prompt must be one of {known} that has particles of weight above 0, got {prompt}")
        return which, log_weights


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
        generation_config: settings of the kernel and its blocks, over which those among `overrides` go. Of the model's
            own those count that say what may stand where (`lengths`, `energy_temperature`, `suppress_tokens`,
            `allowed_tokens`, `protected_positions`, `avoid`, `min_distance`) and `seed`; how its chains move doesn't.
        num_particles: N, of each run.
        num_runs: independent runs of each prompt, which say how far log Z can be trusted.
        run_keys: pairs (prompt, run) of the runs to do; by default `num_runs` for every prompt. A run is the same
            whichever others are done beside it, so runs can be divided over calls and processes that have one seed.
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
        >>> out.log_weights.shape, out.draw(3).shape[0], out.log_partition.shape
        (torch.Size([2, 8]), 3, torch.Size([1]))
    """
    inputs = {
        "input_ids": input_ids, "attention_mask": attention_mask, "free_mask": free_mask,
        "encoder_input_ids": encoder_input_ids, "encoder_attention_mask": encoder_attention_mask,
    }  # fmt: skip
    with evaluation_mode(model):
        asked = particles_of(
            model, inputs, generation_config, overrides, extra_energies, token_budget,
            num_particles=num_particles, num_runs=num_runs, run_keys=run_keys, num_moves=num_moves,
        )  # fmt: skip
        return annealed(asked, *asked.ladders(target_cess, ladder))


def annealed(asked: AskedParticles, ladders: Tensor, num_rows: int) -> SMCOutput:
    """Anneals from the fill to the target along ladders (R, S), which took `num_rows` to find."""
    annealing, chains = asked.prepared(asked.keys, asked.config.seed)
    with named_rows(annealing):
        particles, levels = annealing.annealed(annealing.filled(chains.ids), 0.0, 1.0, fixed(ladders))
    dead = (particles.log_weights == -torch.inf).all(1)
    if bool(dead.any()):
        logger.warning(
            f"{int(dead.sum())} of {len(dead)} runs have no particle that the constraints allow: their estimate of Z "
            "is 0. More particles, or a finite penalty in place of a constraint, may help."
        )
    found = by_prompt(log_mean_weight(particles.log_weights), asked.keys, asked.num_prompts)
    return SMCOutput(
        sequences=particles.state.ids,
        attention_mask=attended_mask(chains.start, chains.stop, chains.ids.shape[1]).long(),
        log_weights=particles.log_weights,
        energies=particles.energies,
        log_partition=found.value,
        error=found.error,
        levels=levels,
        ancestors=particles.ancestors,
        prompt_indices=torch.tensor([key.prompt for key in asked.keys]),
        run_indices=torch.tensor([key.chain for key in asked.keys]),
        num_masked_rows=num_rows + annealing.target.runner.num_rows,
        seed=asked.config.seed,
    )


def particles_of(
    model: EnergyModel,
    inputs: dict[str, Tensor | None],
    generation_config: ChainGenerationConfig | None,
    overrides: dict[str, Any],
    extra_energies: object,
    token_budget: int | None,
    **numbers: Any,
) -> AskedParticles:
    """What arguments of `sample_smc` ask for, checked; `numbers` are those of `AskedParticles.of`."""
    further = {name: value for name, value in overrides.items() if is_model_input(model.mlm, name)}
    settings, ids = {name: value for name, value in overrides.items() if name not in further}, inputs["input_ids"]
    asked = ChainGenerationConfig.asked(generation_config)
    config = settings_of_particles(asked, model.generation_config, settings, ids is not None)
    check_avoid(model, config)
    lengths = len(config.lengths) if isinstance(config.lengths, list) else 1
    extra, support = as_extra_energies(extra_energies), proposal_support(model, config.suppress_tokens)

    def chains_of(config: ResolvedChainConfig, keys: list[tuple[int, int]]) -> Chains:
        return build_chains(model, config, keys, inputs, None, further)

    def target_of(chains: Chains, config: ResolvedChainConfig) -> Target:
        runner = EachRowOnce(model.masked_batch_runner(token_budget))
        return model_target(model, chains, config, support, extra, runner)

    prompts, length = (lengths, longest_of(config)) if ids is None else as_ids("input_ids", ids).shape
    return AskedParticles.of(config, prompts, length, chains_of, target_of, **numbers)
