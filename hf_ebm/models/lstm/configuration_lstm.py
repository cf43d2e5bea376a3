"""Configurations of the recurrent encoder-decoder and of the recurrent masked language model."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

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


class BiLSTMMaskedLMConfig(PreTrainedConfig):
    """Shape of a masked language model of two LSTMs (thesis section 6.2.3).

    Args:
        vocab_size: number of ids.
        embedding_dim: size of the embeddings.
        hidden_size: size of a state: of the left and of the right context together, so it is even.
        dropout: on embeddings and before the output layer.
        initializer_range: all parameters start uniform in ± this, those of padding at 0.
        pad_token_id: as in Transformers.
        tie_word_embeddings: without effect, as there are no weights that could be tied.

    Raises:
        ValueError: for a value that is not possible, naming it.
    """

    model_type = "hf_ebm_bilstm_masked_lm"

    vocab_size: int = 8000
    embedding_dim: int = 64
    hidden_size: int = 128
    dropout: float = 0.0
    initializer_range: float = 0.1
    pad_token_id: int = 0
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        for name in ("vocab_size", "embedding_dim", "hidden_size"):
            setattr(self, name, as_whole(name, getattr(self, name), 1))
        if self.hidden_size % 2:
            raise ValueError(f"hidden_size must be even, half of it for each side, got {self.hidden_size}")
        self.dropout = as_number("dropout", self.dropout, least=0, below=1)
        self.initializer_range = as_number("initializer_range", self.initializer_range, above=0)
        self.pad_token_id = as_whole("pad_token_id", self.pad_token_id, 0, self.vocab_size - 1)
