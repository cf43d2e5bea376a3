"""Costs of decoded sequences, for training on what a model decodes (Welleck & Cho 2020, section 5).

A sequence is a text, whose symbols are separated by white space, or a list of token ids, which are its symbols. A
reference may also be a list of texts that are all right. Lower is better; costs are (B,) float32 on the CPU and have no
gradient. Lists that are empty, of unequal length or of other things, and references without a symbol raise
`ValueError`.

Trainers take `SequenceCost`s: `as_cost` makes one of a name in `COSTS` or of a callable.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from typing import Any

import torch

from hf_ebm.checks import as_whole, name_of, shown
from hf_ebm.objectives.costs import SequenceCost

Symbols = Sequence[Hashable]


def nearest_reference(symbols: Sequence[Hashable], references: Sequence[Sequence[Hashable]]) -> tuple[int, int]:
    """Edits (insertions, deletions, substitutions) to the nearest of one or more references, and that one's length.

    Of equally near references the longest is taken. Needs rapidfuzz, else raises `ImportError`.

    Example:
        >>> nearest_reference(["a", "b"], [["a", "b", "c"], ["x"]])
        (1, 3)
    """
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError as error:
        raise ImportError("edit distances need the extra hf_ebm[metrics]: pip install rapidfuzz") from error
    edits, negative_length = min((Levenshtein.distance(symbols, truth), -len(truth)) for truth in references)
    return edits, -negative_length


def normalized_edit_distance(
    predictions: Sequence[str] | Sequence[Sequence[int]],
    references: Sequence[str] | Sequence[Sequence[str]] | Sequence[Sequence[int]],
) -> torch.Tensor:
    """Edits (insertions, deletions, substitutions) by the number of reference symbols, so above 1 for long predictions.

    Of several references the nearest counts, of equally near ones the longest: for pronunciations it is the phoneme
    error rate of the row.

    Needs rapidfuzz, else raises `ImportError`.

    Example:
        >>> normalized_edit_distance(["a b", "a"], ["a b c d", ["b", "a"]])  # of several references the nearest
        tensor([0.5000, 0.0000])
    """
    nearest = [nearest_reference(symbols, truths) for symbols, truths in _symbol_pairs(predictions, references)]
    return _costs(edits / length for edits, length in nearest)


def sentence_bleu_cost(
    predictions: Sequence[str] | Sequence[Sequence[int]],
    references: Sequence[str] | Sequence[Sequence[str]] | Sequence[Sequence[int]],
    tokenize: str = "none",
) -> torch.Tensor:
    """1 - sentence BLEU, from 0 to 1: sacrebleu's, of the effective order and with its default smoothing.

    Args:
        predictions, references: texts or lists of token ids; of several references BLEU counts the n-grams of all.
        tokenize: sacrebleu's name of what divides texts further; "none" takes the symbols as they stand.

    Needs sacrebleu, else raises `ImportError`.

    Example:
        >>> sentence_bleu_cost(["in the beginning god"], ["in the beginning god"])
        tensor([0.])
    """
    try:
        from sacrebleu.metrics import BLEU
    except ImportError as error:
        raise ImportError("BLEU needs the extra hf_ebm[metrics]: pip install sacrebleu") from error
    bleu = BLEU(effective_order=True, tokenize=tokenize)
    costs = []
    for symbols, truths in _symbol_pairs(predictions, references):
        score = bleu.sentence_score(_joined(symbols), [_joined(truth) for truth in truths]).score
        costs.append(max(0.0, 1 - score / 100))  # sacrebleu's scores reach 100.00000000000004
    return _costs(costs)


class _NoSynonyms:
    """Stands in for nltk's reader of WordNet, whose data nltk would have to download."""

    @staticmethod
    def synsets(word: str) -> tuple[()]:
        return ()


def meteor_without_synonyms_cost(
    predictions: Sequence[str] | Sequence[Sequence[int]],
    references: Sequence[str] | Sequence[Sequence[str]] | Sequence[Sequence[int]],
) -> torch.Tensor:
    """1 - METEOR with exact matches (in lower case) and matches of Porter stems only, from 0 to 1.

    It isn't the METEOR of the literature, which also matches synonyms of WordNet. Parameters are nltk's: alpha 0.9,
    beta 3, gamma 0.5; of several references the best counts. The fragmentation penalty is never 0: a perfect match of m
    symbols costs 0.5 / m^3, of one symbol 0.5. No match costs 1. nltk matches a repeated word with its last occurrence,
    which can make more chunks than there need be.

    Needs nltk, else raises `ImportError`.

    Example:
        >>> meteor_without_synonyms_cost(["god", "light"], ["god", "dark"])
        tensor([0.5000, 1.0000])
    """
    try:
        from nltk.translate.meteor_score import meteor_score
    except ImportError as error:
        raise ImportError("METEOR needs the extra hf_ebm[metrics]: pip install nltk") from error
    costs = []
    for symbols, truths in _symbol_pairs(predictions, references):
        truths = [list(map(str, truth)) for truth in truths]
        costs.append(1 - meteor_score(truths, list(map(str, symbols)), wordnet=_NoSynonyms()))
    return _costs(costs)


def repetition(predictions: Sequence[str] | Sequence[Sequence[int]], n: int = 4) -> torch.Tensor:
    """1 - unique n-grams / n-grams of each prediction, below 1; 0 for fewer than n symbols (section 5.1).

    Raises:
        ValueError: for n below 1.

    Example:
        >>> repetition([[1, 2, 1, 2, 1]], n=2)  # four bigrams, two different ones
        tensor([0.5000])
    """
    n = as_whole("n", n, 1)
    shares = []
    for symbols in _symbol_rows(predictions, "predictions"):
        grams = [tuple(symbols[start : start + n]) for start in range(len(symbols) - n + 1)]
        shares.append(1 - len(set(grams)) / len(grams) if grams else 0.0)
    return _costs(shares)


