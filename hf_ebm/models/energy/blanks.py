"""Blanks of rows that callers give, and what may fill them: words, numbers of pieces, and blanks that are equal, as
spaces of fills.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_ebm.checks import as_ids, as_mask, listed, shown, whole, wholes
from hf_ebm.model_facts import limit_of
from hf_ebm.models.energy.chains import proposal_support
from hf_ebm.models.energy.encoding import check_encoded, encode_plain
from hf_ebm.models.energy.inputs import by_row, check_inputs, context_of
from hf_ebm.runtime import where_float64_is
from hf_ebm.sampling.target import ExtraEnergy, Target
from hf_ebm.scoring.joint_fills import FillSpace, Slot
from hf_ebm.scoring.rows import Runner
from hf_ebm.texts import as_texts, report_unknown, word_ids, word_starts

if TYPE_CHECKING:
    from hf_ebm.models.energy.modeling_energy import EnergyModel

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

    def further(self, runner: Runner, energy: str, extra: tuple[ExtraEnergy, ...]) -> Callable[[Tensor], Tensor] | None:
        """Extra energies and conditions as one function of ids; `None` where there are none."""
        extra = (*extra, *((1.0, condition) for condition in self.conditions))
        if not extra:
            return None
        nothing, free = torch.zeros(1, dtype=torch.long), torch.zeros_like(self.space.ids[None], dtype=torch.bool)
        target = Target(runner, energy, free, nothing, nothing, free[0], None, extra)
        return lambda ids: target.extra_energy(ids.cpu()).to(ids.device)  # those of chains, which lie on the host


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
    starts = word_starts(tokenizer, len(support)) if rules.pieces is not None else None
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
    device = where_float64_is(support.device)
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
    around = (ids[: at[blank]], ids[at[blank] + 1 :])
    texts = None
    if len(parts) == len(at) + 1:
        texts = tuple(str(tokenizer.mask_token).join(own) for own in (parts[: blank + 1], parts[blank + 1 :]))
    found = []
    for word in words:
        pieces = word_ids(tokenizer, row, word, texts, around)
        if not pieces or max(pieces) >= len(support) or not bool(support[torch.tensor(pieces)].all()):
            raise ValueError(
                f"words: {word!r} of row {row}, blank {blank} has no tokens that may be proposed; its tokens are "
                f"{list(tokenizer.convert_ids_to_tokens(pieces))}"
            )
        found.append(tuple(pieces))
    return list(dict.fromkeys(found))


class BlankRow(NamedTuple):
    """One row.

    Attributes:
        layouts: every way to lay out its blanks.
        source: (1, S) ids that an encoder-decoder model conditions on.
        further_inputs: what else the model reads, by name.
    """

    layouts: list[Layout]
    source: Tensor | None
    further_inputs: dict[str, Any]

    @property
    def can_be_chained(self) -> bool:
        """Whether chains of single tokens can move: one layout, a slot for each position."""
        return len(self.layouts) == 1 and all(len(slot.positions) == 1 for slot in self.layouts[0].space.slots)


def blank_rows(
    model: EnergyModel,
    texts: Iterable[str] | str | os.PathLike | Tensor,
    tokenizer: PreTrainedTokenizerBase,
    rules: Rules,
    attention_mask: Tensor | None,
    encoder_texts: Iterable[str] | None,
    further_inputs: Mapping[str, Any] | None,
    unknown_tokens: str,
) -> list[BlankRow]:
    """Every row, checked. Arguments are those of `fill`, in evaluation mode."""
    rows, spelled = _rows(model, texts, tokenizer, attention_mask, unknown_tokens)
    sources = _sources(model, tokenizer, encoder_texts, len(rows), unknown_tokens)
    inputs = by_row(further_inputs or {}, len(rows), "texts")
    support = proposal_support(model, None)
    limit = limit_of(model.mlm, model.config.max_sequence_length, tokenizer)
    found = []
    for row, ids in enumerate(rows):
        text = None if spelled is None else spelled[row]
        layouts = layouts_of(model, tokenizer, row, ids, text, support, rules)
        for layout in layouts:
            check_encoded(model, limit, "texts", row, layout.space.ids.tolist())
        source = None if sources is None else torch.tensor([sources[row]])
        own = {name: int(values[row]) for name, values in inputs.items()}
        found.append(BlankRow([_with_context(model, layout, source, own) for layout in layouts], source, own))
    return found


def _rows(
    model: EnergyModel,
    texts: Iterable[str] | str | os.PathLike | Tensor,
    tokenizer: PreTrainedTokenizerBase,
    attention_mask: Tensor | None,
    unknown_tokens: str,
) -> tuple[list[list[int]], list[str] | None]:
    """Ids of every row, and the texts where these were given."""
    if isinstance(texts, Tensor):
        ids = as_ids("texts", texts)
        sequences = check_inputs(model, ids, as_mask("attention_mask", attention_mask, ids)).sequences
        ends = zip(sequences.start.tolist(), sequences.stop.tolist(), strict=True)
        return [ids[row, start:stop].tolist() for row, (start, stop) in enumerate(ends)], None
    if attention_mask is not None:
        raise ValueError("attention_mask was given with texts; it is for token ids")
    spelled = as_texts("texts", texts)
    rows = encode_plain(model, tokenizer, "texts", spelled)
    report_unknown(tokenizer, "texts", spelled, unknown_tokens)
    return rows, spelled


def _sources(
    model: EnergyModel,
    tokenizer: PreTrainedTokenizerBase,
    encoder_texts: Iterable[str] | None,
    count: int,
    unknown_tokens: str,
) -> list[list[int]] | None:
    conditional, given = model.mlm.config.is_encoder_decoder, encoder_texts is not None
    if conditional != given:
        role = "is an encoder-decoder, its energy is conditional on" if conditional else "has no encoder to take"
        raise ValueError(f"encoder_texts: {type(model.mlm).__name__} {role} an encoder input")
    if encoder_texts is None:
        return None
    sources = as_texts("encoder_texts", encoder_texts)
    if len(sources) != count:
        raise ValueError(f"encoder_texts has {len(sources)} rows, texts has {count}; they must be equal")
    report_unknown(tokenizer, "encoder_texts", sources, unknown_tokens)
    return encode_plain(model, tokenizer, "encoder_texts", sources)


def _with_context(model: EnergyModel, layout: Layout, source: Tensor | None, further: dict[str, Any]) -> Layout:
    sequences = check_inputs(model, layout.space.ids[None]).sequences
    return layout._replace(space=layout.space._replace(context=context_of(model, sequences, source, None, further)))
