"""Encoder, attention and decoder of the recurrent encoder-decoder, and what the decoder carries from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput

from hf_ebm.checks import as_number, as_whole, check_choice

ATTENTIONS = ("additive", "fixed")
INITIAL_STATES = ("encoder", "zero")

_SIZES = (
    "vocab_size", "decoder_vocab_size", "embedding_dim", "decoder_embedding_dim", "hidden_size", "encoder_layers",
    "decoder_layers",
)  # fmt: skip


class LSTMSeq2SeqConfig(PreTrainedConfig):
    """Shape of an LSTM encoder and an LSTM decoder with attention (Bahdanau et al. 2015; thesis ch. 3 to 5).

    Args:
        vocab_size: number of source ids.
        decoder_vocab_size: number of target ids, `None` for `vocab_size`. Where source and target share a tokenizer,
            the target symbols are its first ids.
        embedding_dim, decoder_embedding_dim: sizes of the two embeddings.
        hidden_size: size of the decoder's states, of the encoder's output and of the attention; a bidirectional
            encoder has half of it per direction.
        encoder_layers, decoder_layers: numbers of LSTM layers.
        bidirectional: whether the encoder reads the source in both directions.
        attention: `"additive"` (learned, Bahdanau et al.), or `"fixed"`: output i reads source position i, as in
            tagging, where the source is `x_1 … x_n </s>` and the target `y_1 … y_n </s>`.
        initial_state: where the decoder starts: `"encoder"` (a learned projection of the encoder's last states) or
            `"zero"`.
        dropout: on embeddings, between layers, and before the output layer.
        initializer_range: all parameters start uniform in ± this (Sutskever et al. 2014), those of padding at 0.
        use_cache, pad_token_id, bos_token_id, eos_token_id, decoder_start_token_id: as in Transformers.
        is_encoder_decoder, tie_word_embeddings: always `True` and `False`.

    Raises:
        ValueError: for a value that is not possible, naming it.
    """

    model_type = "hf_ebm_lstm_seq2seq"

    vocab_size: int = 8000
    decoder_vocab_size: int | None = None
    embedding_dim: int = 256
    decoder_embedding_dim: int = 256
    hidden_size: int = 256
    encoder_layers: int = 1
    decoder_layers: int = 1
    bidirectional: bool = True
    attention: str = "additive"
    initial_state: str = "encoder"
    dropout: float = 0.0
    initializer_range: float = 0.1
    use_cache: bool = True
    pad_token_id: int = 0
    bos_token_id: int = 1
    eos_token_id: int = 2
    decoder_start_token_id: int = 1
    is_encoder_decoder: bool = True
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        if self.decoder_vocab_size is None:
            self.decoder_vocab_size = self.vocab_size
        super().__post_init__(**kwargs)
        for name in _SIZES:
            setattr(self, name, as_whole(name, getattr(self, name), 1))
        for name, allowed in (("attention", ATTENTIONS), ("initial_state", INITIAL_STATES)):
            check_choice(name, getattr(self, name), allowed)
        if self.bidirectional and self.hidden_size % 2:
            raise ValueError(
                f"hidden_size must be even with a bidirectional encoder, which has half of it per direction; got "
                f"{self.hidden_size}"
            )
        self.dropout = as_number("dropout", self.dropout, least=0, below=1)
        self.initializer_range = as_number("initializer_range", self.initializer_range, above=0)
        self._check_token_ids()

    @property
    def num_target_ids(self) -> int:
        """`decoder_vocab_size`, which is `vocab_size` where none is given."""
        return self.vocab_size if self.decoder_vocab_size is None else self.decoder_vocab_size

    def _check_token_ids(self) -> None:
        for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
            # Padding stands in sources too; the others are read and written by the decoder alone.
            limit = min(self.vocab_size, self.num_target_ids) if name == "pad_token_id" else self.num_target_ids
            setattr(self, name, as_whole(name, getattr(self, name), 0, limit - 1))
        if self.pad_token_id == self.eos_token_id:
            raise ValueError(f"eos_token_id must differ from pad_token_id, got {self.eos_token_id} for both")
        if not self.is_encoder_decoder or self.tie_word_embeddings:
            raise ValueError(
                "is_encoder_decoder must be True and tie_word_embeddings False: the model is an encoder-decoder whose "
                f"embeddings and output layer differ in size; got {self.is_encoder_decoder} and "
                f"{self.tie_word_embeddings}"
            )


def init_uniform(module: nn.Module, bound: float) -> None:
    """Starts a module's own parameters uniform in ± `bound`, the embedding of padding at 0."""
    for parameter in module.parameters(recurse=False):
        init.uniform_(parameter, -bound, bound)
    if isinstance(module, nn.Embedding) and not getattr(module.weight, "_is_hf_initialized", False):
        init.zeros_(module.weight[module.padding_idx])


def right_padded_lengths(name: str, mask: Tensor) -> Tensor:
    """Number of ones in each row of a (B, T) mask of ones followed by zeros; (B,) integers.

    Raises:
        ValueError: naming the mask and the first row that is empty or has a zero before a one.
    """
    mask = mask.bool()
    wrong = ~mask[:, 0] | (mask[:, 1:] & ~mask[:, :-1]).any(1)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"{name}: row {row} is {mask[row].int().tolist()}, must be ones followed by zeros; pad on the right "
            "(padding_side='right' in a tokenizer), and no row may be empty"
        )
    return mask.sum(1)


