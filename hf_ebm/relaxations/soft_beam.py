"""The relaxed beam search, its objectives (Goyal et al. 2018, 2019; thesis, algorithm 3), and decoding with it.

Scores are local or global (2019). `soft_beam_search` decodes behind `generate()`: soft states, hard backpointers.

Every selection of beam search is replaced by a distribution: a beam's state, input embedding, score and cost are
expectations under it, so the cost of what the search finds is differentiable. As alpha grows all of them tend to those
of hard beam search.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.checkpoint import checkpoint
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateBeamEncoderDecoderOutput

from hf_ebm.checks import as_whole, check_choice, number, whole
from hf_ebm.objectives.costs import check_costs, cost_of_tokens
from hf_ebm.objectives.losses import IGNORED, at_least_float32
from hf_ebm.relaxations.soft_choices import SoftSelection, soft_top_k
from hf_ebm.relaxations.stepwise import DecoderState, StepwiseDecoder
from hf_ebm.renamed import renamed_attributes

Result = TypeVar("Result")
NORMALIZATIONS = ("local", "global")
# Score of what cannot be selected: finite, so that differences are, and below any score of a model.
_FORBIDDEN = -1e9


class Decoder(Protocol):
    """What the search needs of a decoder; `StepwiseDecoder` is one."""

    def begin(self, embeddings: torch.Tensor, **inputs: Any) -> tuple[torch.Tensor, DecoderState]: ...

    def step(self, embeddings: torch.Tensor, state: DecoderState) -> tuple[torch.Tensor, DecoderState]: ...

    def expected_embedding(self, token_weights: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True)
class SoftBeamSettings:
    """How the relaxed search runs.

    Raises:
        ValueError: for a value that is not allowed.
    """

    num_beams: int = 3
    alpha: float = 1.0
    normalization: str = "local"  # "local": log-probabilities; "global": logits
    checkpoint_steps: bool = False  # recompute each step's activations in the backward pass

    def __post_init__(self) -> None:
        alpha = number(self.alpha)  # inf is hard selection
        if alpha is None or not alpha > 0:
            raise ValueError(f"alpha must be above 0, got {self.alpha!r}")
        object.__setattr__(self, "num_beams", as_whole("num_beams", self.num_beams, 1))
        object.__setattr__(self, "alpha", alpha)
        check_choice("normalization", self.normalization, NORMALIZATIONS)


@dataclass
class SoftBeamResult:
    """The relaxed search after its last step, for B inputs and k beams."""

    scores: torch.Tensor  # (B, k), nats; with the costs added if the search was cost-augmented
    costs: torch.Tensor  # (B, k): expected cost of each beam
    beam_indices: torch.Tensor  # (T, B, k): hard backpointers, the largest weight of each soft one
    tokens: torch.Tensor  # (T, B, k): hard labels


def step_scores(logits: torch.Tensor, normalization: str) -> torch.Tensor:
    """f of a step: log-probabilities (`local`) or logits (`global`), (..., V), float32 or better.

    Example:
        >>> step_scores(torch.tensor([0.0, 0.0]), "local"), step_scores(torch.tensor([0.0, 0.0]), "global")
        (tensor([-0.6931, -0.6931]), tensor([0., 0.]))
    """
    logits = at_least_float32(logits)
    return logits.log_softmax(-1) if normalization == "local" else logits


def relaxed_beam_search(
    decoder: Decoder,
    start_embeddings: torch.Tensor,
    encoder_inputs: dict,
    labels: torch.Tensor,
    cost: Callable[[torch.Tensor, int], torch.Tensor],
    settings: SoftBeamSettings,
    cost_augmented: bool = False,
) -> SoftBeamResult:
    """Runs the search for as many steps as each row has labels.

    A row whose labels are over (-100) keeps its scores and costs. The first step has one live beam.

    Args:
        start_embeddings: (B, d).
        encoder_inputs: passed to `decoder.begin`.
        labels: (B, T), -100 after the end of a row.
        cost: see `hf_ebm.objectives.costs`.
        cost_augmented: add the cost of each successor to its score (for the hinge).

    Raises:
        ValueError: if there are more beams than tokens, the cost has a wrong shape, or labels go on after -100.

    Example:
        >>> from hf_ebm import LSTMSeq2SeqConfig, LSTMSeq2SeqForConditionalGeneration
        >>> from hf_ebm.objectives.costs import HammingCost
        >>> from hf_ebm.relaxations.stepwise import StepwiseDecoder
        >>> config = LSTMSeq2SeqConfig(vocab_size=9, decoder_vocab_size=9, hidden_size=8)
        >>> decoder = StepwiseDecoder(LSTMSeq2SeqForConditionalGeneration(config))
        >>> inputs, labels = {"input_ids": torch.tensor([[4, 7]])}, torch.tensor([[5, 6, 2]])
        >>> start = decoder.embed(decoder.gold_ids(labels)[:, 0])
        >>> found = relaxed_beam_search(decoder, start, inputs, labels, HammingCost(), SoftBeamSettings(num_beams=2))
        >>> direct_loss(found, alpha=1.0).sum().backward()
        >>> found.scores.shape, found.tokens.shape
        (torch.Size([1, 2]), torch.Size([3, 1, 2]))
    """
    active = labels != IGNORED
    if bool((active[:, 1:] & ~active[:, :-1]).any()):
        row = int((active[:, 1:] & ~active[:, :-1]).any(1).nonzero()[0])
        raise ValueError(f"labels: row {row} has {IGNORED} before its end; rows must be padded on the right")
    beams, rows = settings.num_beams, len(labels)
    logits, state = decoder.begin(start_embeddings, **encoder_inputs)
    vocab_size = logits.shape[-1]
    if beams > vocab_size:
        raise ValueError(f"num_beams must be at most the vocabulary of {vocab_size} tokens, got {beams}")
    all_costs = check_costs(cost(labels, vocab_size), labels, vocab_size).to(logits)
    scores = costs = logits.new_zeros(rows, 1)

    def select(
        logits: torch.Tensor, scores: torch.Tensor, costs: torch.Tensor, step: int
    ) -> tuple[torch.Tensor, torch.Tensor, SoftSelection, tuple[torch.Tensor, torch.Tensor]]:
        """One recurrence: new scores and costs, what was selected, and the hard choices."""
        successors = scores[:, :, None] + step_scores(logits, settings.normalization).reshape(rows, -1, vocab_size)
        step_costs = cost_of_tokens(all_costs, labels, step, vocab_size)
        if cost_augmented:
            successors = successors + step_costs[:, None]
        chosen = soft_top_k(successors, beams, settings.alpha)
        with torch.autocast(costs.device.type, enabled=False):  # half precision would blur the costs of all steps
            new_costs = torch.bmm(chosen.beam_weights, costs[:, :, None])[..., 0]
            new_costs = new_costs + torch.bmm(chosen.token_weights, step_costs[:, :, None])[..., 0]
        keep = active[:, step, None]
        new_scores = torch.where(keep, chosen.scores, scores)
        new_costs = torch.where(keep, new_costs, costs)
        hard = (chosen.beam_weights.detach().argmax(-1), chosen.token_weights.detach().argmax(-1))
        return new_scores, new_costs, chosen, hard

    scores, costs, chosen, hard = select(logits, scores, costs, 0)
    embeddings = decoder.expected_embedding(chosen.token_weights)
    state, choices = state.repeat(beams), [hard]
    for step in range(1, labels.shape[1]):

        def advance(
            embeddings: torch.Tensor, scores: torch.Tensor, costs: torch.Tensor, state: DecoderState, step: int = step
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, DecoderState, tuple[torch.Tensor, torch.Tensor]]:
            logits, state = decoder.step(embeddings.flatten(0, 1), state)
            scores, costs, chosen, hard = select(logits, scores, costs, step)
            if step < labels.shape[1] - 1:  # nothing follows the last step
                embeddings, state = decoder.expected_embedding(chosen.token_weights), state.mix(chosen.beam_weights)
            return scores, costs, embeddings, state, hard

        scores, costs, embeddings, state, hard = _run(advance, settings, embeddings, scores, costs, state)
        choices.append(hard)
    backpointers, tokens = zip(*choices, strict=True)
    return SoftBeamResult(scores, costs, torch.stack(backpointers), torch.stack(tokens))


def _run(step: Callable[..., Result], settings: SoftBeamSettings, *arguments: Any) -> Result:
    if not settings.checkpoint_steps:
        return step(*arguments)
    return checkpoint(step, *arguments, use_reentrant=False)


def direct_loss(result: SoftBeamResult, alpha: float) -> torch.Tensor:
    """Expected cost of the beams under `softmax(alpha * scores)`, (B,) (thesis, algorithm 3, line 18).

    Example:
        >>> nothing = torch.zeros(0)
        >>> direct_loss(SoftBeamResult(torch.zeros(1, 2), torch.tensor([[1.0, 3.0]]), nothing, nothing), alpha=1.0)
        tensor([2.])
    """
    return (_beam_weights(result.scores, alpha) * result.costs).sum(-1)


def hinge_loss(result: SoftBeamResult, gold_scores: torch.Tensor, alpha: float) -> torch.Tensor:
    """`max(0, s_max - s(y*))`, (B,), s_max the soft maximum of cost-augmented scores (Goyal et al. 2018, section 4).

    Args:
        result: of a cost-augmented search.
        gold_scores: s(y*), (B,), of the same normalization; see `gold_scores`.

    Example:
        >>> nothing = torch.zeros(0)
        >>> found = SoftBeamResult(torch.tensor([[1.0, 1.0]]), nothing, nothing, nothing)
        >>> hinge_loss(found, gold_scores=torch.tensor([0.5]), alpha=1.0)
        tensor([0.5000])
    """
    best = (_beam_weights(result.scores, alpha) * result.scores).sum(-1)
    return (best - gold_scores).clamp_min(0)


def _beam_weights(scores: torch.Tensor, alpha: float) -> torch.Tensor:
    """`softmax(alpha * scores)`, (B, k); of `inf`, the best beam alone."""
    if math.isinf(alpha):
        return torch.nn.functional.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores)
    return (alpha * scores).softmax(-1)


def gold_scores(logits: torch.Tensor, labels: torch.Tensor, normalization: str) -> torch.Tensor:
    """s(y*): the scores of the labels of a teacher-forced pass, (B, T, V) and (B, T) -> (B,).

    Example:
        >>> gold_scores(torch.zeros(1, 3, 2), torch.tensor([[0, 1, -100]]), "local")  # twice log 1/2
        tensor([-1.3863])
    """
    scores = step_scores(logits, normalization).gather(2, labels.clamp_min(0)[..., None])[..., 0]
    return scores.masked_fill(labels == IGNORED, 0).sum(-1)


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


__getattr__ = renamed_attributes(__name__, {"token_scores": "step_scores"})
