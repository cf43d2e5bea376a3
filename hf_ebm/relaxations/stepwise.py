"""Runs a sequence-to-sequence model one step at a time on input embeddings, differentiably.

Search-aware objectives feed the decoder mixtures of embeddings that depend on its own earlier scores. `StepwiseDecoder`
does that for any model of Transformers that decodes with a cache; gradients flow through the cache to every earlier
step. `DecoderState` is what is carried from step to step, as plain tensors that can be mixed over beams. The model
itself applies position offsets, biases of the logits, dropout and so on: only the scale of the embedding, which some
models apply inside their embedding module and some in the decoder, is found out here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.modeling_outputs import BaseModelOutput

from hf_ebm.model_facts import num_embeddings
from hf_ebm.model_modes import encodes_ids, evaluation_mode, made_up_states, state_kept
from hf_ebm.objectives.losses import IGNORED, at_least_float32

_PROBE_LENGTH = 5
# From so many rows on a product takes longer to compute than its result to write.
_ENOUGH_ROWS = 96
# Of models that have been calibrated: `generate` makes a decoder for every batch.
_SCALES_OF_MODELS: weakref.WeakKeyDictionary[PreTrainedModel, float] = weakref.WeakKeyDictionary()


class StepwiseDecoder:
    """The decoder of a sequence-to-sequence model, step by step.

    The first time a model is met, a few random tokens are decoded three ways (token ids at once, embeddings at once,
    embeddings step by step); the model is refused unless all agree.

    Args:
        model: any `AutoModelForSeq2SeqLM`.

    Raises:
        ValueError: for a model that isn't an encoder-decoder, or that cannot be decoded on embeddings with a cache
            (FSMT, Switch and NLLB-MoE, for example).
    """

    def __init__(self, model: PreTrainedModel):
        if not getattr(model.config, "is_encoder_decoder", False) or not hasattr(model, "get_encoder"):
            raise ValueError(
                "model must be a sequence-to-sequence model (AutoModelForSeq2SeqLM), got "
                f"{type(model).__name__}, which has no encoder and decoder"
            )
        self.model = model
        self._products = SummedWeightGradients()
        if model not in _SCALES_OF_MODELS:
            self.scale = 1.0
            with evaluation_mode(model), state_kept(model):
                self._calibrate()
            _SCALES_OF_MODELS[model] = self.scale
        self.scale = _SCALES_OF_MODELS[model]

    @property
    def embedding_weight(self) -> torch.Tensor:
        """The decoder's input embedding as stored, (V, d), before `scale`."""
        return _embedding(self.model).weight

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Input embeddings of tokens: (...,) -> (..., d), as the decoder applies them."""
        embedding = _embedding(self.model)  # the row of padding has no gradient, where the model says so
        return nn.functional.embedding(ids, embedding.weight, embedding.padding_idx) * self.scale

    def expected_embedding(self, token_weights: torch.Tensor) -> torch.Tensor:
        """Mixtures of input embeddings: weights (..., V) -> (..., d)."""
        weight, size = self.embedding_weight, token_weights.shape[-1]
        used = weight if len(weight) == size else weight[:size]  # whose gradient is another table of zeros
        return self._products.mixed(token_weights.to(weight.dtype), used) * self.scale

    def gold_ids(self, labels: torch.Tensor) -> torch.Tensor:
        """The decoder's inputs under teacher forcing, (B, T): labels shifted right as the model itself does it."""
        shift = getattr(self.model, "prepare_decoder_input_ids_from_labels", None)
        if shift is not None:
            return shift(labels=labels)
        # A few families shift inside their forward alone, all by one start token.
        config = self.model.config
        start = labels.new_full((len(labels), 1), config.decoder_start_token_id)
        shifted = torch.cat([start, labels[:, :-1]], 1)
        return shifted.masked_fill(shifted == IGNORED, config.pad_token_id)

    def begin(
        self, embeddings: torch.Tensor, *, model: nn.Module | None = None, **encoder_inputs: Any
    ) -> tuple[torch.Tensor, DecoderState]:
        """Encodes, and decodes the first step.

        Args:
            embeddings: of the start tokens, (B, d).
            model: what is called in place of the model itself: its data-parallel wrapper. Once per backward pass is
                enough for the gradients to be averaged over processes, as this step uses every parameter; calling it
                at every step would need the same number of steps in all processes.
            encoder_inputs: what the encoder takes (`input_ids`, `attention_mask`, …), or `encoder_outputs`.

        Returns:
            Logits (B, V), float32 or better, and the state.

        Raises:
            ValueError: if decoder layers would be dropped at random, or activations recomputed without the cache.
        """
        self._check_mode()
        self._products = SummedWeightGradients()  # of this run of steps
        takes_cache = getattr(self.model, "_supports_default_dynamic_cache", lambda: False)
        with state_kept(self.model), self._products:
            outputs = (self.model if model is None else model)(
                **encoder_inputs,
                decoder_inputs_embeds=embeddings[:, None],
                cache=empty_cache() if takes_cache() else None,  # else it makes its own
                use_cache=True,
                return_dict=True,
            )
        return self._taken(outputs, outputs.encoder_last_hidden_state, encoder_inputs.get("attention_mask"), 1)

    def step(self, embeddings: torch.Tensor, state: DecoderState) -> tuple[torch.Tensor, DecoderState]:
        """Decodes one more step: embeddings (N, d) -> logits (N, V) and the new state."""
        hidden, attention_mask = state.shared[:2]
        with state_kept(self.model), self._products:
            outputs = self.model(
                encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
                attention_mask=attention_mask,
                decoder_inputs_embeds=embeddings[:, None],
                cache=cache_from_state(state),
                use_cache=True,
                return_dict=True,
            )
        return self._taken(outputs, hidden, attention_mask, state.length + 1)

    def _taken(
        self, outputs: Any, hidden: torch.Tensor | None, attention_mask: torch.Tensor | None, length: int
    ) -> tuple[torch.Tensor, DecoderState]:
        if outputs.cache is None or outputs.cache.get_seq_length() != length:
            raise ValueError(f"{type(self.model).__name__} did not keep its cache; it cannot be decoded step by step")
        return at_least_float32(outputs.logits.squeeze(1)), state_from_cache(outputs.cache, hidden, attention_mask)

    def _check_mode(self) -> None:
        if not self.model.training:
            return
        if getattr(self.model, "is_activation_checkpointing", False):
            raise ValueError(
                "gradient checkpointing drops the decoder's cache without saying so: turn it off "
                "(model.activation_checkpointing_disable())"
            )
        check_layers_stay(self.model)

    @torch.no_grad()
    def _calibrate(self) -> None:
        """Finds the scale at which embeddings and ids give the same logits, and checks the steps."""
        name = type(self.model).__name__
        try:
            inputs, ids, reference = _probe(self.model)
            # Kernels of different lengths round differently, by little more than the last bits in half precision.
            single = reference.dtype in (torch.float32, torch.float64)
            tolerance = (1e3 if single else 16) * torch.finfo(reference.dtype).eps
            reference = at_least_float32(reference)
            tolerance *= float(reference.abs().max().clamp_min(1))
            errors: dict[float, float] = {}
            for scale in _scales(self.model):
                self.scale = scale
                found = self.model(**inputs, decoder_inputs_embeds=self.embed(ids), use_cache=False).logits
                errors[scale] = float((found - reference).abs().max())
            self.scale = min(errors, key=errors.__getitem__)
            steps = []
            logits, state = self.begin(self.embed(ids[:, 0]), **inputs)
            for position in range(1, ids.shape[1] + 1):
                steps.append(logits)
                if position < ids.shape[1]:
                    logits, state = self.step(self.embed(ids[:, position]), state)
            stepwise_error = float((torch.stack(steps, 1) - reference).abs().max())
        except (TypeError, AttributeError, RuntimeError, IndexError, ValueError, KeyError) as error:
            raise ValueError(f"{name} cannot be decoded step by step on embeddings: {error}") from error
        if not max(errors[self.scale], stepwise_error) <= tolerance:
            raise ValueError(
                f"{name} cannot be decoded step by step on embeddings: its logits differ from those of token ids by "
                f"{errors[self.scale]:.1e} at once and {stepwise_error:.1e} step by step"
            )


