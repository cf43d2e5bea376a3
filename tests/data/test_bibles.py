"""Pairs of verses, with a program in place of `diatheke` that prints two small Bibles."""

import os

import pytest

from hf_ebm.data import bibles
from hf_ebm.data.bibles import load_verse_pairs, parse_verses

PROGRAM = """#!/bin/sh
[ "$2" = system ] && printf 'Biblical Texts:\\nengWEB9eb : English\\nspaRV9eb : Spanish\\n' && exit
[ "$6" = Prov-Mal ] || exit 0
i=1
while [ $i -le 60 ]; do
  if [ "$2" = spaRV9eb ]; then printf 'II Kings 1:%d: UNO <G1> dos %d.\\n' $i $i
  elif [ $i != 7 ]; then printf 'II Kings 1:%d: One\\n%d two. \\n\\n' $i $i; fi
  i=$((i+1))
done
echo "($2)"
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    path = tmp_path / "diatheke"
    path.write_text(PROGRAM)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    bibles._verses.cache_clear()
    yield path
    bibles._verses.cache_clear()


def test_verses_are_paired_by_reference_and_split_by_number(program):
    splits = load_verse_pairs()
    pairs = [(f"uno dos {i}.", f"one {i} two.") for i in range(1, 61) if i != 7]  # the seventh has no translation
    found = {name: list(zip(rows["source"], rows["target"], strict=True)) for name, rows in splits.items()}
    assert found["validation"] == [pairs[19]] and found["test"] == [pairs[39]]
    assert found["train"] == [pair for index, pair in enumerate(pairs) if index not in (19, 39)]
    assert load_verse_pairs(max_train=3)["train"]["source"][:] == [found["train"][i][0] for i in (0, 19, 38)]


def test_long_verses_are_left_out(program):
    assert len(load_verse_pairs(max_words=3)["train"]) == 57
    assert [len(rows) for rows in load_verse_pairs(max_words=2).values()] == [0, 0, 0]


def test_what_is_missing_is_told(program, monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=r"max_train .* from 1 to 57, got 58"):
        load_verse_pairs(max_train=58)
    bibles._verses.cache_clear()
    program.write_text("#!/bin/sh\necho nothing")
    with pytest.raises(RuntimeError, match=r"spaRV: install .*diatheke, sword-text-sparv"):
        load_verse_pairs()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    with pytest.raises(RuntimeError, match="install the Debian packages diatheke"):
        load_verse_pairs()


def test_a_text_that_cannot_be_downloaded_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"^install the Debian packages bible-kjv and bible-kjv-text"):
        bibles.read_verses(tmp_path / "cache")
    for name in ("apt-get", "dpkg"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 100")
        (tmp_path / name).chmod(0o755)
    with pytest.raises(RuntimeError, match=r"apt-get can't download .*bible-kjv-text"):
        bibles.read_verses(tmp_path / "cache")


def test_the_name_of_the_module_ends_a_text_and_is_no_part_of_it():
    listing = "John 1:1: A <b> c\n(mod)\nRevelation of John 2:3: D: 4:5: e\nf\n\n(mod)\nJude 1:2: \n"
    assert parse_verses(listing) == {"John 1:1": "a c", "Revelation of John 2:3": "d: 4:5: e f"}
