"""How often chains of samples move, for `evaluate.load`."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import evaluate

from hf_ebm.evaluate_modules import CheckedInputs, chains, described

_DESCRIPTION = """\
Novel rate of chains of samples: of all steps from one sample to the next, the share at which the text changes. A Markov
chain that rejects its proposals repeats its sample; at a novel rate near 0 many samples are few texts.
"""

_INPUTS = """
Args:
    predictions (list of lists of str): for each chain, the texts of its samples in order, two or more.
Returns:
    novel_rate (float): the share of steps, of all chains together, at which the sample differs from the one before it:
        from 0 (no chain ever moves) to 1. A chain of n samples has n - 1 steps, so longer chains count for more.
    novel_rates (list of float): the same for each chain.
Raises:
    ValueError: naming the argument, for inputs of another form or none; naming the row, for a chain of fewer than two
        samples.
Examples:

    >>> import evaluate
    >>> from hf_ebm.evaluate_modules import module_path
    >>> novel_rate = evaluate.load(module_path("novel_rate"))
    >>> novel_rate.compute(predictions=[["he went", "he went", "he goes", "he went"], ["she", "she"]])
    {'novel_rate': 0.5, 'novel_rates': [0.6666666666666666, 0.0]}
"""


@described(_DESCRIPTION, _INPUTS)
class NovelRate(CheckedInputs, evaluate.Metric):
    checks: ClassVar = {"predictions": chains}

    def _compute(self, predictions: list[list[str]]) -> dict[str, Any]:
        moves = [[before != sample for before, sample in itertools.pairwise(chain)] for chain in predictions]
        return {
            "novel_rate": sum(map(sum, moves)) / sum(map(len, moves)),
            "novel_rates": [sum(own) / len(own) for own in moves],
        }
