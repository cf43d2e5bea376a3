"""Two models joined: their configuration, how they are loaded, which may be, rows of one's tokens as the other's."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.configuration_utils import SubConfigSpec

from hf_ebm.checks import as_text, as_whole, check_choice
from hf_ebm.model_facts import (
    check_causal,
    check_not_block_sparse,
    check_weights_stay,
    hidden_size_if_padding_is_ignored,
    num_embeddings,
    refuse_needed_inputs,
    share_parameters,
    special_ids,
)
from hf_ebm.models.adapters import own_tokenizer, refuse_adapter_alone, unwrapped
from hf_ebm.models.checkpoints import CompositeConfig, check_trust, load_whole
from hf_ebm.models.fingerprints import fingerprint


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


class Parts(NamedTuple):
    """What `load_parts` gives: the arguments of `ResidualEnergyModel`."""

    lm: PreTrainedModel
    encoder: PreTrainedModel
    lm_tokenizer: PreTrainedTokenizerBase | None
    encoder_tokenizer: PreTrainedTokenizerBase | None
    lm_reference: str | None
    lm_revision: str | None


def load_parts(
    lm: str | os.PathLike, encoder: str | os.PathLike, keep_lm: str, lm_revision: str | None, options: dict[str, Any]
) -> Parts:
    """The arguments of `ResidualEnergyModel` for two models by name; see `from_lm_and_encoder`."""
    check_choice("keep_lm", keep_lm, ("value", "reference"))
    lm, encoder = as_text("lm", lm), as_text("encoder", encoder)
    revision = {"revision": lm_revision} if lm_revision else {}
    of_both = ("token", "cache_dir", "local_files_only", "force_download", "trust_remote_code")
    hub = {k: v for k, v in options.items() if k in of_both}
    trust = options.get("trust_remote_code")
    for argument, name, own, auto_class in (
        ("lm", lm, revision, AutoModelForCausalLM), ("encoder", encoder, {}, AutoModel)
    ):  # fmt: skip
        refuse_adapter_alone(argument, name, **hub, **own)
        check_trust(name, PreTrainedConfig.get_config_dict(name, **hub, **own)[0], auto_class, trust)
    base, _ = load_whole(AutoModelForCausalLM.from_pretrained, lm, **options, **revision)
    config = AutoConfig.from_pretrained(encoder, **hub)

    def load_encoder(*a: Any, **k: Any) -> PreTrainedModel:
        return encoder_of(AutoModel.from_pretrained, config, *a, **k)

    top, _ = load_whole(load_encoder, encoder, **options)
    by_reference = keep_lm == "reference"
    return Parts(
        lm=base,
        encoder=top,
        lm_tokenizer=own_tokenizer(lm, **hub, **revision),
        encoder_tokenizer=own_tokenizer(encoder, **hub),
        lm_reference=lm if by_reference else None,
        lm_revision=lm_revision if by_reference else None,
    )


def load_referenced(config: ResidualEnergyConfig, token: str | bool | None) -> PreTrainedModel:
    """The language model of a reference, in the data type of its checksum, which is of bytes.

    Raises:
        ValueError: if it can't be loaded, or is another than it was.
    """
    revision = {"revision": config.lm_revision} if config.lm_revision else {}
    try:
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
    return lm


def joined_config(
    lm: PreTrainedModel,
    encoder: PreTrainedModel,
    lm_tokenizer: PreTrainedTokenizerBase | None,
    encoder_tokenizer: PreTrainedTokenizerBase | None,
    lm_reference: str | os.PathLike | None,
    lm_revision: str | None,
) -> ResidualEnergyConfig:
    """The configuration of two models joined; with `lm_reference` the first is not saved, but named by it."""
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
        lm_pad_token_id=valid_id(lm, "pad_token_id", "eos_token_id"),
        retokenize=retokenize,
    )
    if lm_reference is not None:
        # A folder by its whole path: a relative one would name another in another working directory.
        reference = as_text("lm_reference", lm_reference)
        config.lm_reference = str(Path(reference).resolve()) if Path(reference).is_dir() else reference
        config.lm_revision = lm_revision
        config.lm_fingerprint, config.lm_reference_dtype = fingerprint(lm), dtype_name(lm.dtype)
        config.lm_dtype = config.lm_reference_dtype
    return config


def dtype_name(dtype: torch.dtype) -> str:
    """As configurations hold it: `"float32"`."""
    return str(dtype).removeprefix("torch.")


def checked_models(lm: object, encoder: object) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The two models, their adapters in their layers; raises `ValueError` for what can't be joined."""
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
    size = hidden_size_if_padding_is_ignored(encoder, valid_id(encoder, "pad_token_id"))
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


