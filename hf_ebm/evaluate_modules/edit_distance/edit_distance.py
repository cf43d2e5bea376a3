"""Edits between texts of symbols, for `evaluate.load`."""

from __future__ import annotations

from typing import Any, ClassVar

import evaluate

from hf_ebm.evaluate_modules import CheckedInputs, described, references, texts
from hf_ebm.objectives.sequence_costs import nearest_reference

_DESCRIPTION = """\
Edit distance (Levenshtein): the least number of symbols to insert, delete or substitute to make a reference of a
prediction. Symbols are what white space separates: words, phonemes, letters with spaces between them.
"""

_CITATION = """\
@article{levenshtein1966binary,
  title = {Binary Codes Capable of Correcting Deletions, Insertions, and Reversals},
  author = {Levenshtein, Vladimir I.},
  journal = {Soviet Physics Doklady},
  volume = {10},
  number = {8},
  pages = {707--710},
  year = {1966}
}
"""

_INPUTS = """
Args:
    predictions (list of str): texts, of which one may be empty.
    references (list of str, or list of lists of str): for each prediction a text, or several that are all right; each
        holds a symbol. The nearest counts, of equally near ones the longest.
Returns:
    edit_distances (list of int): for each prediction, edits to its nearest reference.
    edit_distance (float): their mean, edits a row.
    normalized_edit_distance (float): their sum by the summed lengths of the nearest references. 0 is best; it passes 1
        if predictions are much too long.
Raises:
    ValueError: naming the argument, for inputs of another form, none, or unequally many.
    ImportError: without rapidfuzz, which the extra hf_ebm[metrics] installs.
Examples:

    >>> import evaluate
    >>> from hf_ebm.evaluate_modules import module_path
    >>> edit_distance = evaluate.load(module_path("edit_distance"))
    >>> results = edit_distance.compute(
    ...     predictions=["the cat sat", "a dog"], references=["the cat sat down", ["the dog", "a dog ran off"]]
    ... )
    >>> results["edit_distances"], results["edit_distance"]
    ([1, 1], 1.0)
    >>> round(results["normalized_edit_distance"], 3)  # 2 edits by 4 + 2 symbols
    0.333
"""


@described(_DESCRIPTION, _INPUTS, _CITATION)
class EditDistance(CheckedInputs, evaluate.Metric):
    checks: ClassVar = {"predictions": texts, "references": references}

    def _compute(self, predictions: list[str], references: list[list[str]]) -> dict[str, Any]:
        nearest = [
            nearest_reference(text.split(), [truth.split() for truth in truths])
            for text, truths in zip(predictions, references, strict=True)
        ]
        edits = [distance for distance, _ in nearest]
        return {
            "edit_distance": sum(edits) / len(edits),
            "edit_distances": edits,
            "normalized_edit_distance": sum(edits) / sum(length for _, length in nearest),
        }
