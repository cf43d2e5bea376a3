"""Embedded trained models, so that everything runs without a network, and the scripts that made them.

- `kjv_masked_lm/`: a small masked language model of King James Bible clauses, its tokenizer, card and held-out text.
- `train_masked_lm.py` trains it, `write_card.py` writes its card.
"""

from __future__ import annotations

from pathlib import Path

import torch

KJV_MASKED_LM = Path(__file__).parent / "kjv_masked_lm"


def load_embedded(energy: str = "local", **kwargs):
    """The embedded masked language model as an `EnergyModel`, with its tokenizer.

    Args:
        energy: `"local"` or `"raw"`.
        kwargs: for `EnergyModel.from_pretrained`; the dtype is float32 unless given (the weights are stored in half).

    Returns:
        `(model, tokenizer)`.
    """
    from transformers import AutoTokenizer

    from hf_ebm.models.energy import EnergyModel

    model = EnergyModel.from_pretrained(KJV_MASKED_LM, energy=energy, **{"dtype": torch.float32, **kwargs})
    return model, AutoTokenizer.from_pretrained(KJV_MASKED_LM)


def held_out_clauses() -> list[str]:
    """Clauses of the King James Bible that the embedded model was not trained on, in the order of the book."""
    return (KJV_MASKED_LM / "held_out.txt").read_text(encoding="utf-8").splitlines()
