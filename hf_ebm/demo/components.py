"""What the tabs share: fields, what a user typed in them, tokens with their colours, runs, mistakes as messages.

The page is for anybody, so the work of one click is bounded here. Every refusal is a `ValueError` that names the field.
"""

from __future__ import annotations

import functools
import html
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import gradio as gr
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_ebm.checks import as_string, check_choice, number, shown
from hf_ebm.model_facts import max_length
from hf_ebm.models.energy import EnergyModel
from hf_ebm.sampling.configuration import sampler_names, settings_without_effect
from hf_ebm.sampling.kernels import KERNELS
from hf_ebm.texts import unknown_of

# Labels of the chain's tokens; what is neither is context.
CHANGED, BLANK = "just changed", "free"
CHAIN_COLORS = {CHANGED: "#f59e0b", BLANK: "#93c5fd"}
# Bounds in nats between the labels of scored tokens: probability 0.37, 0.05 and 0.002.
_BOUNDS = (1.0, 3.0, 6.0)
ENERGY_COLORS = {"below 1 nat": "#d1fae5", "1 to 3": "#fde68a", "3 to 6": "#fdba74", "above 6": "#f87171"}

Spans = list[tuple[str, str | None]]


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


def prompt_fields(text: str, length: int) -> list:
    """Components for a prompt, text and length, with what stands in them at first."""
    text_field = gr.Textbox(
        text,
        label="Text with blanks",
        info="Three underscores or [MASK] make a blank of one token; the rest is context.",
        lines=2,
    )
    length_field = gr.Number(
        length, label="Length", info="Instead of a text, which is then empty: how many tokens to sample from nothing."
    )
    return [text_field, length_field]


def setting_fields() -> list:
    """Components for the settings: epochs, block size, temperature, seed."""
    with gr.Row():
        epochs = gr.Number(20, label="Epochs", info="Each visits every blank once.", min_width=120)
        block_size = gr.Number(1, label="Block size", info="Blanks drawn together.", min_width=120)
    with gr.Row():
        temperature = gr.Number(
            1.0, label="Temperature", info="Of the target exp(-E/τ) of metropolis_hastings.", step=0.1, min_width=120
        )
        seed = gr.Number(0, label="Seed", info="Same seed, same chain.", min_width=120)
    return [epochs, block_size, temperature, seed]


def stop_button(runs: Runs, elem_id: str) -> None:
    """A button that stops the visitor's own run."""

    def stop(request: gr.Request) -> None:
        runs.stop(request.session_hash)

    gr.Button("Stop", elem_id=elem_id).click(stop, queue=False)


def fields_of_kernel(kernel: str) -> list:
    """Updates of `setting_fields`: those without effect on a kernel can't be typed into."""
    samples, targets = kernel in KERNELS, "energy_temperature" not in settings_without_effect(kernel)
    return [gr.update(), gr.update(interactive=samples), gr.update(interactive=targets), gr.update(interactive=samples)]


def chain_spans(
    model: EnergyModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    free: Sequence[bool],
    changed: Sequence[bool],
) -> Spans:
    """A chain's tokens (special ones left out, blanks not) with their labels."""
    special = set(model.config.special_token_ids or []) - {model.config.mask_token_id}
    shown = [position for position, token in enumerate(ids) if token not in special]
    labels = [CHANGED if changed[position] else BLANK if free[position] else None for position in shown]
    return _spans(token_texts(tokenizer, [ids[position] for position in shown]), labels)


def energy_spans(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], energies: Sequence[float]) -> Spans:
    """Tokens labelled by how high their energies in nats are."""
    labels: list[str | None] = [list(ENERGY_COLORS)[sum(energy >= bound for bound in _BOUNDS)] for energy in energies]
    return _spans(token_texts(tokenizer, ids), labels)


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


def _spans(texts: list[str], labels: list[str | None]) -> Spans:
    """Spaces in front of a token are spans of their own, so that no colour runs into them."""
    spans: Spans = []
    for text, label in zip(texts, labels, strict=True):
        word = text.lstrip(" ")
        if len(word) < len(text):
            spans.append((" ", None))
        spans.append((word, label))
    return spans


