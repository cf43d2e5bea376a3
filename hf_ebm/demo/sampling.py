"""The tab that samples: a chain, token by token, watched while `generate` runs in a thread of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import gradio as gr
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_ebm.demo.components import (
    CHAIN_COLORS,
    Prompt,
    Runs,
    chain_spans,
    example_prompt,
    fields_of_kernel,
    prompt_fields,
    read_prompt,
    read_settings,
    setting_fields,
    shows_errors,
    stop_button,
    warn_unknown,
)
from hf_ebm.models.energy import EnergyModel
from hf_ebm.sampling.configuration import sampler_names
from hf_ebm.sampling.output import ChainGenerationOutput
from hf_ebm.sampling.warm_start import DECODERS

_SECONDS_BETWEEN_VIEWS = 0.1  # as fast as eyes follow; steps in between are shown together


def sampling_tab(model: EnergyModel, tokenizer: PreTrainedTokenizerBase, runs: Runs, concurrency: dict) -> None:
    """Builds the tab inside the current block.

    Args:
        concurrency: arguments of an event that uses the model.
    """
    with gr.Row():
        with gr.Column():
            prompt_inputs = prompt_fields(*example_prompt(model, tokenizer))
            kernel = gr.Dropdown(list(sampler_names()), value=sampler_names()[0], label="Kernel")
            setting_inputs = setting_fields()
            with gr.Row():
                run_button = gr.Button("Run", variant="primary", elem_id="sample-run")
                stop_button(runs, "sample-stop")
        with gr.Column():
            chain = gr.HighlightedText(
                label="Chain", color_map=CHAIN_COLORS, show_legend=True, interactive=False, elem_id="sample-chain"
            )
            status = gr.Markdown(elem_id="sample-status")
            curve = gr.LinePlot(
                x="epoch",
                y="energy",
                x_axis_format="~g",
                y_title="energy, nats",
                label="Energy by epoch",
                elem_id="sample-curve",
            )

    @shows_errors
    def run(
        text: str,
        length: float,
        kernel: str,
        epochs: float,
        block_size: float,
        temperature: float,
        seed: float,
        request: gr.Request,
    ) -> Iterator[tuple]:
        prompt = read_prompt(model, tokenizer, text, length)
        settings = read_settings(prompt, kernel, epochs, block_size, temperature, seed)
        warn_unknown(prompt.unknown)
        free, drawn = prompt.free[0].tolist(), 0
        with runs.running(request.session_hash) as stop:
            for view in watch_chain(model, prompt, settings, stop):
                spans = chain_spans(model, tokenizer, view.ids, free, view.changed)
                plot = gr.skip()
                if len(view.energies) != drawn:
                    # An update, as skipping is one: going from a plain value to an update and back breaks the plot.
                    plot = gr.update(value=curve_frame(kernel, view.energies, settings["num_epochs"]))
                    drawn = len(view.energies)
                yield spans, status_line(view, settings), plot

    run_button.click(
        run,
        [*prompt_inputs, kernel, *setting_inputs],
        [chain, status, curve],
        show_progress_on=[run_button],  # the outputs show it themselves; an error must not cover them
        **concurrency,
    )
    kernel.change(fields_of_kernel, kernel, setting_inputs, queue=False)


def curve_frame(kernel: str, energies: list[float], epochs: int) -> pd.DataFrame:
    """The energy curve as the plot takes it."""
    return pd.DataFrame(energy_points(kernel, energies, epochs), columns=["epoch", "energy"])


def status_line(view: ChainView, settings: dict) -> str:
    """How far a chain is and what is known about it, in Markdown; rates once the run is over."""
    if "decoder" in settings:
        if view.output is None:
            return "decoding …"
        return f"decoded in {settings['num_epochs']} iterations · energy **{view.energies[-1]:.2f}** nats"
    done, asked = max(0, len(view.energies) - 1), settings["num_epochs"]
    state = "running" if view.output is None else "done" if done == asked else "stopped"
    parts = [f"{state}: epoch {done} of {asked}"]
    if view.energies:
        parts.append(f"energy **{view.energies[-1]:.2f}** nats")
    if view.output is not None:
        acceptance, novel = (getattr(view.output.trace, f"{name}_rate").mean() for name in ("acceptance", "novel"))
        parts.append(f"acceptance rate **{acceptance:.2f}** · novel rate **{novel:.2f}**")
    return " · ".join(parts)


def energy_points(kernel: str, energies: list[float], epochs: int) -> list[tuple[int, float]]:
    """Points (epoch, energy) of a curve, the start at 0; a decoder's one energy is a level line over all epochs."""
    if kernel in DECODERS and energies:
        return [(0, energies[0]), (epochs, energies[0])]
    return list(enumerate(energies))


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
    criterion = None if "decoder" in settings else watcher
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
