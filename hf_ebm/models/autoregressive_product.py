"""`ProductLM`: `P(x_t | x_<t) ∝ P_LM(x_t | x_<t) P_φ(x_t | x_<t)`, the RALM of Deng et al. 2020, equation 6."""

from __future__ import annotations

import copy
import inspect
import os
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Cache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.configuration_utils import SubConfigSpec
from transformers.modeling_outputs import CausalLMOutput

from hf_ebm.checks import as_ids, as_mask, as_number, as_numbers_of
from hf_ebm.model_facts import counts_padding, is_causal, num_embeddings, share_parameters
from hf_ebm.models.adapters import refuse_adapters, unwrapped
from hf_ebm.models.checkpoints import (
    CompositeConfig,
    PublishingMixin,
    inner_config,
    is_config,
    keep_weights,
    load_whole,
    refuse_class_of_its_own,
)
from hf_ebm.objectives.losses import IGNORED, at_least_float32, cross_entropy_sum
from hf_ebm.registration import register

if TYPE_CHECKING:
    from typing import Self


class ProductLMConfig(CompositeConfig):
    """Two causal language models over one vocabulary.

    Args:
        text_config: configuration of the frozen one.
        residual_config: configuration of the one that is trained.
        tie_word_embeddings: of the wrapper itself, which ties nothing: each model inside follows its own configuration.
    """

    model_type = "hf_ebm_product_lm"
    sub_configs_defaults = {  # noqa: RUF012
        "text_config": SubConfigSpec(config_class=AutoConfig, model_type="gpt2"),
        "residual_config": SubConfigSpec(config_class=AutoConfig, model_type="gpt2"),
    }

    text_config: PreTrainedConfig | dict | None = None
    residual_config: PreTrainedConfig | dict | None = None
    tie_word_embeddings: bool = True


