"""Configuration of `ResidualEnergyModel`."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec

from hf_ebm.checks import as_whole
from hf_ebm.models.checkpoints import CompositeConfig


class ResidualEnergyConfig(CompositeConfig):
    """A frozen causal language model and the encoder whose energy corrects it.

    Args:
        text_config: configuration of the language model.
        encoder_config: configuration of the encoder, bidirectional or causal.
        lm_reference: Hub name or folder of the language model, where its weights are kept by reference; `None` where
            they are saved with the model.
        lm_revision: branch, tag or commit of that reference.
        lm_fingerprint: SHA-256 of the referenced weights, so that others in their place are noticed.
        lm_reference_dtype: the data type that checksum is of.
        lm_dtype: the data type the referenced language model is used in.
        end_token_ids: tokens that end a continuation.
        start_token_id: the token an empty prefix is made of, if there is one.
        lm_pad_token_id: what stands after the end of the language model's rows.
        max_sequence_length: the longest row in tokens of the language model, and of the encoder, in place of what their
            configurations and the encoder's tokenizer say; see `hf_ebm.model_facts`.
        retokenize: whether encoder and language model have different tokenizers, so that rows go through text.
        tie_word_embeddings: of the wrapper itself, which ties nothing: each model inside follows its own configuration.

    Raises:
        ValueError: for ids that are no whole numbers from 0 up.
    """

    model_type = "hf_ebm_residual"
    sub_configs_defaults = {  # noqa: RUF012
        "text_config": SubConfigSpec(config_class=AutoConfig, model_type="gpt2"),
        "encoder_config": SubConfigSpec(config_class=AutoConfig, model_type="bert"),
    }

    text_config: PreTrainedConfig | dict | None = None
    encoder_config: PreTrainedConfig | dict | None = None
    lm_reference: str | None = None
    lm_revision: str | None = None
    lm_fingerprint: str | None = None
    lm_reference_dtype: str | None = None
    lm_dtype: str | None = None
    end_token_ids: list[int] | None = None
    start_token_id: int | None = None
    lm_pad_token_id: int = 0
    retokenize: bool = False
    max_sequence_length: int | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        if self.max_sequence_length is not None:
            self.max_sequence_length = as_whole("max_sequence_length", self.max_sequence_length, 1)
        self._make_ids_plain("end_token_ids", "start_token_id", "lm_pad_token_id")
