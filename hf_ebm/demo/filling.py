"""The tab that fills the blanks of a text together: the likeliest fills, and what may stand in each blank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import gradio as gr
from transformers import PreTrainedTokenizerBase

from hf_ebm.checks import check_choice
from hf_ebm.demo.components import (
    Page,
    more_examples,
    ranged_number,
    shows_errors,
    text_of,
    token_ids,
    warn_unknown,
    with_masks,
)
from hf_ebm.demo.scoring import heat_map
from hf_ebm.models.energy import EnergyModel
from hf_ebm.models.energy.fill_energy import READINGS, FillOutput
from hf_ebm.texts import unknown_of

# What one click may ask for: blanks, words for each, and masked rows, of which chains run a few times as many.
MAX_BLANKS, MAX_WORDS, ROW_LIMIT = 4, 64, 1024
TOP = 8  # fills, and words of each blank
HEADERS = ["fill", "probability", "energy"]
# What the blanks hold, and the rule of `fill` that says so.
HELD = {"any words": None, "different words": "different", "the same word": "equal"}
_READINGS = dict(zip(("together", "each by itself", "from left to right"), READINGS, strict=True))


def filling_tab(page: Page) -> None:
    """Joint fills of a text's blanks."""
    model, tokenizer = page.model, page.tokenizer
    first_text, first_words = next(iter(page.examples.fills), ("", ""))
    with gr.Row():
        with gr.Column():
            text = gr.Textbox(
                first_text,
                label="Text with blanks",
                info=f"Three underscores or [MASK] make a blank of one token; at most {MAX_BLANKS}.",
                lines=2,
            )
            words = gr.Textbox(
                first_words,
                label="Words",
                info="That may fill the blanks, with commas between them. Empty: any token.",
            )
            labels = [f"{own} ({given or 'any token'})" for own, given in page.examples.fills]
            more_examples(dict(zip(labels, page.examples.fills, strict=True)), [text, words])
            held = gr.Radio(list(HELD), value=next(iter(HELD)), label="The blanks hold")
            reading = gr.Radio(
                list(_READINGS),
                value=next(iter(_READINGS)),
                label="Filled",
                info="Together: by exp(-E/τ). The others: lists of fill-mask, and one mask after the other.",
            )
            temperature = gr.Number(1.0, label="Temperature", info="τ of fills together.", step=0.1)
            button = gr.Button("Fill", variant="primary", elem_id="fill-run")
        with gr.Column():
            status = gr.Markdown(elem_id="fill-status")
            table = gr.Dataframe(
                headers=HEADERS,
                interactive=False,
                wrap=True,
                label="Likeliest fills",
                elem_id="fill-table",
            )
            marginals = gr.HTML(elem_id="fill-marginals")

    @shows_errors
    def fill(text: str, words: str, held: str, reading: str, temperature: float) -> Iterator[tuple]:
        task = read_fill(model, tokenizer, text, words, held, reading, temperature)
        warn_unknown(task.unknown)
        yield "filling …", gr.skip(), gr.skip()
        found = model.fill(task.text, tokenizer, TOP, row_limit=ROW_LIMIT, unknown_tokens="ignore", **task.settings)
        yield fill_status(found), fill_rows(found), marginals_map(found)

    button.click(
        fill,
        [text, words, held, reading, temperature],
        [status, table, marginals],
        show_progress_on=[button],
        **page.event,
    )
    reading.change(
        lambda reading: gr.update(interactive=_READINGS[reading] == "joint"), reading, temperature, queue=False
    )


class FillOrder(NamedTuple):
    """What is to be filled: a text with masks, settings of `fill`, and what the tokenizer has no token for."""

    text: str
    settings: dict
    unknown: list[str]


def read_fill(
    model: EnergyModel, tokenizer: PreTrainedTokenizerBase, text: str | None, words: str | None, held: str,
    reading: str, temperature: float | None,
) -> FillOrder:  # fmt: skip
    """What a user typed, checked; the temperature where it means something.

    Raises:
        ValueError: naming the field, for a text without blanks or with too many, too many words, and numbers out of
            range.
    """
    check_choice("the blanks hold", held, HELD)
    check_choice("filled", reading, _READINGS)
    typed = with_masks(tokenizer, text_of("text", text).strip())
    blanks = token_ids(model, tokenizer, "text", typed).count(tokenizer.mask_token_id)
    if not 1 <= blanks <= MAX_BLANKS:
        raise ValueError(
            f"text must have 1 to {MAX_BLANKS} blanks (___ or [MASK]), got {blanks}; more fit under Sample"
        )
    listed = [word for part in text_of("words", words).split(",") if (word := part.strip())]
    if len(listed) > MAX_WORDS:
        raise ValueError(f"{len(listed)} words were given; this page takes at most {MAX_WORDS}")
    settings: dict[str, Any] = {"reading": _READINGS[reading], "words": listed or None}
    if reading == next(iter(_READINGS)):
        settings["temperature"] = ranged_number("temperature", temperature, 0.01, 100)
    if (rule := HELD[held]) and blanks > 1:
        settings[rule] = list(range(blanks))
    return FillOrder(typed, settings, list(dict.fromkeys(unknown_of(tokenizer, typed).parts)))


def fill_status(found: FillOutput) -> str:
    """How the fills were found and how sure that is, in Markdown."""
    rows = f"{found.num_masked_rows:,} masked rows"
    left_out, error = float(found.left_out[0]), float(found.left_out_error[0])
    if found.method[0] == "chains":
        r_hat = float(found.r_hat[0])
        return f"sampled by chains, with standard errors · split R-hat **{r_hat:.2f}** · {rows}"
    if found.method[0] == "exact":
        return f"all fills listed, so probabilities are exact · {rows}"
    spread = f" ± {error:.3f}" if error else ""
    return f"fills of the likeliest words listed; others have **{left_out:.3f}**{spread} of the probability · {rows}"


def fill_rows(found: FillOutput) -> list[list]:
    """A row for each fill, its columns as in `HEADERS`."""
    return [
        [" · ".join(own.token_strs), _with_error(own.probability, own.error), f"{round(own.energy, 2) + 0.0:.2f}"]
        for own in found.fills[0]
    ]


def marginals_map(found: FillOutput) -> str:
    """The marginal probabilities of words: a row a word, a column a blank."""
    shares = [{word.token_str: word.probability for word in blank} for blank in found.marginals[0]]
    words = list(dict.fromkeys(word for blank in shares for word in blank))
    values = [[blank.get(word) for blank in shares] for word in words]
    return heat_map(
        "Probability of a word in each blank", words, [f"blank {n + 1}" for n in range(len(shares))], values
    )


def _with_error(probability: float, error: float | None) -> str:
    return f"{probability:.4f}" + ("" if error is None else f" ± {error:.4f}")