MAX_TOKENS = 128  # of a text, special tokens included
MAX_EPOCHS = 200
_EXAMPLE = "and the ___ ___ unto the ___ of israel."
_EXAMPLE_LINES = "and god said, let there be light\nand god said, light let there be"
_BLANK = re.compile(r"_{3,}|\[MASK\]|<mask>")


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
    text = _text("text", text).strip()
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
        ids = [*prefix, *[mask] * _whole_number("length", length, 1, room), *suffix]
    else:
        text = _BLANK.sub(lambda _: tokenizer.mask_token, text)
        ids = token_ids(model, tokenizer, "text", text)
        if mask not in ids:
            raise ValueError("text has no blanks; write ___ or [MASK] where words are to be filled in")
        unknown = list(dict.fromkeys(unknown_of(tokenizer, text).parts))
    row = torch.tensor([ids])
    return Prompt(row, row == mask, unknown)


def example_prompt(model: EnergyModel, tokenizer: PreTrainedTokenizerBase) -> tuple[str, int]:
    """A text and a length to begin with, for `read_prompt`: no text where the tokenizer has no tokens for it."""
    try:
        known = not read_prompt(model, tokenizer, _EXAMPLE, 0).unknown
    except ValueError:  # too long
        known = False
    return (_EXAMPLE, 0) if known else ("", 8)


def example_lines(tokenizer: PreTrainedTokenizerBase) -> str:
    """Lines to begin with; "" where the tokenizer has no tokens for them."""
    return "" if unknown_of(tokenizer, _EXAMPLE_LINES).parts else _EXAMPLE_LINES


def read_settings(
    prompt: Prompt, kernel: str, epochs: float | None, block_size: float | None, temperature: float | None,
    seed: float | None,
) -> dict:  # fmt: skip
    """Settings of `generate` by name; those that the kernel has no use for are neither checked nor passed.

    Raises:
        ValueError: naming the field, for what is missing, no number or out of range.
    """
    check_choice("kernel", kernel, sampler_names())
    settings = {
        "kernel" if kernel in KERNELS else "decoder": kernel,
        "num_epochs": _whole_number("epochs", epochs, 1, MAX_EPOCHS),
    }
    settings["seed"] = _whole_number("seed", seed, 0, 2**32 - 1)
    if kernel in KERNELS:
        blanks = int(prompt.free.sum())
        settings["block_size"] = _whole_number("block size", block_size, 1, blanks, f" (there are {blanks} blanks)")
    if "energy_temperature" not in settings_without_effect(kernel):
        settings["energy_temperature"] = _number("temperature", temperature, 0.01, 100)
    return settings


def read_lines(text: str | None, most: int) -> list[str]:
    """The lines of a text that are not blank, without spaces around them. Raises `ValueError` for none or too many."""
    lines = [line.strip() for line in _text("text", text).splitlines() if line.strip()]
    if not lines:
        raise ValueError("there is nothing to score; type a text on each line")
    if len(lines) > most:
        raise ValueError(f"{len(lines)} lines were given; this page scores at most {most} at once")
    return lines


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


def _whole_number(name: str, value: float | None, low: int, high: int, why: str = "") -> int:
    """`value` as an int. Raises `ValueError` unless it is a whole number from `low` to `high`."""
    found = number(value)
    if found is None or not low <= found <= high or found != int(found):
        raise ValueError(f"{name} must be a whole number from {low} to {high}{why}, got {_shown(value)}")
    return int(found)


def _number(name: str, value: float | None, low: float, high: float) -> float:
    """`value` as a float. Raises `ValueError` unless it is a number from `low` to `high`."""
    found = number(value)
    if found is None or not low <= found <= high:
        raise ValueError(f"{name} must be a number from {low} to {high}, got {_shown(value)}")
    return found


def _text(name: str, text: object) -> str:
    if not isinstance(text, str | None):
        raise ValueError(f"{name} must be a text, got {shown(text)}")
    return text or ""


def _shown(value: float | None) -> str:
    return "nothing" if value is None else shown(value)
