"""What a decoder carries from step to step, as plain tensors that can be mixed over beams."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import DynamicCache, EncoderDecoderCache


@dataclass(frozen=True)
class DecoderState:
    """State of N rows after `length` steps.

    `own` holds what depends on the tokens so far (self-attention keys and values, (N, heads, length, d); hidden and
    cell states of an LSTM, (N, layers, d)); `shared` what depends on the input alone (cross-attention keys and values,
    the encoder's output, its attention mask), the same for all beams of one input. None of it is ever written in
    place. `cache_class` is that of the model's own cache.
    """

    own: tuple[torch.Tensor, ...]
    shared: tuple[torch.Tensor | None, ...]
    length: int
    cache_class: type

    def repeat(self, num_beams: int) -> DecoderState:
        """Each row `num_beams` times, side by side: from one beam to k equal ones."""

        def of(tensors):
            return tuple(None if t is None else t.repeat_interleave(num_beams, 0) for t in tensors)

        return replace(self, own=of(self.own), shared=of(self.shared))

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

        return replace(self, own=tuple(of(tensor) for tensor in self.own))


def empty_cache() -> EncoderDecoderCache:
    """A cache of keys and values for the first step.

    Not made from a configuration: T5's counts the encoder's layers there, and a sliding window would cut the cache,
    whose length tells the position; the model's mask applies the window all the same.
    """
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def state_from_cache(cache, encoder_hidden, attention_mask) -> DecoderState:
    """Takes the tensors out of a model's cache.

    A cache that isn't of keys and values gives them itself, by `to_tensors()`, and is made of them again by
    `from_tensors(own, shared, length)`.
    """
    if isinstance(cache, EncoderDecoderCache):
        own, shared = (
            tuple(t for layer in part.layers for t in (layer.keys, layer.values))
            for part in (cache.self_attention_cache, cache.cross_attention_cache)
        )
    else:
        own, shared = cache.to_tensors()
    return DecoderState(own, (encoder_hidden, attention_mask, *shared), cache.get_seq_length(), type(cache))


def cache_from_state(state: DecoderState):
    """A cache for one step of the model, which may grow it: the state's tensors are not touched."""
    kept = state.shared[2:]
    if state.cache_class is not EncoderDecoderCache:
        return state.cache_class.from_tensors(state.own, kept, state.length)
    cache = empty_cache()
    for part, tensors in ((cache.self_attention_cache, state.own), (cache.cross_attention_cache, kept)):
        for layer in range(len(tensors) // 2):
            part.update(tensors[2 * layer], tensors[2 * layer + 1], layer)
            cache.is_updated[layer] = True
    return cache
