"""`EnergyModel.generate`: prompts in, chains out. A thin layer over `hf_ebm.sampling`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.utils import logging

from hf_ebm.checks import as_callables, check_methods, name_of, row_truths
from hf_ebm.model_modes import evaluation_mode
from hf_ebm.models.energy.chains import (
    Chains,
    build_chains,
    check_avoid,
    check_judged,
    check_starts,
    constrained,
    proposal_support,
    replicated,
)
from hf_ebm.models.energy.inputs import is_model_input
from hf_ebm.models.energy.saved_runs import SavedRun, Saver, check_same_target, resumed, weights_of, with_fingerprints
from hf_ebm.runtime import where_float64_is
from hf_ebm.sampling.configuration import ChainGenerationConfig
from hf_ebm.sampling.proposals import FILLS, BlockProposal, proposal_of
from hf_ebm.sampling.replicas import Replicas
from hf_ebm.sampling.run import ChainGenerationOutput, output_of, warn_of_poor_samples
from hf_ebm.sampling.sampler import (
    ChainKey,
    decoded,
    is_over,
    kept_samples,
    kernel_at,
    run_epoch,
    started,
)
from hf_ebm.sampling.target import EnergyFunction, ExtraEnergy, Target, as_extra_energies
from hf_ebm.scoring.logits_cache import MaskedLogitsCache
from hf_ebm.scoring.rows import BadLogitsError, Runner

if TYPE_CHECKING:
    from hf_ebm.models.energy.modeling_energy import EnergyModel
    from hf_ebm.sampling.configuration import ResolvedChainConfig

logger = logging.get_logger(__name__)

# Ids and logits to logits; ids (C, T) and nothing to which chains are done, (C,) bool.
Processor = LogitsProcessor | Callable[[Tensor, Tensor], Tensor]
Criterion = StoppingCriteria | Callable[[Tensor, Any], Tensor]


class Streamer(Protocol):
    """What `generate` asks of a streamer; one may have `put_draft` as well."""

    def put(self, value: Tensor, /) -> None: ...

    def end(self) -> None: ...


class Job(NamedTuple):
    """A run with what it samples and how: what `run_job` runs, whether its target is of a model or a function."""

    run: SavedRun
    config: ResolvedChainConfig
    keys: list[ChainKey]
    target: Target


@torch.no_grad()
def generate(
    model: EnergyModel,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    free_mask: Tensor | None = None,
    generation_config: ChainGenerationConfig | None = None,
    logits_processor: LogitsProcessorList | Processor | Sequence[Processor] | None = None,
    stopping_criteria: StoppingCriteriaList | Criterion | Sequence[Criterion] | None = None,
    streamer: Streamer | None = None,
    *,
    encoder_input_ids: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    extra_energies: Sequence[ExtraEnergy | EnergyFunction] | ExtraEnergy | EnergyFunction | None = None,
    chain_keys: Sequence[tuple[int, int]] | None = None,
    chain_rows: Sequence[int] | None = None,
    save_state_to: str | os.PathLike | None = None,
    resume_from: str | os.PathLike | None = None,
    token_budget: int | None = None,
    **overrides: Any,
) -> ChainGenerationOutput:
    """Samples sequences from `exp(-E/τ)` by block Metropolis–Hastings (thesis ch. 6).

    Without `input_ids`, `lengths` says how many tokens to sample from nothing. Where a prompt holds mask tokens,
    these are free and the rest is context. A prompt without mask tokens (and without `free_mask`) is where the
    chain starts, with every position free that holds no special token. A free token that may not be proposed (a
    mask, [UNK]) is filled by the warm start.

    Args:
        input_ids: (B, T) prompts.
        attention_mask: (B, T), 0 at padding.
        free_mask: (B, T), true at the positions to sample.
        generation_config: settings, over which those among `overrides` go. Unset ones are the model's own.
        logits_processor: further warps of the proposal. They see the masked ids and change how the chain moves, not
            what it samples. The warm starts `"greedy"` and `"mask_predict"` don't use them.
        stopping_criteria: called with the ids (C, T) after each epoch; the run ends once every chain has been done.
        streamer: gets the starting ids by `put`, then the ids after every step that changed some by `put_draft`
            (by `put` if it has none), and `end`.
        encoder_input_ids, encoder_attention_mask: (B, S) context of an encoder-decoder model.
        extra_energies: pairs (weight, function from ids (n, T) to energies (n,) in nats) added to the energy, and
            divided by the temperature with it; infinity forbids. A pair, or a function alone, whose weight is 1,
            needs no list. See also `hf_ebm.TextEnergy`.
        chain_keys: pairs (prompt, chain) of the chains to run; by default `num_chains` for every prompt. A chain is
            the same whichever others run beside it, so chains can be divided over calls and processes.
        chain_rows: the row of the inputs that each of `chain_keys` starts from, by default its prompt's; so chains
            of one prompt can have other lengths, or start elsewhere.
        save_state_to: folder the run is saved to as it goes, and at its end, also when it is interrupted. Checksums
            of the model are saved with it, which take a second for each 100 million parameters.
        resume_from: folder to go on from. Settings and prompts come from there; `num_epochs`, `target_rhat` and
            `max_rows` may make the run longer, other settings must agree, and so must the model: its weights as they
            are loaded, configuration, adapters and code. Processors, criteria and extra energies are to be given again.
        token_budget: tokens per forward pass; by default from free memory.
        overrides: settings by name, and what else the model reads, by the names of its own forward:
            `token_type_ids`, `langs`, `lang_ids`, `bbox`, … Whole numbers (B, T, …), one a row (B,), or one for
            all. They are saved with the run.

    Returns:
        `ChainGenerationOutput`, all of it on the CPU.

    Raises:
        ValueError: for anything that cannot be done as asked, before any work; for NaN logits, when they appear.

    Example:
        >>> from hf_ebm.assets import load_embedded
        >>> model, tokenizer = load_embedded()
        >>> prompt = tokenizer("and [MASK] said unto [MASK],", return_tensors="pt")
        >>> out = model.generate(**prompt, num_chains=3, num_epochs=4, seed=0)
        >>> out.sequences.shape[0], out.energies.shape
        (3, torch.Size([3, 4]))
        >>> again = model.generate(**prompt, num_chains=3, num_epochs=4, seed=0)
        >>> torch.equal(out.samples, again.samples)
        True
    """
    asked = ChainGenerationConfig.asked(generation_config)
    if streamer is not None:
        check_methods("streamer", streamer, "put", "end")
    further = as_callables("logits_processor", logits_processor)
    criteria = as_callables("stopping_criteria", stopping_criteria)
    inputs = {
        "input_ids": input_ids, "attention_mask": attention_mask, "free_mask": free_mask,
        "encoder_input_ids": encoder_input_ids, "encoder_attention_mask": encoder_attention_mask,
    }  # fmt: skip
    further_inputs = {name: overrides.pop(name) for name in list(overrides) if is_model_input(model.mlm, name)}
    extra = as_extra_energies(extra_energies)
    with evaluation_mode(model):  # with dropout there would be no one energy to sample from
        if resume_from is not None:
            given = {**inputs, **further_inputs, "chain_keys": chain_keys, "chain_rows": chain_rows}
            names = [name for name, value in given.items() if value is not None]
            if names:
                raise ValueError(f"resume_from: the chains come from the saved run; leave out {', '.join(names)}")
            job = _resume(model, resume_from, asked, overrides, extra, token_budget)
        else:
            config = asked.resolved(model.generation_config, overrides)
            if input_ids is not None and (asked.lengths is not None or overrides.get("lengths") is not None):
                raise ValueError("lengths was given together with input_ids; it is for sampling from nothing")
            which = chain_keys, chain_rows
            job = _begin(model, config, inputs, further_inputs, which, extra, token_budget)
        if not job.config.targets_energy and any(weight for weight, _ in extra):
            raise ValueError(f"extra_energies have no effect with {job.config.sampler}")
        if job.config.decoder is not None and (further or criteria):
            raise ValueError(f"logits_processor and stopping_criteria have no effect with {job.config.sampler}")
        if save_state_to is not None:
            job = job._replace(run=with_fingerprints(job.run, model))
        return run_job(job, further, criteria, streamer, save_state_to)


def chains_apart(
    model: EnergyModel,
    settings: dict[str, Any],
    inputs: dict[str, Tensor],
    further_inputs: dict[str, Any],
    which_chains: tuple[Sequence[tuple[int, int]], Sequence[int]],
    extra: tuple[ExtraEnergy, ...],
) -> ChainGenerationOutput:
    """Chains that a method runs for itself: `settings` are all there are, the model's own say nothing of them."""
    config = ChainGenerationConfig(**settings).resolved(ChainGenerationConfig(), {})
    none = dict.fromkeys(("attention_mask", "free_mask", "encoder_input_ids", "encoder_attention_mask"))
    job = _begin(model, config, none | inputs, further_inputs, which_chains, extra, None)
    return run_job(job, [], [], None, None)


