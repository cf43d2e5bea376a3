"""Configurations inside others, and telling configurations from models."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, TypeVar

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_ebm.plain_values import as_whole, wholes

if TYPE_CHECKING:
    from typing_extensions import TypeIs

Config = TypeVar("Config", bound=PreTrainedConfig)


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
