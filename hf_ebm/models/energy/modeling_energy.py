"""`EnergyModel`: any masked language model as an energy model."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from hf_ebm.generation_settings import SettingsGenerationMixin
from hf_ebm.model_facts import vocabulary_size
from hf_ebm.model_modes import model_output
from hf_ebm.models.adapters import (
    active_adapters,
    adapter_to_save,
    add_adapter,
    has_adapters,
    refuse_other_adapter,
    switch_adapters,
    unwrapped,
)
from hf_ebm.models.checkpoints import (
    PublishingMixin,
    check_found_again,
    has_own_code,
    inner_config,
    is_config,
    keep_weights,
    refuse_own_code,
    save_code,
)
from hf_ebm.models.energy.conditional_energy import generate_from_sources
from hf_ebm.models.energy.configuration_energy import (
    EnergyConfig,
    rehearse,
    resized_number,
    resized_roles,
    under_new_names,
)
from hf_ebm.models.energy.fill_energy import fill
from hf_ebm.models.energy.generation_energy import generate
from hf_ebm.models.energy.inputs import check_energy_inputs, check_masked_lm, check_masked_lm_config
from hf_ebm.models.energy.loading_energy import FIELDS, load_energy, save_adapted
from hf_ebm.models.energy.mutations_energy import score_variants
from hf_ebm.models.energy.pair_energy import pair_joints
from hf_ebm.models.energy.partition_energy import log_partition
from hf_ebm.models.energy.perplexity_energy import perplexity
from hf_ebm.models.energy.scoring_energy import score, score_ids
from hf_ebm.models.energy.smc_energy import sample_smc
from hf_ebm.models.reranking import rerank
from hf_ebm.registration import register
from hf_ebm.sampling.configuration import ChainGenerationConfig
from hf_ebm.scoring.energies import ENERGIES, token_energies
from hf_ebm.scoring.head import PositionLogits
from hf_ebm.scoring.masked_batches import MaskedBatchRunner

if TYPE_CHECKING:
    from typing import Self

    from transformers import ProcessorMixin


@model_output
class EnergyOutput(ModelOutput):
    """Output of `EnergyModel.forward`.

    Args:
        energy: (B,) energies in nats, differentiable.
        token_energies: (B, T) their terms; 0 at context positions.
    """

    energy: Tensor
    token_energies: Tensor


class EnergyModel(PublishingMixin, SettingsGenerationMixin):
    """A masked language model as an energy model over sequences (thesis ch. 6; Salazar et al. 2020 for `local`).

    `EnergyModel(mlm, energy="local", mask_token_id=…, special_token_ids=…)` wraps a model object, further fields of
    `EnergyConfig` by name; `EnergyModel.from_pretrained` takes a masked-LM checkpoint, an adapter of one, or a saved
    `EnergyModel`. The masked language model stays reachable as `.mlm`; of a `PeftModel` it is the base model with the
    adapters' layers.

    Args:
        mlm: a masked language model, or an `EnergyConfig` to make one of.
        mlm_class: with an `EnergyConfig`, the class of the masked language model where a checkpoint's own code has it;
            by default what `AutoModelForMaskedLM` makes.

    Raises:
        ValueError: for a model without a masked-LM head, or of a family that cannot work (the message says why).
    """

    config: EnergyConfig
    generation_config: ChainGenerationConfig

    # Methods with modules of their own, which are functions of a model there.
    generate = generate
    generate_from_sources = generate_from_sources
    fill = fill
    log_partition = log_partition
    pair_joints = pair_joints
    perplexity = perplexity
    score = score
    rerank = rerank
    sample_smc = sample_smc
    score_ids = score_ids
    score_variants = score_variants

    config_class = EnergyConfig
    generation_config_class = ChainGenerationConfig
    base_model_prefix = "energy_base"  # no module of this name: an inner checkpoint's own prefix must not match it
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(
        self, mlm: PreTrainedModel | EnergyConfig, *, mlm_class: type[PreTrainedModel] | None = None, **fields: Any
    ):
        given = None
        mlm = unwrapped("mlm", mlm)  # type: ignore[assignment]  # checked below
        if is_config(mlm, EnergyConfig):
            if fields:
                raise ValueError(
                    f"with an EnergyConfig there are no further arguments; got {', '.join(sorted(fields))}"
                )
            config = mlm
            inner = inner_config(config.text_config)
            check_masked_lm_config(inner)
            if mlm_class is None:
                refuse_own_code("text_config", inner, AutoModelForMaskedLM)
        elif isinstance(mlm, PreTrainedModel):
            check_masked_lm(mlm)
            given = mlm
            config = EnergyConfig(text_config=copy.deepcopy(mlm.config), **_checked_fields(fields))
        else:
            raise ValueError(f"mlm must be a masked language model or an EnergyConfig, got {type(mlm).__name__}")
        super().__init__(config)
        make = AutoModelForMaskedLM.from_config if mlm_class is None else mlm_class._from_config
        self.mlm = given if given is not None else make(config.text_config)
        keep_weights(self.mlm.modules() if given is not None else ())
        self.config.text_config = self.mlm.config
        self.post_init()
        if given is not None:
            self.train(given.training)

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *args: Any,
        energy: str | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        **kwargs: Any,
    ) -> Self:
        """Loads a masked-LM checkpoint, an adapter of one or a saved `EnergyModel`, with Transformers' usual arguments.

        Args:
            pretrained_model_name_or_path: Hub name or folder.
            energy: a name of `hf_ebm.scoring.energies.ENERGIES`; `None` keeps what was saved, and is `"local"` for a
                masked-LM checkpoint.
            processing_class: tokenizer (or processor) to take the token roles from; by default the checkpoint's own.
            kwargs: fields of `EnergyConfig` by name; the arguments of `AutoModelForMaskedLM.from_pretrained`.
                `trust_remote_code=True` runs a checkpoint's own code; for masked-LM checkpoints of a type that
                Transformers has, too, False takes its class in place of the checkpoint's.

        Raises:
            ValueError: if the checkpoint has no masked-LM head or lacks other weights, or its tokenizer no mask token;
                if it has code of its own and `trust_remote_code` isn't given.
        """
        given, wants_info = pretrained_model_name_or_path, kwargs.pop("output_loading_info", False)
        kwargs = under_new_names(kwargs)
        fields = {name: kwargs.pop(name) for name in FIELDS if name in kwargs}
        fields |= {} if energy is None else {"energy": energy}
        found = load_energy(cls, super().from_pretrained, given, args, fields, processing_class, kwargs)
        return found if wants_info else found[0]  # type: ignore[return-value]  # annotated as in Transformers

    def check_can_be_saved(self) -> None:
        """Raises `ValueError` for a model that would not be loaded again as it is; see `save_pretrained`."""
        if has_adapters(self.mlm):
            adapter_to_save(self.mlm, self.name_or_path)
        else:
            check_found_again("mlm", self.mlm, AutoModelForMaskedLM)

    def save_pretrained(
        self, save_directory: str | os.PathLike, is_main_process: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """The stock one's, with the code of a masked language model that has its own.

        Of one with an adapter the adapter alone is written, with its base model's name.

        Raises:
            ValueError: before anything is written, for what would not be loaded again as it is: a class without a file,
                an adapter whose base model has no name.
        """
        if kwargs.get("push_to_hub") and (has_adapters(self.mlm) or has_own_code(self.mlm)):
            raise ValueError("push_to_hub: upload a model with an adapter or code of its own by push_to_hub()")
        self.check_can_be_saved()
        if has_adapters(self.mlm):
            save_adapted(self, save_directory, is_main_process, *args, **kwargs)
            return
        refuse_other_adapter(save_directory)
        if is_main_process:
            save_code(self.mlm, AutoModelForMaskedLM, save_directory)
        super().save_pretrained(save_directory, is_main_process, *args, **kwargs)

    @torch.compiler.disable  # what a pass is made of depends on the data; passes may be compiled, see `compile`
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        free_mask: Tensor | None = None,
        encoder_input_ids: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        token_budget: int | None = None,
        **further_inputs: Any,
    ) -> EnergyOutput:
        """Energies of sequences given their context; differentiable.

        With gradients, passes beyond what one token budget holds are run again on the way back, so it bounds memory
        then too; the gradients are the same.

        Args:
            input_ids: (B, T) token ids.
            attention_mask: (B, T), 0 at padding, which may stand before or after the text.
            free_mask: (B, T), true where the token is part of the random variable; the rest is context. By default
                every position that holds no special token.
            encoder_input_ids, encoder_attention_mask: (B, S) the context of an encoder-decoder model (required there).
            token_budget: tokens per forward pass of the masked language model; by default from free memory.
            further_inputs: what else the model reads, by the names of its own forward: `token_type_ids`, `langs`,
                `lang_ids`, `bbox`, `position_ids`, … Whole numbers (B, T, …), one a row (B,), or one for all.

        Raises:
            ValueError: for an input the model doesn't take, or needs and isn't given; for mismatched shapes, ids
                outside the vocabulary, more tokens than the model has positions, a mask token at a scored position, or
                NaN logits.
        """
        sequences, scored = check_energy_inputs(
            self, input_ids, attention_mask, free_mask, encoder_input_ids, encoder_attention_mask, further_inputs
        )
        terms = token_energies(self.masked_batch_runner(token_budget), sequences, scored, self.config.energy)
        return EnergyOutput(energy=terms.sum(1), token_energies=terms)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the passes of the masked language model, in place; arguments as of `torch.compile`.

        So does `model.mlm = torch.compile(model.mlm)`.
        """
        self.mlm.compile(*args, **kwargs)

    @property
    def vocab_size(self) -> int:
        """Number of ids the masked language model has embeddings for."""
        return vocabulary_size(self.mlm)

    @property
    def input_device(self) -> torch.device:
        """Where token ids go: the device of the embeddings, also under a device map."""
        embeddings = self.get_input_embeddings()
        return next((embeddings if isinstance(embeddings, nn.Module) else self.mlm).parameters()).device

    def card_facts(self) -> dict[str, Any]:
        return {
            "template": "energy_model.md", "task": "fill-mask", "citations": ["GOYAL_2022"],
            "tags": ["energy-based-model", "masked-lm", self.mlm.config.model_type],
            "energy": self.config.energy, "about_energy": ENERGIES[self.config.energy].about,
            "inner": type(self.mlm).__name__, "conditional": self.mlm.config.is_encoder_decoder,
        }  # fmt: skip

    def masked_batch_runner(self, token_budget: int | None = None) -> MaskedBatchRunner:
        """A runner of masked rows through the masked language model, which counts from zero.

        Args:
            token_budget: tokens per forward pass; by default from free memory, as far as it is known by now.
        """
        kept = self.__dict__.get("_runner")
        if kept is None or getattr(kept.position_logits, "model", None) is not self.mlm:
            encoder_decoder = self.mlm.config.is_encoder_decoder
            logits = PositionLogits(self.mlm, "decoder_input_ids" if encoder_decoder else "input_ids")
            prepare = self._decoder_inputs if encoder_decoder else None
            kept = self.__dict__["_runner"] = MaskedBatchRunner(logits, None, self.vocab_size, prepare=prepare)
        mask = self.config.mask_token_id
        if token_budget is None:
            return kept.from_zero(mask, self.input_device)
        return MaskedBatchRunner(
            kept.position_logits, mask, self.vocab_size, token_budget, kept.prepare, self.input_device
        )

    def _decoder_inputs(self, ids: Tensor, states: Tensor | None) -> tuple[Tensor, dict]:
        shift = getattr(self.mlm, "prepare_decoder_input_ids_from_labels", None)
        if shift is None or states is None:
            raise ValueError(f"{type(self.mlm).__name__} needs an encoder input, and must shift labels by itself")
        return shift(ids), {"encoder_outputs": (states,), "use_cache": False}

    def resize_token_embeddings(  # type: ignore[override]  # the module isn't always an nn.Embedding
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
        *,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    ) -> nn.Module:
        """Another number of token ids, as in Transformers, with their roles.

        Args:
            new_num_tokens, pad_to_multiple_of, mean_resizing: as in Transformers.
            processing_class: tokenizer (or processor) to take the token roles from, which has grown. Without one the
                new ids are never proposed, as they have no token.

        Returns:
            The embeddings.

        Raises:
            ValueError: before anything changes, for a model that can't be resized, roles of ids that would be no more,
                and a tokenizer of more tokens.
        """
        given = {"new_num_tokens": new_num_tokens, "pad_to_multiple_of": pad_to_multiple_of}
        arguments: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        arguments |= {} if mean_resizing else {"mean_resizing": False}  # some families don't take it
        if new_num_tokens is not None or pad_to_multiple_of is not None:
            number = resized_number(self.vocab_size, new_num_tokens, pad_to_multiple_of)
            roles = resized_roles(self.config, self.vocab_size, number, processing_class)
            if has_adapters(self.mlm):
                raise ValueError(
                    "resize_token_embeddings: resize the base model, and save it, before it gets an adapter"
                )
            rehearse(self.mlm, number, arguments)
            self.mlm.resize_token_embeddings(**arguments)
            for field, value in roles.items():
                setattr(self.config, field, value)
            self.__dict__.pop("_runner", None)  # it counts on a number of logits
        return self.get_input_embeddings()

    def add_adapter(self, adapter_config: Any, adapter_name: str | None = None) -> None:
        """A new adapter of `.mlm`, by a configuration of PEFT; it is the active one."""
        add_adapter(self.mlm, adapter_config, adapter_name or "default")

    def enable_adapters(self) -> None:
        """Energies are those with adapters."""
        switch_adapters(self.mlm, True)

    def disable_adapters(self) -> None:
        """Energies are those of the base model."""
        switch_adapters(self.mlm, False)

    def active_adapters(self) -> list[str]:
        return active_adapters(self.mlm)

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        return self.mlm.load_adapter(*args, **kwargs)

    def set_adapter(self, *args: Any, **kwargs: Any) -> None:
        self.mlm.set_adapter(*args, **kwargs)

    def delete_adapter(self, *args: Any, **kwargs: Any) -> None:
        self.mlm.delete_adapter(*args, **kwargs)

    def get_adapter_state_dict(self, *args: Any, **kwargs: Any) -> dict:
        return self.mlm.get_adapter_state_dict(*args, **kwargs)

    def _init_weights(self, module: nn.Module) -> None:
        self.mlm._init_weights(module)

    def get_input_embeddings(self) -> nn.Module:
        return self.mlm.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.mlm.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module | None:
        return self.mlm.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.mlm.set_output_embeddings(new_embeddings)


def _checked_fields(fields: dict) -> dict:
    fields = under_new_names(fields)
    unknown = sorted(set(fields) - set(FIELDS))
    if unknown:
        raise ValueError(f"EnergyModel has no argument {', '.join(unknown)}; it takes {', '.join(FIELDS)}")
    return fields


register(EnergyConfig, {AutoModel: EnergyModel})