def _begin(
    model: EnergyModel,
    config: ResolvedChainConfig,
    inputs: dict[str, Tensor | None],
    further_inputs: dict[str, Any],
    which_chains: tuple[Sequence[tuple[int, int]] | None, Sequence[int] | None],
    extra: tuple[ExtraEnergy, ...],
    token_budget: int | None,
) -> Job:
    if inputs["input_ids"] is not None:
        config.lengths = None  # the model's own concern sampling from nothing, and are no part of this run
    config.draw_seed()
    support = proposal_support(model, config.suppress_tokens)
    check_avoid(model, config)
    chain_keys, chain_rows = which_chains
    chains = build_chains(model, config, chain_keys, inputs, chain_rows, further_inputs)
    runner = model.masked_batch_runner(token_budget)
    return begun(chains, config, lambda rows: model_target(model, rows, config, support, extra, runner), extra)


def _resume(
    model: EnergyModel,
    path: str | os.PathLike,
    asked: ChainGenerationConfig,
    overrides: dict[str, Any],
    extra: tuple[ExtraEnergy, ...],
    token_budget: int | None,
) -> Job:
    run, config = resumed(path, asked, overrides, extra, model)
    support = proposal_support(model, config.suppress_tokens)
    runner = model.masked_batch_runner(token_budget)
    return going_on(run, config, lambda rows: model_target(model, rows, config, support, extra, runner))


