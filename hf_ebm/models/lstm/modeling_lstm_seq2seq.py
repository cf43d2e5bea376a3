"""`LSTMSeq2SeqForConditionalGeneration`: an LSTM encoder-decoder with additive or fixed attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
)
from transformers.loss.loss_utils import fixed_cross_entropy
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.utils import TransformersKwargs

from hf_ebm.models.checkpoints import PublishingMixin
from hf_ebm.models.lstm.modules_lstm import (
    LSTMCache,
    LSTMDecoder,
    LSTMEncoder,
    LSTMSeq2SeqConfig,
    init_uniform,
    right_padded_lengths,
)
from hf_ebm.registration import register

# Label of positions without a target.
_IGNORED = -100
# A score no token of a model has. Finite, unlike that of forbidden tokens: beam search carries on from candidates that
# did not end, and sampling among those needs one of them to be possible.
_LAST_RESORT = -1e9


class LSTMSeq2SeqForConditionalGeneration(PublishingMixin, GenerationMixin):
    """The recurrent encoder-decoder of thesis ch. 3 to 5 (Bahdanau et al. 2015), with `generate`.

    Sources and targets are padded on the right. With `attention="fixed"`, `generate` writes exactly as many tokens as
    the source has, the end token last.

    Args:
        config: sizes and kinds of everything.
    """

    config_class = LSTMSeq2SeqConfig
    main_input_name = "input_ids"
    _is_stateful = True  # a recurrent state cannot be cut back, which assisted decoding needs

    def __init__(self, config: LSTMSeq2SeqConfig):
        super().__init__(config)
        self.encoder = LSTMEncoder(config)
        self.decoder = LSTMDecoder(config)
        self.lm_head = nn.Linear(2 * config.hidden_size, config.num_target_ids)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        init_uniform(module, self.config.initializer_range)

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding of source ids; that of target ids is `get_decoder().get_input_embeddings()`."""
        return self.encoder.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the embedding of source ids."""
        self.encoder.add_module("embed_tokens", value)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: source and target ids have vocabularies of their own, and one number cannot say which to resize.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "resize_token_embeddings: the model has a source and a target vocabulary; make a model of the size you "
            f"need with vocab_size (now {self.config.vocab_size}) and decoder_vocab_size (now "
            f"{self.config.num_target_ids}) in its configuration"
        )

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """(B, T) labels to the (B, T) ids read while predicting them: one to the right, -100 as padding."""
        start = labels.new_full((len(labels), 1), self.config.decoder_start_token_id)
        shifted = torch.cat([start, labels[:, :-1]], 1)
        return shifted.masked_fill(shifted == _IGNORED, self.config.pad_token_id)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple[Tensor] | None = None,
        cache: LSTMCache | None = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> Seq2SeqLMOutput | tuple:
        """Logits of the targets given the sources, with the loss if there are labels.

        Args:
            input_ids: (B, S) source ids, not read if there are `encoder_outputs`.
            attention_mask: (B, S), 0 at padding of the source, which stands on the right.
            decoder_input_ids: (B, T) target ids to read; by default those that go with `labels`.
            decoder_attention_mask: (B, T), 0 at padding on the right; it changes no logits before it.
            encoder_outputs: what `get_encoder()` returned, or a tuple of its (B, S, hidden_size) states.
            cache: state after the tokens before `decoder_input_ids`. It is not changed.
            inputs_embeds, decoder_inputs_embeds: (B, S, embedding_dim), (B, T, decoder_embedding_dim) instead of ids.
            labels: (B, T) target ids, -100 where there is no target.
            use_cache: whether to return the new state in `cache`; by default the configuration's.
            output_attentions: whether to return the weights of additive attention, in `cross_attentions` as a tuple of
                one (B, 1, T, S) tensor.
            return_dict: `False` for a tuple.
            kwargs: `num_items_in_batch`, the number of targets the loss is divided by (by default those of this batch).

        Returns:
            `loss`, `logits` (B, T, decoder_vocab_size), `cache`, `cross_attentions`, `encoder_last_hidden_state`.

        Raises:
            ValueError: for ids or labels outside the vocabulary, padding on the left, a cache of another shape, or,
                with fixed attention, more targets than source positions; naming the row where there is one.
        """
        unknown = sorted(set(kwargs) - TransformersKwargs.__optional_keys__)
        if unknown:
            raise ValueError(f"forward has no argument {', '.join(unknown)}")
        if labels is not None:
            self._check_labels(labels)
            if decoder_input_ids is None and decoder_inputs_embeds is None:
                decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if (decoder_input_ids is None) == (decoder_inputs_embeds is None):
            raise ValueError(
                "decoder_input_ids, decoder_inputs_embeds: give one of them, or labels alone; got both or none"
            )
        if encoder_outputs is None:
            encoder_outputs = self.encoder(input_ids, attention_mask, inputs_embeds)
        source_states = encoder_outputs[0]
        embeds = decoder_inputs_embeds
        if embeds is None:
            embeds = self.decoder.embed_tokens(decoder_input_ids)
        self._check_shapes(embeds, source_states, attention_mask, cache, labels)
        if decoder_attention_mask is not None:
            right_padded_lengths("decoder_attention_mask", decoder_attention_mask)
        if self.config.attention == "fixed":
            _check_aligned(embeds, source_states, attention_mask, cache, labels, decoder_attention_mask)

        features, cache, weights = self.decoder(embeds, source_states, attention_mask, cache)
        logits = self.lm_head(features)
        use_cache = self.config.use_cache if use_cache is None else use_cache
        output = Seq2SeqLMOutput(
            loss=None if labels is None else _loss(logits, labels, kwargs.get("num_items_in_batch")),
            logits=logits,
            cache=cache if use_cache else None,  # type: ignore[arg-type]  # annotated as one of keys and values
            cross_attentions=(weights[:, None],) if output_attentions and weights is not None else None,
            encoder_last_hidden_state=source_states,
        )
        return output.to_tuple() if return_dict is False else output

    def check_targets(self, labels: Tensor, attention_mask: Tensor | None = None) -> None:
        """What `forward` checks of labels, for callers that decode step by step and give it none.

        Args:
            labels: (B, T) target ids, -100 where there is no target.
            attention_mask: (B, S), 0 at padding of the source.

        Raises:
            ValueError: naming the row, for a label outside the vocabulary, or with fixed attention for another
                number of targets than of source positions, unless it is none.
        """
        self._check_labels(labels)
        if self.config.attention == "fixed" and attention_mask is not None:
            targets, sources = _target_lengths(labels != _IGNORED), attention_mask.sum(1)
            differ = (targets != sources) & (targets > 0)
            _refuse_rows(differ, targets, sources, "a target must be as long as its source")

    def _check_labels(self, labels: Tensor) -> None:
        wrong = (labels != _IGNORED) & ((labels < 0) | (labels >= self.config.num_target_ids))
        if bool(wrong.any()):
            row, position = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"labels: row {row} has {int(labels[row, position])}, must be from 0 to "
                f"{self.config.num_target_ids - 1}, or {_IGNORED} where there is no target"
            )

    def _check_shapes(
        self,
        embeds: Tensor,
        source_states: Tensor,
        attention_mask: Tensor | None,
        cache: LSTMCache | None,
        labels: Tensor | None,
    ) -> None:
        batch, source_shape = len(source_states), source_states.shape[:2]
        if attention_mask is not None and attention_mask.shape != source_shape:
            raise ValueError(
                f"attention_mask must have the source's shape {tuple(source_shape)}, got {tuple(attention_mask.shape)}"
            )
        if len(embeds) != batch:
            raise ValueError(f"decoder inputs must have a row for each of the {batch} sources, got {len(embeds)} rows")
        if labels is not None and labels.shape != embeds.shape[:2]:
            raise ValueError(
                f"labels must have the decoder inputs' shape {tuple(embeds.shape[:2])}, got {tuple(labels.shape)}"
            )
        if cache is None:
            return
        if not isinstance(cache, LSTMCache):
            raise ValueError(f"cache must be an LSTMCache, got {type(cache).__name__}")
        shape = (self.config.decoder_layers, batch, self.config.hidden_size)
        if cache.hidden.shape != shape or cache.cell.shape != shape:
            raise ValueError(
                f"cache: its hidden and cell must have shape {shape}, got {tuple(cache.hidden.shape)} and "
                f"{tuple(cache.cell.shape)}"
            )
        if cache.keys is not None and cache.keys.shape[:2] != source_shape:
            raise ValueError(
                f"cache: its keys must have the source's shape {tuple(source_shape)}, got {tuple(cache.keys.shape[:2])}"
            )

    def _beam_search(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Stock beam search, which writes end tokens after the end where the padding id is 0, with padding there."""
        generation_config = kwargs["generation_config"]
        stock: Callable[..., Any] = super()._beam_search  # type: ignore[misc]
        result = stock(input_ids, *args, **kwargs)
        if generation_config._eos_token_tensor is not None:
            sequences = result if isinstance(result, Tensor) else result.sequences
            written = sequences[:, input_ids.shape[1] :]
            ends = torch.isin(written, generation_config._eos_token_tensor).long()
            written.masked_fill_(ends.cumsum(1) > ends, generation_config._pad_token_tensor)
        return result

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """`generate` must not make a cache of keys and values; the decoder makes its own."""
        return False

    def _prepare_generated_length(
        self, generation_config: GenerationConfig, has_default_max_length: bool, *args: Any, **kwargs: Any
    ) -> GenerationConfig:
        """With fixed attention the longest source sets the length; a limit that was asked for may be lower."""
        longest = kwargs["inputs_tensor"].shape[1] + 1
        if self.config.attention == "fixed" and has_default_max_length and generation_config.max_new_tokens is None:
            generation_config.max_new_tokens = longest - kwargs["input_ids_length"]
        stock: Callable[..., GenerationConfig] = super()._prepare_generated_length  # type: ignore[misc]
        generation_config = stock(generation_config, has_default_max_length, *args, **kwargs)
        if self.config.attention == "fixed":
            generation_config.max_length = min(generation_config.max_length, longest)
        return generation_config

    def _get_logits_processor(
        self, generation_config: GenerationConfig, *args: Any, **kwargs: Any
    ) -> LogitsProcessorList:
        """With fixed attention, first of all, only tokens that make the target as long as its source."""
        stock: Callable[..., LogitsProcessorList] = super()._get_logits_processor  # type: ignore[misc]
        processors, model_kwargs = stock(generation_config, *args, **kwargs), kwargs["model_kwargs"]
        if self.config.attention != "fixed":
            return processors
        config, mask = self.config, model_kwargs.get("attention_mask")
        states = model_kwargs["encoder_outputs"][0]
        lengths = torch.full((len(states),), states.shape[1]) if mask is None else mask.sum(1)
        other = {config.bos_token_id, config.decoder_start_token_id}
        processor = FixedLengthLogitsProcessor(lengths, config.eos_token_id, config.pad_token_id, other)
        return LogitsProcessorList([processor, *processors])


