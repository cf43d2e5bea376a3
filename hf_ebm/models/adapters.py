"""Adapters of PEFT on a model inside another. PEFT needn't be installed: what isn't imported has made no adapter."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_SAFE_WEIGHTS_NAME,
    CONFIG_NAME,
    cached_file,
    is_peft_available,
    is_peft_greater_or_equal,
)

from hf_ebm.model_facts import close, five_tokens
from hf_ebm.model_modes import compiled_in_place, encodes_ids, evaluation_mode, made_up_states, state_kept
from hf_ebm.models.checkpoints import refuse_missing_weights

LOWEST_PEFT = "0.21.2"  # with Transformers 5.24 earlier ones leave weights of adapters out, or don't generate


def found_file(name: str, file: str, **hub: Any) -> str | None:
    """Where a file of a folder or Hub repository lies; `None` where there is none."""
    quiet = dict(_raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False)
    try:
        return cached_file(name, file, **hub, **quiet)
    except OSError:  # neither a folder nor a name on the Hub
        return None


def adapter_settings(name: str | os.PathLike, **hub: Any) -> dict[str, Any] | None:
    """What `adapter_config.json` of a folder or Hub repository says; `None` where there is none.

    Raises:
        ValueError: if PEFT isn't installed or too old, or no base model is named.
    """
    found = found_file(str(name), ADAPTER_CONFIG_NAME, **hub)
    if found is None:
        return None
    if not is_peft_available():
        raise ValueError(f"{name} holds an adapter, which needs the package peft (pip install peft)")
    _refuse_old_peft(str(name))
    settings = json.loads(Path(found).read_text(encoding="utf-8"))
    if not settings.get("base_model_name_or_path"):
        raise ValueError(f"{name}: its {ADAPTER_CONFIG_NAME} names no base model")
    return settings


def saved_type(name: str, **hub: Any) -> str | None:
    """The model type that a folder's or Hub repository's `config.json` states; `None` for an adapter alone."""
    if found_file(name, CONFIG_NAME, **hub) is None and adapter_settings(name, **hub) is not None:
        return None
    return PreTrainedConfig.get_config_dict(name, **hub)[0].get("model_type")


def refuse_adapter_alone(argument: str, name: str, **hub: Any) -> None:
    """Raises `ValueError` for a folder or Hub repository that holds an adapter."""
    if adapter_settings(name, **hub) is not None:
        raise ValueError(f"{argument}: {name} holds an adapter; merge_and_unload() it and save the whole model")


def base_arguments(settings: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments that load an adapter's base model, its name among them, of those that load the adapter."""
    of_adapter = ("revision", "subfolder", "config", "adapter_kwargs")
    own = {key: value for key, value in arguments.items() if key not in of_adapter}
    revision = {"revision": settings["revision"]} if settings.get("revision") else {}
    return own | revision | {"name": settings["base_model_name_or_path"]}


def load_adapter(model: PreTrainedModel, name: str | os.PathLike, **hub: Any) -> dict:
    """Puts a saved adapter's layers into a model; returns the loading info.

    Raises:
        ValueError: for an adapter that lacks weights, or whose weights have no place in the model.
    """
    loaded: Any = model.load_adapter(str(name), adapter_kwargs=hub, dtype=model.dtype)  # annotated as None
    info = loaded.to_dict()
    if info["unexpected_keys"]:
        keys = sorted(info["unexpected_keys"])
        raise ValueError(
            f"{name}: the adapter is of another model; {type(model).__name__} has no {', '.join(keys[:3])}"
        )
    refuse_missing_weights(name, info)
    return info


# One of these lies beside the weights if a checkpoint has a tokenizer. Without one, Transformers would make up a
# tokenizer from the model's configuration, and every energy computed with it would be wrong.
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model",
)  # fmt: skip