class ProductLM(PublishingMixin, GenerationMixin):
    """A frozen causal language model times a trained one, renormalized per token and trained by exact likelihood.

    `ProductLM(lm, residual)` wraps two models, `ProductLM.from_lm(lm)` one and a copy of it whose output layer starts
    at zero, so that the product starts as `lm`. It generates without a cache.

    Raises:
        ValueError: for models that aren't causal, of different vocabularies or data types, or with shared weights.
    """

    lm: PreTrainedModel
    residual: PreTrainedModel
    config_class = ProductLMConfig
    base_model_prefix = "product_base"  # no module of this name: an inner checkpoint's own prefix must not match it
    main_input_name = "input_ids"
    _supports_sdpa = True

    def __init__(self, lm: PreTrainedModel | ProductLMConfig, residual: PreTrainedModel | None = None):
        given: tuple[PreTrainedModel, ...] = ()
        if is_config(lm, ProductLMConfig):
            config = lm
        else:
            given = _checked_models(lm, residual)
            configs = [copy.deepcopy(model.config) for model in given]
            config = ProductLMConfig(text_config=configs[0], residual_config=configs[1])
        super().__init__(config)
        self.lm, self.residual = given or (
            AutoModelForCausalLM.from_config(inner_config(own)) for own in (config.text_config, config.residual_config)
        )
        keep_weights(self.modules() if given else ())
        self.config.text_config, self.config.residual_config = self.lm.config, self.residual.config
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(self.generation_config, name, getattr(self.lm.generation_config, name))
        self.generation_config.use_cache = False
        self.post_init()
        self.lm.requires_grad_(False).eval()

    @classmethod
    def from_lm(cls, lm: PreTrainedModel) -> ProductLM:
        """`lm` and a copy of it with an output layer of zeros of its own.

        Example:
            >>> from hf_ebm.assets import load_embedded_causal
            >>> lm, _ = load_embedded_causal()
            >>> product = ProductLM.from_lm(lm).eval()  # as the language model at first
            >>> ids = torch.tensor([[2, 70, 80]])
            >>> torch.allclose(product(ids).logits.log_softmax(-1), lm(ids).logits.log_softmax(-1), atol=1e-5)
            True
        """
        residual = copy.deepcopy(_causal("lm", lm)).requires_grad_(True)
        head = residual.get_output_embeddings()
        weight, bias = getattr(head, "weight", None), getattr(head, "bias", None) is not None
        if weight is None:
            raise ValueError(f"lm: {type(lm).__name__} has no output layer")
        zeros = nn.Linear(weight.shape[1], weight.shape[0], bias=bias, device=lm.device, dtype=lm.dtype)
        for parameter in zeros.parameters():
            nn.init.zeros_(parameter)
        residual.set_output_embeddings(zeros)
        residual.config.tie_word_embeddings = False
        residual.all_tied_weights_keys = residual.get_expanded_tied_weights_keys(all_submodels=True)
        return cls(lm, residual)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike | None, *args: Any, **kwargs: Any
    ) -> Self:
        """As in Transformers; the first model stays frozen.

        Raises:
            ValueError: for a checkpoint of another model, and for one that lacks weights.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = load_whole(super().from_pretrained, pretrained_model_name_or_path, *args, **kwargs)
        model.lm.requires_grad_(False).eval()
        return (model, info) if wants_info else model  # type: ignore[return-value]  # annotated as in Transformers

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """The stock one's. Raises `ValueError` for parts with adapters or code of their own, before it writes."""
        for name, part in (("lm", self.lm), ("residual", self.residual)):
            refuse_adapters(name, part)
            refuse_class_of_its_own(name, part, AutoModelForCausalLM)
        super().save_pretrained(save_directory, *args, **kwargs)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **unused: Any,
    ) -> CausalLMOutput:
        """Logits (B, T, V), normalized, and with `labels` (-100 where there is none) the mean loss of their tokens.

        Args:
            num_items_in_batch: what the summed loss is divided by in place of the number of labels; a Trainer's.

        Raises:
            ValueError: for anything but tensors of ids, of 0 and 1, and of labels, of one shape.
        """
        input_ids = as_ids("input_ids", input_ids)
        if attention_mask is not None:
            attention_mask = as_mask("attention_mask", attention_mask, input_ids).long()
        if labels is not None:
            labels = as_numbers_of("labels", labels, input_ids)
        with torch.no_grad():
            base = at_least_float32(_logits(self.lm, input_ids, attention_mask))
        residual = at_least_float32(_logits(self.residual, input_ids, attention_mask))
        logits = (base.log_softmax(-1) + residual).log_softmax(-1)
        loss = None
        if labels is not None:
            following = labels[:, 1:]
            count: Tensor | float = (following != IGNORED).sum()
            if isinstance(num_items_in_batch, Tensor) and num_items_in_batch.shape == (1,):
                count = num_items_in_batch  # so it comes under data parallelism
            elif num_items_in_batch is not None:
                count = as_number("num_items_in_batch", num_items_in_batch, least=0)
            loss = cross_entropy_sum(logits[:, :-1], following) / count
        return CausalLMOutput(loss=loss, logits=logits)

    def card_facts(self) -> dict[str, Any]:
        return {"citations": ["DENG_2020"]}

    def train(self, mode: bool = True) -> ProductLM:
        """The frozen model stays in evaluation mode."""
        super().train(mode)
        self.lm.eval()
        return self

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The whole row each time."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: there are two models. Raises `ValueError`, always."""
        raise ValueError("resize_token_embeddings: resize both language models before they are joined")

    def _init_weights(self, module: nn.Module) -> None:
        self.residual._init_weights(module)

    def get_input_embeddings(self) -> nn.Module:
        return self.residual.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.residual.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module | None:
        return self.residual.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.residual.set_output_embeddings(new_embeddings)


def _checked_models(lm: object, residual: object) -> tuple[PreTrainedModel, PreTrainedModel]:
    lm, residual = _causal("lm", unwrapped("lm", lm)), _causal("residual", unwrapped("residual", residual))
    sizes = [num_embeddings(model) for model in (lm, residual)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"lm and residual must have one vocabulary, got {sizes[0]} and {sizes[1]} ids")
    if lm.dtype != residual.dtype:
        raise ValueError(f"lm and residual must have one data type, got {lm.dtype} and {residual.dtype}")
    if share_parameters(lm, residual):
        raise ValueError("lm and residual must not share weights, as only the second is trained; copy.deepcopy one")
    return lm, residual


def _causal(name: str, model: object) -> PreTrainedModel:
    found = isinstance(model, PreTrainedModel) and model.can_generate() and not model.config.is_encoder_decoder
    if not found or not isinstance(model, PreTrainedModel) or not is_causal(model):
        raise ValueError(f"{name} must be a causal language model, got {type(model).__name__}")
    return model


def _logits(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """A model's logits, with positions counted from the first attended token, where padding stands on the left."""
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    if attention_mask is None or bool(attention_mask[:, 0].all()):
        return model(**inputs).logits
    if "position_ids" in inspect.signature(model.forward).parameters and not counts_padding(model):
        inputs["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
    return model(**inputs).logits


register(ProductLMConfig, {AutoModelForCausalLM: ProductLM})
