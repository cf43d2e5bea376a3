"""Errors of transcriptions, for `evaluate.load`."""

from __future__ import annotations

from typing import Any, ClassVar

import evaluate

from hf_ebm.data.metrics import transcription_scores
from hf_ebm.evaluate_modules import CheckedInputs, described, references, texts

_DESCRIPTION = """\
Phoneme error rate of transcriptions, such as pronunciations of words: symbols to insert, delete or substitute, by the
number of symbols of the reference; and word accuracy, the share of transcriptions without an error. A word may have
several right transcriptions. Symbols are what white space separates.
"""

_INPUTS = """
Args:
    predictions (list of str): transcriptions, of which one may be empty.
    references (list of str, or list of lists of str): for each prediction a transcription, or several that are all
        right; each holds a symbol. The nearest counts, of equally near ones the longest.
Returns:
    phoneme_error_rate (float): edits to the nearest references, summed, by their summed lengths. 0 is best; it passes 1
        if predictions are much too long.
    word_accuracy (float): the share of predictions that equal a reference, from 0 to 1.
Raises:
    ValueError: naming the argument, for inputs of another form, none, or unequally many.
    ImportError: without rapidfuzz and sacrebleu, which the extra hf_ebm[metrics] installs.
Examples:

    >>> import evaluate
    >>> from hf_ebm.evaluate_modules import module_path
    >>> phoneme_error_rate = evaluate.load(module_path("phoneme_error_rate"))
    >>> results = phoneme_error_rate.compute(
    ...     predictions=["T AH M EY T OW", "HH AH L"],
    ...     references=[["T AH M EY T OW", "T AH M AA T OW"], "HH AH L OW"],
    ... )
    >>> results["phoneme_error_rate"], results["word_accuracy"]  # 1 edit by 6 + 4 symbols; 1 word of 2
    (0.1, 0.5)
"""


@described(_DESCRIPTION, _INPUTS)
class PhonemeErrorRate(CheckedInputs, evaluate.Metric):
    checks: ClassVar = {"predictions": texts, "references": references}

    def _compute(self, predictions: list[str], references: list[list[str]]) -> dict[str, Any]:
        scores = transcription_scores(predictions, references)
        return {name: scores[name] for name in ("phoneme_error_rate", "word_accuracy")}
