"""Spanish to English from two Bibles in the public domain: Reina-Valera 1909 and the World English Bible, by verse.

The Debian packages `sword-text-sparv` and `sword-text-web` hold the texts, `diatheke` prints them.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache

from datasets import Dataset, DatasetDict

from hf_ebm.checks import as_whole
from hf_ebm.data.kjv import HELD_OUT_EVERY

DEBIAN_PACKAGES = ("diatheke", "sword-text-sparv", "sword-text-web")
MODULES = {"source": "spaRV", "target": "engWEB"}  # how the names that diatheke lists begin
RANGES = ("Gen-Job", "Prov-Mal", "Matt-Rev")  # a psalm's title would be printed with all verses from there on
_REFERENCE = re.compile(r"((?:I{1,3} )?[A-Z][a-z]+(?: of [A-Z][a-z]+)? \d+:\d+): ")
_TAG = re.compile(r"<[^<>]*>")


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
        raise RuntimeError(f"install the Debian packages {', '.join(DEBIAN_PACKAGES)} to get the verses")
    listed = _diatheke("-b", "system", "-k", "modulelist")
    names = [line.split(" :")[0] for line in listed.splitlines() if line.startswith(module)]
    if not names:
        raise RuntimeError(
            f"diatheke has no text whose name begins with {module}: install the Debian packages "
            f"{', '.join(DEBIAN_PACKAGES)}"
        )
    return parse_verses("".join(_diatheke("-b", names[0], "-f", "plain", "-k", books) for books in RANGES))


def _diatheke(*arguments: str) -> str:
    return subprocess.run(["diatheke", *arguments], capture_output=True, check=True).stdout.decode("utf-8", "replace")