def check_layers_stay(model: PreTrainedModel) -> None:
    """Raises `ValueError` for a decoder whose layers are dropped at random in training.

    Example:
        >>> from transformers import BartConfig, BartForConditionalGeneration
        >>> config = BartConfig(vocab_size=9, d_model=16, encoder_layers=1, decoder_layers=1, decoder_layerdrop=0.1)
        >>> check_layers_stay(BartForConditionalGeneration(config))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        ValueError: model: decoder_layerdrop must be 0 for step-by-step decoding, got 0.1, ...
    """
    dropped = next((p for module in model.get_decoder().modules() if (p := getattr(module, "layerdrop", 0))), 0)
    if dropped:
        raise ValueError(
            f"model: decoder_layerdrop must be 0 for step-by-step decoding, got {dropped}, as a dropped layer misses a "
            f"step of its cache; load {type(model).__name__} with decoder_layerdrop=0.0"
        )


def _embedding(model: PreTrainedModel) -> nn.Embedding:
    decoder = model.get_decoder()
    found = getattr(decoder, "embed_tokens", None)
    return decoder.get_input_embeddings() if found is None else found


def _scales(model: PreTrainedModel) -> list[float]:
    """Where models keep the scale: nowhere, in the embedding module, or in the decoder."""
    modules = (_embedding(model), model.get_decoder())
    return list(dict.fromkeys([1.0, *(float(getattr(module, "embed_scale", 1.0)) for module in modules)]))