def valid_id(model: PreTrainedModel, *names: str) -> int:
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


def encoder_of(
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


class Retokenizer:
    """Turns ids of a language model into ids of an encoder.

    A whole row, prefix and continuation, is decoded once and tokenized once, so that pieces may join across the border.
    What text cannot hold is treated so:

    - special tokens of the language model (start, padding, …) are left out; the encoder's own stand around the text;
    - the encoder's closing tokens stand only after a row that ended with an end token, so that a finished row and one
      that was stopped differ; for a tokenizer without closing tokens it is its end token, if it has one;
    - a row without text is the encoder's start, end or padding token;
    - unknown tokens become the encoder's unknown token;
    - bytes that form no character become U+FFFD, as the language model's tokenizer decodes them.

    A text that spells a special token of the encoder is read as that token. Rows with the same text, and the same
    ending, have the same energy, however the language model spells them.

    Args:
        lm_tokenizer: of the language model.
        encoder_tokenizer: of the encoder.
        end_ids: the language model's end tokens.
    """

    def __init__(
        self,
        lm_tokenizer: PreTrainedTokenizerBase,
        encoder_tokenizer: PreTrainedTokenizerBase,
        end_ids: Sequence[int],
    ):
        self.lm_tokenizer, self.encoder_tokenizer = lm_tokenizer, encoder_tokenizer
        self.end_ids = set(end_ids)
        self._dropped = (set(lm_tokenizer.all_special_ids) - {lm_tokenizer.unk_token_id}) | self.end_ids
        self._closing = _closing_tokens(encoder_tokenizer)
        some = (encoder_tokenizer.bos_token_id, encoder_tokenizer.eos_token_id, encoder_tokenizer.pad_token_id)
        self._empty = next((token for token in some if token is not None), 0)

    def __call__(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rows of encoder ids, on the CPU, for rows of the language model's ids, each with at least one token."""
        ids = self.encoder_tokenizer([self.text(row.tolist()) for row in rows], verbose=False)["input_ids"]
        found = []
        for row, own in zip(rows, ids, strict=True):
            ended = len(row) > 0 and int(row[-1]) in self.end_ids
            if self._closing and not ended:
                own = own[: -self._closing]
            elif not self._closing and ended and self.encoder_tokenizer.eos_token_id is not None:
                own = [*own, self.encoder_tokenizer.eos_token_id]
            found.append(torch.tensor(own or [self._empty], dtype=torch.long))
        return found

    def text(self, ids: Sequence[int]) -> str:
        """The text of a row."""
        text = self.lm_tokenizer.decode(
            [i for i in ids if i not in self._dropped], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        theirs, own = self.lm_tokenizer.unk_token, self.encoder_tokenizer.unk_token
        if not isinstance(text, str):
            raise ValueError(f"ids must be those of one row, got {ids!r}")
        return text if theirs is None or theirs == own else text.replace(theirs, own or "\ufffd")


def same_vocabulary(first: PreTrainedTokenizerBase, second: PreTrainedTokenizerBase) -> bool:
    """Whether two tokenizers have the same tokens under the same ids."""
    return first.get_vocab() == second.get_vocab()


def _closing_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """How many special tokens a tokenizer puts after a text."""
    ids = tokenizer("a", verbose=False)["input_ids"]
    count = 0
    while count < len(ids) and ids[len(ids) - 1 - count] in tokenizer.all_special_ids:
        count += 1
    return min(count, len(ids) - 1)
