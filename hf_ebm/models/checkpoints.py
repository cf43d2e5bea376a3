"""Models in checkpoints: those inside others, with configurations, code and weights; and how ours are published.

A class that comes with a checkpoint is named by `auto_map` in its configuration and lies in files beside it.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.dynamic_module_utils import custom_object_save, get_class_from_dynamic_module
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_ebm.checks import as_whole, wholes
from hf_ebm.model_modes import compiled_in_place

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, ModelCard
    from typing_extensions import TypeIs

Config = TypeVar("Config", bound=PreTrainedConfig)
Model = TypeVar("Model", bound=nn.Module)

_CONFIG = "AutoConfig"
# Contacts (ESM) and pooling play no part in energies or in next tokens.
_UNUSED = ("contact_head", "pooler")


class UnloadedConfig(PreTrainedConfig):
    """An inner configuration whose class is in its checkpoint's own code, which has not been run.

    Args:
        values: the configuration as it was saved.
    """

    values: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.auto_map = (self.values or {}).get("auto_map", {})

    def to_dict(self) -> dict[str, Any]:
        """The configuration as it was saved."""
        others = {name: value for name, value in super().to_dict().items() if name != "values"}
        return others | copy.deepcopy(self.values or {})


class CompositeConfig(PreTrainedConfig):
    """Base of configurations that hold others."""

    def __post_init__(self, **kwargs: Any) -> None:
        for name in self.sub_configs_defaults:
            value = getattr(self, name)
            if isinstance(value, dict) and "AutoConfig" in (value.get("auto_map") or {}):
                known: Any = CONFIG_MAPPING[value["model_type"]] if value.get("model_type") in CONFIG_MAPPING else None
                if known is None or known.__module__.startswith("transformers."):
                    setattr(self, name, UnloadedConfig(values=value))
        super().__post_init__(**kwargs)

    def _make_ids_plain(self, *names: str) -> None:
        """Fields that hold a token id, or a list of them if they are called `…_ids`, as ints.

        Raises:
            ValueError: for what is neither `None` nor that.
        """
        for name in names:
            value = getattr(self, name)
            if value is None:
                continue
            found = wholes(value) if name.endswith("_ids") else as_whole(name, value, 0)
            if found is None:
                raise ValueError(f"{name} must be a list of token ids, got {value!r}")
            setattr(self, name, found)

    def to_diff_dict(self) -> dict[str, Any]:
        """What is saved. The folder that an inner model was loaded from is left out, as it is of an outer one."""
        saved = super().to_diff_dict()
        for name in self.sub_configs_defaults:
            if isinstance(saved.get(name), dict):
                saved[name].pop("_name_or_path", None)
        return saved


def is_config(value: object, config_class: type[Config]) -> TypeIs[Config]:
    """Whether a value is a configuration of this type.

    By type, not class: a checkpoint's own code may have been loaded twice, from two of its files.
    """
    return getattr(type(value), "model_type", None) == config_class.model_type


def inner_config(config: PreTrainedConfig | dict | None) -> PreTrainedConfig:
    """A configuration inside another, which has made one of what it was given.

    Raises:
        ValueError: if it is none, or of a class that has not been loaded.
    """
    if isinstance(config, UnloadedConfig):
        raise ValueError(
            f"the inner model has code of its own ({', '.join(sorted(set(config.auto_map.values())))}), which is not "
            "run unless asked for; look at it and load by from_pretrained(…, trust_remote_code=True), if that class "
            "takes it"
        )
    if not isinstance(config, PreTrainedConfig):
        raise ValueError(f"the inner configuration must be a PreTrainedConfig, got {type(config).__name__}")
    return config


def refuse_missing_weights(name: str | os.PathLike | None, info: dict) -> None:
    """Raises `ValueError` for a checkpoint that lacks weights, or has some of another shape.

    Args:
        name: of the checkpoint.
        info: what `from_pretrained(output_loading_info=True)` says of it.
    """
    of_other_shape = [entry[0] if isinstance(entry, tuple) else entry for entry in info.get("mismatched_keys") or ()]
    needed = sorted({*info["missing_keys"], *of_other_shape})
    needed = [key for key in needed if not any(unused in key for unused in _UNUSED)]
    if needed:
        shown = ", ".join(needed[:5]) + (", …" if len(needed) > 5 else "")
        raise ValueError(f"{name}: the checkpoint has no weights for {shown}, which would be random")


def keep_weights(modules: Iterable[nn.Module]) -> None:
    """`post_init` must not touch weights that are somebody's."""
    for module in modules:
        vars(module)["_is_hf_initialized"] = True


