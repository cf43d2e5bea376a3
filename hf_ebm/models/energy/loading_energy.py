"""What `EnergyModel.from_pretrained` reads, and what is saved of a model with an adapter.

A masked-LM checkpoint, an adapter of one with its base model, or a saved `EnergyModel`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedTokenizerBase
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING
from transformers.utils import CONFIG_NAME

from hf_ebm.checks import as_text
from hf_ebm.model_facts import vocabulary_size
from hf_ebm.models.adapters import (
    adapter_settings,
    adapter_to_save,
    base_arguments,
    found_file,
    load_adapter,
    own_tokenizer,
    save_adapter,
)
from hf_ebm.models.checkpoints import check_trust, load_inner_code, load_whole
from hf_ebm.models.energy.configuration_energy import OLD_MASKING, EnergyConfig, token_roles
from hf_ebm.models.energy.inputs import check_masked_lm_config

if TYPE_CHECKING:
    from transformers import ProcessorMixin

    from hf_ebm.models.energy.modeling_energy import EnergyModel

    Model = TypeVar("Model", bound=EnergyModel)

# Arguments that say where on the Hub (or on disk) a repository is; needed for every file that is read from it.
_HUB_ARGUMENTS = ("cache_dir", "force_download", "proxies", "local_files_only", "token", "revision", "subfolder")
_NAME = "pretrained_model_name_or_path"  # which Transformers lets be `None` beside configuration and weights
# Fields of `EnergyConfig` that `EnergyModel` and `from_pretrained` take by name.
FIELDS = tuple(name for name in EnergyConfig.__annotations__ if name not in ("text_config", "tie_word_embeddings"))


def load_energy(
    cls: type[Model],
    load_saved: Callable[..., Model],
    given: str | os.PathLike | None,
    args: tuple,
    fields: dict[str, Any],
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None,
    kwargs: dict[str, Any],
) -> tuple[Model, dict]:
    """A model of whatever lies there, and the loading info; see `EnergyModel.from_pretrained`.

    Args:
        load_saved: the `from_pretrained` of Transformers.
        fields: of `EnergyConfig`, which go over what was saved and what the tokenizer says.
    """
    checked = EnergyConfig(**fields)  # before anything is loaded
    fields = {field: getattr(checked, field) for field in fields}
    config = kwargs.get("config")
    name = None if given is None and config is not None else as_text(_NAME, given)
    hub = {key: kwargs[key] for key in _HUB_ARGUMENTS if key in kwargs}
    adapter = None if name is None else adapter_settings(name, **hub)
    if name is not None and config is None and (adapter is None or found_file(name, CONFIG_NAME, **hub)):
        config, _ = PreTrainedConfig.get_config_dict(name, **hub)
    model_type = config.get("model_type") if isinstance(config, dict) else getattr(config, "model_type", None)
    if adapter is not None and model_type in (None, EnergyConfig.model_type):
        return _load_adapted(cls, as_text(_NAME, name), args, fields, processing_class, kwargs, adapter, config)
    if model_type == EnergyConfig.model_type:
        return _load_saved(cls, load_saved, name, args, fields, processing_class, kwargs)
    check_trust(name, config or {}, AutoModelForMaskedLM, kwargs.get("trust_remote_code"))
    return _load_masked_lm(cls, name, args, fields, processing_class, kwargs)


def _load_saved(
    cls: type[Model],
    load_saved: Callable[..., Model],
    name: str | None,
    args: tuple,
    fields: dict[str, Any],
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None,
    kwargs: dict[str, Any],
) -> tuple[Model, dict]:
    config, kwargs, where = _config_and_rest(cls.config_class, name, kwargs)
    if name is not None:
        mlm_class = load_inner_code(config, "text_config", AutoModelForMaskedLM, name, **where)
        kwargs |= {} if mlm_class is None else {"mlm_class": mlm_class}
    hub = {key: where[key] for key in _HUB_ARGUMENTS if key in where}
    model, info = load_whole(load_saved, name, *args, config=config, **kwargs, **hub)
    roles = {} if processing_class is None else token_roles(processing_class, model.vocab_size)
    _set_fields(model, roles | fields)
    return model, info


def _load_masked_lm(
    cls: type[Model],
    name: str | None,
    args: tuple,
    fields: dict[str, Any],
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None,
    kwargs: dict[str, Any],
) -> tuple[Model, dict]:
    config, kwargs, where = _config_and_rest(AutoConfig, name, kwargs)
    remote = getattr(config, "auto_map", None) or {}
    if type(config) not in MODEL_FOR_MASKED_LM_MAPPING and "AutoModelForMaskedLM" not in remote:
        raise ValueError(
            f"{name}: model type {config.model_type!r} has no class with a masked-LM head; an energy needs a "
            "checkpoint that AutoModelForMaskedLM can load (BERT, RoBERTa, ModernBERT, ESM, …)"
        )
    check_masked_lm_config(config)
    mlm, info = load_whole(AutoModelForMaskedLM.from_pretrained, name, *args, config=config, **kwargs | where)
    if processing_class is None:
        processing_class = own_tokenizer(as_text(_NAME, name), **where)
    roles = {} if processing_class is None else token_roles(processing_class, vocabulary_size(mlm))
    model = cls(mlm, **(roles | fields))
    model.config.name_or_path = model.name_or_path = str(name)
    return model, info


def _load_adapted(
    cls: type[Model],
    name: str,
    args: tuple,
    fields: dict[str, Any],
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None,
    kwargs: dict[str, Any],
    adapter: dict[str, Any],
    config: PreTrainedConfig | dict | None,
) -> tuple[Model, dict]:
    """The base model that an adapter names, with it; energy and token roles are those saved beside it, if any."""
    hub = {key: kwargs[key] for key in _HUB_ARGUMENTS if key in kwargs}
    saved = config.to_dict() if isinstance(config, PreTrainedConfig) else config or {}
    saved = saved | {"masking": saved[OLD_MASKING]} if OLD_MASKING in saved else saved
    own = {field: saved[field] for field in FIELDS if field in saved}
    beside = own_tokenizer(name, **hub) if processing_class is None else processing_class
    base = base_arguments(adapter, kwargs)
    model = cls.from_pretrained(base.pop("name"), *args, processing_class=beside, **base)
    size = (saved.get("text_config") or {}).get("vocab_size", model.vocab_size)
    if size != model.mlm.config.vocab_size:
        raise ValueError(f"{name}: its base model has {model.vocab_size} ids, had {size} when it was saved")
    info = load_adapter(model.mlm, name, **hub)
    roles = {} if processing_class is None else token_roles(processing_class, model.vocab_size)
    _set_fields(model, own | roles | fields)
    return model, info


def _set_fields(model: EnergyModel, fields: dict[str, Any]) -> None:
    for field, value in fields.items():
        setattr(model.config, field, value)


def _config_and_rest(config_class: Any, name: str | None, kwargs: dict) -> tuple[Any, dict, dict]:
    """The configuration, a copy, the arguments that are not for it, and those that say where files and code are."""
    where = {key: kwargs[key] for key in (*_HUB_ARGUMENTS, "trust_remote_code", "code_revision") if key in kwargs}
    config = kwargs.get("config")
    if config is not None:
        return copy.deepcopy(config), {key: kwargs[key] for key in kwargs if key not in (*where, "config")}, where
    # What is for the model alone must not end in its configuration (dtype="auto", for one).
    kept = {key: kwargs[key] for key in ("dtype", "torch_dtype", "quantization_config") if key in kwargs}
    others = {key: kwargs[key] for key in kwargs if key not in (*kept, "config")}
    config, rest = config_class.from_pretrained(as_text(_NAME, name), return_unused_kwargs=True, **others)
    return config, {key: rest[key] for key in rest if key not in where} | kept, where


def save_adapted(
    model: EnergyModel,
    save_directory: str | os.PathLike,
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    **unused: Any,
) -> None:
    """Writes an adapter with its base model's name, the energy's configuration and generation settings."""
    name = adapter_to_save(model.mlm, model.name_or_path)
    if not is_main_process:
        return
    Path(save_directory).mkdir(parents=True, exist_ok=True)
    if state_dict is not None:
        state_dict = {key.removeprefix("mlm."): value for key, value in state_dict.items()}
    save_adapter(model.mlm, name, Path(save_directory), state_dict)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(save_directory)
    model.generation_config.save_pretrained(save_directory)
