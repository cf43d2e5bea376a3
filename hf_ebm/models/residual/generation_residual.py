"""`ResidualEnergyModel.generate`: joint sampling, and its settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.utils import ModelOutput, logging

from hf_ebm.generation_settings import GenerationSettings, SettingsGenerationMixin
from hf_ebm.models.residual.candidates import Proposal, candidate_energies, sample_continuations
from hf_ebm.models.residual.inputs_residual import check_prefixes, unpadded
from hf_ebm.models.residual.stepwise import StepwiseSettings, sample_stepwise
from hf_ebm.objectives.completions import pad_right
from hf_ebm.objectives.partition_function import effective_sample_size, log_importance_weights

logger = logging.get_logger(__name__)

METHODS = ("resampling", "stepwise")
# Fewer effective candidates than this are hardly a choice.
FEW_EFFECTIVE_CANDIDATES = 5.0

_DEFAULTS: dict[str, Any] = {
    "method": "resampling",
    "max_new_tokens": 20,
    "num_candidates": 64,
    "num_samples": 1,
    "temperature": 1.0,
    "top_k": None,
    "top_p": None,
    "stepwise_top_k": 128,
    "num_rollouts": 32,
    "candidates_at_once": 256,
    "seed": None,
}


class JointGenerationConfig(GenerationSettings):
    """Settings of `ResidualEnergyModel.generate`. A field left `None` takes the model's setting, else the default here.

    Args:
        method (`str`, default `"resampling"`): `"resampling"` draws candidates from the language model and chooses
            among them by weights softmax(-E) (Deng et al. 2020, algorithm 1), which is exact as `num_candidates` grows;
            `"stepwise"` chooses token by token with the future marginalized by rollouts (appendix A.1), far slower.
        max_new_tokens (`int`, default 20): the length at which a continuation without an end token is stopped.
        num_candidates (`int`, default 64): candidates of a prompt.
        num_samples (`int`, default 1): samples of a prompt, drawn from its candidates with replacement.
        temperature (`float`, default 1.0), top_k (`int`), top_p (`float`): warps of the language model. What is sampled
            is the warped language model times exp(-E).
        stepwise_top_k (`int`, default 128): tokens that `"stepwise"` considers at a step, the language model's best.
        num_rollouts (`int`, default 32): continuations from each of them.
        candidates_at_once (`int`, default 256): rows run together; memory grows with it and not with
            `num_candidates`. Draws depend on it.
        seed (`int`): drawn from torch's generator if `None`. The samples of a prompt do not depend on other prompts.

    Raises:
        ValueError: for unknown fields and for values that are out of range or contradict each other.
    """

    defaults = _DEFAULTS

    def validate(self, strict: bool = False, user_set_attributes: set[str] | None = None) -> None:
        """Raises `ValueError` for values out of range and for contradictory ones."""
        self._check_choice("method", METHODS)
        for name in (
            "max_new_tokens", "num_candidates", "num_samples", "top_k", "stepwise_top_k", "num_rollouts",
            "candidates_at_once",
        ):  # fmt: skip
            self._check_whole(name, 1)
        self._check_whole("seed", 0)
        self._check_number("temperature", lambda v: 1e-6 <= v < float("inf"), "a number from 0.000001 up")
        self._check_number("top_p", lambda v: 0 < v <= 1, "a number above 0 and up to 1")


@dataclass
class JointGenerationOutput(ModelOutput):
    """Samples of B prompts, `num_samples` each: those of the first prompt, then those of the second, …

    Args:
        sequences: (N, T) prompts and continuations, padded on the right, on the CPU.
        attention_mask: (N, T), 0 at padding.
        prompt_lengths: (N,) where continuations begin.
        energies: (N,) energies of the samples in nats, float64.
        prompt_indices: (N,) which prompt a sample is of.
        effective_sample_size: (B,) of the candidates' weights, from 1 to their number; `None` for `"stepwise"`.
        candidates: for each prompt its candidates' continuations, where asked for.
        candidate_energies: (B, n) their energies, where asked for.
        candidate_log_weights: (B, n) their normalized log weights, where asked for.
        seed: the seed used.
    """

    sequences: torch.LongTensor | None = None
    attention_mask: torch.LongTensor | None = None
    prompt_lengths: torch.LongTensor | None = None
    energies: torch.DoubleTensor | None = None
    prompt_indices: torch.LongTensor | None = None
    effective_sample_size: torch.DoubleTensor | None = None
    candidates: list[list[Tensor]] | None = None
    candidate_energies: torch.DoubleTensor | None = None
    candidate_log_weights: torch.DoubleTensor | None = None
    seed: int | None = None


class JointGenerationMixin(SettingsGenerationMixin):
    """Gives a residual model `generate`."""

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor | Sequence[Sequence[int]] | None = None,
        attention_mask: Tensor | None = None,
        generation_config: JointGenerationConfig | None = None,
        *,
        return_candidates: bool = False,
        **overrides,
    ) -> JointGenerationOutput:
        """Samples continuations from `P_LM(x | prefix) exp(-E(prefix, x)) / Z(prefix)`.

        Args:
            input_ids: (B, P) prompts in the language model's tokens, padded on either side, or B lists of ids; without
                any, one prompt of the start token.
            attention_mask: (B, P), 0 at padding.
            generation_config: settings; `overrides` are settings by name. Unset ones are the model's own.
            return_candidates: return all candidates with their energies and weights.

        Returns:
            `JointGenerationOutput`. A warning is logged where weights are concentrated on few candidates, so that
            samples are far from exact.

        Raises:
            ValueError: before any work, for anything that cannot be done as asked; for NaN energies, naming prompt and
                candidate, when they appear.
        """
        if generation_config is not None and not isinstance(generation_config, JointGenerationConfig):
            raise ValueError(
                f"generation_config must be a JointGenerationConfig, got {type(generation_config).__name__}"
            )
        config = (generation_config or JointGenerationConfig()).resolved(self.generation_config, overrides)
        if config.method == "stepwise":
            _check_stepwise(
                {**(generation_config.settings() if generation_config else {}), **overrides}, return_candidates
            )
        if config.seed is None:
            config.seed = int(torch.randint(0, 2**31, ()))
        prompts = [[]] if input_ids is None else input_ids
        if isinstance(prompts, Tensor):
            prompts = unpadded(prompts, attention_mask)
        elif attention_mask is not None:
            raise ValueError("attention_mask is for a tensor of input_ids, which lists of ids don't need")
        prefixes = check_prefixes(self, prompts, config.max_new_tokens)
        join = self._resample if config.method == "resampling" else self._stepwise
        numbers = logging.tqdm(range(len(prefixes)), desc="Sampling", unit="prompt", delay=2, leave=False)
        return _output(self, prefixes, [join(prefixes[row], row, config) for row in numbers], config, return_candidates)

    def proposal(self, config: JointGenerationConfig) -> Proposal:
        """How candidates are sampled from the language model."""
        return Proposal(
            config.max_new_tokens,
            tuple(self.end_ids),
            config.temperature,
            config.top_k,
            config.top_p,
        )

    def _resample(self, prefix: Tensor, row: int, config: JointGenerationConfig) -> dict:
        part, proposal = config.candidates_at_once, self.proposal(config)
        candidates: list[Tensor] = []
        for number, done in enumerate(range(0, config.num_candidates, part)):
            count, seed = min(part, config.num_candidates - done), stream_seed(config.seed, row, number)
            drawn = sample_continuations(self.lm, [prefix], count, proposal, seed, part)[0]
            candidates += [ids.cpu() for ids in drawn]
        try:
            energies = candidate_energies(self, prefix, candidates, part)
            log_weights = log_importance_weights(energies)
        except ValueError as error:
            raise ValueError(f"prompt {row}, candidate: {error}") from error
        generator = torch.Generator().manual_seed(stream_seed(config.seed, row, -1))
        chosen = torch.multinomial(log_weights.exp(), config.num_samples, replacement=True, generator=generator)
        size = effective_sample_size(log_weights)
        if float(size) < min(FEW_EFFECTIVE_CANDIDATES, config.num_candidates / 2):
            logger.warning(
                f"prompt {row}: the weights of {config.num_candidates} candidates are those of {float(size):.1f} equal "
                "ones; take more candidates, or a better language model"
            )
        return {
            "samples": [candidates[i] for i in chosen.tolist()], "energies": energies[chosen], "size": size,
            "candidates": candidates, "candidate_energies": energies, "log_weights": log_weights,
        }  # fmt: skip

    def _stepwise(self, prefix: Tensor, row: int, config: JointGenerationConfig) -> dict:
        settings = StepwiseSettings(
            config.max_new_tokens, config.stepwise_top_k, config.num_rollouts, config.candidates_at_once
        )
        try:
            samples = [
                sample_stepwise(self, prefix, settings, stream_seed(config.seed, row, number)).cpu()
                for number in range(config.num_samples)
            ]
            energies = candidate_energies(self, prefix, samples, config.candidates_at_once)
        except ValueError as error:
            raise ValueError(f"prompt {row}, rollout: {error}") from error
        return {"samples": samples, "energies": energies}


def _check_stepwise(given: dict[str, Any], return_candidates: bool) -> None:
    """Raises `ValueError` for settings of this call that say nothing there; the model's own are for resampling."""
    if return_candidates:
        raise ValueError("return_candidates has no meaning with method 'stepwise', which draws no candidates")
    for name in ("num_candidates", "temperature", "top_k", "top_p"):
        if given.get(name) not in (None, _DEFAULTS[name]):
            raise ValueError(f"{name} has no effect with method 'stepwise', so giving it contradicts it")


