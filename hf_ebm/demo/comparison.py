"""The tab that compares kernels on one prompt."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import gradio as gr
import pandas as pd
import torch
from torch import Tensor

from hf_ebm.demo.components import (
    Page,
    Prompt,
    Spans,
    prompt_fields,
    read_prompt,
    shows_errors,
    stop_button,
    warn_unknown,
)
from hf_ebm.demo.sampling import (
    BLANK,
    CHAIN_COLORS,
    CURVE_COLORS,
    chain_spans,
    energy_points,
    read_settings,
    setting_fields,
)
from hf_ebm.demo.scoring import as_local
from hf_ebm.models.energy import EnergyModel
from hf_ebm.sampling.configuration import sampler_names
from hf_ebm.sampling.kernels import KERNELS
from hf_ebm.sampling.run import ChainGenerationOutput
from hf_ebm.sampling.warm_start import DECODERS

CHAINS = 4  # of a sampling kernel: enough for a mean, few enough to wait for
_HEADERS = ["kernel", "energy", "mean energy", "acceptance", "novel"]


def comparison_tab(page: Page) -> None:
    """What every kernel makes of one prompt."""
    model, tokenizer = page.model, page.tokenizer
    with gr.Row():
        with gr.Column():
            prompt_inputs = prompt_fields(page)
        with gr.Column():
            setting_inputs = setting_fields()
    with gr.Row():
        run_button = gr.Button("Compare", variant="primary", elem_id="compare-run")
        stop_button(page.runs, "compare-stop")
    status = gr.Markdown(elem_id="compare-status")
    with gr.Row():
        shown = [
            gr.HighlightedText(
                label=kernel, color_map={BLANK: CHAIN_COLORS[BLANK]}, interactive=False, show_inline_category=False
            )
            for kernel in sampler_names()
        ]
    gr.Markdown(
        f"Local energies in nats. Text and energy are the first chain's, curves are means of {CHAINS} chains, the mean "
        "energy is over the later half of the epochs. "
        + "; ".join([f"`{name}` {entry.about}" for name, entry in (KERNELS | DECODERS).items()])
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
                color_map=dict(zip(sampler_names(), itertools.cycle(CURVE_COLORS), strict=False)),
                x_axis_format="~g",
                y_title="mean energy, nats",
                label="Mean energy by epoch",
                elem_id="compare-curves",
            )

    @shows_errors
    def compare(
        text: str,
        length: float,
        epochs: float,
        block_size: float,
        temperature: float,
        seed: float,
        request: gr.Request,
    ) -> Iterator[tuple]:
        prompt = read_prompt(model, tokenizer, text, length)
        settings = {k: read_settings(prompt, k, epochs, block_size, temperature, seed) for k in sampler_names()}
        warn_unknown(prompt.unknown)
        free, results = prompt.free[0].tolist(), list[KernelResult]()
        texts: list[Spans | None] = [None] * len(sampler_names())
        # A plot that is there keeps its scale of colours, so it is taken away and made anew.
        yield "running …", *texts, [], gr.update(visible=False)
        with page.runs.running(request.session_hash) as stop:
            for number, result in enumerate(compare_kernels(model, prompt, settings, stop)):
                results.append(result)
                texts[number] = chain_spans(model, tokenizer, result.ids, free, [False] * len(free))
                yield "running …", *texts, comparison_rows(results), gr.skip()
            state = "stopped" if stop.is_set() else "done"
        curves = gr.update(value=curves_frame(results, int(epochs)), visible=True) if results else gr.skip()
        yield state, *texts, comparison_rows(results), curves

    run_button.click(
        compare,
        [*prompt_inputs, *setting_inputs],
        [status, *shown, table, plot],
        show_progress_on=[run_button],  # as on the tab that samples
        **page.event,
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


@dataclass(frozen=True)
class KernelResult:
    """What a kernel made of a prompt; energies are local ones in nats.

    Attributes:
        ids: the T tokens of the first chain at its end.
        energy: their energy.
        energies: mean over chains of the energy at the start and after each epoch; `mask_predict` has the last alone.
        mean_energy: mean over the later half of the epochs.
        acceptance_rate, novel_rate: means over chains and epochs, `None` with `mask_predict`.
    """

    kernel: str
    ids: list[int]
    energy: float
    energies: list[float]
    mean_energy: float
    acceptance_rate: float | None
    novel_rate: float | None


def compare_kernels(
    model: EnergyModel, prompt: Prompt, settings: dict[str, dict], stop: threading.Event
) -> Iterator[KernelResult]:
    """Runs the kernels one after the other and yields the result of each.

    Args:
        settings: of `generate`, by kernel.
        stop: once set, the kernel at work ends after its epoch, and the others are left out.

    Raises:
        ValueError: what `generate` raises.
    """
    local = as_local(model)
    for kernel, own in settings.items():
        if stop.is_set():
            return
        if kernel in DECODERS:  # deterministic, so more chains would be copies; takes no criteria
            output = model.generate(prompt.ids, free_mask=prompt.free, **own)
            yield _result(kernel, output, _local_energies(local, model, prompt, output.samples, output.energies))
        else:
            start = _Start()
            criterion = lambda ids, scores: torch.full((len(ids),), stop.is_set(), device=ids.device)  # noqa: E731
            output = model.generate(
                prompt.ids, free_mask=prompt.free, num_chains=CHAINS, streamer=start, stopping_criteria=criterion, **own
            )
            states = torch.cat([start.ids[:, None], output.samples], 1)
            yield _result(kernel, output, _local_energies(local, model, prompt, states, output.energies))


class _Start:
    """A streamer that keeps the tokens (C, T) that the chains start from."""

    def put(self, ids: Tensor) -> None:
        self.ids = ids.clone()

    def put_draft(self, ids: Tensor) -> None:
        """The steps are not kept."""

    def end(self) -> None:
        """Nothing to do."""


def _local_energies(local: EnergyModel, model: EnergyModel, prompt: Prompt, states: Tensor, energies: Tensor) -> Tensor:
    """(C, n) local energies of states (C, n, T); `energies` (C, k) are the model's energies of the last k of them."""
    known = energies if local is model else energies[:, :0]
    rest = states[:, : states.shape[1] - known.shape[1]]
    if not rest.shape[1]:
        return known
    rows = rest.flatten(0, 1)
    with torch.no_grad():
        found = local(rows, free_mask=prompt.free.expand(rows.shape)).energy
    return torch.cat([found.double().cpu().view(rest.shape[:2]), known], 1)


def _result(kernel: str, output: ChainGenerationOutput, energies: Tensor) -> KernelResult:
    by_epoch = energies.mean(0)
    epochs = output.energies.shape[1]
    rates = (output.trace.acceptance_rate, output.trace.novel_rate)
    acceptance, novel = (None if kernel in DECODERS else float(rate.mean()) for rate in rates)
    return KernelResult(
        kernel=kernel,
        ids=output.sequences[0].tolist(),
        energy=float(energies[0, -1]),
        energies=by_epoch.tolist(),
        mean_energy=float(by_epoch[-(epochs - epochs // 2) :].mean()),
        acceptance_rate=acceptance,
        novel_rate=novel,
    )
