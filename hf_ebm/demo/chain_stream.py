"""A chain watched while it runs: `generate` in a thread of its own, its steps as an iterator."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_ebm.demo.prompts import Prompt
from hf_ebm.models.energy import EnergyModel
from hf_ebm.sampling.output import ChainGenerationOutput
from hf_ebm.sampling.warm_start import DECODERS

_SECONDS_BETWEEN_VIEWS = 0.1  # as fast as eyes follow; steps in between are shown together


@dataclass(frozen=True)
class ChainView:
    """A chain at some moment.

    Attributes:
        ids: its T tokens.
        changed: for each, whether it changed since the view before.
        energies: energy in nats at the start and after each epoch that is done; `mask_predict` has the last one alone.
        output: what `generate` returned, once the run is over.
    """

    ids: list[int]
    changed: list[bool]
    energies: list[float]
    output: ChainGenerationOutput | None = None


def watch_chain(model: EnergyModel, prompt: Prompt, settings: dict, stop: threading.Event) -> Iterator[ChainView]:
    """Runs one chain and yields views of it; the last one has the output.

    Setting `stop` ends the run after the epoch it is in, with the output so far. So does closing the iterator. With the
    decoder, which is short, there is nothing to watch or to stop.

    Raises:
        ValueError: what `generate` raises.
    """
    events: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_run, args=(model, prompt, settings, stop, events), daemon=True).start()
    try:
        start = prompt.ids[0].tolist()
        view = ChainView(start, [False] * len(start), [])
        yield view
        while view.output is None:
            seen = time.monotonic()
            view = _after(view, _waiting(events))
            yield view
            time.sleep(max(0.0, _SECONDS_BETWEEN_VIEWS - (time.monotonic() - seen)))
    finally:
        stop.set()


def _waiting(events: queue.SimpleQueue) -> list:
    """All events there are; waits for the first."""
    found = [events.get()]
    while not events.empty():
        found.append(events.get())
    return found


def _after(view: ChainView, events: list) -> ChainView:
    """The next view: all that happened since the last one."""
    ids, energies, output = torch.tensor(view.ids), list(view.energies), None
    changed = torch.zeros_like(ids, dtype=torch.bool)
    for event in events:
        if isinstance(event, BaseException):
            raise event
        if isinstance(event, Tensor):
            changed |= event != ids
            ids = event
        elif isinstance(event, float):
            energies.append(event)
        else:
            output = event
    return replace(view, ids=ids.tolist(), changed=changed.tolist(), energies=energies, output=output)


def _run(model: EnergyModel, prompt: Prompt, settings: dict, stop: threading.Event, events: queue.SimpleQueue) -> None:
    """Puts what the watcher sees, then the output or the error."""
    watcher = _Watcher(model, prompt, stop, events)
    criterion = None if settings["kernel"] in DECODERS else watcher
    try:
        output = model.generate(
            prompt.ids, free_mask=prompt.free, stopping_criteria=criterion, streamer=watcher, **settings
        )
        events.put(output)
    except Exception as error:  # raised again where somebody is listening
        events.put(error)


class _Watcher:
    """A streamer that is a stopping criterion too: hands on the tokens of the first chain, and its energy where due.

    The run keeps its trace to itself until it is over, so energies are evaluated anew: one masked row for each blank.
    """

    def __init__(self, model: EnergyModel, prompt: Prompt, stop: threading.Event, events: queue.SimpleQueue):
        self.model, self.prompt, self.stop, self.events = model, prompt, stop, events

    def put(self, ids: Tensor) -> None:
        """The tokens at the start, or those that a decoder ends with."""
        self.put_draft(ids)
        self._put_energy(ids)

    def put_draft(self, ids: Tensor) -> None:
        """The tokens after a step."""
        self.events.put(ids[0].clone())

    def end(self) -> None:
        """Nothing to do: the output follows."""

    def __call__(self, ids: Tensor, scores: None) -> Tensor:
        """Called after every epoch: whether to stop."""
        self._put_energy(ids)
        return torch.full((len(ids),), self.stop.is_set(), device=ids.device)

    def _put_energy(self, ids: Tensor) -> None:
        self.events.put(float(self.model(ids[:1], free_mask=self.prompt.free).energy))
