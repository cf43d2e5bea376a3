"""`ResidualEnergyModel`: a causal language model corrected by the energy of a whole sequence."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import ModelOutput

from hf_ebm.checks import as_ids, as_mask, as_text, check_tokenizer, shown
from hf_ebm.generation_settings import SettingsGenerationMixin
from hf_ebm.model_facts import limit_of
from hf_ebm.model_modes import model_output, state_kept
from hf_ebm.models.adapters import own_tokenizer, refuse_adapters
from hf_ebm.models.checkpoints import (
    PublishingMixin,
    inner_config,
    is_config,
    keep_weights,
    load_whole,
    refuse_class_of_its_own,
)
from hf_ebm.models.reranking import rerank
from hf_ebm.models.residual.candidates import as_id_rows, lm_of
from hf_ebm.models.residual.generation_residual import JointGenerationConfig, generate
from hf_ebm.models.residual.joined_models import (
    ResidualEnergyConfig,
    Retokenizer,
    checked_models,
    dtype_name,
    encoder_of,
    joined_config,
    load_parts,
    load_referenced,
    valid_id,
)
from hf_ebm.models.residual.scoring_residual import score
from hf_ebm.objectives.completions import pad_right
from hf_ebm.registration import register

if TYPE_CHECKING:
    from typing import Self

_ENCODER_TOKENIZER = "encoder_tokenizer"  # a folder beside the weights; the language model's lies with them


@model_output
class ResidualEnergyOutput(ModelOutput):
    """Output of `ResidualEnergyModel.forward`.

    Args:
        energy: (B,) energies in nats, differentiable; float32, or float64 of a model in float64.
    """

    energy: Tensor


class ResidualEnergyModel(PublishingMixin, SettingsGenerationMixin):
    """`P(x | prefix) ∝ P_LM(x | prefix) exp(-E(prefix, x))` with a frozen language model (Deng et al. 2020).

    E is a linear function of the encoder's top hidden states, averaged over all tokens of prefix and continuation
    (section 4.1). The language model is `.lm`: always in evaluation mode, never trained. A continuation is a sequence
    that ends with an end token of the language model, or is stopped at a length.

    `ResidualEnergyModel(lm, encoder)` wraps model objects, `from_lm_and_encoder` loads them by name, `from_pretrained`
    loads what `save_pretrained` wrote.

    Args:
        lm: a causal language model.
        encoder: a model that gives hidden states: bidirectional (BERT, RoBERTa, ModernBERT, …) or causal.
        lm_tokenizer, encoder_tokenizer: both where the two models have different vocabularies; rows then go through
            text, see `Retokenizer`. They are saved with the model.
        lm_reference: Hub name or folder the language model came from; its weights are then not saved.
        lm_revision: of that reference.

    Raises:
        ValueError: for models of other kinds, different vocabularies without tokenizers, and models of different data
            types that are to be saved together.
    """

    config: ResidualEnergyConfig
    generation_config: JointGenerationConfig
    lm: PreTrainedModel | None  # None where it is kept by reference, and not loaded
    encoder: PreTrainedModel

    # Methods with modules of their own, which are functions of a model there.
    generate = generate
    score = score
    rerank = rerank

    config_class = ResidualEnergyConfig
    generation_config_class = JointGenerationConfig
    base_model_prefix = "residual_base"  # no module of this name: an inner checkpoint's own prefix must not match it
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(
        self,
        lm: PreTrainedModel | ResidualEnergyConfig,
        encoder: PreTrainedModel | None = None,
        *,
        lm_tokenizer: PreTrainedTokenizerBase | None = None,
        encoder_tokenizer: PreTrainedTokenizerBase | None = None,
        lm_reference: str | os.PathLike | None = None,
        lm_revision: str | None = None,
    ):
        given: tuple[PreTrainedModel, PreTrainedModel] | tuple[()] = ()
        if is_config(lm, ResidualEnergyConfig):
            config = lm
        else:
            given = checked_models(lm, encoder)
            for name, tokenizer in (("lm_tokenizer", lm_tokenizer), ("encoder_tokenizer", encoder_tokenizer)):
                if tokenizer is not None:
                    check_tokenizer(name, tokenizer)
            if not isinstance(lm_revision, str | None):
                raise ValueError(f"lm_revision must be a text, got {shown(lm_revision)}")
            config = joined_config(*given, lm_tokenizer, encoder_tokenizer, lm_reference, lm_revision)
        super().__init__(config)
        self.lm, self.encoder = given or (
            None if config.lm_reference else AutoModelForCausalLM.from_config(inner_config(config.text_config)),
            encoder_of(AutoModel.from_config, inner_config(config.encoder_config)),
        )
        if isinstance(getattr(self.encoder, "pooler", None), nn.Module):
            self.encoder.add_module("pooler", None)  # it plays no part, and would not be loaded again
        self.head = nn.Linear(self.encoder.config.hidden_size, 1, dtype=self.encoder.dtype if given else None)
        for model in given:
            keep_weights(model.modules())
        if self.lm is not None:
            self.config.text_config = self.lm.config
        self.config.encoder_config = self.encoder.config
        self.lm_tokenizer, self.encoder_tokenizer = lm_tokenizer, encoder_tokenizer
        self.post_init()
        if given:
            self.head.to(self.encoder.device)
            self.train(self.encoder.training)
        self._freeze_lm()

    @classmethod
    def from_lm_and_encoder(
        cls,
        lm: str | os.PathLike,
        encoder: str | os.PathLike,
        *,
        keep_lm: str = "value",
        lm_revision: str | None = None,
        **kwargs: Any,
    ) -> ResidualEnergyModel:
        """Loads a causal language model and an encoder, each from the Hub or a folder, and joins them.

        The head is new; train it with `hf_ebm.trainers.ResidualNCETrainer`. Tokenizers are read beside the models.

        Args:
            keep_lm: `"value"` saves the language model's weights with the model, `"reference"` only its name and the
                checksum of its weights.
            lm_revision: branch, tag or commit of the language model.
            kwargs: for both `from_pretrained`: `dtype`, `token`, `cache_dir`, …

        Raises:
            ValueError: for what cannot be loaded as such, checkpoints without the weights they need, and as the class.

        Example:
            >>> from hf_ebm.assets import KJV_CAUSAL_LM, KJV_MASKED_LM
            >>> model = ResidualEnergyModel.from_lm_and_encoder(KJV_CAUSAL_LM, KJV_MASKED_LM, dtype=torch.float32)
            >>> model(torch.tensor([[2, 70, 80, 3]])).energy.shape
            torch.Size([1])
        """
        return cls(**load_parts(lm, encoder, keep_lm, lm_revision, kwargs)._asdict())

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike | None, *args: Any, **kwargs: Any
    ) -> Self:
        """Loads a saved model, its language model from the reference where it was kept by reference.

        Raises:
            ValueError: if weights are missing, or the referenced language model is another than it was.
        """
        name = as_text("pretrained_model_name_or_path", pretrained_model_name_or_path)
        hub = {k: kwargs[k] for k in ("token", "cache_dir", "local_files_only", "revision", "subfolder") if k in kwargs}
        found, _ = PreTrainedConfig.get_config_dict(name, **hub)
        if found.get("model_type") != ResidualEnergyConfig.model_type:
            raise ValueError(
                f"{name} is no saved ResidualEnergyModel but of the type {found.get('model_type')!r}; join a language "
                "model and an encoder with from_lm_and_encoder"
            )
        wants_info = kwargs.pop("output_loading_info", False)
        model, info = load_whole(super().from_pretrained, name, *args, **kwargs)
        if model.config.lm_reference is not None:
            lm, dtype = (
                load_referenced(model.config, kwargs.get("token")),
                kwargs.get("dtype", kwargs.get("torch_dtype")),
            )
            in_use = getattr(torch, str(model.config.lm_dtype)) if dtype in (None, "auto") else model.dtype
            model.lm = lm.to(model.encoder.device, in_use)  # type: ignore[arg-type]  # a wrapped method without its self
            model.config.text_config = lm.config
        model.lm_tokenizer = own_tokenizer(name, **hub)
        if model.config.retokenize:
            folder = "/".join(filter(None, [hub.get("subfolder"), _ENCODER_TOKENIZER]))
            model.encoder_tokenizer = AutoTokenizer.from_pretrained(name, **{**hub, "subfolder": folder})
        model._freeze_lm()
        return (model, info) if wants_info else model  # type: ignore[return-value]  # annotated as in Transformers

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """The stock one's, with the language model's tokenizer, where known, and the encoder's, where it is another.

        Raises:
            ValueError: before anything is written, for parts of different data types, with adapters, or with code of
                their own.
        """
        refuse_adapters("encoder", self.encoder)
        refuse_class_of_its_own("encoder", self.encoder, AutoModel)
        if self.config.lm_reference is None:
            refuse_adapters("lm", lm_of(self))
        if self.lm is not None:
            refuse_class_of_its_own("lm", self.lm, AutoModelForCausalLM)
        if self.config.lm_reference is None and lm_of(self).dtype != self.dtype:
            raise ValueError(
                f"lm and encoder must have one data type to be saved together, got {lm_of(self).dtype} and {self.dtype}"
            )
        if self.config.lm_reference is not None and self.lm is not None:
            self.config.lm_dtype = dtype_name(self.lm.dtype)
        super().save_pretrained(save_directory, *args, **kwargs)
        if self.lm_tokenizer is not None:
            self.lm_tokenizer.save_pretrained(save_directory)
        if self.config.retokenize:
            if self.encoder_tokenizer is None:
                raise ValueError("encoder_tokenizer must be set, to be saved: the two vocabularies differ")
            self.encoder_tokenizer.save_pretrained(Path(save_directory) / _ENCODER_TOKENIZER)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> ResidualEnergyOutput:
        """Energies of rows of the encoder's tokens; see `encoder_rows`.

        Args:
            input_ids: (B, T) ids of prefix and continuation.
            attention_mask: (B, T), 0 at padding.

        Raises:
            ValueError: for anything but tensors of ids, and of 0 and 1, of one shape.
        """
        input_ids = as_ids("input_ids", input_ids)
        mask = as_mask("attention_mask", attention_mask, input_ids).long()
        with state_kept(self.encoder):
            hidden = self.encoder(input_ids=input_ids, attention_mask=mask)[0]
        return ResidualEnergyOutput(energy=self.energy_of_mean(self.summed(hidden, mask) / mask.sum(1, keepdim=True)))

    @staticmethod
    def summed(hidden: Tensor, mask: Tensor) -> Tensor:
        """Sum over attended tokens of hidden states (B, T, d), in float32 or better: (B, d)."""
        hidden = hidden if hidden.dtype == torch.float64 else hidden.float()
        with torch.autocast(hidden.device.type, enabled=False):
            return torch.einsum("btd,bt->bd", hidden, mask.to(hidden.dtype))

    def energy_of_mean(self, mean: Tensor) -> Tensor:
        """The head on mean hidden states (B, d), in float32 or better: (B,)."""
        with torch.autocast(mean.device.type, enabled=False):
            return (mean @ self.head.weight.to(mean.dtype)[0]) + self.head.bias.to(mean.dtype)[0]

    def encoder_rows(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Ids and attention mask (B, T) for the encoder, of rows of the language model's ids.

        Raises:
            ValueError: naming the row, for one without a token or longer than the encoder has positions for.
        """
        rows = as_id_rows("rows", rows)
        own = self.retokenizer(rows) if self.config.retokenize else rows
        spelled_by = self.encoder_tokenizer if self.config.retokenize else None
        limit = limit_of(self.encoder, self.config.max_sequence_length, spelled_by, "encoder")
        device = self.encoder.device
        for number, ids in enumerate(own):
            if len(ids) == 0:
                raise ValueError(f"row {number} has 0 tokens for the encoder, which needs 1 or more")
            if limit is not None:
                limit.check(len(ids), f"row {number} of the encoder")
        ids, mask = pad_right([row.to(device) for row in own], self.encoder_pad_id)
        return ids, mask

    def card_facts(self) -> dict[str, Any]:
        tags = ["energy-based-model", "residual"]
        return {"template": "residual_model.md", "task": "text-generation", "tags": tags, "citations": ["DENG_2020"]}

    def train(self, mode: bool = True) -> ResidualEnergyModel:
        """The language model stays in evaluation mode."""
        super().train(mode)
        if self.lm is not None:
            self.lm.eval()
        return self

    @property
    def retokenizer(self) -> Retokenizer:
        """What turns rows of the language model into rows of the encoder, where their tokenizers differ."""
        if self.lm_tokenizer is None or self.encoder_tokenizer is None:
            raise ValueError("lm_tokenizer and encoder_tokenizer must both be set: the two vocabularies differ")
        return Retokenizer(self.lm_tokenizer, self.encoder_tokenizer, self.end_ids)

    @property
    def end_ids(self) -> list[int]:
        """The language model's end tokens."""
        return self.config.end_token_ids or []

    @property
    def encoder_pad_id(self) -> int:
        """What stands after the end of the encoder's rows."""
        return valid_id(self.encoder, "pad_token_id", "eos_token_id")

    @property
    def dtype(self) -> torch.dtype:
        """Of encoder and head; the language model's is `.lm.dtype`."""
        return self.encoder.dtype

    @property
    def device(self) -> torch.device:
        """Of encoder and head, and of the language model where it can be used."""
        return self.encoder.device

    def _freeze_lm(self) -> None:
        if self.lm is None:
            return
        self.lm.requires_grad_(False).eval()
        if self.config.lm_reference is not None:
            self._keys_to_ignore_on_save = [f"lm.{name}" for name in self.lm.state_dict()]

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.head:
            nn.init.normal_(self.head.weight, std=0.02)
            nn.init.zeros_(self.head.bias)
        elif self.lm is not None and any(module is one for one in self.lm.modules()):
            self.lm._init_weights(module)
        else:
            self.encoder._init_weights(module)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: there are two vocabularies. Raises `ValueError`, always."""
        raise ValueError("resize_token_embeddings: resize language model and encoder before they are joined")

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.set_input_embeddings(value)


register(ResidualEnergyConfig, {AutoModel: ResidualEnergyModel})
