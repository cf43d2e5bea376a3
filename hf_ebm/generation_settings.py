"""Generation settings of the project's own models, in place of those of left-to-right decoding."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from hf_ebm.checks import check_choice
from hf_ebm.plain_values import as_number, as_whole

if TYPE_CHECKING:
    from typing import Self

    _Model = PreTrainedModel  # what the mixin is mixed into
else:
    _Model = object

logger = logging.get_logger(__name__)


class GenerationSettings(GenerationConfig):
    """Base of the settings classes: a field that is `None` takes the model's setting, else the class's default.

    Subclasses give `defaults`, a value for each field, and `validate`.

    Raises:
        ValueError: for unknown fields.
    """

    defaults: ClassVar[dict[str, Any]] = {}
    seed: int | None

    if TYPE_CHECKING:  # Transformers' own annotations say `GenerationConfig`

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self: ...

        @classmethod
        def from_pretrained(cls, pretrained_model_name: str | os.PathLike, *args: Any, **kwargs: Any) -> Self: ...

    # A Trainer aligns these with its tokenizer. Here they are the model configuration's business.
    bos_token_id = eos_token_id = pad_token_id = property(lambda self: None, lambda self, value: None)

    def __init__(self, **kwargs: Any):
        # The parent's fields are those of left-to-right decoding; none of them applies, so its __init__ is not called.
        for name in self.defaults:
            setattr(self, name, kwargs.pop(name, None))
        self._commit_hash = kwargs.pop("_commit_hash", None)
        self._from_model_config = kwargs.pop("_from_model_config", None)
        self.transformers_version = kwargs.pop("transformers_version", None)
        self._refuse_unknown(kwargs)
        self.validate()

    @classmethod
    def _refuse_unknown(cls, given: Iterable[str]) -> None:
        unknown = sorted(set(given) - set(cls.defaults))
        if unknown:
            raise ValueError(f"unknown generation settings: {', '.join(unknown)}; known: {', '.join(cls.defaults)}")

    @classmethod
    def _get_default_generation_params(cls) -> dict[str, Any]:
        return dict(cls.defaults)

    @classmethod
    def from_model_config(cls, model_config: PreTrainedConfig | dict) -> GenerationConfig:
        """Model configurations hold no such settings; Transformers expects this error."""
        raise NotImplementedError

    def resolved(self, base: GenerationSettings, overrides: dict[str, Any]) -> GenerationSettings:
        """A complete copy: `overrides` over these settings over `base` over the defaults.

        Raises:
            ValueError: for unknown overrides and contradictions.
        """
        self._refuse_unknown(overrides)
        given = {name: value for name, value in overrides.items() if value is not None}
        layers = (self.defaults, base.settings(), self.settings(), given)
        return type(self)(**{name: value for layer in layers for name, value in layer.items()})

    def settings(self) -> dict[str, Any]:
        """The settings that are set."""
        return {name: getattr(self, name) for name in self.defaults if getattr(self, name) is not None}

    def _check_choice(self, name: str, allowed: tuple[str, ...]) -> None:
        if getattr(self, name) is not None:
            check_choice(name, getattr(self, name), allowed)

    def _check_whole(self, name: str, least: int) -> None:
        if getattr(self, name) is not None:
            setattr(self, name, as_whole(name, getattr(self, name), least))

    def _check_number(self, name: str, **bounds: float) -> None:
        if getattr(self, name) is not None:
            setattr(self, name, as_number(name, getattr(self, name), **bounds))


class SettingsGenerationMixin(_Model):
    """Loads the `generation_config_class`. (Transformers knows generating models by "GenerationMixin" in a base.)"""

    generation_config_class: type[GenerationSettings]
    generation_config: GenerationSettings

    def adjust_generation_fn(
        self, generation_config: GenerationConfig | None, from_auto_class: bool, from_pipeline: str | None,
        pretrained_model_name_or_path: str, cache_dir: str | None, force_download: bool, proxies: dict | None,
        local_files_only: bool, token: str | bool | None, revision: str, subfolder: str, trust_remote_code: bool,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """Called by `from_pretrained` to load the generation settings; the stock one would make a stock config."""
        if generation_config is not None:
            self.generation_config = self.generation_config_class.from_dict(generation_config.to_dict())
            return
        try:
            self.generation_config = self.generation_config_class.from_pretrained(
                pretrained_model_name_or_path, cache_dir=cache_dir, force_download=force_download, proxies=proxies,
                local_files_only=local_files_only, token=token, revision=revision, subfolder=subfolder,
                _from_auto=from_auto_class, _from_pipeline=from_pipeline,
            )  # fmt: skip
        except OSError:
            logger.info("Generation config file not found, using the default settings.")
