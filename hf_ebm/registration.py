"""Transformers' auto classes know this package's models from `import hf_ebm` on, and import them when asked for."""

from __future__ import annotations

import sys
from collections.abc import ItemsView, Iterator, ValuesView
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

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
