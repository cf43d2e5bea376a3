"""A Gradio page around an `EnergyModel`, as a Hugging Face Space would run it. Extra `hf_ebm[demo]`.

- `prompts`, `chain_stream`, `comparison`, `score_table`, `tokens`: what the page does, as plain functions.
- `sampling_tab`, `comparison_tab`, `score_tab`, `page`: its components; `messages`: errors of the user's as messages.
"""

from __future__ import annotations

try:
    import gradio  # noqa: F401
except ImportError as error:
    raise ImportError("the demo needs the extra hf_ebm[demo]: pip install gradio") from error

from hf_ebm.demo.page import build_demo

__all__ = ["build_demo"]
