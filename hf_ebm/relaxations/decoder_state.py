"""What a decoder carries from step to step, as plain tensors that can be mixed over beams."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer


class TensorCache(Protocol):
    """A cache that isn't of keys and values: it gives its tensors itself, and is made of them again."""

    def to_tensors(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor | None, ...]]: ...

    @classmethod
    def from_tensors(
        cls, own: tuple[torch.Tensor, ...], shared: tuple[torch.Tensor | None, ...], length: int
    ) -> TensorCache: ...

    def get_seq_length(self) -> int: ...


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
    cache_class: type[EncoderDecoderCache | TensorCache]

    def repeat(self, num_beams: int) -> DecoderState:
        """Each row `num_beams` times, side by side: from one beam to k equal ones."""

        own = tuple(tensor.repeat_interleave(num_beams, 0) for tensor in self.own)
        shared = tuple(None if t is None else t.repeat_interleave(num_beams, 0) for t in self.shared)
        return replace(self, own=own, shared=shared)

    def mix(self, beam_weights: torch.Tensor) -> DecoderState:
        """The convex mix over beams: row i becomes `sum_j beam_weights[:, i, j] * row j`.

        One-hot weights reorder the beams, as hard beam search does.

        Args:
            beam_weights: (B, k, k), for B * k rows.
        """
        rows, beams, _ = beam_weights.shape

        def of(tensor: torch.Tensor) -> torch.Tensor:
            flat = tensor.reshape(rows, beams, -1)
            return torch.bmm(beam_weights.to(flat.dtype), flat).view_as(tensor)

        return replace(self, own=tuple(of(tensor) for tensor in self.own))


def empty_cache() -> EncoderDecoderCache:
    """A cache of keys and values for the first step.

    Not made from a configuration: T5's counts the encoder's layers there, and a sliding window would cut the cache,
    whose length tells the position; the model's mask applies the window all the same.
    """
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def state_from_cache(
    cache: EncoderDecoderCache | TensorCache,
    encoder_hidden: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
) -> DecoderState:
    """Takes the tensors out of a model's cache.

    Raises:
        ValueError: for a layer without keys and values.
    """
    shared: tuple[torch.Tensor | None, ...]
    if isinstance(cache, EncoderDecoderCache):
        own, shared = _keys_and_values(cache.self_attention_cache), _keys_and_values(cache.cross_attention_cache)
    else:
        own, shared = cache.to_tensors()
    return DecoderState(own, (encoder_hidden, attention_mask, *shared), cache.get_seq_length(), type(cache))


def _keys_and_values(cache: Cache) -> tuple[torch.Tensor, ...]:
    found: list[torch.Tensor] = []
    for layer in cache.layers:
        if not isinstance(layer, CacheLayerMixin) or layer.keys is None or layer.values is None:
            raise ValueError(f"the cache has a layer without keys and values, {type(layer).__name__}")
        found += [layer.keys, layer.values]
    return tuple(found)


def cache_from_state(state: DecoderState) -> EncoderDecoderCache | TensorCache:
    """A cache for one step of the model, which may grow it: the state's tensors are not touched."""
    kept = state.shared[2:]
    if not issubclass(state.cache_class, EncoderDecoderCache):
        return state.cache_class.from_tensors(state.own, kept, state.length)
    cache, cross = empty_cache(), tuple(tensor for tensor in kept if tensor is not None)
    for part, tensors in ((cache.self_attention_cache, state.own), (cache.cross_attention_cache, cross)):
        for keys, values in zip(tensors[::2], tensors[1::2], strict=True):
            cache.is_updated[len(part.layers)] = True
            part.layers.append(_layer_of(keys, values))
    return cache


def _layer_of(keys: torch.Tensor, values: torch.Tensor) -> DynamicLayer:
    """A layer that holds these very tensors; `update` would copy them, which takes longer than a step on few rows."""
    layer = DynamicLayer()
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    return layer
