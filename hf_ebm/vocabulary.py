"""How many ids a model knows, and how many it predicts."""

from __future__ import annotations

from torch import Tensor
from transformers import PreTrainedModel


def num_embeddings(model: PreTrainedModel) -> int:
    """Rows of a model's input embeddings.

    Raises:
        ValueError: for a model whose input embeddings have no weight.
    """
    weight = model.get_input_embeddings().weight
    if not isinstance(weight, Tensor):
        raise ValueError(f"model: {type(model).__name__} has no matrix of input embeddings")
    return weight.shape[0]


def num_outputs(model: PreTrainedModel) -> int:
    """How many ids a model predicts."""
    head = model.get_output_embeddings()
    return model.config.get_text_config(decoder=True).vocab_size if head is None else head.weight.shape[0]
