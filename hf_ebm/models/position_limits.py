"""How long a sequence a model has positions for."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel


def max_length(model: PreTrainedModel) -> int | None:
    """The longest sequence the model has positions for, `None` where its configuration states no limit."""
    config = model.config.get_text_config(decoder=True) if hasattr(model.config, "get_text_config") else model.config
    limits = [getattr(config, "max_position_embeddings", None)]
    # Positions of RoBERTa's kind start after the padding index.
    limits += [
        len(weight) - (0 if (p := _padding(table)) is None else p + 1) for table, weight in _position_tables(model)
    ]
    stated = [limit for limit in limits if limit and limit > 0]
    return min(stated) if stated else None


def counts_padding(model: PreTrainedModel) -> bool:
    """Whether positions of the model are of RoBERTa's kind: it counts them itself, from the ids, after padding."""
    return any(_padding(table) is not None for table, _ in _position_tables(model))


def _position_tables(model: nn.Module) -> list[tuple[nn.Module, Tensor]]:
    """Tables of position embeddings with their weights."""
    named = (module for name, module in model.named_modules() if name.endswith("embeddings.position_embeddings"))
    found = ((module, getattr(module, "weight", None)) for module in named)
    return [(module, weight) for module, weight in found if isinstance(weight, Tensor) and weight.ndim == 2]


def _padding(table: nn.Module) -> int | None:
    return getattr(table, "padding_idx", None)
