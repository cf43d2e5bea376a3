"""Old names of modules and of what is in them: they still work, and warn."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


class _Renamed(ModuleType):
    """Stands under a module's old name and looks its contents up under the new one, which is imported then."""

    def __init__(self, old: str, new: str | tuple[str, ...]):
        self._new = (new,) if isinstance(new, str) else new
        super().__init__(old, f"Renamed: it is `{'`, `'.join(self._new)}`.")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # which tools ask of every module
            raise AttributeError(name)
        for new in self._new:
            if hasattr(module := importlib.import_module(new), name):
                warn_of_rename(f"{self.__name__}.{name}", f"{new}.{name}")
                return getattr(module, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def warn_of_rename(old: str, new: str) -> None:
    """Says that a name still works and what it is called now; the caller of the caller is named."""
    warnings.warn(f"{old} is called {new} now; the old name will go", FutureWarning, stacklevel=3)


def rename_modules(package: str, names: Mapping[str, str | tuple[str, ...]]) -> None:
    """Lets modules that were in a package be imported from where they were.

    Args:
        package: its full name.
        names: for each module's old name in the package the new full name; or several, that it was divided into.
    """
    for old, new in names.items():
        stand_in = _Renamed(f"{package}.{old}", new)
        sys.modules[stand_in.__name__] = stand_in
        setattr(sys.modules[package], old, stand_in)


def renamed_attributes(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """A module's `__getattr__`, by which things in it are found under their old names.

    Args:
        package: the module's full name.
        names: for each old name the new one; with its module, `module:name`, where it is in another.
    """

    def found(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, _, new = names[name].rpartition(":")
        warn_of_rename(f"{package}.{name}", f"{module or package}.{new}")
        return getattr(importlib.import_module(module or package), new)

    return found