def repetition_cost(
    predictions: Sequence[str] | Sequence[Sequence[int]], references: object = None, n: int = 4
) -> torch.Tensor:
    """`repetition` as a cost; references aren't read.

    Example:
        >>> repetition_cost([[1, 2, 1, 2, 1]], n=2)
        tensor([0.5000])
    """
    return repetition(predictions, n)


def non_termination(predictions: Sequence[Sequence[int]], eos_token_id: int) -> torch.Tensor:
    """1 for each list of token ids that lacks the end token, else 0.

    Example:
        >>> non_termination([[5, 6, 2], [5, 6, 7]], eos_token_id=2)
        tensor([0., 1.])
    """
    end = as_whole("eos_token_id", eos_token_id)
    return _costs(end not in ids for ids in token_ids(predictions, "predictions"))


def token_ids(sequences: Sequence[Sequence[int]], argument: str) -> list[list[int]]:
    """The sequences as lists of Python ints.

    Raises:
        ValueError: naming the argument, and the row, unless it is a list of one or more lists of token ids.

    Example:
        >>> token_ids([torch.tensor([5, 6]), [7]], "predictions")
        [[5, 6], [7]]
    """
    _check_list(sequences, argument)
    rows = []
    for row, sequence in enumerate(sequences):
        if isinstance(sequence, str):
            raise ValueError(f"{argument} must be lists of token ids, got the text {sequence!r} in row {row}")
        rows.append(_ids(sequence, argument, row))
    return rows


COSTS: dict[str, SequenceCost] = {
    cost.name: cost
    for cost in (
        SequenceCost("edit_distance", normalized_edit_distance, "ids"),
        SequenceCost("sentence_bleu", sentence_bleu_cost, "texts"),
        SequenceCost("meteor_without_synonyms", meteor_without_synonyms_cost, "texts"),
        SequenceCost("phoneme_error", normalized_edit_distance, "texts"),
        SequenceCost("repetition", repetition_cost, "ids"),
    )
}


def as_cost(cost: str | Callable[..., Any] | SequenceCost) -> SequenceCost:
    """The cost of that name, the `SequenceCost` itself, or one of any other callable.

    A callable reads what its attribute `reads` says, texts if it has none.

    Raises:
        ValueError: for an unknown name, something that can't be called, or another value of `reads`.

    Example:
        >>> as_cost("edit_distance")([[5, 6]], [[5, 7]])
        tensor([0.5000])
        >>> as_cost(lambda predictions, references: [float(len(text)) for text in predictions])(["abc"], ["ab"])
        tensor([3.])
    """
    if isinstance(cost, SequenceCost):
        return cost
    if isinstance(cost, str) and cost in COSTS:
        return COSTS[cost]
    if not callable(cost) or isinstance(cost, type):
        raise ValueError(f"cost must be a callable or one of {', '.join(COSTS)}, got {shown(cost)}")
    return SequenceCost(name_of(cost), cost, getattr(cost, "reads", "texts"))


def _symbol_pairs(predictions: Sequence, references: Sequence) -> list[tuple[Symbols, list[Symbols]]]:
    """Symbols of each prediction, and of its one or more references."""
    predicted = _symbol_rows(predictions, "predictions")
    _check_list(references, "references")
    if len(predictions) != len(references):
        raise ValueError(
            f"predictions and references must be equally many, got {len(predictions)} and {len(references)}"
        )
    return [
        (symbols, _reference_symbols(reference, isinstance(prediction, str), row))
        for row, (symbols, prediction, reference) in enumerate(zip(predicted, predictions, references, strict=True))
    ]


def _reference_symbols(reference: str | Sequence, of_text: bool, row: int) -> list[Symbols]:
    several = isinstance(reference, (list, tuple)) and all(isinstance(text, str) for text in reference)
    alternatives: list[str | Sequence] = list(reference) if several else [reference]
    truths = [_symbols(alternative, "references", row) for alternative in alternatives]
    if not truths or not all(truths):
        raise ValueError(f"references must hold a symbol each, got {reference!r} in row {row}")
    if of_text != isinstance(alternatives[0], str):
        raise ValueError(f"predictions and references must be both texts or both token ids, which row {row} isn't")
    return truths


def _symbol_rows(sequences: Sequence, argument: str) -> list[Symbols]:
    _check_list(sequences, argument)
    return [_symbols(sequence, argument, row) for row, sequence in enumerate(sequences)]


def _check_list(sequences: Sequence, argument: str) -> None:
    unfit = isinstance(sequences, (str, bytes, Mapping, Set)) or getattr(sequences, "ndim", 1) == 0
    if unfit or not hasattr(sequences, "__len__") or not len(sequences):
        raise ValueError(
            f"{argument} must be a list of one or more texts or lists of token ids, got {shown(sequences)}"
        )


def _symbols(sequence: str | Sequence, argument: str, row: int) -> Symbols:
    return sequence.split() if isinstance(sequence, str) else _ids(sequence, argument, row)


def _ids(sequence: Sequence, argument: str, row: int) -> list[int]:
    try:
        # Python ints: tensors of equal value would count as different symbols.
        return list(map(operator.index, sequence))
    except (TypeError, RuntimeError):
        raise ValueError(
            f"{argument} must be texts or lists of token ids, got {shown(sequence)} in row {row}"
        ) from None


def _costs(costs: Iterable[float]) -> torch.Tensor:
    return torch.tensor(list(costs), dtype=torch.float32)


def _joined(symbols: Symbols) -> str:
    return " ".join(map(str, symbols))
