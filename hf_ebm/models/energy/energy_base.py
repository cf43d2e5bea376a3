"""What the parts of `EnergyModel` know of the whole; for type checkers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from hf_ebm.models.energy.configuration_energy import EnergyConfig
    from hf_ebm.scoring.rows import RowRunner

    class EnergyBase(PreTrainedModel):
        """An `EnergyModel`, as scoring and generation see it."""

        config: EnergyConfig
        mlm: PreTrainedModel

        @property
        def vocab_size(self) -> int: ...

        @property
        def input_device(self) -> torch.device: ...

        def _row_runner(self, token_budget: int | None = None) -> RowRunner: ...
else:
    EnergyBase = object
