"""Special tokens of a model, by its settings."""

from __future__ import annotations

from transformers import PreTrainedModel

from hf_ebm.plain_values import whole


def special_ids(model: PreTrainedModel, name: str) -> list[int]:
    """A special token's ids (`"eos_token_id"`, …), by the generation settings, else by the configuration.

    [] where there are none.
    """
    for owner in (getattr(model, "generation_config", None), model.config.get_text_config(decoder=True)):
        found = getattr(owner, name, None)
        if found is not None:
            return list(found) if whole(found) is None else [found]
    return []
