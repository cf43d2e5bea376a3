"""`ResidualEnergyModel.generate`: joint sampling, and its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import BatchEncoding
from transformers.utils import ModelOutput, logging

from hf_ebm.checks import advice_on_ids, as_truth
from hf_ebm.generation_settings import GenerationSettings, Resolved, Setting, setting
from hf_ebm.model_modes import model_output
from hf_ebm.models.residual.candidates import (
    SamplingParameters,
    candidate_energies,
    check_continuations_fit,
    check_prefixes,
    lm_of,
    sample_continuations,
    sample_stepwise,
    unpadded,
)
from hf_ebm.objectives.completions import pad_right
from hf_ebm.objectives.losses import effective_sample_size, log_importance_weights
from hf_ebm.random_state import stream_seed

if TYPE_CHECKING:
    from hf_ebm.models.residual.modeling_residual import ResidualEnergyModel

logger = logging.get_logger(__name__)

# How samples are drawn, the default first.
METHODS = {
    "resampling": "draws candidates from the language model and chooses among them by weights softmax(-E) (Deng et al. "
    "2020, algorithm 1), which is exact as `num_candidates` grows",
    "stepwise": "chooses token by token with the future marginalized by rollouts (appendix A.1), far slower",
}
# Fewer effective candidates than this are hardly a choice.
FEW_EFFECTIVE_CANDIDATES = 5.0


class JointGenerationConfig(GenerationSettings):
    """Settings of `ResidualEnergyModel.generate`. A field left `None` takes the model's setting, else the default here.

    Raises:
        ValueError: for unknown fields and for values that are out of range or contradict each other.
    """

    method: Setting[str] = setting("resampling", choices=METHODS)
    max_new_tokens: Setting[int] = setting(
        20, "The length at which a continuation without an end token is stopped.", least=1
    )
    num_candidates: Setting[int] = setting(64, "Candidates of a prompt.", least=1)
    num_samples: Setting[int] = setting(1, "Samples of a prompt, drawn from its candidates with replacement.", least=1)
    temperature: Setting[float] = setting(
        1.0,
        "Temperature of the language model. With it, `top_k` or `top_p` what is sampled is the warped language model "
        "times exp(-E).",
        least=1e-6,
    )
    top_k: Setting[int | None] = setting(None, "Sample among so many tokens, the likeliest.", least=1)
    top_p: Setting[float | None] = setting(None, "Sample among the likeliest tokens of this mass.", above=0, most=1)
    stepwise_top_k: Setting[int] = setting(
        128, "Tokens that `stepwise` considers at a step, the language model's best.", least=1
    )
    num_rollouts: Setting[int] = setting(32, "Continuations from each of them.", least=1)
    candidates_at_once: Setting[int] = setting(
        256,
        "Rows run together; memory grows with it and not with `num_candidates`. Draws depend on it.",
        least=1,
    )
    seed: Setting[int] = setting(
        None,
        "Drawn from torch's generator if `None`. The samples of a prompt do not depend on other prompts.",
        least=0,
    )

    if TYPE_CHECKING:

        def resolved(self, base: GenerationSettings, overrides: dict[str, Any]) -> ResolvedJointConfig: ...


if TYPE_CHECKING:

    class ResolvedJointConfig(JointGenerationConfig, Resolved):
        """What `resolved` gives, and the seed that is drawn then."""


class Joined(NamedTuple):
    """Samples of a prompt and their energies; with resampling also the candidates they were drawn from."""

    samples: list[Tensor]
    energies: Tensor
    candidates: Candidates | None = None


class Candidates(NamedTuple):
    ids: list[Tensor]
    energies: Tensor
    log_weights: Tensor
    size: Tensor


@model_output
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

    sequences: Tensor
    attention_mask: Tensor
    prompt_lengths: Tensor
    energies: Tensor
    prompt_indices: Tensor
    effective_sample_size: Tensor | None
    candidates: list[list[Tensor]] | None
    candidate_energies: Tensor | None
    candidate_log_weights: Tensor | None
    seed: int


@torch.no_grad()
def generate(
    model: ResidualEnergyModel,
    input_ids: Tensor | Sequence[Sequence[int]] | None = None,
    attention_mask: Tensor | None = None,
    generation_config: JointGenerationConfig | None = None,
    *,
    return_candidates: bool = False,
    **overrides: Any,
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
    asked = JointGenerationConfig.asked(generation_config)
    return_candidates = as_truth("return_candidates", return_candidates)
    config = asked.resolved(model.generation_config, overrides)
    if config.method == "stepwise":
        _check_stepwise(asked.settings() | overrides, return_candidates)
    config.draw_seed()
    prompts: Sequence[Tensor | Sequence[int]] = [[]]
    if isinstance(input_ids, (Tensor, str, Mapping, BatchEncoding)):
        prompts = unpadded(input_ids, attention_mask)
    elif attention_mask is not None:
        advice = advice_on_ids(input_ids)
        raise ValueError(f"attention_mask is for a tensor of input_ids, which lists of ids don't need{advice}")
    elif input_ids is not None:
        prompts = input_ids
    prefixes = check_prefixes(model, prompts, config.max_new_tokens, "input_ids")
    _check_fits(config, len(prefixes))
    join = resample if config.method == "resampling" else choose_stepwise
    numbers = logging.tqdm(range(len(prefixes)), desc="Sampling", unit="prompt", delay=2, leave=False)
    results = [join(model, prefixes[row], row, config) for row in numbers]
    return _output(model, prefixes, results, config, return_candidates)


def resample(model: ResidualEnergyModel, prefix: Tensor, row: int, config: ResolvedJointConfig) -> Joined:
    """Samples of a prompt, drawn from candidates of the language model by weights softmax(-E) (algorithm 1)."""
    part = config.candidates_at_once
    sampling = SamplingParameters(
        config.max_new_tokens, tuple(model.end_ids), config.temperature, config.top_k, config.top_p
    )
    candidates: list[Tensor] = []
    for number, done in enumerate(range(0, config.num_candidates, part)):
        count, seed = min(part, config.num_candidates - done), stream_seed(config.seed, row, number)
        drawn = sample_continuations(lm_of(model), [prefix], count, sampling, seed, part)[0]
        candidates += [ids.cpu() for ids in drawn]
    try:
        energies = candidate_energies(model, prefix, candidates, part)
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
    pool = Candidates(candidates, energies, log_weights, size)
    return Joined([candidates[i] for i in chosen.tolist()], energies[chosen], pool)


def choose_stepwise(model: ResidualEnergyModel, prefix: Tensor, row: int, config: ResolvedJointConfig) -> Joined:
    """Samples of a prompt, each chosen token by token (appendix A.1)."""
    try:
        samples = [
            sample_stepwise(
                model, prefix, config.max_new_tokens, config.stepwise_top_k, config.num_rollouts,
                stream_seed(config.seed, row, number), config.candidates_at_once,
            ).cpu()
            for number in range(config.num_samples)
        ]  # fmt: skip
        energies = candidate_energies(model, prefix, samples, config.candidates_at_once)
    except ValueError as error:
        raise ValueError(f"prompt {row}, rollout: {error}") from error
    return Joined(samples, energies)


def _check_stepwise(given: dict[str, Any], return_candidates: bool) -> None:
    """Raises `ValueError` for settings of this call that say nothing there; the model's own are for resampling."""
    if return_candidates:
        raise ValueError("return_candidates has no meaning with method 'stepwise', which draws no candidates")
    for name in ("num_candidates", "temperature", "top_k", "top_p"):
        if given.get(name) not in (None, JointGenerationConfig.defaults[name]):
            raise ValueError(f"{name} has no effect with method 'stepwise'; leave it unset")


