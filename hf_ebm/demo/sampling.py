"""The tab that samples: chains, token by token, watched while `generate` runs in a thread of its own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gradio as gr
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_ebm.checks import check_choice
from hf_ebm.demo.components import (
    Page,
    Prompt,
    Spans,
    prompt_fields,
    ranged_number,
    read_prompt,
    shows_errors,
    spaced,
    stop_button,
    token_texts,
    warn_unknown,
    whole_number,
)
from hf_ebm.models.energy import EnergyModel
from hf_ebm.sampling.configuration import sampler_names, settings_without_effect
from hf_ebm.sampling.convergence import energy_diagnostics
from hf_ebm.sampling.kernels import KERNELS
from hf_ebm.sampling.run import ChainGenerationOutput
from hf_ebm.sampling.warm_start import DECODERS

MAX_CHAINS, MAX_EPOCHS = 8, 200
# Labels of the chain's tokens; what is neither is context.
CHANGED, BLANK = "just changed", "free"
CHAIN_COLORS = {CHANGED: "#f59e0b", BLANK: "#93c5fd"}
# Of the curves of chains or kernels.
CURVE_COLORS = ("#2563eb", "#dc2626", "#16a34a", "#9333ea", "#ea580c", "#0891b2", "#ca8a04", "#db2777")
CHAIN_CURVES = {str(number): color for number, color in enumerate(CURVE_COLORS[:MAX_CHAINS], 1)}
_SECONDS_BETWEEN_VIEWS = 0.1  # as fast as eyes follow; steps in between are shown together


def sampling_tab(page: Page) -> None:
    """Chains from a prompt, as they change, with the curves of their energies."""
    model, tokenizer = page.model, page.tokenizer
    with gr.Row():
        with gr.Column():
            prompt_inputs = prompt_fields(page)
            with gr.Row():
                run_button = gr.Button("Run", variant="primary", elem_id="sample-run")
                stop_button(page.runs, "sample-stop")
            with gr.Row():
                kernel = gr.Dropdown(list(sampler_names()), value=sampler_names()[0], label="Kernel")
                chains = gr.Number(4, label="Chains", info=f"Each from its own draws, at most {MAX_CHAINS}.")
            setting_inputs = setting_fields()
        with gr.Column():
            shown = gr.HighlightedText(
                label="Chains", color_map=CHAIN_COLORS, show_legend=True, interactive=False, elem_id="sample-chain"
            )
            status = gr.Markdown(elem_id="sample-status")
            curve = gr.LinePlot(
                x="epoch",
                y="energy",
                color="chain",
                color_map=CHAIN_CURVES,
                x_axis_format="~g",
                y_title="energy, nats",
                label="Energy by epoch",
                elem_id="sample-curve",
            )
            gr.Markdown(
                "Split R-hat compares the energies of the chains over the later half of the epochs: near 1 the chains "
                "agree, above 1.1 they need more epochs, or blocks."
            )

    @shows_errors
    def sample(
        text: str,
        length: float,
        kernel: str,
        chains: float,
        epochs: float,
        block_size: float,
        temperature: float,
        seed: float,
        request: gr.Request,
    ) -> Iterator[tuple]:
        prompt = read_prompt(model, tokenizer, text, length)
        settings = read_settings(prompt, kernel, epochs, block_size, temperature, seed)
        if kernel in KERNELS:
            settings["num_chains"] = whole_number("chains", chains, 1, MAX_CHAINS)
        warn_unknown(prompt.unknown)
        free, drawn = prompt.free[0].tolist(), 0
        with page.runs.running(request.session_hash) as stop:
            for view in watch_chains(model, prompt, settings, stop):
                spans = chains_spans(model, tokenizer, view, free)
                plot = gr.skip()
                if len(view.energies) != drawn:
                    # An update, as skipping is one: going from a plain value to an update and back breaks the plot.
                    named: dict[str, Any] = {} if drawn else {"colors_in_legend": list(CHAIN_CURVES)[: len(view.ids)]}
                    plot = gr.update(value=curve_frame(kernel, view.energies, settings["num_epochs"]), **named)
                    drawn = len(view.energies)
                yield spans, status_line(view, settings), plot

    run_button.click(
        sample,
        [*prompt_inputs, kernel, chains, *setting_inputs],
        [shown, status, curve],
        show_progress_on=[run_button],  # the outputs show it themselves; an error must not cover them
        **page.event,
    )
    kernel.change(fields_of_kernel, kernel, [chains, *setting_inputs], queue=False)


def setting_fields() -> list:
    """Components for the settings: epochs, block size, temperature, seed."""
    with gr.Row():
        epochs = gr.Number(20, label="Epochs", info="Each visits every blank once.", min_width=120)
        block_size = gr.Number(1, label="Block size", info="Blanks drawn together.", min_width=120)
    with gr.Row():
        temperature = gr.Number(
            1.0, label="Temperature", info="Of the target exp(-E/τ) of metropolis_hastings.", step=0.1, min_width=120
        )
        seed = gr.Number(0, label="Seed", info="Same seed, same chains.", min_width=120)
    return [epochs, block_size, temperature, seed]


def fields_of_kernel(kernel: str) -> list:
    """Updates of the number of chains and of `setting_fields`: what has no effect on a kernel can't be typed into."""
    samples, targets = kernel in KERNELS, "energy_temperature" not in settings_without_effect(kernel)
    return [gr.update(interactive=usable) for usable in (samples, True, samples, targets, samples)]


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
        "num_epochs": whole_number("epochs", epochs, 1, MAX_EPOCHS),
    }
    settings["seed"] = whole_number("seed", seed, 0, 2**32 - 1)
    if kernel in KERNELS:
        blanks = int(prompt.free.sum())
        settings["block_size"] = whole_number("block size", block_size, 1, blanks, f" (there are {blanks} blanks)")
    if "energy_temperature" not in settings_without_effect(kernel):
        settings["energy_temperature"] = ranged_number("temperature", temperature, 0.01, 100)
    return settings


