"""Blanks of a row and what may fill them: words, numbers of pieces, and blanks that are equal, as spaces of fills."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_ebm.checks import listed, shown, whole, wholes
from hf_ebm.scoring.joint_fills import FillSpace, Slot
from hf_ebm.texts import tokenized

if TYPE_CHECKING:
    from hf_ebm.models.energy.modeling_energy import EnergyModel

# What WordPiece marks pieces with that go on, and byte-level BPE and SentencePiece those that begin.
_MARKS = ("##", "Ġ", "▁")
# Choices of numbers of pieces for a row.
_MOST_LAYOUTS = 64


class Rules(NamedTuple):
    """What fills must be like.

    Attributes:
        words: for each blank the words that may stand there, or `None`; one list is for all blanks.
        pieces: for each blank its least and greatest number of pieces, or `None`; one is for all blanks.
        equal, different: groups of blanks, numbered from 0, that hold the same word, or different ones.
        pattern: what the text of the whole result must hold.
    """

    words: list[str] | list[list[str] | None] | None
    pieces: tuple[int, int] | list[tuple[int, int] | None] | None
    equal: list[list[int]]
    different: list[list[int]]
    pattern: re.Pattern[str] | None

    def of_blanks(self, name: str, row: int, count: int) -> list:
        """Words or pieces of each of a row's blanks."""
        given = getattr(self, name)
        per_blank = isinstance(given, list) and not (given and isinstance(given[0], str))
        if per_blank and len(given) != count:
            raise ValueError(f"{name} has entries for {len(given)} blanks, row {row} has {count}")
        return given if per_blank else [given] * count


def as_rules(words: object, pieces: object, equal: object, different: object, pattern: object) -> Rules:
    """Checked rules. Raises `ValueError` naming the argument, and the blank, for what is none."""
    groups = {"equal": _as_groups("equal", equal), "different": _as_groups("different", different)}
    if isinstance(pattern, str):
        try:
            pattern = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"pattern is no regular expression: {error}") from error
    if not isinstance(pattern, re.Pattern | None):
        raise ValueError(f"pattern must be a regular expression, got {shown(pattern)}")
    return Rules(_as_words(words), _as_pieces(pieces), pattern=pattern, **groups)


def _as_words(words: object) -> list | None:
    if words is None:
        return None
    given = listed(words)
    if not given:
        raise ValueError(f"words must be a list of words, or one for each blank, got {shown(words)}")
    if all(isinstance(word, str) for word in given):
        return given
    for blank, own in enumerate(given):
        inner = None if own is None else listed(own)
        if own is not None and not (inner and all(isinstance(word, str) for word in inner)):
            raise ValueError(f"words: blank {blank} must have a list of one word or more, or None, got {shown(own)}")
    return [None if own is None else listed(own) for own in given]


def _as_pieces(pieces: object) -> tuple[int, int] | list[tuple[int, int] | None] | None:
    if pieces is None:
        return None
    if not isinstance(pieces, list):
        return _as_range(
            f"pieces must be a number, a pair (least, most), or a list of such, got {shown(pieces)}", pieces
        )
    message = "pieces: blank {} must have a number, a pair (least, most), or None, got {}"
    return [None if own is None else _as_range(message.format(n, shown(own)), own) for n, own in enumerate(pieces)]


def _as_range(message: str, pieces: object) -> tuple[int, int]:
    one = whole(pieces)
    found = wholes([one, one] if one is not None else pieces, 1)
    if found is None or len(found) != 2 or found[0] > found[1]:
        raise ValueError(message)
    return found[0], found[1]


def _as_groups(name: str, groups: object) -> list[list[int]]:
    given = [] if groups is None else listed(groups)
    given = [given] if given and wholes(given) else given
    found = [wholes(own) for own in given or []]
    checked = [own for own in found if own is not None and len(set(own)) == len(own) > 1]
    if given is None or len(checked) != len(found):
        raise ValueError(
            f"{name} must be a list of two different numbers of blanks or more, counted from 0, or of such lists, got "
            f"{shown(groups)}"
        )
    return checked


class Blank(NamedTuple):
    """A blank in a layout.

    Attributes:
        positions: (n,) its columns.
        slots: numbers of the slots that fill them.
    """

    positions: Tensor
    slots: list[int]


class Layout(NamedTuple):
    """A row with a number of masks for each blank.

    Attributes:
        space: its fills.
        blanks: one after the other.
        conditions: functions of ids (N, T), infinite where a fill is forbidden.
        texts_are_read: whether a condition decodes.
    """

    space: FillSpace
    blanks: list[Blank]
    conditions: list[Callable[[Tensor], Tensor]]
    texts_are_read: bool


