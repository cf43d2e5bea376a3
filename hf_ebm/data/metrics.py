"""Metrics: of predicted sequences, plain functions on lists of texts whose symbols are separated by white space; and of
minimal pairs, as of BLiMP (Warstadt et al. 2020), which of two sentences a model prefers, and how often by group.

Rates, accuracies and F1 are between 0 and 1 (an error rate can pass 1); BLEU and its n-gram precisions are per cent, as
sacrebleu gives them. All raise `ValueError` for empty lists; those of predicted sequences also for lists of unequal
length and references without a symbol.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hf_ebm.checks import as_number, as_whole
from hf_ebm.objectives.sequence_costs import nearest_reference
from hf_ebm.random_state import generator_of

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEUScore

    from hf_ebm.models.energy.scoring_energy import ScoreOutput


def tagging_scores(
    predictions: Sequence[str], references: Sequence[str], default_label: str | None = None
) -> dict[str, float]:
    """Scores of one label a position.

    Args:
        predictions, references: texts of labels, one reference for each prediction.
        default_label: left out of `macro_f1`, as is usual for "O" in named entities.

    Returns:
        `accuracy`: right labels by positions. A position that only one of the two sequences has counts and is wrong.
        `macro_f1`: unweighted mean of the F1 of each label that the references hold, except `default_label`; a label
        that only predictions hold lowers it through the positions it takes. NaN if no label remains.
        `sequence_accuracy`: the share of predictions that are right at all positions.

    Example:
        >>> found = tagging_scores(["a b", "a a"], ["a a", "a a"])
        >>> found["accuracy"], found["sequence_accuracy"]
        (0.75, 0.5)
    """
    predicted, expected = _split_pairs(predictions, references)
    right: Counter[str] = Counter()
    in_predictions, in_references = right.copy(), right.copy()
    positions = 0
    for labels, truth in zip(predicted, expected, strict=True):
        positions += max(len(labels), len(truth))
        in_predictions.update(labels)
        in_references.update(truth)
        right.update(label for label, true in zip(labels, truth, strict=False) if label == true)
    scored = [label for label in in_references if label != default_label]
    f1 = [2 * right[label] / (in_predictions[label] + in_references[label]) for label in scored]
    return {
        "accuracy": right.total() / positions,
        "macro_f1": sum(f1) / len(f1) if f1 else math.nan,
        "sequence_accuracy": _share(labels == truth for labels, truth in zip(predicted, expected, strict=True)),
    }


def stress_scores(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """`tagging_scores` of stress at the vowels of the references, with "0", the commonest label there, as the default.

    Consonants have the label "-" and nothing to decide. A label that a prediction lacks is wrong.

    Example:
        >>> stress_scores(["- 1 - 0"], ["- 1 - 1"])["accuracy"]  # of the vowels
        0.5
    """
    predicted, expected = _split_pairs(predictions, references)
    pairs = [
        [(label, truth) for label, truth in itertools.zip_longest(labels[: len(truths)], truths, fillvalue="-")]
        for labels, truths in zip(predicted, expected, strict=True)
    ]
    vowels = [[pair for pair in row if pair[1] != "-"] for row in pairs]
    texts = [[" ".join(symbols) for symbols in zip(*row, strict=True)] for row in vowels]
    if not all(texts):
        raise ValueError(f"references must hold a vowel each, got none in row {texts.index([])}")
    return tagging_scores([text[0] for text in texts], [text[1] for text in texts], default_label="0")


def transcription_scores(
    predictions: Sequence[str], references: Sequence[str] | Sequence[Sequence[str]]
) -> dict[str, float]:
    """Scores of transcriptions, such as pronunciations, each with one reference or several.

    Args:
        predictions: texts.
        references: for each prediction a text, or a list of texts that are all right.

    Returns:
        `phoneme_error_rate`: edits (insertions, deletions, substitutions) to the nearest reference, summed, by the
        summed lengths of these references. Of equally near ones the longest is taken.
        `word_accuracy`: the share of predictions that equal a reference.
        `bleu`: sacrebleu's corpus BLEU of the symbols as they stand, per cent, with its default smoothing.

    Needs rapidfuzz and sacrebleu, else raises `ImportError`.

    Example:
        >>> found = transcription_scores(["HH AH L"], [["HH AH L OW", "HH EH L OW"]])
        >>> found["phoneme_error_rate"], found["word_accuracy"]
        (0.25, 0.0)
    """
    alternatives = _alternatives(references)
    predicted, _ = _split_pairs(predictions, [texts[0] for texts in alternatives])
    expected = [[text.split() for text in texts] for texts in alternatives]
    edits = length = 0
    for symbols, truths in zip(predicted, expected, strict=True):
        nearest_edits, nearest_length = nearest_reference(symbols, truths)
        edits += nearest_edits
        length += nearest_length
    return {
        "phoneme_error_rate": edits / length,
        "word_accuracy": _share(symbols in truths for symbols, truths in zip(predicted, expected, strict=True)),
        "bleu": _corpus_bleu(predictions, alternatives).score,
    }


def ngram_overlap(predictions: Sequence[str], references: Sequence[str] | Sequence[Sequence[str]]) -> dict[str, float]:
    """The parts of BLEU: `precision_1` to `precision_4`, per cent, and `length_ratio`.

    `precision_n` is the share of the predictions' n-grams that the references hold, counted over all rows and clipped
    as in BLEU but not smoothed; 0 if the predictions are too short to have any. `length_ratio` is the predictions'
    length by that of the references (of several, the one nearest in length). Arguments are those of
    `transcription_scores`.

    Needs sacrebleu, else raises `ImportError`.

    Example:
        >>> found = ngram_overlap(["a b c"], ["a b d"])
        >>> round(found["precision_1"], 1), found["precision_2"], found["length_ratio"]
        (66.7, 50.0, 1.0)
    """
    alternatives = _alternatives(references)
    _split_pairs(predictions, [texts[0] for texts in alternatives])
    bleu = _corpus_bleu(predictions, alternatives)
    scores = {
        f"precision_{n}": 100 * found / total if total else 0.0
        for n, (found, total) in enumerate(zip(bleu.counts, bleu.totals, strict=True), 1)
    }
    return {**scores, "length_ratio": bleu.sys_len / bleu.ref_len}


def _split_pairs(predictions: Sequence[str], references: Sequence[str]) -> tuple[list[list[str]], list[list[str]]]:
    if isinstance(predictions, str) or isinstance(references, str):
        raise ValueError("predictions and references must be lists of texts, got a single text")
    if not len(predictions) or len(predictions) != len(references):
        raise ValueError(
            f"predictions and references must be equally many, one or more, got {len(predictions)} and "
            f"{len(references)}"
        )
    expected = [text.split() for text in references]
    for row, symbols in enumerate(expected):
        if not symbols:
            raise ValueError(f"references must hold a symbol each, got none in row {row}")
    return [text.split() for text in predictions], expected


def _alternatives(references: Sequence[str] | Sequence[Sequence[str]]) -> list[list[str]]:
    """References as a list of one text or more for each row."""
    if isinstance(references, str):
        raise ValueError("references must be a list, got a single text")
    alternatives = [[texts] if isinstance(texts, str) else list(texts) for texts in references]
    for row, texts in enumerate(alternatives):
        if not texts or not all(text.split() for text in texts):
            raise ValueError(f"references must be one text or more with a symbol each, got {texts!r} in row {row}")
    return alternatives


def _corpus_bleu(predictions: Sequence[str], alternatives: list[list[str]]) -> BLEUScore:
    try:
        from sacrebleu.metrics import BLEU
    except ImportError as error:
        raise ImportError("BLEU needs the extra hf_ebm[metrics]: pip install sacrebleu") from error
    # sacrebleu wants the first references of all rows, then the second ones, …, with None where a row has fewer.
    most = max(map(len, alternatives))
    streams = [[texts[k] if k < len(texts) else None for texts in alternatives] for k in range(most)]
    # "none" divides at white space only; force=True silences advice for texts that end with a lone full stop.
    # Its annotation leaves the None out.
    return BLEU(tokenize="none", force=True).corpus_score(list(predictions), streams)  # type: ignore[arg-type]


def _share(flags: Iterable[bool]) -> float:
    flags = list(flags)
    return sum(flags) / len(flags)


class Accuracy(NamedTuple):
    """A share of pairs with the interval that bootstrapped shares lie in.

    Attributes:
        accuracy, low, high: from 0 to 1.
        pairs: how many there are.
    """

    accuracy: float
    low: float
    high: float
    pairs: int


def accuracy_of(
    wins: Sequence[float], *, level: float = 0.95, num_resamples: int = 2000, seed: int = 0, name: str = ""
) -> Accuracy:
    """The mean of wins with its bootstrap interval, of percentiles (Efron 1979); it has no width where all are alike.

    Args:
        wins: of each pair 1, 0, or 0.5 for a tie.
        level: the share of bootstrapped means that lie in the interval.
        name: of the group, whose random numbers don't depend on what other groups there are.

    Example:
        >>> accuracy_of([1, 1, 0, 1, 0.5, 1, 1, 1, 0, 1])
        Accuracy(accuracy=0.75, low=0.5, high=1.0, pairs=10)
    """
    level = as_number("level", level, least=0, most=1)
    count = as_whole("num_resamples", num_resamples, 1)
    if not wins:
        raise ValueError("wins must hold a pair, got none")
    values, frequency = np.unique(np.asarray(wins, dtype=np.float64), return_counts=True)
    # A resample has of each value a number that is multinomial.
    generator = generator_of(as_whole("seed", seed, 0), zlib.crc32(name.encode()))
    means = generator.multinomial(len(wins), frequency / len(wins), size=count) @ values / len(wins)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Accuracy(float(np.mean(wins)), float(low), float(high), len(wins))


def accuracies_of(wins: Sequence[float], groups: Sequence[str], **how: Any) -> dict[str, Accuracy]:
    """`accuracy_of` of each group, in the order in which they come; further arguments as there.

    Example:
        >>> found = accuracies_of([1, 0, 1], ["anaphora", "anaphora", "islands"])
        >>> {name: own.accuracy for name, own in found.items()}
        {'anaphora': 0.5, 'islands': 1.0}
    """
    by_group: dict[str, list[float]] = {}
    for win, group in zip(wins, groups, strict=True):
        by_group.setdefault(group, []).append(win)
    return {group: accuracy_of(own, name=group, **how) for group, own in by_group.items()}


def differing(good: Sequence[str], bad: Sequence[str]) -> tuple[list[int], list[int]]:
    """Where two lists of tokens differ: positions in each that the other has no counterpart of.

    Example:
        >>> differing(["the", "cats", "run"], ["the", "cat", "s", "run"])
        ([1], [1, 2])
    """
    spans = [span for span in SequenceMatcher(None, good, bad, autojunk=False).get_opcodes() if span[0] != "equal"]
    own = [place for _, start, stop, _, _ in spans for place in range(start, stop)]
    return own, [place for _, _, _, start, stop in spans for place in range(start, stop)]


def compared_pairs(good: ScoreOutput, bad: ScoreOutput) -> list[dict[str, Any]]:
    """A record for each pair: energies in nats, who wins, and of each its tokens that the other hasn't, with terms.

    `win` is 1 where the good sentence has the lower energy and 0.5 where both have the same tokens.
    """
    records = []
    for row, tokens in enumerate(zip(good.tokens, bad.tokens, strict=True)):
        energies = float(good.energy[row]), float(bad.energy[row])
        # The same tokens in another batch have the same energy only up to rounding, which must not decide who wins.
        tie = tokens[0] == tokens[1] or energies[0] == energies[1]
        record: dict[str, Any] = {"energy_good": energies[0], "energy_bad": energies[1]}
        record["win"] = 0.5 if tie else float(energies[0] < energies[1])
        terms = good.token_energies[row], bad.token_energies[row]
        for name, own, values, places in zip(("good", "bad"), tokens, terms, differing(*tokens), strict=True):
            record[f"tokens_{name}"] = [own[place] for place in places]
            record[f"token_energies_{name}"] = [values[place] for place in places]
        records.append(record)
    return records
