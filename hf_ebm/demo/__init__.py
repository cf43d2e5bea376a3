"""A Gradio page around an `EnergyModel`, as a Hugging Face Space would run it. Extra `hf_ebm[demo]`.

- `sampling`, `comparison`, `scoring`: a tab each, with what it does as plain functions.
- `components`: what tabs share: fields, and what a user typed in them, checked.
"""

from __future__ import annotations

try:
    import gradio as gr
except ImportError as error:
    raise ImportError("the demo needs the extra hf_ebm[demo]: pip install gradio") from error

from transformers import PreTrainedTokenizerBase

from hf_ebm.demo.comparison import comparison_tab
from hf_ebm.demo.components import Runs
from hf_ebm.demo.sampling import sampling_tab
from hf_ebm.demo.scoring import score_tab
from hf_ebm.models.energy import EnergyModel
from hf_ebm.models.energy.encoding import check_same_mask

__all__ = ["build_demo"]

# One thing at a time: runs side by side on one device would all be slower. Others wait in line.
_CONCURRENCY = {"concurrency_id": "model", "concurrency_limit": 1}
# Gradio shows a field that can't be typed into like any other.
_STYLE = "<style>input:disabled {opacity: 0.4 !important; cursor: not-allowed !important}</style>"


def build_demo(model: EnergyModel, tokenizer: PreTrainedTokenizerBase) -> gr.Blocks:
    """The page for a model, to be launched: `build_demo(*load_embedded()).launch()`.

    It sends nothing anywhere (no analytics).

    Args:
        model: on its device; put into evaluation mode.
        tokenizer: the model's own.

    Raises:
        ValueError: for a model that the page can't show: an encoder-decoder, one without known token roles, or one
            whose mask token is not the tokenizer's.
    """
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
    runs = Runs()
    with gr.Blocks(title="hf_ebm", analytics_enabled=False) as page:
        gr.Markdown(
            f"# Sequences by energy\nA masked language model as an energy model over whole texts (energy: "
            f"{model.config.energy}): low energy, likely text."
        )
        with gr.Tab("Sample"):
            sampling_tab(model, tokenizer, runs, _CONCURRENCY)
        with gr.Tab("Compare kernels"):
            comparison_tab(model, tokenizer, runs, _CONCURRENCY)
        with gr.Tab("Score and rerank"):
            score_tab(model, tokenizer, _CONCURRENCY)
        gr.HTML(_STYLE, padding=False)
    return page
