"""Bibles in the public domain: the King James Bible as clauses and as verses, and Spanish-English pairs of verses.

The King James Bible comes from the Debian packages `bible-kjv` and `bible-kjv-text`. A clause here is a stretch of 4 to
24 words of one verse that ends where the verse's own punctuation ends it. Pairs are of Reina-Valera 1909 and the World
English Bible, from the packages `sword-text-sparv` and `sword-text-web`, which `diatheke` prints. Every twentieth verse
is held out, so no verse is on both sides.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerBase

from hf_ebm.checks import as_whole
from hf_ebm.objectives.losses import IGNORED

MIN_WORDS, MAX_WORDS = 4, 24
HELD_OUT_EVERY = 20
KJV_PACKAGES = ("bible-kjv", "bible-kjv-text")
PAIR_PACKAGES = ("diatheke", "sword-text-sparv", "sword-text-web")
MODULES = {"source": "spaRV", "target": "engWEB"}  # how the names that diatheke lists begin
RANGES = ("Gen-Job", "Prov-Mal", "Matt-Rev")  # a psalm's title would be printed with all verses from there on
_REFERENCE = re.compile(r"((?:I{1,3} )?[A-Z][a-z]+(?: of [A-Z][a-z]+)? \d+:\d+): ")
_TAG = re.compile(r"<[^<>]*>")


def read_verses(cache_dir: str | Path) -> list[str]:
    """All 31,102 verses in order, without their references.

    Uses the `bible` program if it is installed; otherwise unpacks the two Debian packages into `cache_dir` (which needs
    `apt-get` and `dpkg`, no root). Raises `RuntimeError` when neither is possible.
    """
    program, options = shutil.which("bible"), list[str]()
    if program is None:
        program, options = _unpack_debian_packages(Path(cache_dir))
    command = [program, "-f", "-l", "100000", *options, "Gen1:1-Rev22:21"]
    listing = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout
    verses = [line.split(" ", 1)[1].strip() for line in listing.splitlines() if re.match(r"\S+\d+:\d+ ", line)]
    if len(verses) != 31_102:
        raise RuntimeError(f"the `bible` program printed {len(verses)} verses where the book has 31,102")
    return verses


def _unpack_debian_packages(cache: Path) -> tuple[str, list[str]]:
    advice = f"install the Debian packages {' and '.join(KJV_PACKAGES)} to get the text"
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise RuntimeError(advice)
    cache.mkdir(parents=True, exist_ok=True)
    if subprocess.run(["apt-get", "download", "-q", *KJV_PACKAGES], cwd=cache).returncode:
        raise RuntimeError(f"apt-get can't download them: {advice}")
    for package in cache.glob("bible-kjv*.deb"):
        subprocess.run(["dpkg", "-x", package.name, "root"], cwd=cache, check=True)
    return str(cache / "root/usr/bin/bible"), ["-p", str(cache / "root/usr/lib")]


def split_clauses(verse: str) -> list[str]:
    """Clauses of `MIN_WORDS` to `MAX_WORDS` words of one verse; what is shorter joins a neighbour or is left out.

    Example:
        >>> split_clauses("And God said, Let there be light: and there was light.")
        ['And God said, Let there be light:', 'and there was light.']
    """
    pieces: list[list[str]] = []
    for sentence in re.split(r"(?<=[.;:?!])\s+", verse):
        words = sentence.split()
        if len(words) <= MAX_WORDS:
            pieces.append(words)
        else:
            pieces.extend(_fill([part.split() for part in re.split(r"(?<=,)\s+", sentence)]))
    return [" ".join(words) for words in _join_short(pieces) if MIN_WORDS <= len(words) <= MAX_WORDS]


def _fill(parts: list[list[str]]) -> list[list[str]]:
    """Joins consecutive parts as long as they fit into `MAX_WORDS`."""
    filled: list[list[str]] = [[]]
    for part in parts:
        if filled[-1] and len(filled[-1]) + len(part) > MAX_WORDS:
            filled.append([])
        filled[-1] = filled[-1] + part
    return filled


def _join_short(pieces: list[list[str]]) -> list[list[str]]:
    joined: list[list[str]] = []
    for words in pieces:
        touches_short = joined and min(len(joined[-1]), len(words)) < MIN_WORDS
        if touches_short and len(joined[-1]) + len(words) <= MAX_WORDS:
            joined[-1] = joined[-1] + words
        else:
            joined.append(words)
    return joined


def load_kjv_clauses(cache_dir: str | Path) -> tuple[list[str], list[str]]:
    """`(train, held_out)` clauses in the order of the book."""
    train, held_out = load_kjv_verses(cache_dir)
    return [c for verse in train for c in split_clauses(verse)], [c for verse in held_out for c in split_clauses(verse)]


def split_held_out(verses: list[str]) -> tuple[list[str], list[str]]:
    """`(validation, test)`: every other held-out verse.

    Example:
        >>> split_held_out(["a", "b", "c"])
        (['a', 'c'], ['b'])
    """
    return verses[::2], verses[1::2]


def completion_rows(verses: list[str], tokenizer: PreTrainedTokenizerBase, prompt_length: int = 10) -> list[dict]:
    """Verses as rows of a causal model that continues their first tokens (Welleck and Cho 2020, section 5.1).

    Args:
        tokenizer: puts an end token after a text.
        prompt_length: tokens of the prompt, a start token among them. Verses with nothing but their end after it are
            left out.

    Returns:
        Rows of `input_ids`, `attention_mask` and `labels`, the last -100 on the prompt.

    Example:
        >>> from hf_ebm.assets import load_embedded_causal
        >>> _, tokenizer = load_embedded_causal()
        >>> completion_rows(["let there be light"], tokenizer, prompt_length=3)[0]["labels"]
        [-100, -100, -100, 90, 768, 3]
    """
    return [
        {
            "input_ids": ids,
            "attention_mask": [1] * len(ids),
            "labels": [IGNORED] * prompt_length + ids[prompt_length:],
        }
        for ids in tokenizer(verses)["input_ids"]
        if len(ids) > prompt_length + 1
    ]


def load_kjv_verses(cache_dir: str | Path) -> tuple[list[str], list[str]]:
    """`(train, held_out)` whole verses in the order of the book."""
    verses = read_verses(cache_dir)
    held_out = verses[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return [verse for number, verse in enumerate(verses, 1) if number % HELD_OUT_EVERY], held_out


def load_verse_pairs(max_words: int = 20, max_train: int | None = None) -> DatasetDict:
    """Translation of verses: `source` Spanish, `target` English, both in lower case, punctuation as it stands.

    Rows are the verses that both Bibles have, the Psalms left out, in the order of the book. Every twentieth of them is
    held out, the first of these for validation, the second for test, and so on.

    Args:
        max_words: the most words of a verse on either side.
        max_train: keeps so many rows of train, from the whole book, whose parts differ; default all.

    Returns splits `train`, `validation` and `test`. Raises `ValueError` for numbers below 1 and for a `max_train` above
    the number of rows there are, `RuntimeError` where the Debian packages aren't installed.
    """
    max_words = as_whole("max_words", max_words, 1)
    source, target = (_verses(name) for name in MODULES.values())
    pairs = [(source[verse], target[verse]) for verse in source if verse in target]
    held_out = pairs[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    parts = {
        "train": [pair for number, pair in enumerate(pairs, 1) if number % HELD_OUT_EVERY],
        "validation": held_out[::2],
        "test": held_out[1::2],
    }
    parts = {
        name: [pair for pair in part if max(len(text.split()) for text in pair) <= max_words]
        for name, part in parts.items()
    }
    if max_train is not None:
        rows = parts["train"]
        most = as_whole("max_train", max_train, 1, len(rows))
        parts["train"] = [rows[index * len(rows) // most] for index in range(most)]
    return DatasetDict(
        {
            name: Dataset.from_dict({"source": [pair[0] for pair in part], "target": [pair[1] for pair in part]})
            for name, part in parts.items()
        }
    )


def parse_verses(listing: str) -> dict[str, str]:
    """Texts by reference of what `diatheke` prints: lines of one verse joined, tags left out, in lower case.

    Example:
        >>> parse_verses("Genesis 1:3: And God said,\\n  <G430> Let there be light.\\n(module)\\n")
        {'Genesis 1:3': 'and god said, let there be light.'}
    """
    found: dict[str, list[str]] = {}
    parts: list[str] = []
    for line in listing.splitlines():
        if re.fullmatch(r"\(\w+\)", line):  # the module's name
            continue
        if start := _REFERENCE.match(line):
            parts = found.setdefault(start[1], [])
            line = line[start.end() :]
        parts.append(_TAG.sub(" ", line))
    texts = {verse: " ".join(" ".join(lines).split()).lower() for verse, lines in found.items()}
    return {verse: text for verse, text in texts.items() if text}


@cache
def _verses(module: str) -> dict[str, str]:
    """A Bible, printed once a process."""
    if shutil.which("diatheke") is None:
        raise RuntimeError(f"install the Debian packages {', '.join(PAIR_PACKAGES)} to get the verses")
    listed = _diatheke("-b", "system", "-k", "modulelist")
    names = [line.split(" :")[0] for line in listed.splitlines() if line.startswith(module)]
    if not names:
        raise RuntimeError(
            f"diatheke has no text whose name begins with {module}: install the Debian packages "
            f"{', '.join(PAIR_PACKAGES)}"
        )
    return parse_verses("".join(_diatheke("-b", names[0], "-f", "plain", "-k", books) for books in RANGES))


def _diatheke(*arguments: str) -> str:
    return subprocess.run(["diatheke", *arguments], capture_output=True, check=True).stdout.decode("utf-8", "replace")