def run_lstm(
    lstm: nn.LSTM, inputs: Tensor | PackedSequence, state: tuple[Tensor, Tensor] | None = None
) -> tuple[Any, tuple[Tensor, Tensor]]:
    """`lstm(inputs, state)`, on the CPU in the type of its weights under autocast, too; differentiable in every mode.

    Torch would hand half precision to oneDNN, which has no such LSTM for most processors and raises. cuDNN has no
    gradients in evaluation mode, for which PyTorch's own kernels run.
    """
    own_kernels = torch.is_grad_enabled() and not lstm.training
    with torch.backends.cudnn.flags(enabled=False) if own_kernels else nullcontext():
        return _in_their_type(lstm, lstm.all_weights[0][0], inputs, state)


def step_lstm(weights: Sequence[Tensor], inputs: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """One step of a layer with `weights`, in their type like `run_lstm`; (B, H) states."""
    return _in_their_type(lambda x, s: torch.lstm_cell(x, s, *weights), weights[0], inputs, state)


def _in_their_type(
    run: Callable[..., Any], weight: Tensor, inputs: Tensor | PackedSequence, state: tuple[Tensor, Tensor] | None
) -> Any:
    with torch.autocast("cpu", enabled=False):
        return run(inputs.to(weight.dtype), None if state is None else tuple(part.to(weight.dtype) for part in state))


class LSTMEncoder(nn.Module):
    """Reads the source; a row's output doesn't depend on how much it is padded.

    Args:
        config: the model's configuration.
    """

    main_input_name = "input_ids"

    def __init__(self, config: LSTMSeq2SeqConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.embedding_dim, config.pad_token_id)
        self.dropout = nn.Dropout(config.dropout)
        self.lstm = nn.LSTM(
            config.embedding_dim,
            config.hidden_size // 2 if config.bidirectional else config.hidden_size,
            config.encoder_layers,
            batch_first=True,
            dropout=config.dropout if config.encoder_layers > 1 else 0.0,
            bidirectional=config.bidirectional,
        )

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool = True,
    ) -> BaseModelOutput | tuple[Tensor]:
        """Encodes a batch of sources.

        Args:
            input_ids: (B, S) source ids.
            attention_mask: (B, S), 0 at padding, which stands on the right; without it there is none.
            inputs_embeds: (B, S, embedding_dim) instead of `input_ids`.
            output_attentions, output_hidden_states: passed by `generate`; there are none to return.

        Returns:
            `last_hidden_state` (B, S, hidden_size), 0 at padding.

        Raises:
            ValueError: for ids outside the vocabulary, padding on the left, empty rows or mismatched shapes.
        """
        if input_ids is not None and inputs_embeds is None:
            _check_ids("input_ids", input_ids, self.embed_tokens.num_embeddings)
            inputs_embeds = self.embed_tokens(input_ids)
        elif input_ids is not None or inputs_embeds is None:
            raise ValueError("input_ids, inputs_embeds: give one of them (or encoder_outputs), got both or none")
        embeds, shape = self.dropout(inputs_embeds), inputs_embeds.shape[:2]
        if attention_mask is None:
            states = run_lstm(self.lstm, embeds)[0]
        elif attention_mask.shape != shape:
            raise ValueError(
                f"attention_mask must have the source's shape {tuple(shape)}, got {tuple(attention_mask.shape)}"
            )
        else:
            lengths = right_padded_lengths("attention_mask", attention_mask).cpu()
            packed = pack_padded_sequence(embeds, lengths, batch_first=True, enforce_sorted=False)
            states, _ = pad_packed_sequence(run_lstm(self.lstm, packed)[0], batch_first=True, total_length=shape[1])
        return BaseModelOutput(last_hidden_state=states) if return_dict else (states,)


