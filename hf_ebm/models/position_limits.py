"""How long a sequence a model has positions for."""

from __future__ import annotations

from torch import nn


def max_length(model: nn.Module) -> int | None:
    """The longest sequence the model has positions for, `None` where its configuration states no limit."""
    config = model.config.get_text_config(decoder=True) if hasattr(model.config, "get_text_config") else model.config
    limits = [getattr(config, "max_position_embeddings", None)]
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if name.endswith("embeddings.position_embeddings") and weight is not None and weight.dim() == 2:
            # Positions of RoBERTa's kind start after the padding index.
            padding = getattr(module, "padding_idx", None)
            limits.append(len(weight) - (0 if padding is None else padding + 1))
    stated = [limit for limit in limits if limit and limit > 0]
    return min(stated) if stated else None
