"""Repeated 4-grams of sequences of token ids, for `evaluate.load`."""

from __future__ import annotations

from typing import Any, ClassVar

import evaluate

from hf_ebm.evaluate_modules import CheckedInputs, described, id_rows
from hf_ebm.objectives.sequence_costs import repetition

_DESCRIPTION = """\
Repetition within sequences of token ids: 1 - unique 4-grams / 4-grams of each sequence, and the mean over sequences.
"""

_CITATION = """\
@inproceedings{welleck2021mle,
  title = {{MLE}-Guided Parameter Search for Task Loss Minimization in Neural Sequence Modeling},
  author = {Welleck, Sean and Cho, Kyunghyun},
  booktitle = {Proceedings of the AAAI Conference on Artificial Intelligence},
  volume = {35},
  number = {16},
  pages = {14032--14040},
  year = {2021},
  doi = {10.1609/aaai.v35i16.17652}
}
"""

_INPUTS = """
Args:
    predictions (list of lists of int): token ids of each sequence, without padding. A sequence may be empty.
Returns:
    repetitions (list of float): for each sequence, 1 - unique 4-grams / 4-grams: from 0, where none occurs twice, to
        below 1; 0 for fewer than four tokens.
    repetition (float): their mean.
Raises:
    ValueError: naming the argument, for inputs of another form or none.
Examples:

    >>> import evaluate
    >>> from hf_ebm.evaluate_modules import module_path
    >>> repetition = evaluate.load(module_path("repetition"))
    >>> repetition.compute(predictions=[[5, 6, 7, 8, 9], [5, 5, 5, 5, 5]])  # the second's two 4-grams are the same
    {'repetition': 0.25, 'repetitions': [0.0, 0.5]}
"""


@described(_DESCRIPTION, _INPUTS, _CITATION)
class Repetition(CheckedInputs, evaluate.Metric):
    checks: ClassVar = {"predictions": id_rows}

    def _compute(self, predictions: list[list[int]]) -> dict[str, Any]:
        shares = repetition(predictions)
        return {"repetition": shares.double().mean().item(), "repetitions": shares.tolist()}
