"""Generation settings of the project's own models, in place of those of left-to-right decoding.

A setting is declared once, as a field of a settings class: its type, default, help, choices and bounds. Its check, its
entry in the documentation, its option of a command and its type after `resolved` follow from that.
"""

from __future__ import annotations

import inspect
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, get_args, get_origin, overload

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from hf_ebm.checks import as_number, as_truth, as_whole, check_choice

if TYPE_CHECKING:
    from typing import Self

logger = logging.get_logger(__name__)
T = TypeVar("T")


class Setting(Generic[T]):
    """The type of a setting: `T` once settings are resolved, `T | None` until then."""

    if TYPE_CHECKING:

        @overload
        def __get__(self, settings: Resolved, owner: type | None = None) -> T: ...
        @overload
        def __get__(self, settings: GenerationSettings | None, owner: type | None = None) -> T | None: ...
        def __get__(self, settings: object, owner: type | None = None) -> T | None: ...


class Resolved:
    """What `resolved` gives is of this kind as well, for type checkers alone."""


def setting(
    default: Any,
    about: str = "",
    *,
    choices: Mapping[str, Any] | None = None,
    check: Callable[[str, Any], Any] | None = None,
    **bounds: float,
) -> Any:
    """A field that declares a setting.

    Args:
        default: its value where nobody sets it.
        about: its help, in sentences.
        choices: what a text may be: names with what they are, a text or an entry with `about`.
        check: `(name, value) -> plain value`, for what isn't a choice, a number or a truth value.
        bounds: of a number: `least`, `above`, `most`, `below`.
    """
    return field(default=default, metadata={"about": about, "choices": choices, "check": check, "bounds": bounds})


def help_of_setting(own: Field) -> str:
    """What a setting does, with what it may be."""
    choices = own.metadata["choices"] or {}
    told = "; ".join(f"`{name}` {getattr(entry, 'about', entry)}" for name, entry in choices.items())
    return " ".join(part for part in (own.metadata["about"], told and f"{told}.") if part)


def option_type(own: Field) -> type:
    """What a setting is made of on a command line: a list if it may be one, else a value; what is neither is a text."""
    for kind in (list[int], list[float]):
        if kind in _kinds(own):
            return kind
    return str if get_origin(_kinds(own)[0]) else _kinds(own)[0]


def _kinds(own: Field) -> list[type]:
    """The types a setting may have, `None` left out."""
    (declared,) = get_args(own.type)
    return (
        [kind for kind in get_args(declared) if kind is not NoneType] if isinstance(declared, UnionType) else [declared]
    )


def _checked(own: Field, value: Any) -> Any:
    """A value of a setting, made plain. Raises `ValueError` for what it may not be."""
    if own.metadata["check"] is not None:
        return own.metadata["check"](own.name, value)
    if own.metadata["choices"] is not None:
        check_choice(own.name, value, own.metadata["choices"])
        return value
    checks: dict[type, Callable[..., Any]] = {int: as_whole, float: as_number, bool: as_truth}
    return checks[option_type(own)](own.name, value, **own.metadata["bounds"])


def _told(own: Field) -> str:
    """A setting's entry in the docstring of its class."""
    kinds = " or ".join(f"`{inspect.formatannotation(kind)}`" for kind in _kinds(own))
    default = "" if own.default is None else f", default `{own.default!r}`"
    entry = f"{own.name} ({kinds}{default}): {help_of_setting(own)}"
    return textwrap.fill(entry, 116, initial_indent=4 * " ", subsequent_indent=8 * " ", break_on_hyphens=False)


