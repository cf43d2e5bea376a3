"""What the parts of `ResidualEnergyModel` know of the whole; for type checkers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from hf_ebm.models.residual.configuration_residual import ResidualEnergyConfig

    class ResidualBase(PreTrainedModel):
        """A `ResidualEnergyModel`, as scoring and generation see it."""

        config: ResidualEnergyConfig
        lm: PreTrainedModel | None  # None where it is kept by reference, and not loaded
        encoder: PreTrainedModel
        head: nn.Linear

        @property
        def end_ids(self) -> list[int]: ...

        @property
        def encoder_pad_id(self) -> int: ...

        def encoder_rows(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]: ...

        @staticmethod
        def summed(hidden: Tensor, mask: Tensor) -> Tensor: ...

        def energy_of_mean(self, mean: Tensor) -> Tensor: ...
else:
    ResidualBase = object
