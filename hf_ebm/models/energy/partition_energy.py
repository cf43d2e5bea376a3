"""`EnergyModel.log_partition`: log Z of prompts or lengths, exact or estimated, with an estimate from above."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from hf_ebm.checks import as_truth, check_choice, shown
from hf_ebm.model_modes import evaluation_mode, model_output
from hf_ebm.models.energy.chains import Chains
from hf_ebm.models.energy.smc_energy import AskedParticles, asked_particles, by_prompt, named_rows
from hf_ebm.random_state import stream_seed
from hf_ebm.runtime import check_fits, where_float64_is
from hf_ebm.sampling.configuration import ChainGenerationConfig
from hf_ebm.sampling.constraints import at_least_away
from hf_ebm.sampling.fill_estimates import LogPartition
from hf_ebm.sampling.sampler import ChainKey
from hf_ebm.sampling.smc import falling, fixed, log_mean_weight
from hf_ebm.sampling.target import EnergyFunction, ExtraEnergy, Target
from hf_ebm.scoring.joint_fills import FillSpace, Slot, joint_tables, summarized

if TYPE_CHECKING:
    from hf_ebm.models.energy.modeling_energy import EnergyModel

METHODS = ("exact", "smc")
# Sequences that "exact" weighs at most.
_MOST_SEQUENCES = 2**30
# Numbers of the seed of chains, and of the particles that start at their samples.
_CHAINS, _REVERSE = 1, 2
# Settings of the chains that the reverse run starts at, where none are given, and which may be.
_NUM_CHAINS, _NUM_EPOCHS = 8, 64
_OF_CHAINS = ("num_chains", "num_epochs", "burn_in", "thinning")


@model_output
class LogPartitionOutput(ModelOutput):
    """log Z of `exp(-E/τ)` of B prompts, over all sequences that may be sampled, in nats (float64).

    Args:
        log_partition: (B,) log Z, or an estimate, which isn't above it in expectation.
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
            log Z in expectation (Jensen's inequality).
        upper: whether an estimate from above is made (bidirectional Monte Carlo, Grosse, Ghahramani & Adams 2015): the
            same annealing backwards, started at samples of chains, estimates 1/Z. It is a bound in expectation if those
            are samples of the target. Chains give such in the long run only: where they miss a mode it is too low, and
            a small gap says no more than that both found the same modes. `num_chains` (of each run), `num_epochs`,
            `burn_in` and `thinning` are settings of these chains.
        num_particles, num_runs, target_cess, ladder, num_moves: as for `sample_smc`.
        encoder_input_ids, encoder_attention_mask, extra_energies, token_budget, overrides: as for `sample_smc`.

    Raises:
        ValueError: before any work, for what `sample_smc` refuses, and for too many sequences to enumerate.

    Example:
        >>> from hf_ebm.assets import load_embedded
        >>> model, tokenizer = load_embedded()
        >>> prompt = tokenizer("and [MASK] said unto him", return_tensors="pt")
        >>> exact = model.log_partition(**prompt, method="exact")
        >>> found = model.log_partition(**prompt, num_particles=16, num_chains=2, num_epochs=8, seed=0)
        >>> bool(exact.error == 0), found.log_partition.shape, found.method
        (True, torch.Size([1]), 'smc')
    """
    check_choice("method", method, METHODS)
    upper = as_truth("upper", upper)
    inputs = {
        "input_ids": input_ids, "attention_mask": attention_mask, "free_mask": free_mask,
        "encoder_input_ids": encoder_input_ids, "encoder_attention_mask": encoder_attention_mask,
    }  # fmt: skip
    of_chains = {name: overrides.pop(name) for name in _OF_CHAINS if name in overrides}
    with evaluation_mode(model):
        asked = asked_particles(
            model, inputs, generation_config, overrides, num_particles, num_runs, None, num_moves,
            extra_energies, token_budget,
        )  # fmt: skip
        if method == "exact":
            return _output(method, asked, *_enumerated(asked))
        ladders, num_rows = asked.ladders(target_cess, ladder)
        lower = asked.sampled(ladders, num_rows)
        num_rows, above = lower.num_masked_rows, dict.fromkeys(lower.log_partition, LogPartition(math.nan, math.nan))
        if upper:
            above, more = _from_above(asked, ladders, of_chains)
            num_rows += more
    return _output(method, asked, lower.log_partition, above, num_rows)


def _output(
    method: str, asked: AskedParticles, lower: dict[int, LogPartition], upper: dict[int, LogPartition], num_rows: int
) -> LogPartitionOutput:
    numbers = [torch.tensor(own, dtype=torch.float64).T for own in (list(lower.values()), list(upper.values()))]
    return LogPartitionOutput(
        log_partition=numbers[0][0], error=numbers[0][1], upper=numbers[1][0], upper_error=numbers[1][1],
        method=method, num_masked_rows=num_rows, seed=asked.config.seed,
    )  # fmt: skip


def _from_above(
    asked: AskedParticles, ladders: Tensor, of_chains: Mapping[str, Any]
) -> tuple[dict[int, LogPartition], int]:
    """Estimates of log Z by annealing from samples of chains to the fill, and the masked rows that took."""
    settings: dict[str, Any] = {"num_chains": _NUM_CHAINS, "num_epochs": _NUM_EPOCHS} | {
        name: value for name, value in of_chains.items() if value is not None
    }
    config = copy.copy(asked.config)
    config.seed = stream_seed(asked.config.seed, _CHAINS)
    settings.setdefault("burn_in", settings["num_epochs"] // 2)
    number, given = settings["num_chains"], {**asked.inputs, **asked.further_inputs}
    out = asked.model.generate(
        generation_config=config,
        chain_keys=[(key.prompt, key.chain * number + own) for key in asked.keys for own in range(number)],
        extra_energies=asked.extra, token_budget=asked.token_budget,
        **given, **settings,
    )  # fmt: skip
    annealing, _ = asked.prepared(asked.keys, stream_seed(asked.config.seed, _REVERSE))
    samples = out.samples.view(len(asked.keys), -1, out.samples.shape[2])
    chosen = torch.arange(asked.num_particles) * samples.shape[1] // asked.num_particles
    with named_rows(annealing):
        particles = annealing.started(samples[:, chosen].flatten(0, 1))
        particles, _ = annealing.annealed(particles, 1.0, 0.0, fixed(falling(ladders)))
        particles = annealing.back_to_fill(particles)
    found = by_prompt(log_mean_weight(particles.log_weights), asked.keys)
    upper = {prompt: LogPartition(-own.value, own.error) for prompt, own in found.items()}
    return upper, out.num_masked_rows + annealing.target.runner.num_rows


def _enumerated(asked: AskedParticles) -> tuple[dict[int, LogPartition], dict[int, LogPartition], int]:
    """log Z of each prompt by enumeration, twice, and the masked rows that took."""
    prompts = list(dict.fromkeys(key.prompt for key in asked.keys))
    annealing, chains = replace(asked, num_particles=1).prepared([ChainKey(own, 0) for own in prompts], 0)
    target, model = annealing.target, asked.model
    runner = model.masked_batch_runner(asked.token_budget)  # rows are of other sequences than a cache keeps
    spaces = [_space(target, chains, row, prompt) for row, prompt in enumerate(prompts)]
    dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
    found = {}
    for row, (prompt, space) in enumerate(zip(prompts, spaces, strict=True)):
        tables = joint_tables(runner, space, model.config.energy, dtype)
        further = _further(asked, target, chains, row)
        summary = summarized(tables, space, asked.config.energy_temperature, 1, [], further)
        found[prompt] = LogPartition(float(summary.log_partition), 0.0)
    return found, found, runner.num_rows


def _space(target: Target, chains: Chains, row: int, prompt: int) -> FillSpace:
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
            f"method: prompt {prompt} has {shown(number)} sequences, 'exact' enumerates up to {_MOST_SEQUENCES}; "
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