def model_target(
    model: EnergyModel,
    chains: Chains,
    config: ResolvedChainConfig,
    support: Tensor,
    extra: tuple[ExtraEnergy, ...],
    runner: Runner,
) -> Target:
    """What chains of a model are after, but for their constraints; `runner` runs their rows."""
    if config.targets_energy and _masks_single_sites(config):
        dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
        like = torch.empty(0, dtype=dtype, device=where_float64_is(model.input_device))
        runner = MaskedLogitsCache.around(runner, chains.free, model.vocab_size, like)
    where = (chains.free, chains.start, chains.stop)
    return Target(runner, model.config.energy, *where, support, chains.context, extra)


def _masks_single_sites(config: ResolvedChainConfig) -> bool:
    """Whether some proposals read rows with one position masked: those of single sites and of sequential fill."""
    sizes = config.block_size if isinstance(config.block_size, list) else [config.block_size]
    return FILLS[config.block_fill].masks_single_sites or 1 in sizes or config.final_block_size == 1


def begun(
    chains: Chains, config: ResolvedChainConfig, target_of: Callable[[Chains], Target], extra: tuple[ExtraEnergy, ...]
) -> Job:
    """Chains that have done nothing yet, with their replicas, restricted to what settings let them be.

    Args:
        target_of: makes the target of the rows, those of replicas among them.
    """
    rows, ladder = replicated(chains, config.num_replicas), config.replica_temperatures
    target = constrained(target_of(rows), config, rows.keys, rows.ids)
    check_starts(target, config, rows.keys, rows.ids)
    keys = [list(key) for key in chains.keys]
    run_config = {
        "settings": config.settings(), "keys": keys, "energy": target.energy, "extra_energies": weights_of(extra),
    }  # fmt: skip
    begun_at = None if config.max_changes is None else rows.ids.clone()  # tensors of a file share no memory
    replicas = None if ladder is None else Replicas.begin(ladder, len(keys))
    run = SavedRun.begin(target.unknown_state(rows.ids), run_config, target, begun_at, replicas)
    return Job(run, config, chains.keys, target)