def layouts_of(
    model: EnergyModel,
    tokenizer: PreTrainedTokenizerBase,
    row: int,
    ids: list[int],
    text: str | None,
    support: Tensor,
    rules: Rules,
) -> list[Layout]:
    """Every way to lay out a row's blanks.

    Args:
        ids: of the row; each mask is a blank.
        text: that they are of, if it is known: words are tokenized in it.
        support: (V,) bool, the tokens that may be proposed.

    Raises:
        ValueError: naming row and blank, for a row without blanks, numbers of blanks that there are none of, words
            without a token, and blanks that nothing can fill.
    """
    at = [place for place, token in enumerate(ids) if token == model.config.mask_token_id]
    if not at:
        raise ValueError(f"texts: row {row} holds no mask token {tokenizer.mask_token!r}, so there is nothing to fill")
    for name in ("equal", "different"):
        most = max((blank for group in getattr(rules, name) for blank in group), default=-1)
        if most >= len(at):
            raise ValueError(f"{name} names blank {most}, row {row} has {len(at)}, counted from 0")
    words, pieces = (rules.of_blanks(name, row, len(at)) for name in ("words", "pieces"))
    lists = [
        None if own is None else _tuples(tokenizer, row, blank, at, ids, text, own, support)
        for blank, own in enumerate(words)
    ]
    options = [_numbers(own, given) for own, given in zip(lists, pieces, strict=True)]
    for blank, (own, given) in enumerate(zip(options, pieces, strict=True)):
        if not own:
            raise ValueError(f"words: none of row {row}, blank {blank} has {given[0]} to {given[1]} pieces")
    chosen = [numbers for numbers in product(*options) if all(len({numbers[b] for b in g}) == 1 for g in rules.equal)]
    if len(chosen) > _MOST_LAYOUTS:
        raise ValueError(
            f"pieces: row {row} could be laid out in {len(chosen)} ways, at most {_MOST_LAYOUTS} are tried"
        )
    starts = _word_starts(tokenizer, len(support)) if rules.pieces is not None else None
    found = []
    for numbers in chosen:
        free = [_pieces_of(number, given, support.cpu(), starts) for number, given in zip(numbers, pieces, strict=True)]
        sets = [
            own if tuples is None else [_of_length(tuples, n)]
            for own, tuples, n in zip(free, lists, numbers, strict=True)
        ]
        found += _layout(tokenizer, ids, at, numbers, sets, [tuples is not None for tuples in lists], rules, support)
    if not found:
        raise ValueError(f"equal: row {row} has blanks that no word can fill all of")
    return found


def _numbers(tuples: list[tuple[int, ...]] | None, pieces: tuple[int, int] | None) -> list[int]:
    """Numbers of pieces that a blank may have."""
    least, most = pieces or ((1, 1) if tuples is None else (1, 2**31))
    if tuples is None:
        return list(range(least, most + 1))
    return sorted({len(own) for own in tuples if least <= len(own) <= most})


def _of_length(tuples: list[tuple[int, ...]], number: int) -> Tensor:
    return torch.tensor([own for own in tuples if len(own) == number])


def _pieces_of(number: int, given: tuple[int, int] | None, support: Tensor, starts: Tensor | None) -> list[Tensor]:
    """Candidates (K, 1) of each piece of a blank: of a word, where a number of pieces was given and tokens tell."""
    if given is None or starts is None:
        return [support.nonzero()] * number
    return [(support & starts).nonzero(), *[(support & ~starts).nonzero()] * (number - 1)]


def _layout(
    tokenizer: PreTrainedTokenizerBase,
    ids: list[int],
    at: list[int],
    numbers: Sequence[int],
    sets: list[list[Tensor]],
    are_words: list[bool],
    rules: Rules,
    support: Tensor,
) -> list[Layout]:
    """The layout of these numbers of pieces, none where blanks have nothing in common that must be equal."""
    counts = dict(zip(at, numbers, strict=True))
    row: list[int] = []
    positions: list[list[int]] = []
    for place, token in enumerate(ids):
        count = counts.get(place, 1)
        if place in counts:
            positions.append(list(range(len(row), len(row) + count)))
        row += [token] * count
    slots: list[tuple[list[int], Tensor]] = []
    owners: list[list[int]] = [[] for _ in at]
    for group in _joined(rules.equal, len(at)):
        words = [sets[blank] for blank in group if are_words[blank]]
        if words:  # one slot holds the whole word
            rows = set.intersection(*({tuple(own) for own in one[0].tolist()} for one in words))
            parts = [torch.tensor(sorted(rows))] if rows else [torch.empty(0, 1)]
            where = [[place for blank in group for place in positions[blank]]]
        else:
            parts = [_common([sets[blank][piece] for blank in group]) for piece in range(numbers[group[0]])]
            where = [[positions[blank][piece] for blank in group] for piece in range(numbers[group[0]])]
        for own, part in zip(where, parts, strict=True):
            if not len(part):
                return []
            for blank in group:
                owners[blank].append(len(slots))
            slots.append((own, part.repeat(1, len(group))))
    order = sorted(range(len(slots)), key=lambda number: slots[number][0][0])
    place_of = {number: place for place, number in enumerate(order)}
    device = support.device
    made = tuple(Slot(torch.tensor(slots[n][0], device=device), slots[n][1].to(device)) for n in order)
    blanks = [
        Blank(torch.tensor(own, device=device), [place_of[number] for number in owned])
        for own, owned in zip(positions, owners, strict=True)
    ]
    conditions = [_differ([blanks[blank].positions for blank in group]) for group in rules.different]
    if rules.pattern is not None:
        conditions.append(_matches(rules.pattern, tokenizer))
    template = torch.tensor(row, device=device)
    return [Layout(FillSpace(template, made), blanks, conditions, rules.pattern is not None)]


