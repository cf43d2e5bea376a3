"""The tab that compares kernels on one prompt."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import gradio as gr
import pandas as pd
from transformers import PreTrainedTokenizerBase

from hf_ebm.demo.comparison import CHAINS, KernelResult, compare_kernels, energy_points
from hf_ebm.demo.messages import shows_errors, warn_unknown
from hf_ebm.demo.prompts import example_prompt, read_prompt, read_settings
from hf_ebm.demo.sampling_tab import prompt_fields, setting_fields, stop_button
from hf_ebm.demo.sessions import Runs
from hf_ebm.demo.tokens import BLANK, CHAIN_COLORS, Spans, chain_spans
from hf_ebm.models.energy import EnergyModel
from hf_ebm.sampling.configuration import kernel_names
from hf_ebm.sampling.kernels import KERNELS
from hf_ebm.sampling.warm_start import DECODERS

_COLORS = ("#2563eb", "#dc2626", "#16a34a", "#9333ea", "#ea580c")
_HEADERS = ["kernel", "energy", "mean energy", "acceptance", "novel"]


def comparison_tab(model: EnergyModel, tokenizer: PreTrainedTokenizerBase, runs: Runs, concurrency: dict) -> None:
    """Builds the tab inside the current block; `concurrency` as for `sampling_tab`."""
    with gr.Row():
        with gr.Column():
            prompt_inputs = prompt_fields(*example_prompt(model, tokenizer))
        with gr.Column():
            setting_inputs = setting_fields()
    with gr.Row():
        run_button = gr.Button("Compare", variant="primary", elem_id="compare-run")
        stop_button(runs, "compare-stop")
    status = gr.Markdown(elem_id="compare-status")
    with gr.Row():
        shown = [
            gr.HighlightedText(
                label=kernel, color_map={BLANK: CHAIN_COLORS[BLANK]}, interactive=False, show_inline_category=False
            )
            for kernel in kernel_names()
        ]
    gr.Markdown(
        f"Local energies in nats. Text and energy are the first chain's, curves are means of {CHAINS} chains, the mean "
        "energy is over the later half of the epochs. "
        + "; ".join(
            [f"`{name}` {kernel.about}" for name, kernel in KERNELS.items()]
            + [f"`{name}` decodes one text and makes no chain" for name in DECODERS]
        )
        + "."
    )
    with gr.Row():
        with gr.Column():
            table = gr.Dataframe(
                headers=_HEADERS, interactive=False, wrap=True, label="Kernels", elem_id="compare-table"
            )
        with gr.Column():
            plot = gr.LinePlot(
                x="epoch",
                y="energy",
                color="kernel",
                color_map=dict(zip(kernel_names(), itertools.cycle(_COLORS), strict=False)),
                x_axis_format="~g",
                y_title="mean energy, nats",
                label="Mean energy by epoch",
                elem_id="compare-curves",
            )

    @shows_errors
    def run(
        text: str,
        length: float,
        epochs: float,
        block_size: float,
        temperature: float,
        seed: float,
        request: gr.Request,
    ) -> Iterator[tuple]:
        prompt = read_prompt(model, tokenizer, text, length)
        settings = {k: read_settings(prompt, k, epochs, block_size, temperature, seed) for k in kernel_names()}
        warn_unknown(prompt.unknown)
        free, results = prompt.free[0].tolist(), list[KernelResult]()
        texts: list[Spans | None] = [None] * len(kernel_names())
        # A plot that is there keeps its scale of colours, so it is taken away and made anew.
        yield "running …", *texts, [], gr.update(visible=False)
        with runs.running(request.session_hash) as stop:
            for number, result in enumerate(compare_kernels(model, prompt, settings, stop)):
                results.append(result)
                texts[number] = chain_spans(model, tokenizer, result.ids, free, [False] * len(free))
                yield "running …", *texts, comparison_rows(results), gr.skip()
            state = "stopped" if stop.is_set() else "done"
        curves = gr.update(value=curves_frame(results, int(epochs)), visible=True) if results else gr.skip()
        yield state, *texts, comparison_rows(results), curves

    run_button.click(
        run,
        [*prompt_inputs, *setting_inputs],
        [status, *shown, table, plot],
        show_progress_on=[run_button],  # as on the tab that samples
        **concurrency,
    )


def comparison_rows(results: list[KernelResult]) -> list[list]:
    """A row of the table for each kernel; rates that a decoder doesn't have are dashes."""
    return [
        [own.kernel, f"{own.energy:.2f}", f"{own.mean_energy:.2f}", _rate(own.acceptance_rate), _rate(own.novel_rate)]
        for own in results
    ]


def curves_frame(results: list[KernelResult], epochs: int) -> pd.DataFrame:
    """The energy curves of all kernels as the plot takes them."""
    points = [(*point, own.kernel) for own in results for point in energy_points(own.kernel, own.energies, epochs)]
    return pd.DataFrame(points, columns=["epoch", "energy", "kernel"])


def _rate(rate: float | None) -> str:
    return "–" if rate is None else f"{rate:.2f}"
