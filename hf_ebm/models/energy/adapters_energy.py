"""Adapters of an `EnergyModel`: they are its masked language model's, and are saved beside that one's name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor

from hf_ebm.models.adapters import active_adapters, adapter_to_save, add_adapter, save_adapter, switch_adapters
from hf_ebm.models.energy.energy_base import EnergyBase


class EnergyAdaptersMixin(EnergyBase):
    """Gives a model the adapter methods of Transformers, of which those it doesn't define go to `.mlm`."""

    def add_adapter(self, adapter_config: Any, adapter_name: str | None = None) -> None:
        """A new adapter of `.mlm`, by a configuration of PEFT; it is the active one."""
        add_adapter(self.mlm, adapter_config, adapter_name or "default")

    def enable_adapters(self) -> None:
        """Energies are those with adapters."""
        switch_adapters(self.mlm, True)

    def disable_adapters(self) -> None:
        """Energies are those of the base model."""
        switch_adapters(self.mlm, False)

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        return self.mlm.load_adapter(*args, **kwargs)

    def set_adapter(self, *args: Any, **kwargs: Any) -> None:
        self.mlm.set_adapter(*args, **kwargs)

    def active_adapters(self) -> list[str]:
        return active_adapters(self.mlm)

    def delete_adapter(self, *args: Any, **kwargs: Any) -> None:
        self.mlm.delete_adapter(*args, **kwargs)

    def get_adapter_state_dict(self, *args: Any, **kwargs: Any) -> dict:
        return self.mlm.get_adapter_state_dict(*args, **kwargs)

    def _save_adapter(
        self,
        save_directory: str | os.PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        **unused: Any,
    ) -> None:
        """Writes the adapter with its base model's name, the energy's configuration and generation settings."""
        name = adapter_to_save(self.mlm, self.name_or_path)
        if not is_main_process:
            return
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        if state_dict is not None:
            state_dict = {key.removeprefix("mlm."): value for key, value in state_dict.items()}
        save_adapter(self.mlm, name, Path(save_directory), state_dict)
        self.config.architectures = [type(self).__name__]
        self.config.save_pretrained(save_directory)
        self.generation_config.save_pretrained(save_directory)