def _probe(model: PreTrainedModel) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """Encoder inputs, decoder ids (2, T) and the logits the model gives them, without touching the random state."""
    generator = torch.Generator().manual_seed(0)

    def draw(vocab_size: int) -> torch.Tensor:
        low = min(3, vocab_size - 1)  # past the usual special tokens
        ids = torch.randint(low, min(vocab_size, 50), (2, _PROBE_LENGTH), generator=generator)
        return ids.to(_embedding(model).weight.device)

    ids = draw(_embedding(model).num_embeddings)
    inputs: dict[str, Any]
    if encodes_ids(model):
        source = draw(num_embeddings(model))
        inputs = {"input_ids": source, "attention_mask": torch.ones_like(source)}
    else:
        inputs = {"encoder_outputs": made_up_states(model, len(ids))}
    reference = model(**inputs, decoder_input_ids=ids, use_cache=False).logits
    return inputs, ids, reference


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

    Example:
        >>> empty_cache().get_seq_length()
        0
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

    Example:
        >>> cache, keys = empty_cache(), torch.ones(1, 2, 3, 4)  # of one row, two heads and three steps
        >>> _ = cache.self_attention_cache.update(keys, keys, 0)
        >>> state = state_from_cache(cache, encoder_hidden=None, attention_mask=None)
        >>> state.length, state.repeat(2).own[0].shape
        (3, torch.Size([2, 2, 3, 4]))
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
    """A cache for one step of the model, which may grow it: the state's tensors are not touched.

    Example:
        >>> keys = torch.ones(1, 2, 3, 4)
        >>> cache_from_state(DecoderState((keys, keys), (None, None), 3, EncoderDecoderCache)).get_seq_length()
        3
    """
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


class SummedWeightGradients(TorchFunctionMode):
    """Inside, linear layers hold back what the gradients of their weights are made of, until enough rows are together.

    One object serves all steps of a search. A step has few rows, and the gradient of a large weight takes longer to
    write, and to add to that of other steps, than to multiply. Outputs are those of ordinary layers bit for bit,
    gradients up to the order of sums. Under autocast, and of weights that don't learn, layers are left alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self._weights: dict[Tensor, tuple[Tensor, _Sum]] = {}

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is nn.functional.linear and not kwargs and self._sums(*args[:2]):
            return self._product(False, *args)
        return func(*args, **(kwargs or {}))

    def mixed(self, inputs: Tensor, weight: Tensor) -> Tensor:
        """`inputs @ weight`, (N, V) and (V, d)."""
        return self._product(True, inputs, weight) if self._sums(inputs, weight) else inputs @ weight

    def _sums(self, inputs: Tensor, weight: Tensor) -> bool:
        learns = torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf and inputs.dim() > 1
        return learns and not torch.is_autocast_enabled(inputs.device.type)

    def _product(self, mixes: bool, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight not in self._weights:
            total = _Sum()
            self._weights[weight] = _Handle.apply(weight, total), total
        # Of rows, as a view of a layer's own output could not be changed in place by what comes next.
        rows = _Product.apply(inputs.flatten(0, -2), *self._weights[weight], bias, mixes)
        return rows.view(*inputs.shape[:-1], -1)


class _Sum:
    """The gradient of a weight in one backward pass: what is summed, and pairs of factors that wait for others."""

    def __init__(self) -> None:
        self.total: Tensor | None = None
        self.factors: list[tuple[Tensor, Tensor]] = []
        self.backward_pass = -1

    def add(self, left: Tensor, right: Tensor) -> None:
        """Adds `left.T @ right`."""
        current = torch._C._current_graph_task_id()
        if current != self.backward_pass:  # of one that didn't ask for the weight's gradient nothing is left
            self.total, self.factors, self.backward_pass = None, [], current
        self.factors.append((left, right))
        if sum(len(rows) for rows, _ in self.factors) >= _ENOUGH_ROWS:
            self.multiply()

    def multiply(self) -> None:
        if self.factors:
            left, right = (torch.cat(rows) for rows in zip(*self.factors, strict=True))
            self.total = left.t() @ right if self.total is None else self.total.addmm_(left.t(), right)
            self.factors = []


class _Handle(torch.autograd.Function):
    """A weight for products, that hands their sum to the original when all of them have come back."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, total: _Sum) -> Tensor:
        ctx.total = total
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: None) -> tuple[Tensor | None, None]:
        ctx.total.multiply()
        total, ctx.total.total = ctx.total.total, None
        return total, None


class _Product(torch.autograd.Function):
    """A linear layer, or `inputs @ weight` if it mixes; the weight's gradient goes to its sum."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, total: _Sum, bias: Tensor | None, mixes: bool) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.total, ctx.mixes = total, mixes
        return inputs @ weight if mixes else nn.functional.linear(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, Tensor | None, None]:
        inputs, weight = ctx.saved_tensors
        ctx.total.add(*((inputs, grad) if ctx.mixes else (grad, inputs)))
        inputs_grad = grad @ (weight.t() if ctx.mixes else weight) if ctx.needs_input_grad[0] else None
        return inputs_grad, None, None, grad.sum(0) if ctx.needs_input_grad[3] else None, None