class AdditiveAttention(nn.Module):
    """score(h, s) = v · tanh(W_q h + W_k s), normalised over the source (Bahdanau et al. 2015, A.1.2)."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.query = nn.Linear(hidden_size, hidden_size, bias=False)
        self.key = nn.Linear(hidden_size, hidden_size, bias=False)
        self.score = nn.Linear(hidden_size, 1, bias=False)

    def forward(
        self, hidden: Tensor, keys: Tensor, source_states: Tensor, padding: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(B, H) hidden, (B, S, H) keys and states, (B, S) true at padding → (B, H) context, (B, S) weights."""
        scores = self.score(torch.tanh(keys + self.query(hidden)[:, None])).squeeze(-1)
        if padding is not None:
            scores = scores.masked_fill(padding, -torch.inf)
        weights = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
        weights = weights.to(source_states.dtype)
        return torch.bmm(weights[:, None], source_states)[:, 0], weights


@dataclass(eq=False)
class LSTMCache:
    """State of a decoder after `length` tokens.

    Every decoder step returns a new cache, and no method writes into a tensor, so gradients flow through any number of
    steps, and a cache can be kept, or mixed with others, while decoding goes on.

    Args:
        hidden, cell: (decoder_layers, B, hidden_size) states of the LSTM.
        length: number of decoder tokens read so far.
        keys: (B, S, hidden_size) the source's projections that additive attention compares with; `None` with fixed
            attention, and to have them computed.
    """

    hidden: Tensor
    cell: Tensor
    length: int
    keys: Tensor | None = None

    # What `generate` asks of a cache that a caller hands in.
    is_compileable = False
    is_croppable = False
    is_linear = (False,)

    def to_tensors(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor | None]]:
        """What depends on the tokens so far, (B, layers, hidden_size) each, and what depends on the source alone."""
        return (self.hidden.transpose(0, 1), self.cell.transpose(0, 1)), (self.keys,)

    @classmethod
    def from_tensors(cls, own: tuple[Tensor, Tensor], shared: tuple[Tensor | None], length: int) -> LSTMCache:
        """The cache whose `to_tensors()` these are."""
        hidden, cell = (tensor.transpose(0, 1).contiguous() for tensor in own)
        return cls(hidden, cell, length, *shared)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of decoder tokens read so far, the same for all layers."""
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Makes row i what row `beam_idx[i]` was; (B,) integers."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows `indices`, in that order."""
        indices = indices.to(self.hidden.device)
        self.hidden, self.cell = self.hidden.index_select(1, indices), self.cell.index_select(1, indices)
        if self.keys is not None:
            self.keys = self.keys.index_select(0, indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row `repeats` times, copies beside each other."""
        self.hidden, self.cell = self.hidden.repeat_interleave(repeats, 1), self.cell.repeat_interleave(repeats, 1)
        if self.keys is not None:
            self.keys = self.keys.repeat_interleave(repeats, 0)


class LSTMDecoder(nn.Module):
    """The next output's features from the tokens so far and the source.

    Args:
        config: the model's configuration.
    """

    def __init__(self, config: LSTMSeq2SeqConfig):
        super().__init__()
        self.config = config
        layers, size = config.decoder_layers, config.hidden_size
        self.embed_tokens = nn.Embedding(config.num_target_ids, config.decoder_embedding_dim, config.pad_token_id)
        self.dropout = nn.Dropout(config.dropout)
        self.lstm = nn.LSTM(
            config.decoder_embedding_dim + size,
            size,
            layers,
            batch_first=True,
            dropout=config.dropout if layers > 1 else 0.0,
        )
        self.attention = AdditiveAttention(size) if config.attention == "additive" else None
        if config.initial_state == "encoder":
            self.initial_hidden = nn.Linear(size, layers * size)
            self.initial_cell = nn.Linear(size, layers * size)

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding of target ids."""
        return self.embed_tokens

    def start(self, source_states: Tensor, attention_mask: Tensor | None) -> LSTMCache:
        """The state before the first token, from (B, S, H) encoder states and their (B, S) mask alone."""
        batch, layers = len(source_states), self.config.decoder_layers
        if self.config.initial_state == "zero":
            hidden = cell = source_states.new_zeros(layers, batch, self.config.hidden_size)
        else:
            last = self._last_states(source_states, attention_mask)
            hidden, cell = (
                torch.tanh(project(last)).view(batch, layers, -1).transpose(0, 1)
                for project in (self.initial_hidden, self.initial_cell)
            )
        return LSTMCache(hidden, cell, 0)

    def _last_states(self, source_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        """What each direction of the encoder gave last: at the last position, and at the first one coming back."""
        if attention_mask is None:
            last = source_states[:, -1]
        else:
            rows = torch.arange(len(source_states), device=source_states.device)
            last = source_states[rows, attention_mask.to(rows.device).sum(1).long() - 1]
        if not self.config.bidirectional:
            return last
        half = self.config.hidden_size // 2
        return torch.cat([last[:, :half], source_states[:, 0, half:]], -1)

    def forward(
        self, embeds: Tensor, source_states: Tensor, attention_mask: Tensor | None, cache: LSTMCache | None
    ) -> tuple[Tensor, LSTMCache, Tensor | None]:
        """Reads T tokens.

        Args:
            embeds: (B, T, decoder_embedding_dim) of the tokens.
            source_states: (B, S, hidden_size) the encoder's output.
            attention_mask: (B, S), 0 at padding.
            cache: the state so far, `None` at the start. It is not changed.

        Returns:
            (B, T, 2 · hidden_size) what the output layer reads; the new state; (B, T, S) attention weights, `None` with
            fixed attention.
        """
        cache = self.start(source_states, attention_mask) if cache is None else cache
        embeds = self.dropout(embeds)
        if self.attention is None:
            features, cache = self._read_fixed(embeds, source_states, cache)
            weights = None
        else:
            features, cache, weights = self._read_additive(self.attention, embeds, source_states, attention_mask, cache)
        return self.dropout(features), cache, weights

    def _read_fixed(self, embeds: Tensor, source_states: Tensor, cache: LSTMCache) -> tuple[Tensor, LSTMCache]:
        end = cache.length + embeds.shape[1]
        contexts = source_states[:, cache.length : end]
        # Rows may be padded further than the source is; nothing is read there.
        contexts = nn.functional.pad(contexts, (0, 0, 0, embeds.shape[1] - contexts.shape[1]))
        outputs, (hidden, cell) = run_lstm(
            self.lstm, torch.cat([embeds, contexts], -1), (cache.hidden.contiguous(), cache.cell.contiguous())
        )
        return torch.cat([outputs, contexts], -1), LSTMCache(hidden, cell, end)

    def _read_additive(
        self,
        attention: AdditiveAttention,
        embeds: Tensor,
        source_states: Tensor,
        attention_mask: Tensor | None,
        cache: LSTMCache,
    ) -> tuple[Tensor, LSTMCache, Tensor]:
        keys = attention.key(source_states) if cache.keys is None else cache.keys
        padding = None if attention_mask is None else ~attention_mask.to(keys.device).bool()
        hidden, cell = list(cache.hidden.unbind(0)), list(cache.cell.unbind(0))
        layer_weights, features, weights = self.lstm.all_weights, [], []
        for embed in embeds.unbind(1):
            context, weight = attention(hidden[-1], keys, source_states, padding)
            below = torch.cat([embed, context], -1)
            for layer, parameters in enumerate(layer_weights):
                if layer > 0:
                    below = self.dropout(below)
                hidden[layer], cell[layer] = step_lstm(parameters, below, (hidden[layer], cell[layer]))
                below = hidden[layer]
            features.append(torch.cat([below, context], -1))
            weights.append(weight)
        cache = LSTMCache(torch.stack(hidden), torch.stack(cell), cache.length + embeds.shape[1], keys)
        return torch.stack(features, 1), cache, torch.stack(weights, 1)


def _check_ids(name: str, ids: Tensor, limit: int) -> None:
    wrong = (ids < 0) | (ids >= limit)
    if bool(wrong.any()):
        row, position = wrong.nonzero()[0].tolist()
        raise ValueError(f"{name}: row {row} has id {int(ids[row, position])}, ids are from 0 to {limit - 1}")
