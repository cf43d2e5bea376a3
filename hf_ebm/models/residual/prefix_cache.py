"""Work on a prefix done once for all its continuations, through a model's key-value cache."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_ebm.model_facts import num_embeddings
from hf_ebm.model_modes import evaluation_mode, state_kept
from hf_ebm.models.probes import close, is_causal


def prefix_cache(model: PreTrainedModel, prefixes: Tensor) -> tuple[DynamicCache, Tensor]:
    """The cache after prefixes (B, P) without padding, and the model's first output for them."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    with state_kept(model):
        output = model(input_ids=prefixes, attention_mask=torch.ones_like(prefixes), cache=cache, use_cache=True)
    return cache, output[0]


def repeated(cache: DynamicCache, times: int) -> DynamicCache:
    """A copy with each row `times` times in a row."""
    cache = copy.deepcopy(cache)
    cache.batch_repeat_interleave(times)
    return cache


@torch.no_grad()
def can_share_prefix(model: PreTrainedModel) -> bool:
    """Whether the model computes the same through a cache: it is causal, and has one whose rows can be repeated.

    Tried once for each data type, and kept.
    """
    kept = model.__dict__.setdefault("_hf_ebm_shares_prefix", {})
    if model.dtype not in kept:
        kept[model.dtype] = is_causal(model) and _caches(model)
    return kept[model.dtype]


def _caches(model: PreTrainedModel) -> bool:
    size = num_embeddings(model)
    row = torch.arange(1, 5, device=model.device)[None] % size
    rows, mask = row.repeat(2, 1), torch.ones_like(row.repeat(2, 1))
    with evaluation_mode(model), state_kept(model):
        whole = model(input_ids=rows, attention_mask=mask)[0]
        try:
            cache, before = prefix_cache(model, row[:, :2])
            cached = model(input_ids=rows[:, 2:], attention_mask=mask, cache=repeated(cache, 2), use_cache=True)[0]
        except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError):
            return False  # whatever a model without such a cache raises
    return close(torch.cat([before.repeat(2, 1, 1), cached], 1), whole)
