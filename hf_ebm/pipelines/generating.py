"""What the two samplers share: settings of a generation, and one seed for a call."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from hf_ebm.generation_settings import GenerationSettings
from hf_ebm.pipelines.rows import RowPipeline


class GeneratingPipeline(RowPipeline):
    """Base of the samplers. Settings are arguments by name, or a `generation_config`; by name they go first.

    A call has one seed: the settings', else one drawn from torch's generator when it is called. An input's random
    stream is keyed by that seed and the input's number in the call, so samples depend neither on the batch size nor on
    the other inputs, and equal inputs of a call get samples of their own.
    """

    config_class: ClassVar[type[GenerationSettings]]
    further_arguments: ClassVar[tuple[str, ...]]

    def arguments(self) -> tuple[str, ...]:
        return ("generation_config", *self.further_arguments, *self.config_class.defaults)

    def __call__(
        self, inputs: Any, *args: Any, num_workers: int | None = None, batch_size: int | None = None, **kwargs: Any
    ) -> Any:
        # Here, as `generate` would draw a seed for every batch; and what contradicts itself is refused before any work.
        seed = self.resolved(**{**self._forward_params, **self._sanitize_parameters(**kwargs)[1]}).seed
        kwargs["seed"] = int(torch.randint(0, 2**31, ())) if seed is None else seed
        return super().__call__(inputs, *args, num_workers=num_workers, batch_size=batch_size, **kwargs)

    def _sanitize_parameters(self, **given: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        config = given.get("generation_config")
        if config is not None and not isinstance(config, self.config_class):
            raise ValueError(f"generation_config must be a {self.config_class.__name__}, got {type(config).__name__}")
        return super()._sanitize_parameters(**given)

    def resolved(self, generation_config: GenerationSettings | None = None, **arguments: Any) -> GenerationSettings:
        """The complete settings of a call. Raises `ValueError` for contradictions."""
        overrides = {name: value for name, value in arguments.items() if name in self.config_class.defaults}
        base = self.model.generation_config
        if not isinstance(base, GenerationSettings):
            raise ValueError(f"model must have settings of this package, got {type(base).__name__}")
        return (generation_config or self.config_class()).resolved(base, overrides)
