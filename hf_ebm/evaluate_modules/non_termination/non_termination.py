"""Sequences of token ids that never end, for `evaluate.load`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import evaluate
import torch

from hf_ebm.checks import whole, wholes
from hf_ebm.evaluate_modules import CheckedInputs, described, id_rows
from hf_ebm.objectives.sequence_costs import non_termination

_DESCRIPTION = """\
Non-termination: the share of decoded sequences of token ids that hold no end token: they were stopped by a limit on
their length.
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
    predictions (list of lists of int): token ids of each decoded sequence, without its prompt and start token. An empty
        one didn't end.
    end_id (int, or list of int): the end token, or several, any of which ends a sequence (an `eos_token_id`).
Returns:
    non_termination (float): the share of sequences that hold no end token, from 0 (all end) to 1.
Raises:
    ValueError: naming the argument, for inputs of another form or none.
Examples:

    >>> import evaluate
    >>> from hf_ebm.evaluate_modules import module_path
    >>> non_termination = evaluate.load(module_path("non_termination"))
    >>> predictions = [[5, 6, 2], [5, 5, 5], [7, 3, 0], [8]]
    >>> non_termination.compute(predictions=predictions, end_id=2)
    {'non_termination': 0.75}
    >>> non_termination.compute(predictions=predictions, end_id=[2, 3])
    {'non_termination': 0.5}
"""


@described(_DESCRIPTION, _INPUTS, _CITATION)
class NonTermination(CheckedInputs, evaluate.Metric):
    checks: ClassVar = {"predictions": id_rows}

    def _compute(self, predictions: list[list[int]], end_id: int | Iterable[int]) -> dict[str, Any]:
        lacking = torch.stack([non_termination(predictions, end) for end in _end_ids(end_id)])
        return {"non_termination": lacking.amin(0).double().mean().item()}


def _end_ids(end_id: int | Iterable[int]) -> list[int]:
    one = whole(end_id)
    ends = wholes(end_id) if one is None else [one]
    if not ends:
        raise ValueError(f"end_id must be a token id or a list of one or more token ids, got {end_id!r}")
    return ends
