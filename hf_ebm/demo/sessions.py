"""Which run belongs to which visitor, so that a visitor's button stops the visitor's own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
