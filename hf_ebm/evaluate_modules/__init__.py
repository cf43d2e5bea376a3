"""Modules for `evaluate.load`, a folder each: `<name>/<name>.py` and its card, `<name>/README.md`::

    evaluate.load(module_path("edit_distance"))

`evaluate` runs a copy of the one file, so a module imports the library by its full name and holds no mathematics of its
own. Here is what they share: predictions and references, checked before `evaluate` stores them, and the model that
scores texts.

`evaluate` looks at the first row of a batch alone. In the others it makes a text of a list ("['a', 'b']") and a list of
letters of a text. It cuts off the fraction of a number where an id is expected, and takes a lone text for its letters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import datasets
import evaluate

from hf_ebm.checks import check_choice
from hf_ebm.objectives.sequence_costs import token_ids
from hf_ebm.renamed import rename_modules
from hf_ebm.texts import report_unknown

if TYPE_CHECKING:  # the models are imported where one is needed: most modules need none
    from transformers import PreTrainedTokenizerBase

    from hf_ebm.models.energy import EnergyModel
    from hf_ebm.models.energy.scoring_energy import ScoreOutput

# Modules that were copied elsewhere import these.
rename_modules(__name__, dict.fromkeys(("inputs", "scoring", "shared"), __name__))

MODULES = (
    "edit_distance",
    "energy_gap",
    "minimal_pairs",
    "non_termination",
    "novel_rate",
    "phoneme_error_rate",
    "pseudo_perplexity",
    "repetition",
)


def module_path(name: str) -> str:
    """The folder of a module, to hand to `evaluate.load`.

    Raises:
        ValueError: for a name that isn't in `MODULES`.
    """
    check_choice("name", name, MODULES)
    return str(Path(__file__).parent / name)


class CheckedInputs:
    """Stands before `evaluate.Metric` among the bases of a module, and checks what is added to it.

    It isn't derived from `evaluate.Metric`: `evaluate.load` makes an instance of the first class in the module's file
    that is.

    Attributes:
        checks: for each feature, a function `(argument, given) -> rows` that raises `ValueError` naming the argument.
    """

    checks: ClassVar[dict[str, Callable[[str, Any], list]]]

    def add_batch(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> None:
        """Adds rows, to be counted by `compute`.

        Raises:
            ValueError: for rows that aren't what the module takes; none of them is added.
        """
        given = {"predictions": predictions, "references": references}
        columns = {name: check(name, given[name]) for name, check in self.checks.items()}
        if len(set(map(len, columns.values()))) > 1:
            sizes = " and ".join(str(len(rows)) for rows in columns.values())
            raise ValueError(f"{' and '.join(columns)} must be equally many, got {sizes}")
        super().add_batch(**columns, **kwargs)  # type: ignore[misc]  # of evaluate.Metric, which is without types

    def add(self, *, prediction: Any = None, reference: Any = None, **kwargs: Any) -> None:
        """Adds one row, to be counted by `compute`.

        Raises:
            ValueError: for a row that isn't what the module takes; it isn't added.
        """
        # evaluate.combine passes a row's prediction as `predictions`, and its reference as `references`.
        row = {"predictions": prediction, "references": reference, **kwargs}
        self.add_batch(**{name: [value] for name, value in row.items()})


def texts(argument: str, given: Any) -> list[str]:
    """Rows of one text each; a text may be empty."""
    rows = _rows(argument, given, "texts")
    for row, text in enumerate(rows):
        if not isinstance(text, str):
            raise ValueError(f"{argument} must be texts, got {text!r} in row {row}")
    return rows


def references(argument: str, given: Any) -> list[list[str]]:
    """Rows of one or more references each, from rows of a text or a list of texts; each holds a symbol."""
    rows = []
    for row, alternatives in enumerate(_rows(argument, given, "texts or lists of texts")):
        listed = [alternatives] if isinstance(alternatives, str) else _text_list(argument, row, alternatives)
        if not all(text.split() for text in listed):
            raise ValueError(f"{argument} in row {row} must hold a symbol each, got {alternatives!r}")
        rows.append(listed)
    return rows


def chains(argument: str, given: Any) -> list[list[str]]:
    """Rows of the samples of one chain each, two or more."""
    rows = []
    for row, samples in enumerate(_rows(argument, given, "lists of texts, one for each chain")):
        rows.append(_text_list(argument, row, samples))
        if len(rows[-1]) < 2:
            raise ValueError(f"{argument} in row {row} must hold two or more samples, got {samples!r}")
    return rows


def id_rows(argument: str, given: Any) -> list[list[int]]:
    """Rows of token ids, as Python ints; a row may be empty."""
    return token_ids(_rows(argument, given, "lists of token ids"), argument)


# What `evaluate` stores of rows that were checked.
_FEATURES: dict[Callable, Any] = {
    texts: datasets.Value("string"),
    references: datasets.List(datasets.Value("string")),
    chains: datasets.List(datasets.Value("string")),
    id_rows: datasets.List(datasets.Value("int64")),
}


def described(description: str, inputs: str, citation: str = "") -> Callable[[type], type]:
    """A decorator of modules that says to `evaluate`, and in their docstrings, what they are and what they take."""

    def decorated(module: type) -> type:
        def info(self: CheckedInputs) -> evaluate.MetricInfo:
            features = datasets.Features({name: _FEATURES[check] for name, check in self.checks.items()})
            return evaluate.MetricInfo(
                description=description, citation=citation, inputs_description=inputs, features=features
            )

        module._info = info  # type: ignore[attr-defined]  # of evaluate.Metric, which is without types
        return evaluate.utils.file_utils.add_start_docstrings(description, inputs)(module)

    return decorated


def _rows(argument: str, given: Any, allowed: str) -> list:
    # A dict would be taken for a list of its keys, and a set has no order.
    try:
        rows = [] if isinstance(given, (str, bytes, Mapping, Set)) else list(given)
    except TypeError:
        rows = []
    if not rows:
        raise ValueError(f"{argument} must be a list of one or more {allowed}, got {given!r}")
    return rows


def _text_list(argument: str, row: int, given: Any) -> list[str]:
    listed = _rows(f"{argument} in row {row}", given, "texts")
    if not all(isinstance(text, str) for text in listed):
        raise ValueError(f"{argument} in row {row} must be a list of texts, got {given!r}")
    return listed


def energy_model(
    model_id: str | os.PathLike | None, model: EnergyModel | None, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[EnergyModel, PreTrainedTokenizerBase]:
    """`(model, tokenizer)`: those given, or those of that name; without either, the embedded model.

    A model that is loaded here is in float32, on a GPU if there is one.

    Raises:
        ValueError: for a name together with a model or a tokenizer, one of these two without the other, a model that is
            no `EnergyModel`, or a name that none can be loaded from.
    """
    from hf_ebm.loading import EMBEDDED, load_energy_model
    from hf_ebm.models.energy import EnergyModel

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
