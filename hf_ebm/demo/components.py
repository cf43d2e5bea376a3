"""What the tabs share: examples, fields, what a user typed in them, tokens as texts, runs, mistakes as messages.

The page is for anybody, so the work of one click is bounded here. Every refusal is a `ValueError` that names the field.
"""

from __future__ import annotations

import functools
import html
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import gradio as gr
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_ebm.checks import as_string, number, shown
from hf_ebm.model_facts import max_length
from hf_ebm.models.energy import EnergyModel
from hf_ebm.texts import unknown_of

Spans = list[tuple[str, str | None]]


class Page(NamedTuple):
    """What a tab is made for: a function of this builds it inside the current block.

    Attributes:
        examples: that the model has tokens for.
        runs: those in progress.
        event: arguments of an event that uses the model.
    """

    model: EnergyModel
    tokenizer: PreTrainedTokenizerBase
    examples: Examples
    runs: Runs
    event: dict[str, Any]


class Runs:
    """Runs in progress by session, at most one each: the page runs one thing at a time."""

    def __init__(self) -> None:
        self._stops: dict[str | None, threading.Event] = {}

    @contextmanager
    def running(self, session: str | None) -> Iterator[threading.Event]:
        """A run of a session's; the event is set when it is asked to stop."""
        stop = self._stops[session] = threading.Event()
        try:
            yield stop
        finally:
            stop.set()
            self._stops.pop(session, None)

    def stop(self, session: str | None) -> None:
        """Asks the session's run to stop, if there is one."""
        stop = self._stops.get(session)
        if stop is not None:
            stop.set()


def shows_errors(handler: Callable) -> Callable:
    """Makes a `ValueError` of an event's handler (a function or a generator) a message on the page."""
    if inspect.isgeneratorfunction(handler):

        @functools.wraps(handler)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            try:
                yield from handler(*args, **kwargs)
            except ValueError as error:
                raise _message(error) from error
    else:

        @functools.wraps(handler)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            try:
                return handler(*args, **kwargs)
            except ValueError as error:
                raise _message(error) from error

    return wrapped


def warn_unknown(parts: list[str]) -> None:
    """A warning on the page for what the tokenizer has no token for; none without such."""
    if parts:
        named = ", ".join(map(repr, parts[:5])) + (", …" if len(parts) > 5 else "")
        text = f"The model has no token for {named} and sees an unknown token there; energies say little about it."
        gr.Warning(html.escape(text))


def _message(error: ValueError) -> gr.Error:
    # Messages are rendered as HTML, and this one may quote what a user typed.
    return gr.Error(html.escape(str(error)), title="This cannot be done", print_exception=False)


def prompt_fields(page: Page) -> list:
    """Components for a prompt, text and length; the first example stands in them, others are there to click."""
    prompts = [*((text, 0) for text in page.examples.prompts), ("", 8)]
    text = gr.Textbox(
        prompts[0][0],
        label="Text with blanks",
        info="Three underscores or [MASK] make a blank of one token; the rest is context.",
        lines=2,
    )
    length = gr.Number(
        prompts[0][1],
        label="Length",
        info="Instead of a text, which is then empty: how many tokens to sample from nothing.",
    )
    more_examples({own or f"{count} tokens": (own, count) for own, count in prompts}, [text, length])
    return [text, length]


def more_examples(examples: Mapping[str, Sequence], fields: list) -> None:
    """Examples by label that fill the fields when they are clicked."""
    if examples:
        rows, labels = list(map(list, examples.values())), list(examples)
        gr.Examples(
            rows, fields, example_labels=labels, cache_examples=False, preload=False, label="Examples: click, then run"
        )