class FixedLengthLogitsProcessor(LogitsProcessor):
    """Forbids the end token before a row's last source position, demands it there, and padding after it.

    The allowed tokens keep their scores, the end token too, so that a beam's score stays the model's log probability.

    Args:
        source_lengths: (B,) number of source positions of each row of scores.
        eos_token_id, pad_token_id: ids of the end token and of padding.
        other_special_ids: further ids that are no output symbols.
    """

    def __init__(self, source_lengths: Tensor, eos_token_id: int, pad_token_id: int, other_special_ids: set[int]):
        self.source_lengths = source_lengths
        self.eos_token_id, self.pad_token_id = eos_token_id, pad_token_id
        self.special_ids = sorted(other_special_ids | {eos_token_id, pad_token_id})

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(B, t + 1) decoder ids with the start token, (B, V) scores of output t; returns (B, V) scores."""
        position = input_ids.shape[1] - 1
        before_end = scores.index_fill(1, torch.tensor(self.special_ids, device=scores.device), -torch.inf)
        at_end = torch.full_like(scores, -torch.inf)
        at_end[:, self.pad_token_id] = _LAST_RESORT
        at_end[:, self.eos_token_id] = scores[:, self.eos_token_id]
        after_end = torch.full_like(scores, -torch.inf)
        after_end[:, self.pad_token_id] = 0.0
        last = self.source_lengths.to(scores.device)[:, None] - 1
        return torch.where(last.gt(position), before_end, torch.where(last.eq(position), at_end, after_end))


def _loss(logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
    """Cross entropy, the mean over the batch's targets, or their sum over `num_items_in_batch`; at least float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    labels, count = labels.to(logits.device).flatten(), num_items_in_batch
    # The number may be an int as well, whatever the annotation says.
    return fixed_cross_entropy(logits.flatten(0, 1), labels, count, _IGNORED)  # type: ignore[arg-type]


