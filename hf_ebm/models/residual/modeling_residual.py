"""`ResidualEnergyModel`: a causal language model corrected by the energy of a whole sequence."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import ModelOutput

from hf_ebm.checks import as_ids, as_mask, check_choice, check_tokenizer, shown
from hf_ebm.model_facts import limit_of, num_embeddings, special_ids
from hf_ebm.model_modes import model_output, state_kept
from hf_ebm.models.adapters import refuse_adapter_alone, refuse_adapters, unwrapped
from hf_ebm.models.checkpoints import (
    check_trust,
    inner_config,
    is_config,
    keep_weights,
    load_whole,
    refuse_class_of_its_own,
)
from hf_ebm.models.energy.context import refuse_needed_inputs
from hf_ebm.models.energy.token_roles import own_tokenizer
from hf_ebm.models.fingerprints import fingerprint
from hf_ebm.models.probes import (
    check_causal,
    check_not_block_sparse,
    check_weights_stay,
    hidden_size_if_padding_is_ignored,
    share_parameters,
)
from hf_ebm.models.publishing import PublishingMixin, register
from hf_ebm.models.residual.configuration_residual import ResidualEnergyConfig
from hf_ebm.models.residual.generation_residual import JointGenerationConfig, JointGenerationMixin
from hf_ebm.models.residual.inputs_residual import as_id_rows, lm_of
from hf_ebm.models.residual.retokenization import Retokenizer, same_vocabulary
from hf_ebm.models.residual.scoring_residual import ResidualScoringMixin
from hf_ebm.objectives.completions import pad_right
from hf_ebm.plain_values import as_text

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


class ResidualEnergyModel(PublishingMixin, JointGenerationMixin, ResidualScoringMixin, PreTrainedModel):
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
            text, see `hf_ebm.models.residual.retokenization`. They are saved with the model.
        lm_reference: Hub name or folder the language model came from; its weights are then not saved.
        lm_revision: of that reference.

    Raises:
        ValueError: for models of other kinds, different vocabularies without tokenizers, and models of different data
            types that are to be saved together.
    """

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
            given = _checked_models(lm, encoder)
            for name, tokenizer in (("lm_tokenizer", lm_tokenizer), ("encoder_tokenizer", encoder_tokenizer)):
                if tokenizer is not None:
                    check_tokenizer(name, tokenizer)
            if not isinstance(lm_revision, str | None):
                raise ValueError(f"lm_revision must be a text, got {shown(lm_revision)}")
            config = _config_of(*given, lm_tokenizer, encoder_tokenizer, lm_reference, lm_revision)
        super().__init__(config)
        self.lm, self.encoder = given or (
            None if config.lm_reference else AutoModelForCausalLM.from_config(inner_config(config.text_config)),
            _encoder_of(AutoModel.from_config, inner_config(config.encoder_config)),
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
        """
        check_choice("keep_lm", keep_lm, ("value", "reference"))
        lm, encoder = as_text("lm", lm), as_text("encoder", encoder)
        revision = {"revision": lm_revision} if lm_revision else {}
        of_both = ("token", "cache_dir", "local_files_only", "force_download", "trust_remote_code")
        hub = {k: v for k, v in kwargs.items() if k in of_both}
        trust = kwargs.get("trust_remote_code")
        for argument, name, own, auto_class in (
            ("lm", lm, revision, AutoModelForCausalLM), ("encoder", encoder, {}, AutoModel)
        ):  # fmt: skip
            refuse_adapter_alone(argument, name, **hub, **own)
            check_trust(name, PreTrainedConfig.get_config_dict(name, **hub, **own)[0], auto_class, trust)
        base, _ = load_whole(AutoModelForCausalLM.from_pretrained, lm, **kwargs, **revision)
        config = AutoConfig.from_pretrained(encoder, **hub)

        def load_encoder(*a: Any, **k: Any) -> PreTrainedModel:
            return _encoder_of(AutoModel.from_pretrained, config, *a, **k)

        top, _ = load_whole(load_encoder, encoder, **kwargs)
        return cls(
            base,
            top,
            lm_tokenizer=own_tokenizer(lm, **hub, **revision),
            encoder_tokenizer=own_tokenizer(encoder, **hub),
            lm_reference=lm if keep_lm == "reference" else None,
            lm_revision=lm_revision if keep_lm == "reference" else None,
        )

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
            model._attach_referenced_lm(kwargs.get("dtype", kwargs.get("torch_dtype")), kwargs.get("token"))
        model.lm_tokenizer = own_tokenizer(name, **hub)
        if model.config.retokenize:
            folder = "/".join(filter(None, [hub.get("subfolder"), _ENCODER_TOKENIZER]))
            model.encoder_tokenizer = AutoTokenizer.from_pretrained(name, **{**hub, "subfolder": folder})
        model._freeze_lm()
        return (model, info) if wants_info else model  # type: ignore[return-value]  # annotated as in Transformers

    def _attach_referenced_lm(self, dtype: torch.dtype | str | None, token: str | bool | None) -> None:
        config = self.config
        revision = {"revision": config.lm_revision} if config.lm_revision else {}
        try:
            # In the type of the checksum first: it is of bytes.
            lm, _ = load_whole(
                AutoModelForCausalLM.from_pretrained,
                str(config.lm_reference),
                dtype=getattr(torch, str(config.lm_reference_dtype)),
                token=token,
                **revision,
            )
        except OSError as error:
            raise ValueError(
                f"lm_reference: the language model {config.lm_reference!r} cannot be loaded; if it was moved, give "
                "from_pretrained its new place as lm_reference"
            ) from error
        if fingerprint(lm) != config.lm_fingerprint:
            raise ValueError(
                f"lm_reference: the weights of {config.lm_reference!r} are not those the energy was made for; give "
                "lm_revision when you join the models, or keep the language model by value"
            )
        in_use = getattr(torch, str(config.lm_dtype)) if dtype in (None, "auto") else self.dtype
        self.lm = lm.to(self.encoder.device, in_use)  # type: ignore[arg-type]  # a wrapped method without its self
        self.config.text_config = lm.config
        self._freeze_lm()

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
            self.config.lm_dtype = _name(self.lm.dtype)
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
        """What stands behind the end of the encoder's rows."""
        return _valid_id(self.encoder, "pad_token_id", "eos_token_id")

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


def _config_of(
    lm: PreTrainedModel,
    encoder: PreTrainedModel,
    lm_tokenizer: PreTrainedTokenizerBase | None,
    encoder_tokenizer: PreTrainedTokenizerBase | None,
    lm_reference: str | os.PathLike | None,
    lm_revision: str | None,
) -> ResidualEnergyConfig:
    retokenize = _must_retokenize(lm, encoder, lm_tokenizer, encoder_tokenizer)
    if lm_reference is None and lm.dtype != encoder.dtype:
        raise ValueError(
            f"lm and encoder must have one data type to be saved together, got {lm.dtype} and {encoder.dtype}; load "
            "them alike, or keep the language model by reference"
        )
    ends = special_ids("eos_token_id", lm)
    config = ResidualEnergyConfig(
        text_config=copy.deepcopy(lm.config),
        encoder_config=copy.deepcopy(encoder.config),
        end_token_ids=ends,
        start_token_id=next(iter(special_ids("bos_token_id", lm)), None),
        lm_pad_token_id=_valid_id(lm, "pad_token_id", "eos_token_id"),
        retokenize=retokenize,
    )
    if lm_reference is not None:
        # A folder by its whole path: a relative one would name another in another working directory.
        reference = as_text("lm_reference", lm_reference)
        config.lm_reference = str(Path(reference).resolve()) if Path(reference).is_dir() else reference
        config.lm_revision = lm_revision
        config.lm_fingerprint, config.lm_reference_dtype = fingerprint(lm), _name(lm.dtype)
        config.lm_dtype = config.lm_reference_dtype
    return config


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _checked_models(lm: object, encoder: object) -> tuple[PreTrainedModel, PreTrainedModel]:
    lm, encoder = unwrapped("lm", lm), unwrapped("encoder", encoder)
    if not isinstance(lm, PreTrainedModel) or not lm.can_generate() or lm.config.is_encoder_decoder:
        raise ValueError(
            f"lm must be a causal language model (AutoModelForCausalLM) or a ResidualEnergyConfig, got "
            f"{type(lm).__name__}"
        )
    check_not_block_sparse("lm", lm)
    check_weights_stay("lm", lm)
    refuse_needed_inputs("lm", lm)
    check_causal("lm", lm)
    if not isinstance(encoder, PreTrainedModel):
        raise ValueError(f"encoder must be a model that gives hidden states (AutoModel), got {type(encoder).__name__}")
    name, made = type(encoder).__name__, AutoModel._model_mapping.get(type(encoder.config), ())
    if type(encoder) not in (made if isinstance(made, tuple) else (made,)) or encoder.config.is_encoder_decoder:
        raise ValueError(f"encoder must be what AutoModel makes of an encoder, without a head or a decoder; got {name}")
    check_not_block_sparse("encoder", encoder)
    check_weights_stay("encoder", encoder)
    refuse_needed_inputs("encoder", encoder)
    if "attention_mask" not in inspect.signature(encoder.forward).parameters:
        raise ValueError(f"encoder: {name} takes no attention mask, so its energies would depend on padding")
    size = hidden_size_if_padding_is_ignored(encoder, _valid_id(encoder, "pad_token_id"))
    if size is None:
        raise ValueError(f"encoder: hidden states of {name} depend on how far a row is padded, and so would energies")
    if size != getattr(encoder.config, "hidden_size", None):
        raise ValueError(
            f"encoder: {name} gives hidden states of size {size}, its configuration says "
            f"{getattr(encoder.config, 'hidden_size', None)}"
        )
    if share_parameters(lm, encoder):
        raise ValueError("lm and encoder must not share weights, as only the encoder is trained; copy.deepcopy one")
    return lm, encoder


def _valid_id(model: PreTrainedModel, *names: str) -> int:
    """The first of these special tokens that the model has an embedding for, else 0."""
    size = num_embeddings(model)
    return next((i for name in names for i in special_ids(name, model) if 0 <= i < size), 0)


def _must_retokenize(
    lm: PreTrainedModel,
    encoder: PreTrainedModel,
    lm_tokenizer: PreTrainedTokenizerBase | None,
    encoder_tokenizer: PreTrainedTokenizerBase | None,
) -> bool:
    """Whether rows go through text."""
    tokenizers = [one for one in (lm_tokenizer, encoder_tokenizer) if one is not None]
    if len(tokenizers) == 2 and not same_vocabulary(*tokenizers):
        return True
    sizes = [num_embeddings(model) for model in (lm, encoder)]
    if len(tokenizers) == 2 and sizes[0] > sizes[1]:
        raise ValueError(
            f"encoder must have embeddings for every id of the language model, got {sizes[1]} for {sizes[0]}; resize "
            "it with resize_token_embeddings"
        )
    if len(tokenizers) < 2 and sizes[0] != sizes[1]:
        raise ValueError(
            f"lm_tokenizer and encoder_tokenizer must both be given: lm has {sizes[0]} embeddings and encoder "
            f"{sizes[1]}, so their vocabularies differ"
        )
    return False


def _encoder_of(
    load: Callable[..., PreTrainedModel], config: PreTrainedConfig, *args: Any, **kwargs: Any
) -> PreTrainedModel:
    """An encoder without the pooling layer, which many checkpoints lack and no energy needs."""
    found = AutoModel._model_mapping.get(type(config), None)
    model_class = found[0] if isinstance(found, tuple) else found
    if model_class is not None and "add_pooling_layer" in inspect.signature(model_class).parameters:
        kwargs["add_pooling_layer"] = False
        if load == AutoModel.from_config:
            return model_class(config, **kwargs)
    return load(*(args or (config,)), **kwargs)


register(ResidualEnergyConfig, {AutoModel: ResidualEnergyModel})
