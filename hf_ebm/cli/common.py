"""What the commands share: the model's arguments, and loading it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from hf_ebm.checks import shown
from hf_ebm.loading import EMBEDDED, load_energy_model
from hf_ebm.models.energy import EnergyModel
from hf_ebm.scoring.energies import ENERGIES

ENERGY_HELP = f"{' or '.join(ENERGIES)}; default: the model's own, or local."


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


def load_model(arguments: MaskedModelArguments, local_rank: int = 0) -> tuple[EnergyModel, PreTrainedTokenizerBase]:
    """`(model, tokenizer)` on its device, in evaluation mode."""
    return load_energy_model(
        arguments.model,
        dtype=arguments.dtype,
        device=arguments.device,
        local_rank=local_rank,
        revision=arguments.revision,
        energy=arguments.energy,
        max_sequence_length=arguments.max_sequence_length,
        trust_remote_code=arguments.trust_remote_code,
    )
