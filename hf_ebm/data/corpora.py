"""Corpora of one's own as sequence pairs: CoNLL-2003 files, supertag files and parallel text.

Every loader gives a `datasets.DatasetDict` of the splits that were named, in the files' order, with the columns
`source` and `target`: strings of symbols separated by single spaces. Files are UTF-8 unless said otherwise. What does
not have the stated form is a `ValueError` with the file and the line; only what is documented is skipped.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path

from datasets import Dataset, DatasetDict

from hf_ebm.checks import as_path, as_whole

# "<url>", "</doc>", "<?xml", "<!DOCTYPE", but not "<3" or "< 5", which are text.
_METADATA = re.compile(r"<[/?!]?[A-Za-z]")
_SEGMENT = re.compile(r"<seg\b[^>]*>(.*)</seg>")

Files = Mapping[str, str | PathLike]
Pair = tuple[str, str]


def load_conll2003(files: Files, tag_column: int = -1, encoding: str = "utf-8") -> DatasetDict:
    """Words and tags of files in the column format of CoNLL-2003.

    One token a line: the word first, then further columns, separated by white space, equally many on every line of a
    file (four in the English data, five in the German). A blank line ends a sentence, more of them in a row make no
    empty sentence, and `-DOCSTART-` lines are left out. Tags are taken as they stand (the original files have IOB1).

    Args:
        files: split to path.
        tag_column: which column is the target, counted as Python counts; default the last, the named entity.
        encoding: of the files; the original German data are "latin-1".

    Raises `ValueError` for a line of another form, bytes of another encoding, a column that is not there or is the
    word's, and a file without a sentence.
    """
    tag_column = as_whole("tag_column", tag_column)
    _check_files(files, "files")
    return _dataset_dict({split: list(_read_columns(path, tag_column, encoding)) for split, path in files.items()})


def load_tag_files(files: Files, separator: str = "|") -> DatasetDict:
    """Words and tags of files with one sentence a line, as supertaggers' data from CCGbank come.

    A line holds tokens separated by white space, each `word|POS|CATEGORY` or `word|CATEGORY`: the first field is the
    word and the last the tag, and all tokens of a file have equally many fields. Blank lines are left out.

    Args:
        files: split to path.
        separator: what stands between the fields of a token.

    Raises `ValueError` for a token of another form, a separator that is empty or holds white space, and a file without
    a sentence.
    """
    if not isinstance(separator, str) or not separator or separator.split() != [separator]:
        raise ValueError(f"separator must be a text without white space, got {separator!r}")
    _check_files(files, "files")
    return _dataset_dict({split: list(_read_tagged_lines(path, separator)) for split, path in files.items()})


def load_parallel_text(source_files: Files, target_files: Files) -> DatasetDict:
    """Pairs of aligned lines, in plain text or as the IWSLT campaigns give them out.

    Line n of a source file belongs to line n of the target file after metadata are taken out of both. A line that
    starts with a tag is metadata: `<url>…`, `<title>…`, `<translator …>`, `<doc …>`, … in `train.tags.*`; but
    `<seg id="1"> text </seg>`, as in the development and test files, is the line of text it holds, its character
    references resolved. The two files may have other metadata lines (say, a translator on one side only), but between
    two runs of them, that is in each talk, they must have equally many lines of text, so no stray tag shifts the lines
    that follow. A pair with an empty side is left out, both sides together. White space of any kind becomes one space.

    Args:
        source_files, target_files: split to path, for the same splits.

    Raises `ValueError` for unequal splits, unequal numbers of lines (with both counts), a segment that does not end on
    its line, and files without a pair.
    """
    _check_files(source_files, "source_files")
    _check_files(target_files, "target_files")
    if set(source_files) != set(target_files):
        raise ValueError(
            f"source_files and target_files must have the same splits, got {sorted(source_files)} and "
            f"{sorted(target_files)}"
        )
    return _dataset_dict({split: _read_parallel(path, target_files[split]) for split, path in source_files.items()})


def _check_files(files: Files, name: str) -> None:
    if not isinstance(files, Mapping) or not files:
        raise ValueError(f"{name} must be a dict of split to path with one split or more, got {files!r}")
    for split, path in files.items():
        as_path(f"{name}: the path of split {split!r}", path)


def _dataset_dict(pairs: dict[str, list[Pair]]) -> DatasetDict:
    for split, rows in pairs.items():
        if not rows:
            raise ValueError(f"nothing but blank lines or metadata for split {split!r}")
    return DatasetDict(
        {
            split: Dataset.from_dict(
                {"source": [source for source, _ in rows], "target": [target for _, target in rows]}
            )
            for split, rows in pairs.items()
        }
    )


def _read_lines(path: str | PathLike, encoding: str = "utf-8") -> list[str]:
    """Lines that end with a line feed: `str.splitlines` would also divide at characters that texts hold."""
    raw = Path(path).read_bytes()
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: not {encoding} ({error.reason})") from error
    except LookupError as error:
        raise ValueError(f"encoding must be one that Python knows, got {encoding!r}") from error
    lines = text.removeprefix("\ufeff").split("\n")
    return lines[:-1] if not lines[-1] else lines


def _read_columns(path: str | PathLike, tag_column: int, encoding: str) -> Iterator[Pair]:
    width = 0
    words: list[str] = []
    tags: list[str] = []
    for number, line in enumerate([*_read_lines(path, encoding), ""], 1):
        fields = line.split()
        if not fields or fields[0] == "-DOCSTART-":
            if words:
                yield " ".join(words), " ".join(tags)
            words, tags = [], []
            continue
        width = width or len(fields)
        if len(fields) != width or width < 2:
            raise ValueError(
                f"{path}, line {number}: every line needs equally many columns, two or more, got {len(fields)} where "
                f"the first line has {width}: {line!r}"
            )
        if not 0 < (tag_column if tag_column >= 0 else tag_column + width) < width:
            raise ValueError(
                f"tag_column must be from 1 to {width - 1} or from {1 - width} to -1 for {path}, which has {width} "
                f"columns, got {tag_column}"
            )
        words.append(fields[0])
        tags.append(fields[tag_column])


def _read_tagged_lines(path: str | PathLike, separator: str) -> Iterator[Pair]:
    width = 0
    for number, line in enumerate(_read_lines(path), 1):
        tokens = [token.split(separator) for token in line.split()]
        for fields in tokens:
            width = width or len(fields)
            if len(fields) != width or width < 2 or not (fields[0] and fields[-1]):
                raise ValueError(
                    f"{path}, line {number}: every token needs a word, a tag and equally many fields between "
                    f"{separator!r}, got {separator.join(fields)!r} where the first token has {width}"
                )
        if tokens:
            yield " ".join(fields[0] for fields in tokens), " ".join(fields[-1] for fields in tokens)


def _read_parallel(source_path: str | PathLike, target_path: str | PathLike) -> list[Pair]:
    source, target = _read_talks(source_path), _read_talks(target_path)
    counts = [sum(len(talk) for _, talk in side) for side in (source, target)]
    if counts[0] != counts[1]:
        raise ValueError(
            f"aligned files must have equally many lines of text, got {counts[0]} in {source_path} and {counts[1]} in "
            f"{target_path}"
        )
    for (source_line, source_talk), (target_line, target_talk) in zip(source, target, strict=False):
        if len(source_talk) != len(target_talk):
            raise ValueError(
                f"aligned files must have equally many lines of text between lines of metadata, got {len(source_talk)} "
                f"from {source_path}, line {source_line}, and {len(target_talk)} from {target_path}, line {target_line}"
            )
    pairs = zip(*([text for _, talk in side for text in talk] for side in (source, target)), strict=True)
    return [pair for pair in pairs if all(pair)]


def _read_talks(path: str | PathLike) -> list[tuple[int, list[str]]]:
    """Runs of lines of text between lines of metadata, each with the number of its first line."""
    talks: list[tuple[int, list[str]]] = []
    in_metadata = True
    for number, line in enumerate(_read_lines(path), 1):
        text = " ".join(line.split())
        segment = _SEGMENT.fullmatch(text)
        if text.startswith("<seg") and not segment:
            raise ValueError(f"{path}, line {number}: a segment must end with </seg> on its line, got {line!r}")
        if segment:
            text = " ".join(html.unescape(segment[1]).split())
        elif _METADATA.match(text):
            in_metadata = True
            continue
        if in_metadata:
            talks.append((number, []))
            in_metadata = False
        talks[-1][1].append(text)
    return talks
