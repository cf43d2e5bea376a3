"""What the commands share: the model's arguments, and loading it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar, overload

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ebm.assets import load_embedded
from hf_ebm.checks import shown
from hf_ebm.models.adapters import saved_type
from hf_ebm.models.energy import EnergyModel
from hf_ebm.models.energy.token_roles import own_tokenizer
from hf_ebm.models.residual import ResidualEnergyConfig, ResidualEnergyModel
from hf_ebm.scoring.energies import ENERGIES

EMBEDDED = "embedded"
ENERGY_HELP = f"{' or '.join(ENERGIES)}; default: the model's own, or local."
Model = TypeVar("Model", bound=PreTrainedModel)


class Placed(Protocol):
    """Arguments that say where a model runs, and as what."""

    device: str | None
    dtype: str


@dataclass
class AnyModelArguments:
    """Which model, and where it runs."""

    model: str = field(default=EMBEDDED, metadata={"help": "Hub name, folder, or 'embedded' (the model shipped here)."})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of a Hub model."})
    device: str | None = field(default=None, metadata={"help": "cpu, cuda, cuda:1, …; default: cuda if there is one."})
    dtype: str = field(default="float32", metadata={"help": "float32, bfloat16, float16 or float64."})


@dataclass
class MaskedModelArguments(AnyModelArguments):
    """Which masked language model, and where it runs."""

    energy: str | None = field(default=None, metadata={"help": ENERGY_HELP})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run the code that a checkpoint brings along."})
    max_sequence_length: int | None = field(
        default=None,
        metadata={"help": "Longest text in tokens, in place of what the model's configuration and tokenizer say."},
    )


@dataclass
class ModelArguments(MaskedModelArguments):
    """Which masked language model, and how it is run."""

    token_budget: int | None = field(default=None, metadata={"help": "Tokens per forward pass; default: from memory."})
    unknown_tokens: str = field(
        default="warn",
        metadata={"help": "Where a text holds what the tokenizer has no token for: warn, error or ignore."},
    )
    further_inputs: str | None = field(
        default=None, metadata={"help": 'What else the model reads, a number each as JSON: {"langs": 1}.'}
    )

    def inputs_by_name(self) -> dict[str, int]:
        """`further_inputs` as numbers by name. Raises `ValueError` for anything else."""
        try:
            found = json.loads(self.further_inputs or "{}")
        except (json.JSONDecodeError, RecursionError):
            found = None
        if not isinstance(found, dict) or not all(type(value) is int for value in found.values()):
            raise ValueError(
                f'further_inputs must be whole numbers by name, {{"langs": 1}}, got {shown(self.further_inputs)}'
            )
        return found


@overload
def load_model(
    arguments: MaskedModelArguments, local_rank: int = 0, residual: Literal[False] = False
) -> tuple[EnergyModel, PreTrainedTokenizerBase]: ...


@overload
def load_model(
    arguments: MaskedModelArguments, local_rank: int = 0, *, residual: bool
) -> tuple[EnergyModel | ResidualEnergyModel, PreTrainedTokenizerBase]: ...


def load_model(
    arguments: MaskedModelArguments, local_rank: int = 0, residual: bool = False
) -> tuple[EnergyModel | ResidualEnergyModel, PreTrainedTokenizerBase]:
    """`(model, tokenizer)` on its device, in evaluation mode; a residual model as well, if it may be one."""
    dtype, device = usable_device(arguments, local_rank)
    options: dict[str, Any] = {"dtype": dtype} | ({"energy": arguments.energy} if arguments.energy else {})
    longest = {} if arguments.max_sequence_length is None else {"max_sequence_length": arguments.max_sequence_length}
    options |= longest
    if arguments.model == EMBEDDED:
        embedded, own = load_embedded(**options)
        return moved(embedded, device).eval(), own
    where: dict[str, Any] = {"revision": arguments.revision} if arguments.revision else {}
    code: dict[str, Any] = {"trust_remote_code": True} if arguments.trust_remote_code else {}
    model: EnergyModel | ResidualEnergyModel
    try:
        if residual and saved_type(arguments.model, **where) == ResidualEnergyConfig.model_type:
            model = found = ResidualEnergyModel.from_pretrained(arguments.model, dtype=dtype, **longest, **where)
            tokenizer = found.lm_tokenizer
        else:
            model = EnergyModel.from_pretrained(arguments.model, **options, **where, **code)
            tokenizer = own_tokenizer(arguments.model, **where, **code)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"model {arguments.model!r} cannot be loaded: {first_line(error)}") from error
    if tokenizer is None:
        raise ValueError(f"model {arguments.model!r} has no tokenizer beside its weights")
    return moved(model, device).eval(), tokenizer


def moved(model: Model, device: str) -> Model:
    """A model on a device."""
    return model.to(device)  # type: ignore[arg-type]  # a wrapped method without its self


def usable_device(arguments: Placed, local_rank: int) -> tuple[torch.dtype, str]:
    """The data type and the device that arguments name, `dtype` and `device`; refused before anything is loaded."""
    dtype = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if arguments.dtype not in dtype:
        raise ValueError(f"dtype must be one of {', '.join(dtype)}, got {arguments.dtype!r}")
    device = arguments.device or (f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device {device!r} cannot be used: {first_line(error)}") from error
    return dtype[arguments.dtype], device


def first_line(error: BaseException) -> str:
    """An error's message, as far as it fits on a line."""
    return str(error).strip().split("\n")[0]
