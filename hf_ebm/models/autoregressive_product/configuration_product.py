"""Configuration of `ProductLM`."""

from __future__ import annotations

from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec

from hf_ebm.models.checkpoints import CompositeConfig


class ProductLMConfig(CompositeConfig):
    """Two causal language models over one vocabulary.

    Args:
        text_config: configuration of the frozen one.
        residual_config: configuration of the one that is trained.
    """

    model_type = "hf_ebm_product_lm"
    sub_configs_defaults = {  # noqa: RUF012
        "text_config": SubConfigSpec(config_class=AutoConfig, model_type="gpt2"),
        "residual_config": SubConfigSpec(config_class=AutoConfig, model_type="gpt2"),
    }

    text_config: PreTrainedConfig | dict | None = None
    residual_config: PreTrainedConfig | dict | None = None
    tie_word_embeddings: bool = True
