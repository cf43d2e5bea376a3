"""`ProductLM`: `P(x_t | x_<t) ∝ P_LM(x_t | x_<t) P_φ(x_t | x_<t)`, the RALM of Deng et al. 2020, equation 6."""

from __future__ import annotations

import copy
import inspect

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from hf_ebm.models.autoregressive_product.configuration_product import ProductLMConfig
from hf_ebm.models.position_limits import counts_padding
from hf_ebm.models.probes import is_causal, share_parameters
from hf_ebm.models.publishing import PublishingMixin, register
from hf_ebm.models.weights import refuse_missing_weights
from hf_ebm.objectives.token_losses import IGNORED, cross_entropy_sum
from hf_ebm.relaxations.soft_argmax import at_least_float32


class ProductLM(PublishingMixin, PreTrainedModel, GenerationMixin):
    """A frozen causal language model times a trained one, renormalized per token and trained by exact likelihood.

    `ProductLM(lm, residual)` wraps two models, `ProductLM.from_lm(lm)` one and a copy of it whose output layer starts
    at zero, so that the product starts as `lm`. It generates without a cache.

    Raises:
        ValueError: for models that aren't causal, of different vocabularies or data types, or with shared weights.
    """

    config_class = ProductLMConfig
    base_model_prefix = "product_base"  # no module of this name: an inner checkpoint's own prefix must not match it
    main_input_name = "input_ids"
    _supports_sdpa = True

    def __init__(self, lm: PreTrainedModel | ProductLMConfig, residual: PreTrainedModel | None = None):
        # By type, not class: a checkpoint's own code may have been loaded twice, from two of its files.
        given = getattr(type(lm), "model_type", None) != ProductLMConfig.model_type
        if given:
            _check_models(lm, residual)
            super().__init__(
                ProductLMConfig(text_config=lm.config.to_dict(), residual_config=residual.config.to_dict())
            )
        else:
            super().__init__(lm)
            config = lm
            lm, residual = (
                AutoModelForCausalLM.from_config(own) for own in (config.text_config, config.residual_config)
            )
        self.lm, self.residual = lm, residual
        for module in self.modules() if given else ():
            module._is_hf_initialized = True  # `post_init` must not touch weights that are somebody's
        self.config.text_config, self.config.residual_config = lm.config, residual.config
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(self.generation_config, name, getattr(lm.generation_config, name))
        self.generation_config.use_cache = False
        self.post_init()
        self.lm.requires_grad_(False).eval()

    @classmethod
    def from_lm(cls, lm: PreTrainedModel) -> ProductLM:
        """`lm` and a copy of it with an output layer of zeros of its own."""
        residual = copy.deepcopy(lm).requires_grad_(True)
        head = residual.get_output_embeddings()
        bias = getattr(head, "bias", None) is not None
        zeros = nn.Linear(head.weight.shape[1], head.weight.shape[0], bias=bias, device=lm.device, dtype=lm.dtype)
        for parameter in zeros.parameters():
            nn.init.zeros_(parameter)
        residual.set_output_embeddings(zeros)
        residual.config.tie_word_embeddings = False
        residual.all_tied_weights_keys = residual.get_expanded_tied_weights_keys(all_submodels=True)
        return cls(lm, residual)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **kwargs) -> ProductLM:
        """As in Transformers; the first model stays frozen.

        Raises:
            ValueError: for a checkpoint of another model, and for one that lacks weights.
        """
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        refuse_missing_weights(pretrained_model_name_or_path, info)
        model.lm.requires_grad_(False).eval()
        return (model, info) if wants_info else model

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **unused,
    ) -> CausalLMOutput:
        """Logits (B, T, V), normalized, and with `labels` (-100 where there is none) the mean loss of their tokens.

        Args:
            num_items_in_batch: what the summed loss is divided by in place of the number of labels; a Trainer's.
        """
        with torch.no_grad():
            base = at_least_float32(_logits(self.lm, input_ids, attention_mask))
        residual = at_least_float32(_logits(self.residual, input_ids, attention_mask))
        logits = (base.log_softmax(-1) + residual).log_softmax(-1)
        loss = None
        if labels is not None:
            following = labels[:, 1:]
            count = (following != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
            loss = cross_entropy_sum(logits[:, :-1], following) / count
        return CausalLMOutput(loss=loss, logits=logits)

    def train(self, mode: bool = True) -> ProductLM:
        """The frozen model stays in evaluation mode."""
        super().train(mode)
        self.lm.eval()
        return self

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **kwargs):
        """The whole row each time."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def resize_token_embeddings(self, *args, **kwargs):
        """Refused: there are two models. Raises `ValueError`, always."""
        raise ValueError("resize_token_embeddings: resize both language models before they are joined")

    def _init_weights(self, module):
        self.residual._init_weights(module)

    def get_input_embeddings(self):
        return self.residual.get_input_embeddings()

    def set_input_embeddings(self, value):
        self.residual.set_input_embeddings(value)

    def get_output_embeddings(self):
        return self.residual.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings):
        self.residual.set_output_embeddings(new_embeddings)


def _check_models(lm, residual) -> None:
    for name, model in (("lm", lm), ("residual", residual)):
        causal = isinstance(model, PreTrainedModel) and model.can_generate() and not model.config.is_encoder_decoder
        if not causal or not is_causal(model):
            raise ValueError(f"{name} must be a causal language model, got {type(model).__name__}")
    sizes = [model.get_input_embeddings().weight.shape[0] for model in (lm, residual)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"lm and residual must have one vocabulary, got {sizes[0]} and {sizes[1]} ids")
    if lm.dtype != residual.dtype:
        raise ValueError(f"lm and residual must have one data type, got {lm.dtype} and {residual.dtype}")
    if share_parameters(lm, residual):
        raise ValueError("lm and residual must not share weights, as only the second is trained; copy.deepcopy one")


def _logits(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """A model's logits, with positions counted from the first attended token, where padding stands on the left."""
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
    padded = attention_mask is not None and not bool(attention_mask[:, 0].all())
    if padded and "position_ids" in inspect.signature(model.forward).parameters and not counts_padding(model):
        inputs["position_ids"] = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
    return model(**inputs).logits


register(ProductLMConfig, {AutoModelForCausalLM: ProductLM})