def chains_spans(model: EnergyModel, tokenizer: PreTrainedTokenizerBase, view: ChainsView, free: list[bool]) -> Spans:
    """The tokens of all chains, a numbered line each; of one alone without a number."""
    spans: Spans = []
    for number, (ids, changed) in enumerate(zip(view.ids, view.changed, strict=True), 1):
        spans += [(f"{number}. ", None)] if len(view.ids) > 1 else []
        spans += [*chain_spans(model, tokenizer, ids, free, changed), ("\n", None)]
    return spans[:-1]


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
    return spaced(token_texts(tokenizer, [ids[position] for position in shown]), labels)


def curve_frame(kernel: str, energies: list[list[float]], epochs: int) -> pd.DataFrame:
    """The energy curves of the chains as the plot takes them; others without energies, as its colours have to stay."""
    curves = zip(CHAIN_CURVES, zip(*energies, strict=True), strict=False)
    points = [(*point, name) for name, curve in curves for point in energy_points(kernel, curve, epochs)]
    rest = [(0, None, name) for name in list(CHAIN_CURVES)[len(energies[0]) :]]
    return pd.DataFrame(points + rest, columns=["epoch", "energy", "chain"])


def status_line(view: ChainsView, settings: dict) -> str:
    """How far the chains are and what is known about them, in Markdown; rates and R-hat once the run is over."""
    if "decoder" in settings:
        if view.output is None:
            return "decoding …"
        return f"decoded in {settings['num_epochs']} iterations · energy **{view.energies[-1][0]:.2f}** nats"
    done, asked = max(0, len(view.energies) - 1), settings["num_epochs"]
    state = "running" if view.output is None else "done" if done == asked else "stopped"
    parts = [f"{state}: epoch {done} of {asked}"]
    if view.energies:
        mean = "mean energy" if len(view.ids) > 1 else "energy"
        parts.append(f"{mean} **{sum(view.energies[-1]) / len(view.ids):.2f}** nats")
    if view.output is not None:
        acceptance, novel = (getattr(view.output.trace, f"{name}_rate").mean() for name in ("acceptance", "novel"))
        parts.append(f"acceptance rate **{acceptance:.2f}** · novel rate **{novel:.2f}**")
        if (found := later_r_hat(view.output.trace.energy)) is not None:
            parts.append(f"split R-hat **{found:.2f}**")
    return " · ".join(parts)


