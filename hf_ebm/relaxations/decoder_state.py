"""What a decoder carries from step to step, as plain tensors that can be mixed over beams."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedConfig

from hf_ebm.models.lstm.cache_lstm import LSTMCache


@dataclass(frozen=True)
class DecoderState:
    """State of N rows after `length` steps.

    `own` holds what depends on the tokens so far (self-attention keys and values, (N, heads, length, d); hidden and
    cell states of an LSTM, (N, layers, d)); `shared` what depends on the input alone (cross-attention keys and values,
    the encoder's output, its attention mask), the same for all beams of one input. None of it is ever written in place.
    """

    own: tuple[torch.Tensor, ...]
    shared: tuple[torch.Tensor | None, ...]
    length: int

    def repeat(self, num_beams: int) -> DecoderState:
        """Each row `num_beams` times, side by side: from one beam to k equal ones."""

        def of(tensors):
            return tuple(None if t is None else t.repeat_interleave(num_beams, 0) for t in tensors)

        return DecoderState(of(self.own), of(self.shared), self.length)

    def mix(self, beam_weights: torch.Tensor) -> DecoderState:
        """The convex mix over beams: row i becomes `sum_j beam_weights[:, i, j] * row j`.

        One-hot weights reorder the beams, as hard beam search does.

        Args:
            beam_weights: (B, k, k), for B * k rows.
        """
        rows, beams, _ = beam_weights.shape

        def of(tensor):
            flat = tensor.reshape(rows, beams, -1)
            return torch.bmm(beam_weights.to(flat.dtype), flat).view_as(tensor)

        return DecoderState(tuple(of(tensor) for tensor in self.own), self.shared, self.length)


def empty_cache(config: PreTrainedConfig) -> EncoderDecoderCache | None:
    """A cache for the first step; None for models that make their own."""
    if config.model_type == "hf_ebm_lstm_seq2seq":
        return None
    # Not made from the configuration: T5's counts the encoder's layers there, and a sliding window would cut the cache,
    # whose length tells the position; the model's mask applies the window all the same.
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def state_from_cache(cache, encoder_hidden, attention_mask) -> DecoderState:
    """Takes the tensors out of a model's cache."""
    context = (encoder_hidden, attention_mask)
    if isinstance(cache, LSTMCache):
        own = (cache.hidden.transpose(0, 1), cache.cell.transpose(0, 1))
        return DecoderState(own, (*context, cache.keys), cache.get_seq_length())
    own = tuple(t for layer in cache.self_attention_cache.layers for t in (layer.keys, layer.values))
    shared = tuple(t for layer in cache.cross_attention_cache.layers for t in (layer.keys, layer.values))
    return DecoderState(own, (*context, *shared), cache.get_seq_length())


def cache_from_state(state: DecoderState, config: PreTrainedConfig) -> EncoderDecoderCache | LSTMCache:
    """A cache for one step of the model, which may grow it: the state's tensors are not touched."""
    kept = state.shared[2:]
    if config.model_type == "hf_ebm_lstm_seq2seq":
        hidden, cell = (t.transpose(0, 1).contiguous() for t in state.own)
        return LSTMCache(hidden, cell, state.length, kept[0])
    cache = empty_cache(config)
    for part, tensors in ((cache.self_attention_cache, state.own), (cache.cross_attention_cache, kept)):
        for layer in range(len(tensors) // 2):
            part.update(tensors[2 * layer], tensors[2 * layer + 1], layer)
            cache.is_updated[layer] = True
    return cache