class GenerationSettings(GenerationConfig):
    """Base of the settings classes: a field that is `None` takes the model's setting, else the class's default.

    Subclasses declare each setting as a field, `name: Setting[type] = setting(default, about, …)`, and check in
    `check_combinations` what contradicts itself. They are dataclasses, but for what makes and compares them.

    Attributes:
        defaults: a value for each setting.

    Raises:
        ValueError: for unknown fields, and for values that are out of range or contradict each other.
    """

    defaults: ClassVar[dict[str, Any]] = {}
    not_settings: ClassVar[Mapping[str, str]] = {}  # names that are taken for settings: what they are instead
    seed: Setting[int]

    if TYPE_CHECKING:  # Transformers' own annotations say `GenerationConfig`

        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Self: ...

        @classmethod
        def from_pretrained(cls, pretrained_model_name: str | os.PathLike, *args: Any, **kwargs: Any) -> Self: ...

    # A Trainer aligns these with its tokenizer. Here they are the model configuration's business.
    bos_token_id = eos_token_id = pad_token_id = property(lambda self: None, lambda self, value: None)

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        cls.__annotations__ = inspect.get_annotations(cls, eval_str=True)
        dataclass(init=False, repr=False, eq=False)(cls)
        cls.defaults = {own.name: own.default for own in cls.declared()}
        if "__doc__" in vars(cls) and cls.__doc__:
            summary, _, rest = inspect.cleandoc(cls.__doc__).partition("\n\n")
            cls.__doc__ = "\n".join([summary, "", "Args:", *map(_told, cls.declared()), "", rest])

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
    def declared(cls) -> tuple[Field, ...]:
        """The settings as they are declared."""
        return fields(cls)  # type: ignore[arg-type]  # `__init_subclass__` makes dataclasses

    @classmethod
    def _refuse_unknown(cls, given: Iterable[str]) -> None:
        unknown = sorted(set(given) - set(cls.defaults))
        if unknown:
            told = [f"; {cls.not_settings[name]}" for name in unknown if name in cls.not_settings]
            raise ValueError(
                f"unknown generation settings: {', '.join(unknown)}{''.join(told)}; known: {', '.join(cls.defaults)}"
            )

    @classmethod
    def _get_default_generation_params(cls) -> dict[str, Any]:
        return dict(cls.defaults)

    @classmethod
    def from_model_config(cls, model_config: PreTrainedConfig | dict) -> GenerationConfig:
        """Model configurations hold no such settings; Transformers expects this error."""
        raise NotImplementedError

    def validate(self, strict: bool = False, user_set_attributes: set[str] | None = None) -> None:
        """Makes values plain. Raises `ValueError` for those out of range and for contradictory ones."""
        for own in self.declared():
            if getattr(self, own.name) is not None:
                setattr(self, own.name, _checked(own, getattr(self, own.name)))
        self.check_combinations()

    def check_combinations(self) -> None:
        """Raises `ValueError` for settings that contradict each other."""

    @classmethod
    def asked(cls, generation_config: Self | None) -> Self:
        """The settings that a caller gives, none for `None`. Raises `ValueError` for those of another class."""
        if generation_config is None:
            return cls()
        if not isinstance(generation_config, cls):
            raise ValueError(f"generation_config must be a {cls.__name__}, got {type(generation_config).__name__}")
        return generation_config

    def draw_seed(self) -> None:
        """Draws the seed from torch's generator, unless there is one."""
        if self.seed is None:
            self.seed = int(torch.randint(0, 2**31, ()))

    def resolved(self, base: GenerationSettings, overrides: dict[str, Any]) -> GenerationSettings:
        """A complete copy: `overrides` over these settings over `base` over the defaults.

        Raises:
            ValueError: for unknown overrides and contradictions.
        """
        self._refuse_unknown(overrides)
        given = {name: value for name, value in overrides.items() if value is not None}
        merged = dict(self.defaults)
        for layer in (base.settings(), self.settings(), given):
            merged = self.layered(merged, layer)
        return type(self)(**merged)

    @classmethod
    def layered(cls, below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
        """Settings over others."""
        return below | above

    def settings(self) -> dict[str, Any]:
        """The settings that are set."""
        return {name: getattr(self, name) for name in self.defaults if getattr(self, name) is not None}


class SettingsGenerationMixin(PreTrainedModel):
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