def stop_button(runs: Runs, elem_id: str) -> None:
    """A button that stops the visitor's own run."""

    def stop(request: gr.Request) -> None:
        runs.stop(request.session_hash)

    gr.Button("Stop", elem_id=elem_id).click(stop, queue=False)


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The characters that each token adds to the text before it.

    Where a token adds nothing (a space in front) or changes that text (the bytes of one character can be several
    tokens), its name is shown instead.
    """
    texts, before = [], ""
    for text, token in zip(
        tokenizer.batch_decode([list(ids[: end + 1]) for end in range(len(ids))]),
        tokenizer.convert_ids_to_tokens(list(ids)),
        strict=True,
    ):
        texts.append(text[len(before) :] if text.startswith(before) and len(text) > len(before) else token)
        before = text
    return texts


def spaced(texts: list[str], labels: list[str | None]) -> Spans:
    """Spaces in front of a token are spans of their own, so that no colour runs into them."""
    spans: Spans = []
    for text, label in zip(texts, labels, strict=True):
        word = text.lstrip(" ")
        if len(word) < len(text):
            spans.append((" ", None))
        spans.append((word, label))
    return spans


MAX_TOKENS = 128  # of a text, special tokens included
_BLANK = re.compile(r"_{3,}|\[MASK\]|<mask>")


class Examples(NamedTuple):
    """What stands in the fields at first, and more to click: nothing where a model has no tokens for any of it.

    Attributes:
        prompts: texts with blanks.
        fills: texts with blanks, and words for these with commas between them.
        lines: groups of texts to score.
        references: sequences of letters, and the letters that may stand in each.
    """

    prompts: tuple[str, ...] = ()
    fills: tuple[tuple[str, str], ...] = ()
    lines: tuple[str, ...] = ()
    references: tuple[tuple[str, str], ...] = ()


_LETTERS, _AMINO_ACIDS = "abcdefghijklmnopqrstuvwxyz", "ACDEFGHIKLMNPQRSTVWY"


def _proteins(space: str) -> Examples:
    """Of proteins, for tokenizers that want spaces between letters or don't."""
    whole, blanks = "MKTAYIAKQRQISFVKSHFSRQ", ("MKTAYIAKQR___ISF___KSHFSRQ", "MK___YIAKQRQIS___VKSHFSRQ")
    spaced = [space.join(re.findall("___|.", text)) for text in (*blanks, whole, whole.replace("Q", "P"))]
    return Examples(tuple(spaced[:2]), ((spaced[0], ""),), ("\n".join(spaced[2:]),), ((whole, _AMINO_ACIDS),))


# Of English, of the spelling and the phonemes of words, of proteins, of chemical reactions.
EXAMPLES = (
    Examples(
        (
            "and the ___ ___ unto the ___ of israel.",
            "blessed are the ___: for they shall ___ ___.",
            "the ___ of the ___ is ___ ___ ___.",
        ),
        (
            ("the king of ___ and the king of ___", "israel, judah, egypt, babylon"),
            ("and the ___ said unto ___", ""),
            ("he ___ the ___ of the lord", ""),
        ),
        (
            "and god said, let there be light\nand god said, light let there be",
            "the sons of jacob were twelve\nthe sons of jacob was twelve\nthe son of jacob were twelve",
        ),
        (("light", _LETTERS), ("heaven", _LETTERS)),
    ),
    Examples(
        ("p h o n e </s> ___ ___ ___", "e n e r g y </s> ___ ___ ___ ___ ___"),
        (("k n i g h t </s> ___ ___ ___", ""), ("r e a d </s> R ___ D", "")),
    ),
    *map(_proteins, ("", " ")),
    Examples(
        ("CC(=O)___.OCC>>CC(=O)OCC", "CC(=O)Cl.NCc1ccccc1>>CC(=O)___Cc1ccccc1"),
        (("CC(=O)Cl.___Cc1ccccc1>>CC(=O)___Cc1ccccc1", "N, O, S, C"), ("CC(=O)___.OCC>>CC(=O)OCC", "")),
        ("CC(=O)Cl.NCc1ccccc1>>CC(=O)NCc1ccccc1\nCC(=O)Cl.NCc1ccccc1>>CC(=O)OCc1ccccc1",),
        (("CC(=O)Oc1ccccc1C(=O)O", "CNOSFcnos"),),
    ),
)


def examples_for(model: EnergyModel, tokenizer: PreTrainedTokenizerBase) -> Examples:
    """The first examples that are short enough and that the tokenizer has tokens for."""

    def known(text: str) -> bool:
        typed = with_masks(tokenizer, text)
        return not unknown_of(tokenizer, typed).parts and len(tokenizer(typed)["input_ids"]) <= token_limit(model)

    def texts(own: Examples) -> list[str]:
        return [*own.prompts, *(text for text, _ in own.fills), *"\n".join(own.lines).splitlines()]

    return next((own for own in EXAMPLES if all(map(known, texts(own)))), Examples())


