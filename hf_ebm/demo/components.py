"""What the tabs share: fields, tokens with their colours, a visitor's runs, and mistakes as messages on the page."""

from __future__ import annotations

import functools
import html
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import gradio as gr
from transformers import PreTrainedTokenizerBase

from hf_ebm.models.energy import EnergyModel
from hf_ebm.sampling.configuration import settings_without_effect
from hf_ebm.sampling.kernels import KERNELS

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