def own_tokenizer(name: str, **hub_arguments: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer that a folder or Hub repository holds, or that of an adapter's base model; `None` if there is none.

    Args:
        hub_arguments: `revision`, `token`, `cache_dir`, `subfolder`, `trust_remote_code`, … as in Transformers.
    """
    where = {k: v for k, v in hub_arguments.items() if k not in ("trust_remote_code", "code_revision")}
    quiet = dict(_raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=False)
    if not any(cached_file(name, file, **where, **quiet) for file in _TOKENIZER_FILES):
        adapter = adapter_settings(name, **where)
        return None if adapter is None else own_tokenizer(**base_arguments(adapter, hub_arguments))
    return AutoTokenizer.from_pretrained(name, **hub_arguments)


def has_adapters(model: nn.Module) -> bool:
    """Whether a model has layers of adapters, switched on or off."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    return tuners is not None and any(isinstance(module, tuners.BaseTunerLayer) for module in model.modules())


def unwrapped(name: str, model: object) -> object:
    """The base model of a `PeftModel`, its adapters' layers in it, as Transformers' own integration has them.

    A model that was compiled is compiled in place. Other objects are returned as they are. Errors as of
    `check_in_layers`.
    """
    model = compiled_in_place(model)
    check_in_layers(name, model)
    if not _is_peft(model):
        return model
    base = model.get_base_model()
    base._hf_peft_config_loaded = True
    return base


def check_in_layers(name: str, model: object) -> None:
    """Raises `ValueError` for a `PeftModel` whose base model does not run like it.

    Its adapters then work around the base model and not in its layers: prompts, activated LoRA, mixtures. A PEFT that
    is too old is refused, too.
    """
    if not _is_peft(model):
        return
    _refuse_old_peft(name)
    base = model.get_base_model()
    for settings in model.peft_config.values():
        kind = getattr(settings.peft_type, "value", settings.peft_type)
        if settings.is_prompt_learning:
            reason = "puts prompts in front of the model's inputs"
        elif getattr(settings, "alora_invocation_tokens", None):
            reason = "with invocation tokens acts from where they stand, which PeftModel alone looks for"
        elif not has_adapters(base) or not _is_all_in_the_layers(name, model, base):
            reason = "works in PeftModel's own forward"
        else:
            continue
        raise ValueError(f"{name}: an adapter of the type {kind} {reason}, so it can't be used here; LoRA or IA3 can")


def _refuse_old_peft(name: str) -> None:
    if not is_peft_greater_or_equal(LOWEST_PEFT):
        found = importlib.metadata.version("peft")
        raise ValueError(f"{name}: adapters need peft {LOWEST_PEFT} or later, got {found} (pip install --upgrade peft)")


def _is_peft(model: object) -> TypeGuard[Any]:
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


@torch.no_grad()
def _is_all_in_the_layers(name: str, model: Any, base: PreTrainedModel) -> bool:
    ids = five_tokens(base)
    source = {"input_ids": ids} if encodes_ids(base) else {"encoder_outputs": made_up_states(base, 1)}
    inputs = source | ({"decoder_input_ids": ids} if base.config.is_encoder_decoder else {})
    with evaluation_mode(model), state_kept(model):
        try:
            return close(base(**inputs)[0], model(**inputs)[0])
        except Exception as error:
            if encodes_ids(base):  # an input that only this kind of adapter takes is missing
                return False
            raise ValueError(
                f"{name}: a {type(model).__name__} doesn't run {type(base).__name__}, which takes "
                f"{base.main_input_name}; leave task_type out of the adapter's configuration"
            ) from error


def refuse_adapters(name: str, model: nn.Module) -> None:
    """Raises `ValueError` for a part with layers of adapters, which would not be loaded again."""
    if has_adapters(model):
        raise ValueError(f"{name} has layers of an adapter, which can't be saved here; merge_and_unload() them first")


def refuse_other_adapter(folder: str | os.PathLike) -> None:
    """Raises `ValueError` for a folder that holds an adapter, which would be loaded on top of what is saved there."""
    if os.path.isfile(os.path.join(folder, ADAPTER_CONFIG_NAME)):
        raise ValueError(
            f"save_directory: {folder} holds an adapter ({ADAPTER_CONFIG_NAME}), which would be loaded with the model; "
            "remove it or take another folder"
        )


def add_adapter(model: PreTrainedModel, settings: Any, name: str = "default") -> None:
    """Puts new layers of an adapter into a model, by a configuration of PEFT, and switches them on.

    Raises:
        ValueError: for what is no such configuration, a name that is taken, and adapters that aren't layers.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(settings, peft.PeftConfig) or settings.is_prompt_learning:
        raise ValueError(f"adapter_config must be a LoraConfig, IA3Config or the like of peft, got {settings!r}")
    _refuse_old_peft("adapter_config")
    present = getattr(model, "peft_config", {}) if has_adapters(model) else {}
    if name in present:
        raise ValueError(f"adapter_name: there is an adapter {name!r} already")
    settings.base_model_name_or_path = model.name_or_path or None
    peft.inject_adapter_in_model(settings, model, name)
    vars(model)["peft_config"] = {**present, name: settings}
    model._hf_peft_config_loaded = True
    for layer in _layers(model):
        layer.set_adapter([name])


def switch_adapters(model: nn.Module, on: bool) -> None:
    """Switches the layers of adapters on or off. Raises `ValueError` where there are none."""
    if not has_adapters(model):
        raise ValueError("the model has no adapters")
    for layer in _layers(model):
        layer.enable_adapters(enabled=on)


def _layers(model: nn.Module) -> list[Any]:
    if not has_adapters(model):
        return []
    kinds = sys.modules["peft.tuners.tuners_utils"].BaseTunerLayer, sys.modules["peft.utils.other"]
    return [one for one in model.modules() if isinstance(one, (kinds[0], kinds[1].AuxiliaryTrainingWrapper))]


def adapters_in_use(model: nn.Module) -> list[list[Any]]:
    """What the layers of adapters do, beside their weights: which are active and merged, at what scale, on or off."""
    names = ("active_adapters", "merged_adapters", "scaling", "disable_adapters")
    return [[type(one).__name__, *(getattr(one, name, None) for name in names)] for one in _layers(model)]


def active_adapters(model: nn.Module) -> list[str]:
    """Names of the adapters that are in use when they are switched on."""
    return next((list(one.active_adapters) for one in _layers(model) if hasattr(one, "active_adapters")), [])


def adapter_to_save(model: PreTrainedModel, otherwise: str | None) -> str:
    """The adapter that is active. It then says where its base model is; folders by whole paths.

    Args:
        otherwise: a name of the base model in case neither adapter nor model has one.

    Raises:
        ValueError: for several adapters at once, one that isn't the model's own, and a base model that has no name, is
            not to be found under it or has another number of ids.
    """
    advice = "merge_and_unload() the adapter and save the whole, or save the base model first and load it by name"
    known: dict[str, Any] = getattr(model, "peft_config", {}) if model._hf_peft_config_loaded else {}
    active = active_adapters(model)
    if len(active) != 1 or active[0] not in known:
        raise ValueError(
            f"mlm must have one active adapter to be saved, put there by EnergyModel(PeftModel) or add_adapter; it has "
            f"{', '.join(active) or 'none'}"
        )
    settings = known[active[0]]
    base = settings.base_model_name_or_path or model.name_or_path or otherwise
    if not base or found_file(base, CONFIG_NAME) is None:
        raise ValueError(f"the adapter's base model {f'is not found at {base!r}' if base else 'has no name'}; {advice}")
    values = PreTrainedConfig.get_config_dict(base)[0]
    size = values.get("vocab_size", (values.get("text_config") or {}).get("vocab_size", model.config.vocab_size))
    if size != model.config.vocab_size:
        own = model.config.vocab_size
        raise ValueError(f"the adapter's base model at {base!r} has {size} ids, not {own}; {advice}")
    settings.base_model_name_or_path = str(Path(base).resolve()) if Path(base).is_dir() else base
    return active[0]


def save_adapter(model: PreTrainedModel, name: str, folder: Path, state_dict: dict[str, Tensor] | None = None) -> None:
    """Writes an adapter as PEFT does.

    Args:
        name: of the adapter.
        state_dict: the model's, by default as it is.
    """
    peft = sys.modules["peft"]
    found = peft.get_peft_model_state_dict(model, state_dict, name, save_embedding_layers=False)
    weights = {f"base_model.model.{key}": value.detach().cpu().contiguous().clone() for key, value in found.items()}
    save_file(weights, folder / ADAPTER_SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
    model.peft_config[name].save_pretrained(folder)


def read_adapter(model: PreTrainedModel, folder: str | os.PathLike) -> None:
    """Reads the weights of a model's adapter from where `save_adapter` has written them."""
    weights = load_file(Path(folder) / ADAPTER_SAFE_WEIGHTS_NAME)
    found = {key.removeprefix("base_model.model."): value for key, value in weights.items()}
    peft, name = sys.modules["peft"], active_adapters(model)[0]
    unfit = peft.set_peft_model_state_dict(model, found, name).unexpected_keys
    if unfit:
        raise ValueError(f"{folder}: the adapter is of another model, which has {unfit[0]}")