def with_masks(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """A text with the tokenizer's mask for a run of three or more underscores, `[MASK]` and `<mask>`."""
    return _BLANK.sub(lambda _: tokenizer.mask_token, text)


class Prompt(NamedTuple):
    """Where chains start.

    Attributes:
        ids: (1, T) token ids, with masks at the blanks.
        free: (1, T) bool, the blanks.
        unknown: what the tokenizer has no token for, as it was typed.
    """

    ids: Tensor
    free: Tensor
    unknown: list[str]


def read_prompt(
    model: EnergyModel, tokenizer: PreTrainedTokenizerBase, text: str | None, length: float | None
) -> Prompt:
    """The prompt that a text with blanks is, or one of `length` blanks and nothing else; length 0 or `None` is none.

    A run of three or more underscores, `[MASK]` and `<mask>` are one blank each, whatever the model's mask token.

    Raises:
        ValueError: unless exactly one of text and length is given; for a text without blanks or with too many tokens.
    """
    text = text_of("text", text).strip()
    by_length = length is not None and number(length) != 0
    if text and by_length:
        raise ValueError("text and length were both given; clear the text or set the length to 0")
    if not text and not by_length:
        raise ValueError("there is nothing to sample; type a text with blanks (___ or [MASK]) or give a length")
    prefix, suffix = model.config.prefix_token_ids or [], model.config.suffix_token_ids or []
    mask = -1 if model.config.mask_token_id is None else model.config.mask_token_id
    unknown: list[str] = []
    if by_length:
        room = token_limit(model) - len(prefix) - len(suffix)
        ids = [*prefix, *[mask] * whole_number("length", length, 1, room), *suffix]
    else:
        text = with_masks(tokenizer, text)
        ids = token_ids(model, tokenizer, "text", text)
        if mask not in ids:
            raise ValueError("text has no blanks; write ___ or [MASK] where words are to be filled in")
        unknown = list(dict.fromkeys(unknown_of(tokenizer, text).parts))
    row = torch.tensor([ids])
    return Prompt(row, row == mask, unknown)


def token_limit(model: EnergyModel) -> int:
    """The longest text the page takes for a model, in tokens, special tokens included."""
    return min(MAX_TOKENS, max_length(model.mlm, model.config.max_sequence_length) or MAX_TOKENS)


def token_ids(model: EnergyModel, tokenizer: PreTrainedTokenizerBase, name: str, text: str) -> list[int]:
    """Ids of a text. Raises `ValueError`, naming it, where it can't be tokenized or is too long; nothing is cut."""
    as_string(name, text)
    try:
        ids = list(tokenizer(text, verbose=False)["input_ids"])
    except Exception as error:  # tokenizers raise what they like on text they can't take
        raise ValueError(f"{name} cannot be tokenized: {error}") from error
    if len(ids) > token_limit(model):
        raise ValueError(f"{name} is too long: it has {len(ids)} tokens, at most {token_limit(model)} fit")
    return ids


def whole_number(name: str, value: float | None, low: int, high: int, why: str = "") -> int:
    """`value` as an int. Raises `ValueError` unless it is a whole number from `low` to `high`."""
    found = number(value)
    if found is None or not low <= found <= high or found != int(found):
        raise ValueError(f"{name} must be a whole number from {low} to {high}{why}, got {_shown(value)}")
    return int(found)


def ranged_number(name: str, value: float | None, low: float, high: float) -> float:
    """`value` as a float. Raises `ValueError` unless it is a number from `low` to `high`."""
    found = number(value)
    if found is None or not low <= found <= high:
        raise ValueError(f"{name} must be a number from {low} to {high}, got {_shown(value)}")
    return found


def text_of(name: str, text: object) -> str:
    if not isinstance(text, str | None):
        raise ValueError(f"{name} must be a text, got {shown(text)}")
    return text or ""


def _shown(value: float | None) -> str:
    return "nothing" if value is None else shown(value)
