"""Transformers' auto classes know this package's models from `import hf_ebm` on, and import them when asked for."""

from __future__ import annotations

import sys
from collections.abc import ItemsView, Iterator, ValuesView
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Where each type of model is defined, and registered as that is imported.
MODEL_TYPES = {
    "hf_ebm_energy": "hf_ebm.models.energy",
    "hf_ebm_residual": "hf_ebm.models.residual",
    "hf_ebm_product_lm": "hf_ebm.models.autoregressive_product",
    "hf_ebm_lstm_seq2seq": "hf_ebm.models.lstm",
    "hf_ebm_bilstm_masked_lm": "hf_ebm.models.lstm",
}
_AUTO = "transformers.models.auto.configuration_auto"


def announce() -> None:
    """Tells Transformers of `MODEL_TYPES`: now, or as soon as its auto classes, which take long, are imported."""
    if _AUTO in sys.modules:
        _announce_to(sys.modules[_AUTO])
    else:
        sys.meta_path.insert(0, _WhenImported())


class _WhenImported(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _AUTO:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_announce(module: ModuleType) -> None:
                execute(module)
                _announce_to(module)

            spec.loader.exec_module = execute_and_announce  # type: ignore[method-assign]
        return spec


def _announce_to(auto: ModuleType) -> None:
    mapping = auto.CONFIG_MAPPING  # what is registered stands in its `_extra_content`
    mapping._extra_content = _Configurations(MODEL_TYPES | mapping._extra_content)


class _Configurations(dict):
    """Configuration classes by model type; a name stands for a module that registers the class as it is imported."""

    def __getitem__(self, model_type: str) -> type:
        found = super().__getitem__(model_type)
        if isinstance(found, str):
            import_module(found)
            found = super().__getitem__(model_type)
        return found

    def __iter__(self) -> Iterator[str]:  # so that copies are made by way of `__getitem__`
        return super().__iter__()

    def values(self) -> ValuesView:  # type: ignore[override]
        return ValuesView(self)

    def items(self) -> ItemsView:  # type: ignore[override]
        return ItemsView(self)


def register(
    config_class: type[PreTrainedConfig],
    auto_classes: dict[Any, type[PreTrainedModel]],
    inside_a_checkpoint: bool = False,
) -> None:
    """Registers a configuration, and a model class with each auto class.

    The code of a checkpoint is found by its `auto_map`. Registered, it would stand in for the code of every other
    checkpoint of its type, so of it only models inside another model are, which are looked up by their type alone. An
    installed `hf_ebm` goes before.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    remote = config_class.__module__.startswith("transformers_modules.")
    if remote and (config_class.model_type in CONFIG_MAPPING or not inside_a_checkpoint):
        return
    AutoConfig.register(config_class.model_type, config_class)
    for auto_class, model_class in auto_classes.items():
        auto_class.register(config_class, model_class)
