"""The tab that scores and reranks lines of text, best first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import gradio as gr
from transformers import PreTrainedTokenizerBase

from hf_ebm.checks import check_choice
from hf_ebm.demo.components import (
    ENERGY_COLORS,
    Spans,
    energy_spans,
    example_lines,
    read_lines,
    shows_errors,
    token_ids,
    warn_unknown,
)
from hf_ebm.models.energy import EnergyModel
from hf_ebm.texts import unknown_of

MAX_LINES = 32
SORT_KEYS = ("energy", "energy per token")
HEADERS = ["rank", "text", "energy", "tokens", "energy per token", "pseudo-perplexity"]


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


@dataclass(frozen=True)
class ScoredLine:
    """A text with its energy in nats.

    Attributes:
        ids: its scored tokens.
        token_energies: the energy term of each; they sum to `energy`.
        pseudo_perplexity: exponential of the local energy per token.
        unknown: what the tokenizer has no token for.
    """

    text: str
    energy: float
    pseudo_perplexity: float
    ids: list[int]
    token_energies: list[float]
    unknown: list[str]

    @property
    def energy_per_token(self) -> float:
        return self.energy / len(self.ids)


def check_lines(model: EnergyModel, tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """The lines of a text that can be scored; blank ones are passed over.

    Raises:
        ValueError: without lines or for too many; naming the line (from 1), for one that is too long, has a mask, or
            has nothing to score.
    """
    lines = read_lines(text, MAX_LINES)
    for number, line in enumerate(lines, 1):
        ids = token_ids(model, tokenizer, f"line {number}", line)
        if model.config.mask_token_id in ids:
            raise ValueError(f"line {number} has a blank, which has no energy; fill it under Sample first")
        if all(token in (model.config.special_token_ids or ()) for token in ids):
            raise ValueError(f"line {number} has no token that could be scored: {line!r}")
    return lines


def score_lines(model: EnergyModel, tokenizer: PreTrainedTokenizerBase, lines: list[str]) -> list[ScoredLine]:
    """Scores lines that `check_lines` let pass, in their order."""
    found, local = model.score(lines, tokenizer, unknown_tokens="ignore"), as_local(model)
    of_local = found if local is model else local.score(lines, tokenizer, unknown_tokens="ignore")
    perplexities = (of_local.energy / of_local.num_tokens).exp().tolist()
    return [
        ScoredLine(
            text=line,
            energy=float(found.energy[row]),
            pseudo_perplexity=perplexities[row],
            ids=_ids_of(tokenizer, found.tokens[row]),
            token_energies=found.token_energies[row],
            unknown=list(dict.fromkeys(unknown_of(tokenizer, line).parts)),
        )
        for row, line in enumerate(lines)
    ]


def _ids_of(tokenizer: PreTrainedTokenizerBase, tokens: list[str]) -> list[int]:
    ids = tokenizer.convert_tokens_to_ids(tokens)
    return [ids] if isinstance(ids, int) else ids


def sort_lines(lines: list[ScoredLine], key: str) -> list[ScoredLine]:
    """Lines by one of `SORT_KEYS`, lowest first; ties keep their order."""
    check_choice("sort by", key, SORT_KEYS)
    return sorted(lines, key=lambda line: line.energy if key == "energy" else line.energy_per_token)


def table_rows(lines: list[ScoredLine]) -> list[list]:
    """A row for each line, its columns as in `HEADERS`; numbers with two digits after the point."""
    rows = []
    for rank, line in enumerate(lines, 1):
        numbers = (line.energy, line.energy_per_token, line.pseudo_perplexity)
        energy, per_token, perplexity = (round(number, 2) for number in numbers)
        rows.append([rank, line.text, energy, len(line.ids), per_token, perplexity])
    return rows


def as_local(model: EnergyModel) -> EnergyModel:
    """The same masked language model with the local energy; the model itself if that is its energy."""
    if model.config.energy == "local":
        return model
    names = ("mask_token_id", "pad_token_id", "special_token_ids", "excluded_token_ids", "prefix_token_ids")
    fields = {name: getattr(model.config, name) for name in (*names, "suffix_token_ids")}
    return EnergyModel(model.mlm, energy="local", **fields)
