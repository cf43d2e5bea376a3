"""How often an energy model prefers the good sentence of a minimal pair, for `evaluate.load`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

import evaluate
from transformers import PreTrainedTokenizerBase

from hf_ebm.data.metrics import accuracies_of, accuracy_of, compared_pairs
from hf_ebm.evaluate_modules import CheckedInputs, described, energy_model, score, texts
from hf_ebm.models.energy import EnergyModel

_DESCRIPTION = """\
Accuracy on minimal pairs: how often an energy model gives the good sentence of a pair a lower energy than the bad one,
with a bootstrap interval, over all pairs and by group.
"""

_CITATION = """\
@article{warstadt-etal-2020-blimp,
  title = {{BLiMP}: The Benchmark of Linguistic Minimal Pairs for {English}},
  author = {Warstadt, Alex and Parrish, Alicia and Liu, Haokun and Mohananey, Anhad and Peng, Wei and Wang, Sheng-Fu and
    Bowman, Samuel R.},
  journal = {Transactions of the Association for Computational Linguistics},
  volume = {8},
  pages = {377--392},
  year = {2020},
  doi = {10.1162/tacl_a_00321}
}
"""

_INPUTS = """
Args:
    predictions (list of str): the bad sentences. Nothing is cut; an empty text has energy 0.
    references (list of str): for each, the good sentence of the pair.
    groups (list of str): for each pair, the group it belongs to; by default none.
    details (bool): whether results tell of each pair (default False).
    level (float): the share of bootstrapped accuracies that lie in the interval (default 0.95).
    num_resamples (int): resamples of the bootstrap (default 2000).
    seed (int): of the bootstrap (default 0).
    model_id (str or path): a masked language model by Hub name, or the folder of one or of an `EnergyModel`. It is
        loaded at every call, in float32, on a GPU if there is one. By default the embedded model of hf_ebm, "embedded".
    model (EnergyModel), tokenizer: a loaded model and its tokenizer, instead of model_id. It runs where it is.
    unknown_tokens (str): where a text holds what the tokenizer has no token for: "warn" (default), "error" or "ignore".
Returns:
    accuracy (float): the share of pairs whose good sentence has the lower energy; one of the same tokens counts half.
    accuracy_low (float): where the bootstrap interval of the accuracy begins.
    accuracy_high (float): where it ends.
Raises:
    ValueError: naming the argument, for inputs of another form, none, or unequally many; naming the row, for a text too
        long for the model or with a mask token.
Examples:

    >>> import evaluate
    >>> from hf_ebm.evaluate_modules import module_path
    >>> minimal_pairs = evaluate.load(module_path("minimal_pairs"))
    >>> bad = ["let light there be", "he go up", "they was come"]
    >>> good = ["let there be light", "he went up", "they were come"]
    >>> results = minimal_pairs.compute(predictions=bad, references=good, groups=["order", "verbs", "verbs"])
    >>> results["accuracy"], {name: own["pairs"] for name, own in results["groups"].items()}
    (1.0, {'order': 1, 'verbs': 2})
"""


@described(_DESCRIPTION, _INPUTS, _CITATION)
class MinimalPairs(CheckedInputs, evaluate.Metric):
    checks: ClassVar = {"predictions": texts, "references": texts}

    def _compute(
        self,
        predictions: list[str],
        references: list[str],
        groups: Sequence[str] | None = None,
        details: bool = False,
        level: float = 0.95,
        num_resamples: int = 2000,
        seed: int = 0,
        model_id: str | os.PathLike | None = None,
        model: EnergyModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        unknown_tokens: str = "warn",
    ) -> dict[str, Any]:
        names = None if groups is None else texts("groups", groups)
        if names is not None and len(names) != len(predictions):
            raise ValueError(f"groups must be as many as predictions, {len(predictions)}, got {len(names)}")
        scorer, spelling = energy_model(model_id, model, tokenizer)
        bad = score("predictions", predictions, scorer, spelling, unknown_tokens)
        good = score("references", references, scorer, spelling, unknown_tokens)
        pairs = compared_pairs(good, bad)
        how: dict[str, Any] = {"level": level, "num_resamples": num_resamples, "seed": seed}
        wins = [pair["win"] for pair in pairs]
        found = accuracy_of(wins, **how)
        results: dict[str, Any] = {
            "accuracy": found.accuracy, "accuracy_low": found.low, "accuracy_high": found.high,
        }  # fmt: skip
        if names is not None:
            results["groups"] = {name: own._asdict() for name, own in accuracies_of(wins, names, **how).items()}
        return results | ({"pairs": pairs} if details else {})