def going_on(run: SavedRun, config: ResolvedChainConfig, target_of: Callable[[Chains], Target]) -> Job:
    """A saved run with its target, which `target_of` makes for its rows. Raises `ValueError` for another target."""
    keys = [ChainKey(*key) for key in run.run_config["keys"]]
    rows = Chains(keys * (config.num_replicas or 1), run.state.ids, run.start, run.stop, run.free, run.context)
    target = constrained(target_of(rows), config, rows.keys, run.state.ids if run.begun_at is None else run.begun_at)
    if run.has_begun and not (run.step and not kernel_at(run.epoch, config).leaves_invariant):
        check_same_target(run, target)
    return Job(run, config, keys, target)


def run_job(
    job: Job,
    further: list[Processor],
    criteria: list[Criterion],
    streamer: Streamer | None,
    save_state_to: str | os.PathLike | None,
) -> ChainGenerationOutput:
    """Runs what is left of a run, and saves it as it goes; the arguments are those of `generate`."""
    check_judged(job.config, job.keys, job.run.stop - job.run.start)
    saver = Saver(save_state_to)
    saver.save(job.run)  # now, so that a folder that cannot be written costs no work
    proposal = proposal_of(job.config, job.target.support, further)
    try:
        run, confidence = _finished(job, proposal, criteria, streamer, saver)
    except BadLogitsError as error:
        key = job.keys[error.row % len(job.keys)]
        raise BadLogitsError(error.row, error.position, f"prompt {key.prompt}, chain {key.chain}: row") from error
    output = output_of(run, job.config, job.keys, confidence)
    warn_of_poor_samples(output, job.config)
    return output


def _finished(
    job: Job,
    proposal: BlockProposal,
    criteria: list[Criterion],
    streamer: Streamer | None,
    saver: Saver,
) -> tuple[SavedRun, Tensor | None]:
    """The finished run, and with mask-predict the mean log probabilities."""
    confidence = None
    if job.config.decoder is not None:
        run, confidence = decoded(job.run, job.config.decoder, job.config.num_epochs, job.target)
        if streamer is not None:
            streamer.put(run.state.ids)
    else:
        run = job.run
        if not run.has_begun:
            run = started(run, job.config, job.keys, job.target, proposal)
            saver.save_if_due(run)
        if streamer is not None:
            streamer.put(run.cold.ids)
        run = _run_epochs(job._replace(run=run), proposal, criteria, streamer, saver)
    saver.save(run)
    if streamer is not None:
        streamer.end()
    return run, confidence


def _run_epochs(
    job: Job,
    proposal: BlockProposal,
    criteria: list[Criterion],
    streamer: Streamer | None,
    saver: Saver,
) -> SavedRun:
    config, run = job.config, job.run
    prompts = torch.tensor([key.prompt for key in job.keys])
    show = None if streamer is None else getattr(streamer, "put_draft", streamer.put)
    done = torch.zeros(len(job.keys), dtype=torch.bool)
    try:
        while not (is_over(run, config, prompts) or (criteria and bool(done.all()))):
            end = (run.epoch // config.num_epochs + 1) * config.num_epochs
            run = run.with_room(end, kept_samples(end, config.burn_in, config.thinning))
            epochs = range(run.epoch, end)
            for _ in logging.tqdm(epochs, desc="Sampling", unit="epoch", delay=2, leave=False):
                steps = run_epoch(run, config, job.keys, job.target, proposal, show)
                for run in steps:
                    saver.save_if_due(run)
                for criterion in criteria:
                    done |= row_truths(
                        f"stopping_criteria: {name_of(criterion)}",
                        criterion(job.target.copied(run.cold.ids), None),
                        len(done),
                    )
                if criteria and bool(done.all()):
                    break
    except BaseException:
        saver.save_or_warn(run)
        raise
    return run
