"""Configuration of `EnergyModel`."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec

from hf_ebm.checks import as_whole, check_choice
from hf_ebm.models.checkpoints import CompositeConfig
from hf_ebm.scoring.energies import ENERGIES
from hf_ebm.scoring.variants import VARIANTS


class EnergyConfig(CompositeConfig):
    """What turns a masked language model into an energy model.

    Args:
        text_config: configuration of the masked language model.
        energy: `"local"` (minus the pseudo-log-likelihood) or `"raw"` (minus the sum of logits).
        scoring_variant: what `score` computes unless told otherwise, see `hf_ebm.scoring.variants`.
        mask_token_id: id of the mask token.
        pad_token_id: id written beyond the end of shorter sequences.
        special_token_ids: ids that are context wherever they stand: never masked, scored or proposed.
        excluded_token_ids: ids that may stand in a text and are scored there, but are never proposed: the unknown
            token, unused pieces, ids without a token.
        prefix_token_ids, suffix_token_ids: ids the tokenizer puts around a text; unconditional sampling does the same.

        max_sequence_length: the longest sequence in tokens, special ones included, in place of what the model's
            configuration and the tokenizer say; see `hf_ebm.model_facts`.

    Raises:
        ValueError: for an energy or a scoring variant that doesn't exist, and ids that are no whole numbers from 0 up.
    """

    model_type = "hf_ebm_energy"
    sub_configs_defaults = {"text_config": SubConfigSpec(config_class=AutoConfig, model_type="bert")}  # noqa: RUF012

    text_config: PreTrainedConfig | dict | None = None
    energy: str = "local"
    scoring_variant: str = "exact"
    mask_token_id: int | None = None
    pad_token_id: int | None = None
    special_token_ids: list[int] | None = None
    excluded_token_ids: list[int] | None = None
    prefix_token_ids: list[int] | None = None
    suffix_token_ids: list[int] | None = None
    max_sequence_length: int | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        for name, allowed in (("energy", ENERGIES), ("scoring_variant", VARIANTS)):
            check_choice(name, getattr(self, name), allowed)
        if self.max_sequence_length is not None:
            self.max_sequence_length = as_whole("max_sequence_length", self.max_sequence_length, 1)
        self._make_ids_plain(
            "mask_token_id", "pad_token_id", "special_token_ids", "excluded_token_ids", "prefix_token_ids",
            "suffix_token_ids",
        )  # fmt: skip