def stream_seed(seed: int, *key: int) -> int:
    """A seed for one use of a run's seed."""
    return int(np.random.SeedSequence([seed, *(number + 1 for number in key)]).generate_state(1, np.uint64)[0] >> 1)


def _output(model, prefixes, results: list[dict], config, return_candidates: bool) -> JointGenerationOutput:
    rows = [
        torch.cat([prefix.cpu(), ids]) for prefix, own in zip(prefixes, results, strict=True) for ids in own["samples"]
    ]
    sequences, mask = pad_right(rows, model.config.lm_pad_token_id)
    times = torch.tensor([len(own["samples"]) for own in results])
    output = JointGenerationOutput(
        sequences=sequences,
        attention_mask=mask,
        prompt_lengths=torch.tensor([len(prefix) for prefix in prefixes]).repeat_interleave(times),
        energies=torch.cat([own["energies"] for own in results]),
        prompt_indices=torch.arange(len(results)).repeat_interleave(times),
        seed=config.seed,
    )
    if config.method == "resampling":
        output.effective_sample_size = torch.stack([own["size"] for own in results])
    if return_candidates:
        output.candidates = [own["candidates"] for own in results]
        output.candidate_energies = torch.stack([own["candidate_energies"] for own in results])
        output.candidate_log_weights = torch.stack([own["log_weights"] for own in results])
    return output