def _check_aligned(
    embeds: Tensor,
    source_states: Tensor,
    attention_mask: Tensor | None,
    cache: LSTMCache | None,
    labels: Tensor | None,
    decoder_attention_mask: Tensor | None,
) -> None:
    """Raises `ValueError` if a row has more targets than source positions to read.

    Which rows end early is known from labels or the decoder's mask. Without them (in generation, where rows that are
    done are carried along) only the padded lengths can be compared.
    """
    past, steps = (0 if cache is None else cache.length), embeds.shape[1]
    sources = source_states.new_full((len(source_states),), source_states.shape[1], dtype=torch.long)
    used = decoder_attention_mask[:, -steps:].bool() if decoder_attention_mask is not None else None
    used = labels != _IGNORED if labels is not None else used
    if used is None:
        if past + steps <= source_states.shape[1]:
            return
        targets = sources.new_full((len(sources),), past + steps)
    else:
        targets = past + _target_lengths(used)
        sources = sources if attention_mask is None else attention_mask.sum(1)
    targets = targets.to(sources.device)
    _refuse_rows(targets > sources, targets, sources, "a target may not be longer than its source")


def _target_lengths(used: Tensor) -> Tensor:
    """(B, T) true where there is a target → (B,) the last such position, from 1."""
    return (used * torch.arange(1, used.shape[1] + 1, device=used.device)).amax(1)


def _refuse_rows(wrong: Tensor, targets: Tensor, sources: Tensor, rule: str) -> None:
    """Raises `ValueError` for the first row that is wrong, with its lengths."""
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"decoder inputs: row {row} has {int(targets[row])} targets and its source {int(sources[row])} positions; "
            f"with attention='fixed' output i reads source position i, so {rule}"
        )


register(LSTMSeq2SeqConfig, {AutoModelForSeq2SeqLM: LSTMSeq2SeqForConditionalGeneration})