def load_whole(
    load: Callable[..., Model], name: str | os.PathLike | None, *args: Any, **kwargs: Any
) -> tuple[Model, dict]:
    """What a `from_pretrained` loads, and its loading info; `ValueError` for weights that the checkpoint lacks."""
    loaded: Any = load(name, *args, output_loading_info=True, **kwargs)  # annotated as the model alone
    model, info = loaded
    refuse_missing_weights(name, info)
    return model, info


def needed_code(config: PreTrainedConfig | dict, auto_class: type) -> dict[str, str]:
    """Where `auto_map` says the classes of a configuration and its model are; none where installed ones are registered.

    Args:
        auto_class: of Transformers, which makes the model: `AutoModelForMaskedLM`, …
    """
    model_type, own = _told(config)
    if any(not made.__module__.startswith("transformers.") for made in _made_of_type(auto_class, model_type)):
        return {}
    return {key: own[key] for key in (_CONFIG, auto_class.__name__) if key in own}


def refuse_own_code(name: object, config: PreTrainedConfig | dict, auto_class: type) -> None:
    """Raises `ValueError` for a configuration whose model has code of its own."""
    needed = needed_code(config, auto_class)
    if needed:
        raise ValueError(_untrusted(name, needed))


def check_trust(name: object, config: PreTrainedConfig | dict, auto_class: type, trust: bool | None) -> None:
    """Raises `ValueError` for a checkpoint with code of its own that may not be run.

    Args:
        trust: `trust_remote_code` as given. False is taken for the wish to have Transformers' own class, if it has one.
    """
    needed, model_type = needed_code(config, auto_class), _told(config)[0]
    stock = bool(_made_of_type(auto_class, model_type))
    if needed and not trust and not (stock and trust is False):
        advice = f", or False for the class that Transformers has for {model_type!r}" if stock else ""
        raise ValueError(_untrusted(name, needed) + advice)


def load_inner_code(
    config: CompositeConfig,
    part: str,
    auto_class: type,
    name: str | os.PathLike,
    trust_remote_code: bool | None = None,
    **hub: Any,
) -> type[PreTrainedModel] | None:
    """The class of a model inside another, from the checkpoint's own code; `None` where it has none.

    A configuration that waits for its class becomes one of that class.

    Args:
        part: the field of `config` that holds the inner configuration.
        hub: where the checkpoint is: `revision`, `token`, …

    Raises:
        ValueError: without trust. Transformers' own class would make other logits of the same weights.
    """
    inner = getattr(config, part)
    needed = needed_code(inner, auto_class)
    if not needed:
        return None
    if not trust_remote_code:
        raise ValueError(_untrusted(name, needed))
    subfolder = hub.pop("subfolder", None)
    place = os.path.join(name, subfolder) if subfolder and os.path.isdir(name) else name
    if isinstance(inner, UnloadedConfig):
        config_class: Any = get_class_from_dynamic_module(needed[_CONFIG], place, **hub)
        config_class.register_for_auto_class()
        setattr(config, part, config_class(**(inner.values or {})))
    if auto_class.__name__ not in needed:
        return None
    model_class: Any = get_class_from_dynamic_module(needed[auto_class.__name__], place, **hub)
    model_class.register_for_auto_class(auto_class)
    return model_class


def check_found_again(name: str, part: PreTrainedModel, auto_class: type) -> None:
    """Raises `ValueError` for a part that would be loaded again as another class, or not at all.

    Args:
        name: of the part, for the error.
        auto_class: what makes the model again, from its configuration alone or by the code beside it.
    """
    config_class, model_class = type(part.config), _written(type(part))
    made = model_class in _made(auto_class, config_class)
    checked: tuple[tuple[Any, bool, str], ...] = (
        (config_class, _is_known(config_class), "register_for_auto_class()"),
        (model_class, made, f"register_for_auto_class({auto_class.__name__!r})"),
    )
    for owner, found, register in checked:
        has_file = getattr(sys.modules.get(owner.__module__), "__file__", None) and owner.__module__ != "__main__"
        if not found and not (owner._auto_class and has_file):
            raise ValueError(
                f"{name}: {owner.__name__} isn't what {auto_class.__name__} makes of a saved configuration, so another "
                f"class would be loaded again; put its code into a module and call {owner.__name__}.{register}"
            )