def later_r_hat(energies: Tensor) -> float | None:
    """Split R-hat of the later half of energies (chains, epochs); `None` for too few, or where all are the same."""
    later = energies[:, energies.shape[1] // 2 :]
    if later.shape[0] < 2 or later.shape[1] < 4 or bool((later == later[0, 0]).all()):
        return None
    return energy_diagnostics(later).r_hat


def energy_points(kernel: str, energies: Sequence[float], epochs: int) -> list[tuple[int, float]]:
    """Points (epoch, energy) of a curve, the start at 0; a decoder's one energy is a level line over all epochs."""
    if kernel in DECODERS and energies:
        return [(0, energies[0]), (epochs, energies[0])]
    return list(enumerate(energies))


@dataclass(frozen=True)
class ChainsView:
    """C chains at some moment.

    Attributes:
        ids: of each its T tokens.
        changed: for each of these, whether it changed since the view before.
        energies: of each in nats, at the start and after each epoch that is done; a decoder has the last alone.
        output: what `generate` returned, once the run is over.
    """

    ids: list[list[int]]
    changed: list[list[bool]]
    energies: list[list[float]]
    output: ChainGenerationOutput | None = None


def watch_chains(model: EnergyModel, prompt: Prompt, settings: dict, stop: threading.Event) -> Iterator[ChainsView]:
    """Runs chains and yields views of them; the last one has the output.

    Setting `stop` ends the run after the epoch it is in, with the output so far. So does closing the iterator. With the
    decoder, which is short, there is nothing to watch or to stop.

    Raises:
        ValueError: what `generate` raises.
    """
    events: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_run, args=(model, prompt, settings, stop, events), daemon=True).start()
    try:
        starts = prompt.ids.expand(settings.get("num_chains", 1), -1)
        view = ChainsView(starts.tolist(), torch.zeros_like(starts).bool().tolist(), [])
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


def _after(view: ChainsView, events: list) -> ChainsView:
    """The next view: all that happened since the last one."""
    ids, energies, output = torch.tensor(view.ids), list(view.energies), None
    changed = torch.zeros_like(ids, dtype=torch.bool)
    for event in events:
        if isinstance(event, BaseException):
            raise event
        if isinstance(event, Tensor):
            changed |= event != ids
            ids = event
        elif isinstance(event, list):
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
    """A streamer that is a stopping criterion too: hands on the tokens of the chains, and their energies where due.

    The run keeps its trace to itself until it is over, so energies are evaluated anew: one masked row for each
    blank of each chain.
    """

    def __init__(self, model: EnergyModel, prompt: Prompt, stop: threading.Event, events: queue.SimpleQueue):
        self.model, self.prompt, self.stop, self.events = model, prompt, stop, events

    def put(self, ids: Tensor) -> None:
        """The tokens at the start, or those that a decoder ends with."""
        self.put_draft(ids)
        self._put_energies(ids)

    def put_draft(self, ids: Tensor) -> None:
        """The tokens after a step."""
        self.events.put(ids.to("cpu", copy=True))

    def end(self) -> None:
        """Nothing to do: the output follows."""

    def __call__(self, ids: Tensor, scores: None) -> Tensor:
        """Called after every epoch: whether to stop."""
        self._put_energies(ids)
        return torch.full((len(ids),), self.stop.is_set(), device=ids.device)

    def _put_energies(self, ids: Tensor) -> None:
        free_mask = self.prompt.free.expand(ids.shape)
        self.events.put(self.model(ids, free_mask=free_mask).energy.tolist())
