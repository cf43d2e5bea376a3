"""A Gradio page around an `EnergyModel`, as a Hugging Face Space would run it. Extra `hf_ebm[demo]`.

- `sampling`, `filling`, `comparison`, `scoring`: the tabs, with what each does as plain functions;
- `components`: what tabs share: examples, fields, and what a user typed in them, checked.
"""

from __future__ import annotations

from collections.abc import Callable

try:
    import gradio as gr
except ImportError as error:
    raise ImportError("the demo needs the extra hf_ebm[demo]: pip install gradio") from error

from transformers import PreTrainedTokenizerBase

from hf_ebm.checks import check_methods
from hf_ebm.demo.comparison import comparison_tab
from hf_ebm.demo.components import Page, Runs, examples_for
from hf_ebm.demo.filling import filling_tab
from hf_ebm.demo.sampling import sampling_tab
from hf_ebm.demo.scoring import score_tab, variants_tab
from hf_ebm.models.energy import EnergyModel
from hf_ebm.models.energy.encoding import check_same_mask

__all__ = ["build_demo"]

# Every tab there is, in their order. An entry is all that a new one needs.
TABS: dict[str, Callable[[Page], None]] = {
    "Sample": sampling_tab,
    "Fill together": filling_tab,
    "Variants": variants_tab,
    "Score and rerank": score_tab,
    "Compare kernels": comparison_tab,
}
# One thing at a time: runs side by side on one device would all be slower. Others wait in line.
_ONE_AT_A_TIME = {"concurrency_id": "model", "concurrency_limit": 1}
# Gradio shows a field that can't be typed into like any other.
_STYLE = """<style>
input:disabled {opacity: 0.4 !important; cursor: not-allowed !important}
.heat-map {overflow-x: auto}
.heat-map table {width: auto; font-size: 12px; font-variant-numeric: tabular-nums}
.heat-map caption {text-align: left; white-space: nowrap; padding-bottom: 6px}
.heat-map :is(th, td) {padding: 1px 4px !important; text-align: right}
.heat-map * {border-color: var(--border-color-primary) !important}
</style>"""


def build_demo(model: EnergyModel, tokenizer: PreTrainedTokenizerBase) -> gr.Blocks:
    """The page for a model, to be launched: `build_demo(*load_embedded()).launch()`.

    It sends nothing anywhere (no analytics).

    Args:
        model: on its device; put into evaluation mode.
        tokenizer: the model's own.

    Raises:
        ValueError: for a model that the page can't show: one without energies, an encoder-decoder, one without known
            token roles, or one whose mask token is not the tokenizer's.
    """
    check_methods("model", model, "generate", "fill", "score", "score_variants")
    if model.mlm.config.is_encoder_decoder:
        raise ValueError(
            f"model: {type(model.mlm).__name__} is an encoder-decoder, and the page has no field for what its energy "
            "is conditional on; give a masked language model with an encoder alone"
        )
    if model.config.mask_token_id is None or model.config.special_token_ids is None:
        raise ValueError(
            "model: mask_token_id and special_token_ids are not set; load it with its tokenizer beside it, or pass "
            "processing_class= to from_pretrained"
        )
    check_same_mask(tokenizer, model.config.mask_token_id)
    model.eval()
    page = Page(model, tokenizer, examples_for(model, tokenizer), Runs(), _ONE_AT_A_TIME)
    with gr.Blocks(title="hf_ebm", analytics_enabled=False) as blocks:
        gr.Markdown(
            f"# Sequences by energy\nA masked language model as an energy model over whole texts (energy: "
            f"{model.config.energy}): low energy, likely text. With a model of yours: `hf-ebm demo --model FOLDER`."
        )
        for name, build in TABS.items():
            with gr.Tab(name):
                build(page)
        gr.HTML(_STYLE, padding=False)
    return blocks
