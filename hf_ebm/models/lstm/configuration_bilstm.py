"""Configuration of the recurrent masked language model."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from hf_ebm.plain_values import as_number, as_whole


class BiLSTMMaskedLMConfig(PreTrainedConfig):
    """Shape of a masked language model of two LSTMs (thesis section 6.2.3).

    Args:
        vocab_size: number of ids.
        embedding_dim: size of the embeddings.
        hidden_size: size of a state: of the left and of the right context together, so it is even.
        dropout: on embeddings and before the output layer.
        initializer_range: all parameters start uniform in ± this, those of padding at 0.

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
