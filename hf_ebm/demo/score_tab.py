"""The tab that scores and reranks lines of text."""

from __future__ import annotations

from collections.abc import Iterator

import gradio as gr
from transformers import PreTrainedTokenizerBase

from hf_ebm.demo.messages import shows_errors, warn_unknown
from hf_ebm.demo.prompts import example_lines
from hf_ebm.demo.score_table import HEADERS, SORT_KEYS, ScoredLine, check_lines, score_lines, sort_lines, table_rows
from hf_ebm.demo.tokens import ENERGY_COLORS, Spans, energy_spans
from hf_ebm.models.energy import EnergyModel


def score_tab(model: EnergyModel, tokenizer: PreTrainedTokenizerBase, concurrency: dict) -> None:
    """Builds the tab inside the current block; `concurrency` as for `sampling_tab`."""
    scored = gr.State([])
    text = gr.Textbox(
        example_lines(tokenizer),
        label="Texts, one a line",
        lines=5,
        elem_id="score-text",
    )
    with gr.Row():
        key = gr.Radio(list(SORT_KEYS), value=SORT_KEYS[0], label="Sort by", info="Lowest first.")
        button = gr.Button("Score", variant="primary", elem_id="score-run")
    status = gr.Markdown(elem_id="score-status")
    table = gr.Dataframe(
        headers=HEADERS, interactive=False, wrap=True, label="Energies in nats, best first", elem_id="score-table"
    )
    chosen = gr.Dropdown([], label="Tokens of", elem_id="score-chosen")
    tokens = gr.HighlightedText(
        label="Energy of each token, nats",
        color_map=ENERGY_COLORS,
        show_legend=True,
        interactive=False,
        elem_id="score-tokens",
    )

    def show(lines: list[ScoredLine]) -> tuple:
        """Table, choices and tokens for sorted lines; the best is chosen."""
        choices = [(f"{rank}. {line.text}", rank - 1) for rank, line in enumerate(lines, 1)]
        return table_rows(lines), gr.update(choices=choices, value=0), spans_of(lines, 0)

    def spans_of(lines: list[ScoredLine], number: int | None) -> Spans | None:
        if number is None or not 0 <= number < len(lines):
            return None
        return energy_spans(tokenizer, lines[number].ids, lines[number].token_energies)

    @shows_errors
    def score(text: str, key: str) -> Iterator[tuple]:
        texts = check_lines(model, tokenizer, text)
        yield "scoring …", *[gr.skip()] * 4
        lines = sort_lines(score_lines(model, tokenizer, texts), key)
        warn_unknown(list(dict.fromkeys(part for line in lines for part in line.unknown)))
        yield f"{len(lines)} lines scored", lines, *show(lines)

    @shows_errors
    def sort_again(lines: list[ScoredLine], key: str) -> tuple:
        lines = sort_lines(lines, key)
        return (lines, *show(lines)) if lines else (gr.skip(),) * 4

    outputs = [scored, table, chosen, tokens]
    button.click(score, [text, key], [status, *outputs], show_progress_on=[button], **concurrency)
    key.change(sort_again, [scored, key], outputs, queue=False)
    chosen.change(spans_of, [scored, chosen], tokens, queue=False)
