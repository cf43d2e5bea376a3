"""The tab that samples: a chain, token by token."""

from __future__ import annotations

from collections.abc import Iterator

import gradio as gr
import pandas as pd
from transformers import PreTrainedTokenizerBase

from hf_ebm.demo.chain_stream import ChainView, watch_chain
from hf_ebm.demo.comparison import energy_points
from hf_ebm.demo.messages import shows_errors, warn_unknown
from hf_ebm.demo.prompts import example_prompt, read_prompt, read_settings
from hf_ebm.demo.sessions import Runs
from hf_ebm.demo.tokens import CHAIN_COLORS, chain_spans
from hf_ebm.models.energy import EnergyModel
from hf_ebm.sampling.configuration import kernel_names, settings_without_effect
from hf_ebm.sampling.kernels import KERNELS
from hf_ebm.sampling.warm_start import DECODERS


def sampling_tab(model: EnergyModel, tokenizer: PreTrainedTokenizerBase, runs: Runs, concurrency: dict) -> None:
    """Builds the tab inside the current block.

    Args:
        concurrency: arguments of an event that uses the model.
    """
    with gr.Row():
        with gr.Column():
            prompt_inputs = prompt_fields(*example_prompt(model, tokenizer))
            kernel = gr.Dropdown(list(kernel_names()), value=kernel_names()[0], label="Kernel")
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


def curve_frame(kernel: str, energies: list[float], epochs: int) -> pd.DataFrame:
    """The energy curve as the plot takes it."""
    return pd.DataFrame(energy_points(kernel, energies, epochs), columns=["epoch", "energy"])


def status_line(view: ChainView, settings: dict) -> str:
    """How far a chain is and what is known about it, in Markdown; rates once the run is over."""
    if settings["kernel"] in DECODERS:
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
