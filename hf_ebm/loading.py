"""Models by name with their tokenizers, on their device: embedded ones, those of folders and those of the Hub.

Everything here raises `ValueError` for a data type or a device that can't be used, before anything is loaded; for a
name that nothing can be loaded from; and for a model without a tokenizer beside its weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import hf_ebm.models.autoregressive_product  # noqa: F401  registers its model with the Auto classes
from hf_ebm.assets import load_embedded, load_embedded_causal
from hf_ebm.model_facts import check_causal
from hf_ebm.models.adapters import own_tokenizer, refuse_adapter_alone, saved_type
from hf_ebm.models.checkpoints import load_whole
from hf_ebm.models.energy import EnergyConfig, EnergyModel
from hf_ebm.models.residual import ResidualEnergyConfig, ResidualEnergyModel

EMBEDDED = "embedded"
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
Model = TypeVar("Model", bound=PreTrainedModel)


def load_energy_model(
    name: str = EMBEDDED,
    *,
    dtype: str = "float32",
    device: str | None = None,
    local_rank: int = 0,
    revision: str | None = None,
    energy: str | None = None,
    max_sequence_length: int | None = None,
    trust_remote_code: bool = False,
) -> tuple[EnergyModel, PreTrainedTokenizerBase]:
    """A masked language model as an `EnergyModel` in evaluation mode, and its tokenizer.

    Args:
        name: a folder, a Hub name, or `EMBEDDED`.
        dtype: one of `DTYPES`.
        device: by default the GPU of this number, `local_rank`, if there is one.
        revision: branch, tag or commit of a Hub model.
        energy: by default the model's own, else the local one.
        max_sequence_length: in place of what the model's configuration and tokenizer say.
    """
    of_model: dict[str, Any] = {"dtype": usable_dtype(dtype)}
    of_model |= _given(energy=energy, max_sequence_length=max_sequence_length)
    device = usable_device(device, local_rank)
    if name == EMBEDDED:
        model, tokenizer = load_embedded(**of_model)
        return moved(model, device).eval(), tokenizer
    where = _given(revision=revision, trust_remote_code=trust_remote_code or None)
    with loading(f"model {name!r}"):
        model = EnergyModel.from_pretrained(name, **of_model, **where)
        beside = own_tokenizer(name, **where)
    return _ready(name, model, beside, device)


def load_residual_model(
    name: str,
    *,
    dtype: str = "float32",
    device: str | None = None,
    local_rank: int = 0,
    revision: str | None = None,
    max_sequence_length: int | None = None,
) -> tuple[ResidualEnergyModel, PreTrainedTokenizerBase]:
    """A saved `ResidualEnergyModel` in evaluation mode, and the tokenizer of its language model.

    Args:
        name: a folder or a Hub name.
        dtype: one of `DTYPES`.
        device: by default the GPU of this number, `local_rank`, if there is one.
        revision: branch, tag or commit of a Hub model.
        max_sequence_length: in place of what the configurations of its models and the tokenizer say.
    """
    of_model: dict[str, Any] = {"dtype": usable_dtype(dtype)} | _given(max_sequence_length=max_sequence_length)
    device = usable_device(device, local_rank)
    with loading(f"model {name!r}"):
        model = ResidualEnergyModel.from_pretrained(name, **of_model, **_given(revision=revision))
        tokenizer, reference = model.lm_tokenizer, model.config.lm_reference
        if tokenizer is None and reference is not None:
            tokenizer = own_tokenizer(reference, **_given(revision=model.config.lm_revision))
    return _ready(name, model, tokenizer, device)


def load_causal_model(
    name: str = EMBEDDED,
    *,
    dtype: str = "float32",
    device: str | None = None,
    local_rank: int = 0,
    revision: str | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal language model in evaluation mode, and its tokenizer.

    Args:
        name: a folder, a Hub name, or `EMBEDDED`.
        dtype: one of `DTYPES`.
        device: by default the GPU of this number, `local_rank`, if there is one.
        revision: branch, tag or commit of a Hub model.
    """
    found, device, where = usable_dtype(dtype), usable_device(device, local_rank), _given(revision=revision)
    if name == EMBEDDED:
        model, tokenizer = load_embedded_causal(dtype=found)
        return moved(model, device).eval(), tokenizer
    with loading(f"model {name!r}"):
        refuse_adapter_alone("model", name, **where)
        config = _config(name, where)
        if type(config) not in AutoModelForCausalLM._model_mapping:
            raise ValueError(f"model {name!r} of the type {config.model_type!r} is no causal language model")
        own, _ = load_whole(AutoModelForCausalLM.from_pretrained, name, dtype=found, trust_remote_code=False, **where)
        check_causal(f"model {name!r}", own)
        beside = own_tokenizer(name, **where)
    return _ready(name, own, beside, device)


def is_residual(name: str, revision: str | None = None) -> bool:
    """Whether a folder or Hub repository holds a residual model."""
    with loading(f"model {name!r}"):
        return name != EMBEDDED and saved_type(name, **_given(revision=revision)) == ResidualEnergyConfig.model_type


def is_masked(name: str, revision: str | None = None) -> bool:
    """Whether a folder or Hub repository says that it holds a masked language model, or an energy of one."""
    where = _given(revision=revision)
    with loading(f"model {name!r}"):
        found = None if name == EMBEDDED else saved_type(name, **where)
        if found in (None, EnergyConfig.model_type):  # an adapter alone says nothing
            return found is not None
        architectures = PreTrainedConfig.get_config_dict(name, **where)[0].get("architectures") or []
        return any(architecture.endswith("ForMaskedLM") for architecture in architectures)


def usable_dtype(dtype: str) -> torch.dtype:
    """The data type of that name. Raises `ValueError` for another name."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]


def usable_device(device: str | None, local_rank: int = 0) -> str:
    """The device, by default this number of an accelerator if there is one. Raises `ValueError` if it is of no use."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = device or ("cpu" if found is None else f"{found.type}:{local_rank}")
    try:
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {device!r} cannot be used: {first_line(error)}") from error
    return device


def moved(model: Model, device: str) -> Model:
    """A model on a device."""
    return model.to(device)  # type: ignore[arg-type]  # a wrapped method without its self


def first_line(error: BaseException) -> str:
    """An error's message, as far as it fits on a line."""
    return str(error).strip().split("\n")[0]


@contextmanager
def loading(what: str) -> Iterator[None]:
    """What loading raises inside becomes a `ValueError` that says what cannot be loaded."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{what} cannot be loaded: {first_line(error)}") from error


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _config(name: str, where: dict[str, Any]) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(name, trust_remote_code=False, **where)
    except ValueError as error:  # a folder without a model, or of a type that is unknown here
        raise ValueError(f"model {name!r} cannot be loaded: {first_line(error)}") from error


def _ready(
    name: str, model: Model, tokenizer: PreTrainedTokenizerBase | None, device: str
) -> tuple[Model, PreTrainedTokenizerBase]:
    if tokenizer is None:
        raise ValueError(f"model {name!r} has no tokenizer beside its weights")
    return moved(model, device).eval(), tokenizer