def _check_fits(config: ResolvedJointConfig, prompts: int) -> None:
    drawn, name = config.num_candidates, "num_candidates"
    if config.method == "stepwise":
        drawn, name = config.num_rollouts, "num_rollouts"
    check_continuations_fit(f"{name} and num_samples", prompts * (drawn + config.num_samples), config.max_new_tokens)


def _output(
    model: ResidualEnergyModel,
    prefixes: list[Tensor],
    results: list[Joined],
    config: ResolvedJointConfig,
    return_candidates: bool,
) -> JointGenerationOutput:
    rows = [
        torch.cat([prefix.cpu(), ids]) for prefix, own in zip(prefixes, results, strict=True) for ids in own.samples
    ]
    sequences, mask = pad_right(rows, model.config.lm_pad_token_id)
    times = torch.tensor([len(own.samples) for own in results])
    pools = [own.candidates for own in results if own.candidates is not None]  # none of them with "stepwise"
    return JointGenerationOutput(
        sequences=sequences,
        attention_mask=mask,
        prompt_lengths=torch.tensor([len(prefix) for prefix in prefixes]).repeat_interleave(times),
        energies=torch.cat([own.energies for own in results]),
        prompt_indices=torch.arange(len(results)).repeat_interleave(times),
        effective_sample_size=torch.stack([pool.size for pool in pools]) if pools else None,
        candidates=[pool.ids for pool in pools] if return_candidates else None,
        candidate_energies=torch.stack([pool.energies for pool in pools]) if return_candidates else None,
        candidate_log_weights=torch.stack([pool.log_weights for pool in pools]) if return_candidates else None,
        seed=config.seed,
    )
