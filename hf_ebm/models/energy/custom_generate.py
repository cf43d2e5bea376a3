"""Metropolis–Hastings as a `generate` of Transformers' models, for a repository's `custom_generate/generate.py`.

    bart.generate(input_ids, custom_generate=REPOSITORY, trust_remote_code=True, tokenizer=tokenizer, lengths=8)

A masked language model whose class has no `generate` (BERT, ModernBERT, ESM) takes the function itself:

    from transformers import GenerationMixin

    generate = GenerationMixin.load_custom_generate(None, REPOSITORY, trust_remote_code=True)
    generate(model, input_ids=..., tokenizer=tokenizer, num_epochs=20)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_ebm.model_facts import num_embeddings
from hf_ebm.models.energy.configuration_energy import token_roles
from hf_ebm.models.energy.modeling_energy import EnergyModel
from hf_ebm.sampling.configuration import ChainGenerationConfig
from hf_ebm.sampling.run import ChainGenerationOutput

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

    from hf_ebm.models.energy.generation_energy import Streamer


def generate(
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    generation_config: ChainGenerationConfig | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    streamer: Streamer | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    energy: str = "local",
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> ChainGenerationOutput:
    """Samples sequences from `exp(-E)` of a masked language model, see `EnergyModel.generate` of hf_ebm.

    Args:
        model: a masked language model of Transformers.
        inputs, input_ids, attention_mask: prompts whose masks are filled; of an encoder-decoder what its encoder reads,
            and then `lengths` says how long the target is.
        tokenizer: says which tokens are special and which one is the mask (required).
        energy: a name of `hf_ebm.scoring.energies.ENERGIES`.
        kwargs: settings of `ChainGenerationConfig` and further arguments of `EnergyModel.generate`; what Transformers
            hands over unset is left out.

    Raises:
        ValueError: as `EnergyModel` and its `generate` do; for a missing tokenizer; for both `inputs` and `input_ids`.
    """
    if tokenizer is None:
        raise ValueError("tokenizer must be given: it says which tokens are special and which one is the mask")
    if inputs is not None and input_ids is not None:
        raise ValueError("inputs and input_ids were both given; give one of them")
    prompt = input_ids if inputs is None else inputs
    names = ("encoder_input_ids", "encoder_attention_mask") if model.config.is_encoder_decoder else (
        "input_ids", "attention_mask",
    )  # fmt: skip
    given = {**dict(zip(names, (prompt, attention_mask), strict=True)), **kwargs}
    given = {name: value for name, value in given.items() if value is not None}
    roles: dict[str, Any] = token_roles(tokenizer, num_embeddings(model))
    sampler = EnergyModel(model, energy=energy, **roles)
    return sampler.generate(
        generation_config=generation_config, logits_processor=logits_processor, stopping_criteria=stopping_criteria,
        streamer=streamer, **given,
    )  # fmt: skip