def _joined(groups: list[list[int]], count: int) -> list[list[int]]:
    """All blanks, those that are equal together; groups that share a blank are one."""
    found = [{blank} for blank in range(count)]
    for group in groups:
        together = set().union(*(own for own in found if own & set(group)))
        found = [own for own in found if not own & together] + [together]
    return sorted(sorted(own) for own in found)


def _common(sets: list[Tensor]) -> Tensor:
    kept = sets[0]
    for own in sets[1:]:
        kept = kept[torch.isin(kept[:, 0], own[:, 0])]
    return kept


def _differ(positions: list[Tensor]) -> Callable[[Tensor], Tensor]:
    pairs = [
        (one, other) for n, one in enumerate(positions) for other in positions[:n] if len(one) == len(other)
    ]  # others differ anyway

    def different(ids: Tensor) -> Tensor:
        same = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for one, other in pairs:
            same |= (ids[:, one] == ids[:, other]).all(1)
        return torch.zeros(len(ids), dtype=torch.float64, device=ids.device).masked_fill(same, torch.inf)

    return different


def _matches(pattern: re.Pattern[str], tokenizer: PreTrainedTokenizerBase) -> Callable[[Tensor], Tensor]:
    def pattern_holds(ids: Tensor) -> Tensor:
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        return torch.tensor([0.0 if pattern.search(text) else torch.inf for text in texts], device=ids.device)

    return pattern_holds


def _word_starts(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Tensor | None:
    """(V,) bool: the tokens that begin a word, where WordPiece, byte-level BPE or SentencePiece marks them."""
    tokens = [str(token) for token in tokenizer.convert_ids_to_tokens(list(range(min(vocab_size, len(tokenizer)))))]
    tokens += [""] * (vocab_size - len(tokens))
    if any(token.startswith(_MARKS[0]) for token in tokens):
        return torch.tensor([not token.startswith(_MARKS[0]) for token in tokens])
    marked = torch.tensor([token.startswith(_MARKS[1:]) for token in tokens])
    return marked if bool(marked.any()) else None


def _tuples(
    tokenizer: PreTrainedTokenizerBase,
    row: int,
    blank: int,
    at: list[int],
    ids: list[int],
    text: str | None,
    words: list[str],
    support: Tensor,
) -> list[tuple[int, ...]]:
    """Tokens of each word where the blank is. Raises `ValueError` for a word that has none."""
    parts = [] if text is None else text.split(tokenizer.mask_token)
    in_place = len(parts) == len(at) + 1
    before, after, vocabulary = ids[: at[blank]], ids[at[blank] + 1 :], tokenizer.get_vocab()
    found = []
    for word in words:
        pieces = [vocabulary[word]] if word in vocabulary and word.startswith(_MARKS) else None
        if pieces is None and in_place:
            start, end = (tokenizer.mask_token.join(own) for own in (parts[: blank + 1], parts[blank + 1 :]))
            whole_row = list(tokenized(tokenizer, "texts", row, start + word + end)["input_ids"])
            stop = len(whole_row) - len(after)
            if whole_row[: len(before)] == before and stop > len(before) and whole_row[stop:] == after:
                pieces = whole_row[len(before) : stop]
        if pieces is None and word in vocabulary:
            pieces = [vocabulary[word]]
        if pieces is None:
            pieces = list(tokenized(tokenizer, "words", row, word, add_special_tokens=False)["input_ids"])
        if not pieces or max(pieces) >= len(support) or not bool(support[torch.tensor(pieces)].all()):
            raise ValueError(
                f"words: {word!r} of row {row}, blank {blank} has no tokens that may be proposed; its tokens are "
                f"{list(tokenizer.convert_ids_to_tokens(pieces))}"
            )
        found.append(tuple(pieces))
    return list(dict.fromkeys(found))
