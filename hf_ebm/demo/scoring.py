"""The tabs that score: lines of text, best first, and variants of a sequence of letters as a heat map."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import gradio as gr
from transformers import PreTrainedTokenizerBase

from hf_ebm.checks import check_choice
from hf_ebm.demo.components import (
    Page,
    Spans,
    more_examples,
    shows_errors,
    spaced,
    text_of,
    token_ids,
    token_texts,
    warn_unknown,
)
from hf_ebm.models.energy import EnergyModel
from hf_ebm.scoring.mutations import SCHEMES
from hf_ebm.texts import unknown_of

# Bounds in nats between the labels of scored tokens: probability 0.37, 0.05 and 0.002.
_BOUNDS = (1.0, 3.0, 6.0)
ENERGY_COLORS = {"below 1 nat": "#d1fae5", "1 to 3": "#fde68a", "3 to 6": "#fdba74", "above 6": "#f87171"}
MAX_LINES = 32
SORT_KEYS = ("energy", "energy per token")
HEADERS = ["rank", "text", "energy", "tokens", "energy per token", "pseudo-perplexity"]
# Of the tab of variants: letters of a reference, and masked rows that one click may run.
MAX_REFERENCE, MAX_ROWS = 64, 4096
NUM_DRAWS = 256  # of the sites of a variant, where the scheme draws them
_JOINT = ("joint_log_prob", "sampled_joint_log_prob")
VARIANT_HEADERS = ["variant", "score"]
_BEST = 8  # substitutions that are listed where no variants are given


def score_tab(page: Page) -> None:
    """Energies of lines, and of their tokens."""
    model, tokenizer = page.model, page.tokenizer
    scored = gr.State([])
    text = gr.Textbox(next(iter(page.examples.lines), ""), label="Texts, one a line", lines=5, elem_id="score-text")
    more_examples({own.splitlines()[0] + " …": [own] for own in page.examples.lines}, [text])
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
    button.click(score, [text, key], [status, *outputs], show_progress_on=[button], **page.event)
    key.change(sort_again, [scored, key], outputs, queue=False)
    chosen.change(spans_of, [scored, chosen], tokens, queue=False)


def energy_spans(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], energies: Sequence[float]) -> Spans:
    """Tokens labelled by how high their energies in nats are."""
    labels: list[str | None] = [list(ENERGY_COLORS)[sum(energy >= bound for bound in _BOUNDS)] for energy in energies]
    return spaced(token_texts(tokenizer, ids), labels)


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


def read_lines(text: str | None) -> list[str]:
    """The lines of a text that are not blank, without spaces around them. Raises `ValueError` for too many."""
    lines = [line.strip() for line in text_of("text", text).splitlines() if line.strip()]
    if len(lines) > MAX_LINES:
        raise ValueError(f"{len(lines)} lines were given; this page scores at most {MAX_LINES} at once")
    return lines


def check_lines(model: EnergyModel, tokenizer: PreTrainedTokenizerBase, text: str) -> list[str]:
    """The lines of a text that can be scored; blank ones are passed over.

    Raises:
        ValueError: without lines or for too many; naming the line (from 1), for one that is too long, has a mask, or
            has nothing to score.
    """
    lines = read_lines(text)
    if not lines:
        raise ValueError("there is nothing to score; type a text on each line")
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


def variants_tab(page: Page) -> None:
    """Scores of all substitutions of a sequence, and of variants that are listed."""
    model, tokenizer = page.model, page.tokenizer
    first_reference, first_letters = next(iter(page.examples.references), ("", ""))
    with gr.Row():
        with gr.Column():
            reference = gr.Textbox(
                first_reference,
                label="Reference",
                info="The wild type, a token a letter, as of a protein. Models of words take each letter for a word.",
            )
            letters = gr.Textbox(first_letters, label="Letters", info="That are tried at each position.")
            variants = gr.Textbox(
                "", label="Variants, one a line", info="As A24G or A24G:K30R. Empty: the best substitutions.", lines=3
            )
            more_examples({own[0]: (*own, "") for own in page.examples.references}, [reference, letters, variants])
            scheme = gr.Dropdown(list(SCHEMES), value=next(iter(SCHEMES)), label="Scheme")
            about = gr.Markdown(about_scheme(next(iter(SCHEMES))))
            button = gr.Button("Score variants", variant="primary", elem_id="variants-run")
        with gr.Column():
            status = gr.Markdown(elem_id="variants-status")
            shown = gr.HTML(elem_id="variants-map")
            table = gr.Dataframe(
                headers=VARIANT_HEADERS, interactive=False, label="Scores in nats", elem_id="variants-table"
            )

    @shows_errors
    def score_variants(reference: str, letters: str, variants: str, scheme: str) -> Iterator[tuple]:
        scan = read_scan(reference, letters, variants, scheme)
        yield "scoring …", gr.skip(), gr.skip()
        found = model.score_variants(
            scan.reference, scan.variants, tokenizer, scheme=scheme, letters=scan.allowed, num_draws=NUM_DRAWS
        )
        scores = found.scores.tolist()
        told = f"{len(scores)} variants scored · {found.num_rows:,} masked rows"
        yield told, substitutions_map(scan, scores), variant_rows(scan, scores)

    button.click(
        score_variants,
        [reference, letters, variants, scheme],
        [status, shown, table],
        show_progress_on=[button],
        **page.event,
    )
    scheme.change(about_scheme, scheme, about, queue=False)


def about_scheme(scheme: str) -> str:
    """What a scheme is, in Markdown."""
    entry = SCHEMES[scheme]
    return f"{entry.about}; masked rows: {entry.rows}. Above 0 the model prefers the variant."


class Scan(NamedTuple):
    """Variants of a reference: all single substitutions, then those that were listed.

    Attributes:
        reference: its letters.
        letters: that are tried at each position.
        variants: the substitutions position by position, and the listed ones after them.
        num_listed: how many these are.
        scheme: by which they are scored.
    """

    reference: str
    letters: str
    variants: list[str]
    num_listed: int
    scheme: str

    @property
    def allowed(self) -> str | None:
        """The letters for a scheme that is normalized over them."""
        return self.letters if self.scheme in _JOINT else None


def read_scan(reference: str | None, letters: str | None, variants: str | None, scheme: str) -> Scan:
    """The substitutions of what a user typed. Positions of digits keep theirs, which no variant can name.

    Raises:
        ValueError: naming the field, for what is missing or too much for one click.
    """
    check_choice("scheme", scheme, SCHEMES)
    own, tried = ("".join(text_of(*each).split()) for each in (("reference", reference), ("letters", letters)))
    if not 1 <= len(own) <= MAX_REFERENCE or not tried:
        raise ValueError(f"reference must have 1 to {MAX_REFERENCE} letters, got {len(own)}, and letters one or more")
    tried = "".join(dict.fromkeys(letter for letter in tried if not letter.isdecimal() and letter not in ":,;"))
    listed = read_lines(variants)
    sites = [(at, letter) for at, letter in enumerate(own, 1) if not letter.isdecimal()]
    single = [f"{letter}{at}{new}" for at, letter in sites for new in tried if new != letter]
    rows = len(single) + len(listed)
    if scheme == "pseudo_likelihood_ratio":
        rows *= len(own)
    elif scheme in _JOINT:
        sizes = [1 + sum(map(line.count, ":,;")) for line in listed]
        of_size = {size: size * len(tried) ** (size - 1) for size in sizes}
        if scheme == "sampled_joint_log_prob":
            of_size = {size: 1 if size == 1 else size * (2 * NUM_DRAWS + 1) for size in sizes}
        rows = len(sites) + sum(of_size[size] for size in sizes)
    if rows > MAX_ROWS:
        raise ValueError(
            f"scheme {scheme!r} would take up to {rows:,} masked rows, this page runs {MAX_ROWS:,} at most; give a "
            "shorter reference, fewer letters or fewer variants"
        )
    if not single and not listed:
        raise ValueError("there is nothing to score; letters must have one that the reference hasn't everywhere")
    return Scan(own, tried, single + listed, len(listed), scheme)


def variant_rows(scan: Scan, scores: Sequence[float]) -> list[list]:
    """Variants that were listed with their scores, else the best substitutions."""
    found = list(zip(scan.variants, scores, strict=True))
    own = found[-scan.num_listed :] if scan.num_listed else sorted(found, key=lambda each: -each[1])[:_BEST]
    return [[variant, f"{score:+.2f}"] for variant, score in own]


def substitutions_map(scan: Scan, scores: Sequence[float]) -> str:
    """The heat map of all single substitutions: a row a letter, a column a position."""
    by_name = dict(zip(scan.variants, scores, strict=True))
    sites = list(enumerate(scan.reference, 1))
    values = [[by_name.get(f"{letter}{at}{new}") for at, letter in sites] for new in scan.letters]
    columns = [f"{letter}\n{at}" for at, letter in sites]
    return heat_map("Scores of single substitutions, nats", list(scan.letters), columns, values)


def heat_map(title: str, rows: list[str], columns: list[str], values: list[list[float | None]]) -> str:
    """A table in HTML whose cells are blue above 0 and red below, the stronger the further from it; `None` is empty."""
    most = max((abs(value) for row in values for value in row if value is not None), default=0.0) or 1.0
    digits = 0 if most >= 10 else 1 if most >= 1.5 else 2

    def cell(value: float | None) -> str:
        if value is None:
            return "<td></td>"
        color = "37, 99, 235" if value >= 0 else "220, 38, 38"
        number = f"{round(value, digits) + 0.0:.{digits}f}"  # never -0.0
        return f'<td style="background: rgba({color}, {abs(value) / most * 0.7:.2f})">{number}</td>'

    head = "".join(f"<th>{html.escape(column)}</th>" for column in ["", *columns]).replace("\n", "<br>")
    body = "".join(
        f"<tr><th>{html.escape(name)}</th>{''.join(map(cell, row))}</tr>"
        for name, row in zip(rows, values, strict=True)
    )
    table = f"<table><caption>{html.escape(title)}</caption><tr>{head}</tr>{body}</table>"
    return f'<div class="heat-map">{table}</div>'
