"""Work on a prefix done once for all its continuations, through a model's key-value cache."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel


def prefix_cache(model: PreTrainedModel, prefixes: Tensor) -> tuple[DynamicCache, Tensor]:
    """The cache after prefixes (B, P) without padding, and the model's first output for them."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    output = model(input_ids=prefixes, attention_mask=torch.ones_like(prefixes), cache=cache, use_cache=True)
    return cache, output[0]


def repeated(cache: DynamicCache, times: int) -> DynamicCache:
    """A copy with each row `times` times in a row."""
    cache = copy.deepcopy(cache)
    cache.batch_repeat_interleave(times)
    return cache


@torch.no_grad()
def can_share_prefix(model: PreTrainedModel) -> bool:
    """Whether the model computes the same through a cache: it is causal, and has such a cache. Tried once, and kept."""
    if "_hf_ebm_shares_prefix" not in model.__dict__:
        model.__dict__["_hf_ebm_shares_prefix"] = _try_sharing(model)
    return model.__dict__["_hf_ebm_shares_prefix"]


def _try_sharing(model: PreTrainedModel) -> bool:
    size = model.get_input_embeddings().weight.shape[0]
    row = torch.arange(1, 5, device=model.device)[None] % size
    mask = torch.ones_like(row)
    try:
        whole = model(input_ids=row, attention_mask=mask)[0]
        cache, before = prefix_cache(model, row[:, :2])
        cached = model(input_ids=row[:, 2:], attention_mask=mask, cache=cache, use_cache=True)[0]
    except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError):
        return False
    together = torch.cat([before, cached], 1)
    # A bidirectional encoder that knows a cache differs as much as a row's end matters to its beginning.
    error = torch.finfo(whole.dtype).eps ** 0.75 * float(whole.abs().max())
    return together.shape == whole.shape and float((together - whole).abs().max()) <= error