def refuse_class_of_its_own(name: str, part: PreTrainedModel, auto_class: type) -> None:
    """Raises `ValueError` for a part that an auto class doesn't make of its configuration, as its code isn't saved.

    Of another part the configuration forgets `auto_map`, which names code that was not run.
    """
    model_class, config_class = _written(type(part)), type(part.config)
    if not _is_known(config_class) or model_class not in _made(auto_class, config_class):
        raise ValueError(
            f"{name}: {model_class.__name__} has code of its own, which a model of two parts doesn't save; save this "
            "part alone and join them anew"
        )
    vars(part.config).pop("auto_map", None)


def has_own_code(part: PreTrainedModel) -> bool:
    """Whether a part's class, or its configuration's, is saved with its code."""
    return bool(part._auto_class or part.config._auto_class)


def save_code(part: PreTrainedModel, auto_class: type, folder: str | os.PathLike) -> None:
    """Writes the code of a part's own classes into a folder; `auto_map` in its configuration then names these alone."""
    own = {key: o for key, o in ((_CONFIG, part.config), (auto_class.__name__, part)) if o._auto_class}
    if own:
        Path(folder).mkdir(parents=True, exist_ok=True)
    for one in own.values():
        custom_object_save(one, folder)
    if own:
        part.config.auto_map = {key: f"{_file(type(o))}.{_written(type(o)).__name__}" for key, o in own.items()}
    elif hasattr(part.config, "auto_map"):
        del part.config.auto_map  # it names the code that was not run


def _untrusted(name: object, needed: dict[str, str]) -> str:
    return (
        f"{name} has code of its own ({', '.join(sorted(set(needed.values())))}), which is not run unless asked for; "
        "look at it and pass trust_remote_code=True"
    )


def _told(config: PreTrainedConfig | dict) -> tuple[str, dict[str, str]]:
    """A configuration's model type and `auto_map`."""
    values = config if isinstance(config, dict) else {**vars(config), "model_type": config.model_type}
    return values.get("model_type") or "", values.get("auto_map") or {}


def _is_known(config_class: type[PreTrainedConfig]) -> bool:
    """Whether a configuration's class is the one registered for its type."""
    return config_class.model_type in CONFIG_MAPPING and CONFIG_MAPPING[config_class.model_type] is config_class


def _made_of_type(auto_class: Any, model_type: str) -> tuple[type, ...]:
    """The classes that an auto class makes of the configuration registered for a type."""
    return _made(auto_class, CONFIG_MAPPING[model_type]) if model_type in CONFIG_MAPPING else ()


def _made(auto_class: Any, config_class: type[PreTrainedConfig]) -> tuple[type, ...]:
    """The classes that an auto class makes of a configuration."""
    found = auto_class._model_mapping.get(config_class, ())
    return found if isinstance(found, tuple) else (found,)


def _written(model_class: type) -> type:
    """The class as it was written: PyTorch's sharding puts a class of its own over it."""
    return next(one for one in model_class.__mro__ if not one.__module__.startswith("torch."))


def _file(owner: type) -> str:
    return _written(owner).__module__.rpartition(".")[2]


class PublishingMixin(PreTrainedModel):
    """Gives a model `push_to_hub` with a card, a tokenizer, and its code for those without `hf_ebm`."""

    def __setattr__(self, name: str, value: Any) -> None:
        """A part that was compiled is compiled in place, so that what is saved has the names of its weights."""
        super().__setattr__(name, compiled_in_place(value))

    def card_facts(self) -> dict[str, Any]:
        """What the card says of this kind of model in place of what it says of any; all of it may be left out.

        Keys: `template` (a file of `hub_cards`), `tags`, `task` (of its results), `citations` (names in
        `hf_ebm.publishing.cards.CITATIONS`), and what the template reads beside.
        """
        return {}

    def push_to_hub(  # type: ignore[override]  # Transformers' takes anything
        self,
        repo_id: str,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        card: ModelCard | None = None,
        **kwargs: Any,
    ) -> CommitInfo:
        """Uploads weights, configuration, generation settings, tokenizer, card and code as one commit.

        Args:
            repo_id: name of the repository, `"user/name"`; it is created if there is none.
            tokenizer: uploaded beside the model.
            card: a `ModelCard`; by default `hf_ebm.publishing.cards.model_card(self, name=…)`, which then states what
                can be seen from the model alone.
            kwargs: `commit_message`, `commit_description`, `private`, `token`, `revision`, `create_pr`,
                `max_shard_size`, `tags` as in Transformers.

        Raises:
            OSError: if the upload fails; it says what is still there.
        """
        try:
            from hf_ebm.publishing.hub import push_model
        except ImportError as error:  # the class came with a checkpoint's own code
            raise ImportError("push_to_hub needs the package hf_ebm, which is not installed") from error
        return push_model(self, repo_id, tokenizer=tokenizer, card=card, **kwargs)
