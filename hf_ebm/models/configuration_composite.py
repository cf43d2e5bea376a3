"""What the configurations with a model's configuration inside share."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig


class CompositeConfig(PreTrainedConfig):
    """Base of configurations that hold others."""

    def to_diff_dict(self) -> dict[str, Any]:
        """What is saved. The folder that an inner model was loaded from is left out, as it is of an outer one."""
        saved = super().to_diff_dict()
        for name in self.sub_configs_defaults:
            if isinstance(saved.get(name), dict):
                saved[name].pop("_name_or_path", None)
        return saved
