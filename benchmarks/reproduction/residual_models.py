"""Residual models and their baselines before training, made of the converged models of verses."""

from __future__ import annotations

import copy

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_ebm.models.autoregressive_product import ProductLM
from hf_ebm.models.residual import ResidualEnergyModel


def fresh_model(kind: str, base: PreTrainedModel, masked: PreTrainedModel) -> PreTrainedModel:
    """A model of that kind before training, made of the base and, its encoder, of the masked model without its head."""
    lm = copy.deepcopy(base).requires_grad_(True)  # a residual model freezes the base
    if kind == "trained_on":
        return lm.train()
    if kind == "ralm":
        return ProductLM.from_lm(lm)
    if kind == "balm":
        return deepened(lm, 8)
    encoder = lm if kind == "unit" else copy.deepcopy(masked)
    return ResidualEnergyModel(base, encoder.base_model).train()


def deepened(lm: PreTrainedModel, layers: int) -> PreTrainedModel:
    """A GPT-2 with further layers on top that change nothing until they are trained."""
    config = copy.deepcopy(lm.config)
    config.n_layer += layers
    deep = AutoModelForCausalLM.from_config(config)
    deep.load_state_dict(lm.state_dict(), strict=False)
    for block in deep.transformer.h[lm.config.n_layer :]:
        for projection in (block.attn.c_proj, block.mlp.c_proj):
            nn.init.zeros_(projection.weight)
            nn.init.zeros_(projection.bias)
    return deep
