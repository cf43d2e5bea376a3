"""Soft beam decoding behind `generate()` (Goyal et al. 2018, section 3.4): soft states, hard backpointers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateBeamEncoderDecoderOutput

from hf_ebm.checks import whole
from hf_ebm.relaxations.soft_beam import SoftBeamSettings, step_scores
from hf_ebm.relaxations.soft_choices import SoftSelection, soft_top_k
from hf_ebm.relaxations.stepwise import StepwiseDecoder

# Score of what cannot be selected: finite, so that differences are, and below any score of a model.
_FORBIDDEN = -1e9


def soft_beam_search(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    alpha: float = 10.0,
    normalization: str = "local",
    **model_kwargs: Any,
) -> torch.Tensor | GenerateBeamEncoderDecoderOutput:
    """Decodes any sequence-to-sequence model by relaxed beam search:
    `model.generate(**inputs, num_beams=4, custom_generate=soft_beam_search, alpha=10.0, normalization="global")`.

    Selections are soft as in `relaxed_beam_search`; the largest weight of each gives a token and a backpointer, which
    make up the hypotheses. A hypothesis that ends does so by a hard choice: the end token joins the finished ones if it
    is among the `num_beams` best successors, as in Transformers' beam search, and the beams go on with the others.
    `alpha=inf` is hard beam search (greedy search with one beam), with scores normalized as asked.

    Of the generation config, `num_beams`, `num_return_sequences`, `max_length`, `length_penalty`, `early_stopping`,
    everything that makes logits processors and `return_dict_in_generate` are used. Unnormalized scores can grow with
    every step, so under `normalization="global"` the search goes on to the maximum length unless `early_stopping=True`.

    Args:
        alpha: inverse temperature of the relaxation, above 0; `inf` for hard selection.
        normalization: `local` (log-probabilities) or `global` (logits).

    Returns:
        Token ids, (B * num_return_sequences, T), or an output with `sequences` and `sequences_scores` (in nats, divided
        by length ** length_penalty).

    Raises:
        ValueError: with `do_sample`; for a value that is not allowed; for more beams than tokens; for prompts and
            prefixes of PEFT.

    Example:
        >>> from hf_ebm import LSTMSeq2SeqConfig, LSTMSeq2SeqForConditionalGeneration
        >>> config = LSTMSeq2SeqConfig(vocab_size=9, decoder_vocab_size=9, hidden_size=8)
        >>> model = LSTMSeq2SeqForConditionalGeneration(config).eval()
        >>> settings = {"num_beams": 2, "min_new_tokens": 3, "max_new_tokens": 3}
        >>> model.generate(torch.tensor([[4, 7]]), custom_generate=soft_beam_search, alpha=10.0, **settings).shape
        torch.Size([1, 4])
    """
    settings = SoftBeamSettings(generation_config.num_beams or 1, alpha, normalization)
    if generation_config.do_sample:
        raise ValueError("do_sample must be False for soft_beam_search, got True")
    maker = getattr(model.prepare_inputs_for_generation, "__self__", model)
    if maker is not model:
        raise ValueError(
            f"model: soft_beam_search doesn't make the inputs of a step that {type(maker).__name__} makes for its "
            "prompts or prefixes; LoRA or IA3 can be used"
        )
    decoder = StepwiseDecoder(model)
    names = ("encoder_outputs", "attention_mask")
    encoder_inputs = {name: model_kwargs[name] for name in names if model_kwargs.get(name) is not None}
    logits, state = decoder.begin(decoder.embed(input_ids[:, 0]), **encoder_inputs)
    for position in range(1, input_ids.shape[1]):
        logits, state = decoder.step(decoder.embed(input_ids[:, position]), state)
    if settings.num_beams > logits.shape[-1]:
        raise ValueError(
            f"num_beams must be at most the vocabulary of {logits.shape[-1]} tokens, got {settings.num_beams}"
        )
    hypotheses = _Hypotheses(input_ids, logits.dtype, settings, generation_config)
    while True:
        scores = logits_processor(hypotheses.flat, step_scores(logits, normalization))  # type: ignore[arg-type]  # any ids
        successors = (hypotheses.scores[..., None] + scores.unflatten(0, (-1, settings.num_beams))).clamp_min(
            _FORBIDDEN
        )
        going_on = hypotheses.finish(successors, stopping_criteria)
        if going_on is None:
            break
        chosen = soft_top_k(going_on, settings.num_beams, settings.alpha)
        hypotheses.extend(chosen)
        if hypotheses.all_closed():
            break
        embeddings = decoder.expected_embedding(chosen.token_weights)
        logits, state = decoder.step(embeddings.flatten(0, 1), state.mix(chosen.beam_weights))
    return hypotheses.best(generation_config)


class _Hypotheses:
    """The running hypotheses of B inputs, and the best k finished ones of each."""

    def __init__(
        self,
        input_ids: torch.Tensor,
        dtype: torch.dtype,
        settings: SoftBeamSettings,
        generation_config: GenerationConfig,
    ):
        beams = settings.num_beams
        self.settings, self.config = settings, generation_config
        self.running = input_ids.unflatten(0, (-1, beams))  # (B, k, t)
        rows, _, self.prompt_length = self.running.shape
        # The beams are equal at first: one of them is live.
        self.scores = torch.full((rows, beams), _FORBIDDEN, dtype=dtype, device=input_ids.device)
        self.scores[:, 0] = 0
        ends = generation_config.eos_token_id
        self.ends = [] if ends is None else list(ends) if whole(ends) is None else [ends]
        self.pad = generation_config.pad_token_id
        if self.pad is None:
            self.pad = self.ends[0] if self.ends else 0
        self.finished = self.running[:, :0]  # (B, up to k, t)
        self.finished_scores = self.scores[:, :0]
        self.open = torch.ones(rows, dtype=torch.bool, device=input_ids.device)

    @property
    def flat(self) -> torch.Tensor:
        return self.running.flatten(0, 1)

    def finish(self, successors: torch.Tensor, stopping_criteria: StoppingCriteriaList) -> torch.Tensor | None:
        """Takes in those of the k best successors that end, by an end token or another criterion.

        Returns the successors with the ended ones forbidden, or None if all of the k best have ended for another reason
        than an end token (the maximum length, say).
        """
        beams, vocab_size = self.settings.num_beams, successors.shape[-1]
        best, indices = successors.flatten(1).topk(beams)
        tokens = indices % vocab_size
        ending = torch.isin(tokens, torch.tensor(self.ends, device=tokens.device, dtype=tokens.dtype))
        candidates = self._extended(indices // vocab_size, tokens)
        stopped = stopping_criteria(candidates.flatten(0, 1), None).view_as(ending) & ~ending
        length = candidates.shape[-1] - self.prompt_length
        scores = best / length**self.config.length_penalty
        scores = scores.masked_fill(~(ending | stopped) | ~self.open[:, None], -torch.inf)
        padding = (0, candidates.shape[-1] - self.finished.shape[-1])
        finished = torch.nn.functional.pad(self.finished, padding, value=self.pad)
        pool, pool_scores = torch.cat([finished, candidates], 1), torch.cat([self.finished_scores, scores], 1)
        self.finished_scores, kept = pool_scores.topk(beams)
        self.finished = pool.gather(1, kept[..., None].expand(-1, -1, pool.shape[-1]))
        if bool((stopped | ending).all()) and (bool(stopped.any()) or candidates.shape[-1] >= self.config.max_length):
            return None
        if self.ends:
            ends = torch.tensor(self.ends, device=successors.device)
            successors = successors.index_fill(-1, ends, _FORBIDDEN)
        kept_scores = best.masked_fill(ending | stopped, _FORBIDDEN)
        return successors.flatten(1).scatter(1, indices, kept_scores).view_as(successors)

    def extend(self, chosen: SoftSelection) -> None:
        self.scores = chosen.scores
        self.running = self._extended(chosen.beam_weights.argmax(-1), chosen.token_weights.argmax(-1))

    def _extended(self, beams: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        histories = self.running.gather(1, beams[..., None].expand(-1, -1, self.running.shape[-1]))
        return torch.cat([histories, tokens[..., None]], -1)

    def all_closed(self) -> bool:
        """Whether no running hypothesis can still be better; as in Transformers, judged at its present length."""
        full = self.finished_scores.isfinite().all(1)
        if self.config.early_stopping is not True:
            if self.settings.normalization == "global":
                return False
            never, penalty = self.config.early_stopping == "never", self.config.length_penalty
            end = self.config.max_length if never and penalty > 0 else self.running.shape[-1]
            reach = (end - self.prompt_length) ** penalty
            full = full & (self.scores[:, 0] / reach <= self.finished_scores[:, -1])
        self.open = self.open & ~full
        return not bool(self.open.any())

    def best(self, config: GenerationConfig) -> torch.Tensor | GenerateBeamEncoderDecoderOutput:
        wanted = config.num_return_sequences or 1
        sequences, scores = self.finished[:, :wanted].flatten(0, 1), self.finished_scores[:, :wanted].flatten()
        if not config.return_dict_in_generate:
            return sequences
        return GenerateBeamEncoderDecoderOutput(sequences=sequences, sequences_scores=scores)
