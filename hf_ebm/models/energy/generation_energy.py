"""`EnergyModel.generate`: prompts in, chains out. A thin layer over `hf_ebm.sampling`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.utils import logging

from hf_ebm.models.energy.prompts import Chains, build_chains, proposal_support
from hf_ebm.sampling.configuration import ChainGenerationConfig
from hf_ebm.sampling.output import ChainGenerationOutput
from hf_ebm.sampling.proposals import Warp
from hf_ebm.sampling.run import ChainRun
from hf_ebm.sampling.sampler import ChainKey, kept_samples, run_epoch
from hf_ebm.sampling.streams import WARM_START, chain_generator
from hf_ebm.sampling.target import ExtraEnergy, Target
from hf_ebm.sampling.warm_start import mask_predict, sample_masks

logger = logging.get_logger(__name__)

# A state is saved after an epoch if this many seconds have passed since the last time, and always at the end.
_SECONDS_BETWEEN_SAVES = 10.0
# Settings that may change when a run goes on: they say how long it runs, not what it computes.
_EXTENSIBLE = ("num_epochs",)


class _Job(NamedTuple):
    """A run with all it needs to go on."""

    run: ChainRun
    config: ChainGenerationConfig
    keys: list[ChainKey]
    target: Target
    warp: Warp


class EnergyGenerationMixin:
    """Gives a model `generate`. (Transformers recognises generating models by "GenerationMixin" in a base's name.)"""

    def adjust_generation_fn(
        self, generation_config, from_auto_class, from_pipeline, pretrained_model_name_or_path, cache_dir,
        force_download, proxies, local_files_only, token, revision, subfolder, trust_remote_code, **kwargs,
    ):  # fmt: skip
        """Called by `from_pretrained` to load the generation settings; the stock one would make a stock config."""
        if generation_config is not None:
            self.generation_config = self.generation_config_class.from_dict(generation_config.to_dict())
            return
        try:
            self.generation_config = self.generation_config_class.from_pretrained(
                pretrained_model_name_or_path, cache_dir=cache_dir, force_download=force_download, proxies=proxies,
                local_files_only=local_files_only, token=token, revision=revision, subfolder=subfolder,
                _from_auto=from_auto_class, _from_pipeline=from_pipeline,
            )  # fmt: skip
        except OSError:
            logger.info("Generation config file not found, using the default settings.")

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        free_mask: Tensor | None = None,
        generation_config: ChainGenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        streamer=None,
        *,
        token_type_ids: Tensor | None = None,
        encoder_input_ids: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        extra_energies: Sequence[ExtraEnergy] = (),
        chain_keys: Sequence[tuple[int, int]] | None = None,
        save_state_to: str | Path | None = None,
        resume_from: str | Path | None = None,
        token_budget: int | None = None,
        **overrides,
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
            generation_config: settings; `overrides` are settings by name. Unset ones are the model's own.
            logits_processor: further warps of the proposal. They see the masked ids and change how the chain moves, not
                what it samples.
            stopping_criteria: called with the ids (C, T) after each epoch; the run ends once all chains are done.
            streamer: gets the starting ids by `put`, then the ids after every step that changed some by `put_draft`
                (by `put` if it has none), and `end`.
            token_type_ids: accepted because tokenizers return it; only zeros.
            encoder_input_ids, encoder_attention_mask: (B, S) context of an encoder-decoder model.
            extra_energies: pairs (weight, function from ids (n, T) to energies (n,) in nats) added to the energy;
                infinity forbids. See also `hf_ebm.sampling.target.TextEnergy`.
            chain_keys: pairs (prompt, chain) of the chains to run; by default `num_chains` for every prompt. A chain is
                the same whichever others run beside it, so chains can be divided over calls and processes.
            save_state_to: folder the run is saved to as it goes, and at its end, also when it is interrupted.
            resume_from: folder to go on from. Settings and prompts come from there; a larger `num_epochs` makes the run
                longer, other settings must agree. Processors, criteria and extra energies are to be given again.
            token_budget: tokens per forward pass; by default from free memory.

        Returns:
            `ChainGenerationOutput`.

        Raises:
            ValueError: for anything that cannot be done as asked, before any work; for NaN logits, when they appear.
        """
        if generation_config is not None and not isinstance(generation_config, ChainGenerationConfig):
            raise ValueError(
                f"generation_config must be a ChainGenerationConfig, got {type(generation_config).__name__}"
            )
        if token_type_ids is not None and bool(token_type_ids.any()):
            raise ValueError("token_type_ids: only zeros (a single segment) are supported")
        inputs = {
            "input_ids": input_ids, "attention_mask": attention_mask, "free_mask": free_mask,
            "encoder_input_ids": encoder_input_ids, "encoder_attention_mask": encoder_attention_mask,
        }  # fmt: skip
        was_training = self.training
        self.eval()  # with dropout there would be no one energy to sample from
        try:
            if resume_from is not None:
                job = self._resume(resume_from, generation_config, overrides, inputs, extra_energies, token_budget)
            else:
                config = (generation_config or ChainGenerationConfig()).resolved(self.generation_config, overrides)
                job = self._begin(config, inputs, chain_keys, extra_energies, token_budget)
            processors = _proposal_processors(job.config, logits_processor)
            warp = Warp(processors, job.target.support, job.config.proposal_epsilon, bool(job.config.exclude_current))
            job = job._replace(warp=warp)
            if job.run.epoch == 0:
                self._fill_masks(job)
            if streamer is not None:
                streamer.put(job.run.state.ids.cpu())
            confidence = None
            if job.config.kernel == "mask_predict":
                confidence = _run_mask_predict(job)
            else:
                _run_epochs(job, StoppingCriteriaList(stopping_criteria or []), streamer, save_state_to)
        finally:
            self.train(was_training)
        if save_state_to is not None:
            job.run.save(save_state_to)
        if streamer is not None:
            streamer.end()
        return _output(job, confidence)

    def _begin(self, config, inputs, chain_keys, extra_energies, token_budget) -> _Job:
        if config.seed is None:
            config.seed = int(torch.randint(0, 2**31, ()))
        support = proposal_support(self, config.suppress_tokens)
        chains = build_chains(self, config, chain_keys, inputs)
        target = self._target(chains, support, extra_energies, token_budget)
        recipe = {
            "settings": config.settings(),
            "keys": [list(key) for key in chains.keys],
            "energy": self.config.energy,
        }
        run = ChainRun.begin(target.unknown_state(chains.ids), recipe, chains.start, chains.stop, chains.free.cpu())
        return _Job(run, config, chains.keys, target, None)

    def _resume(self, path, generation_config, overrides, inputs, extra_energies, token_budget) -> _Job:
        run = ChainRun.load(path)
        saved = ChainGenerationConfig(**run.recipe["settings"])
        asked = {**(generation_config.settings() if generation_config else {}), **overrides}
        for name, value in asked.items():
            if name not in _EXTENSIBLE and value is not None and value != getattr(saved, name, None):
                raise ValueError(f"resume_from: the saved run has {name}={getattr(saved, name, None)!r}, not {value!r}")
        config = saved.resolved(saved, {name: asked[name] for name in _EXTENSIBLE if name in asked})
        if config.num_epochs != saved.num_epochs and saved.final_block_size is not None:
            raise ValueError(
                "resume_from: the run's block-size schedule depends on num_epochs, which must stay the same"
            )
        if inputs["input_ids"] is not None:
            raise ValueError("resume_from: the prompts come from the saved run; leave out input_ids")
        if run.recipe["energy"] != self.config.energy:
            raise ValueError(
                f"resume_from: the saved run samples {run.recipe['energy']!r}, this model {self.config.energy!r}"
            )
        keys = [ChainKey(*key) for key in run.recipe["keys"]]
        run.recipe["settings"] = config.settings()
        ids = run.state.ids.to(self.input_device)
        context = None
        if self.mlm.config.is_encoder_decoder:
            raise ValueError("resume_from is not supported for encoder-decoder models: their context is not saved")
        chains = Chains(keys, ids, run.start, run.stop, run.free.to(ids.device), context)
        target = self._target(chains, proposal_support(self, config.suppress_tokens), extra_energies, token_budget)
        run.state = type(run.state)(*(field.to(ids.device) for field in run.state))
        if run.epoch:
            _check_same_target(run, target)
        return _Job(run, config, keys, target, None)

    def _target(self, chains: Chains, support: Tensor, extra_energies, token_budget) -> Target:
        runner = self._row_runner(token_budget)
        extra = tuple((float(weight), function) for weight, function in extra_energies)
        return Target(
            runner, self.config.energy, chains.free, chains.start, chains.stop, support, chains.context, extra
        )

    def _fill_masks(self, job: _Job) -> None:
        """Fills what the chains cannot hold, and evaluates the energies of the start."""
        ids, target, config = job.run.state.ids, job.target, job.config
        rows_before = target.runner.num_rows
        masked = target.free & ~target.support[ids]
        if config.kernel == "mask_predict":
            return
        if bool(masked.any()):
            ids = ids.masked_fill(masked, self.config.mask_token_id)
            if config.warm_start == "sample":
                generators = [chain_generator(config.seed, *key, WARM_START) for key in job.keys]
                ids = sample_masks(ids, masked, generators, target, job.warp)
            else:
                iterations = 1 if config.warm_start == "greedy" else min(10, int(masked.sum(1).max()))
                ids, _ = mask_predict(ids, masked, iterations, target)
        job.run.state = target.state(ids)
        job.run.num_masked_rows += target.runner.num_rows - rows_before


def _proposal_processors(config: ChainGenerationConfig, further) -> LogitsProcessorList:
    processors = LogitsProcessorList()
    if config.proposal_temperature != 1.0:
        processors.append(TemperatureLogitsWarper(float(config.proposal_temperature)))
    if config.proposal_top_k is not None:
        processors.append(TopKLogitsWarper(config.proposal_top_k))
    if config.proposal_top_p is not None and config.proposal_top_p < 1:
        processors.append(TopPLogitsWarper(config.proposal_top_p))
    processors.extend(further or [])
    return processors


def _run_epochs(job: _Job, criteria: StoppingCriteriaList, streamer, save_state_to) -> None:
    run, config = job.run, job.config
    run.make_room(config.num_epochs, kept_samples(config.num_epochs, config.burn_in, config.thinning))
    show = None
    if streamer is not None:
        put = getattr(streamer, "put_draft", streamer.put)
        show = lambda ids: put(ids.cpu())  # noqa: E731
    saved = time.monotonic()
    try:
        for _ in logging.tqdm(range(run.epoch, config.num_epochs), desc="Sampling", unit="epoch", delay=2, leave=False):
            run_epoch(run, config, job.keys, job.target, job.warp, show)
            if save_state_to is not None and time.monotonic() - saved > _SECONDS_BETWEEN_SAVES:
                run.save(save_state_to)
                saved = time.monotonic()
            if len(criteria) and bool(criteria(run.state.ids, None).all()):
                break
    except BaseException:
        if save_state_to is not None:
            run.save(save_state_to)
        raise


def _run_mask_predict(job: _Job) -> Tensor:
    run, target = job.run, job.target
    rows_before = target.runner.num_rows
    ids = run.state.ids.masked_fill(target.free, target.runner.mask_token_id)
    ids, confidence = mask_predict(ids, target.free, job.config.num_epochs, target)
    run.state = target.state(ids)
    run.make_room(1, 1)
    run.trace.energy[:, 0] = run.sample_energies[:, 0] = run.state.energy.cpu()
    run.samples[:, 0] = ids.cpu()
    run.epoch = run.kept = 1
    run.num_masked_rows += target.runner.num_rows - rows_before
    return confidence.cpu()


def _check_same_target(run: ChainRun, target: Target) -> None:
    """The first chain's energy must be what it was: another model or other extra energies would go unnoticed."""
    first = torch.zeros(1, dtype=torch.long, device=run.state.ids.device)
    energy = target.terms(run.state.ids[:1], first, target.free[:1]).double().sum() + target.extra_energy(
        run.state.ids[:1]
    )
    carried = run.state.energy[0]
    if not torch.isclose(energy[0], carried, rtol=1e-3, atol=1e-2) and not (energy[0].isinf() and carried.isinf()):
        raise ValueError(
            f"resume_from: the saved state has energy {float(carried):.4f}, this model with these extra energies gives "
            f"{float(energy[0]):.4f}; it is not the run's model"
        )


def _output(job: _Job, confidence: Tensor | None) -> ChainGenerationOutput:
    run, config = job.run, job.config
    columns = torch.arange(run.state.ids.shape[1])
    attended = (columns >= run.start[:, None]) & (columns < run.stop[:, None])
    kept = tuple(range(config.burn_in, run.epoch, config.thinning)) if confidence is None else (0,)
    return ChainGenerationOutput(
        sequences=run.state.ids,
        attention_mask=attended.long(),
        samples=run.samples[:, : run.kept],
        energies=run.sample_energies[:, : run.kept],
        trace=run.trace.first(run.epoch),
        kept_epochs=kept,
        prompt_indices=torch.tensor([key.prompt for key in job.keys]),
        chain_indices=torch.tensor([key.chain for key in job.keys]),
        mean_log_probabilities=confidence,
        num_masked_rows=run.num_masked_rows,
        seed=config.seed,
        run=run,
    )
