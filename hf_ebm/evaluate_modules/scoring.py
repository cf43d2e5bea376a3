"""The energy model that a module scores texts with."""

from __future__ import annotations

import os

from transformers import PreTrainedTokenizerBase

from hf_ebm.loading import EMBEDDED, load_energy_model
from hf_ebm.models.energy import EnergyModel
from hf_ebm.models.energy.scoring_energy import ScoreOutput
from hf_ebm.texts import report_unknown


def energy_model(
    model_id: str | os.PathLike | None, model: EnergyModel | None, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[EnergyModel, PreTrainedTokenizerBase]:
    """`(model, tokenizer)`: those given, or those of that name; without either, the embedded model.

    A model that is loaded here is in float32, on a GPU if there is one.

    Raises:
        ValueError: for a name together with a model or a tokenizer, one of these two without the other, a model that is
            no `EnergyModel`, or a name that none can be loaded from.
    """
    if model is None and tokenizer is None:
        name = EMBEDDED if model_id is None else model_id
        if not isinstance(name, (str, os.PathLike)):
            raise ValueError(f"model_id must be a Hub name, a folder or {EMBEDDED!r}, got {type(name).__name__}")
        try:
            return load_energy_model(os.fspath(name))
        except ValueError as error:
            raise ValueError(f"model_id must be a Hub name, a folder or {EMBEDDED!r}, got {name!r}: {error}") from error
    if model_id is not None or tokenizer is None:
        options = {"model_id": model_id, "model": model, "tokenizer": tokenizer}
        given = " and ".join(name for name, value in options.items() if value is not None)
        raise ValueError(f"give model_id, or model and tokenizer, or none of these; got {given}")
    if not isinstance(model, EnergyModel):
        raise ValueError(f"model must be an EnergyModel, got {type(model).__name__}")
    return model, tokenizer


def score(
    argument: str, texts: list[str], model: EnergyModel, tokenizer: PreTrainedTokenizerBase, unknown_tokens: str
) -> ScoreOutput:
    """`model.score`, whose errors about a text, and warnings, name the module's own argument."""
    report_unknown(tokenizer, argument, texts, unknown_tokens)
    try:
        return model.score(texts, tokenizer, unknown_tokens="ignore")
    except ValueError as error:
        message = str(error)
        if "texts: row" not in message:
            raise
        raise ValueError(message.replace("texts: row", f"{argument}: row", 1)) from error
