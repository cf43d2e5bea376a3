"""Energies of predictions and references under an energy model, for `evaluate.load`."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import evaluate
from transformers import PreTrainedTokenizerBase

from hf_ebm.evaluate_modules import CheckedInputs, described, energy_model, score, texts
from hf_ebm.models.energy import EnergyModel

_DESCRIPTION = """\
Energy gap of pairs of texts under an energy model: the energy of the prediction minus the energy of its reference, in
nats. A positive gap says that the model prefers the reference.
"""

_CITATION = """\
@inproceedings{goyal2022exposing,
  title = {Exposing the Implicit Energy Networks behind Masked Language Models via {Metropolis}--{Hastings}},
  author = {Goyal, Kartik and Dyer, Chris and Berg-Kirkpatrick, Taylor},
  booktitle = {International Conference on Learning Representations},
  year = {2022},
  url = {https://openreview.net/forum?id=6PvWo1kEvlT}
}
"""

_INPUTS = """
Args:
    predictions (list of str): texts. Nothing is cut; an empty text has energy 0.
    references (list of str): for each prediction, the text that it is compared with.
    model_id (str or path): a masked language model by Hub name, or the folder of one or of an `EnergyModel`. It is
        loaded at every call, in float32, on a GPU if there is one. By default the embedded model of hf_ebm, "embedded".
    model (EnergyModel), tokenizer: a loaded model and its tokenizer, instead of model_id. It runs where it is.
    unknown_tokens (str): where a text holds what the tokenizer has no token for: "warn" (default), "error" or "ignore".
Returns:
    energy_gaps (list of float): for each pair, energy of the prediction minus energy of the reference, in nats; 0 if
        both have the same tokens.
    mean_energy_gap (float): their mean, in nats.
    win_rate (float): the share of pairs in which the reference has the lower energy; ties count half.
Raises:
    ValueError: naming the argument, for inputs of another form, none, or unequally many; naming the row, for a text too
        long for the model or with a mask token.
Examples:

    >>> import evaluate
    >>> from hf_ebm.evaluate_modules import module_path
    >>> energy_gap = evaluate.load(module_path("energy_gap"))
    >>> results = energy_gap.compute(
    ...     predictions=["Let God light there said and be", "and he went up"],
    ...     references=["And God said, Let there be light", "And he went up"],  # the embedded model reads no capitals
    ... )
    >>> [round(gap, 1) for gap in results["energy_gaps"]], results["win_rate"]
    ([28.4, 0.0], 0.75)
"""


@described(_DESCRIPTION, _INPUTS, _CITATION)
class EnergyGap(CheckedInputs, evaluate.Metric):
    checks: ClassVar = {"predictions": texts, "references": texts}

    def _compute(
        self,
        predictions: list[str],
        references: list[str],
        model_id: str | os.PathLike | None = None,
        model: EnergyModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        unknown_tokens: str = "warn",
    ) -> dict[str, Any]:
        scorer, spelling = energy_model(model_id, model, tokenizer)
        own = score("predictions", predictions, scorer, spelling, unknown_tokens).energy.tolist()
        others = score("references", references, scorer, spelling, unknown_tokens).energy.tolist()
        # The same tokens in another batch have the same energy only up to rounding, which must not decide who wins.
        ids = (spelling(column, verbose=False)["input_ids"] for column in (predictions, references))
        ties = [tokens == truth for tokens, truth in zip(*ids, strict=True)]
        gaps = [0.0 if tie else mine - other for mine, other, tie in zip(own, others, ties, strict=True)]
        return {
            "energy_gaps": gaps,
            "mean_energy_gap": sum(gaps) / len(gaps),
            "win_rate": sum((gap > 0) + (gap == 0) / 2 for gap in gaps) / len(gaps),
        }
