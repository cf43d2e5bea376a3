"""Mistakes of a user's become messages on the page."""

from __future__ import annotations

import functools
import html
import inspect
from collections.abc import Callable
from typing import Any

import gradio as gr


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
