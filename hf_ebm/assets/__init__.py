"""Embedded trained models, so that everything runs without a network, and the scripts that made them.

- `kjv_masked_lm/`: a small masked language model of King James Bible clauses, its tokenizer, card and held-out text.
- `kjv_causal_lm/`: a small causal language model of whole verses, with the same tokenizer and held-out verses.
- `cmudict_masked_lm/`, `cmudict_encoder_decoder/`: pronunciation of English words, letters to phonemes, by a masked
  language model and by one of BART's shape; `cmudict_length/`: the number of phonemes of a word.
- `train_masked_lm.py`, `train_causal_lm.py`, `train_pronunciation.py` train them, `write_card.py` writes their cards,
  `embedding.py` is shared.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hf_ebm.data.bibles import split_held_out

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_ebm.models.energy import EnergyModel

KJV_MASKED_LM = Path(__file__).parent / "kjv_masked_lm"
KJV_CAUSAL_LM = Path(__file__).parent / "kjv_causal_lm"
PRONUNCIATION = {
    "masked": Path(__file__).parent / "cmudict_masked_lm",
    "encoder_decoder": Path(__file__).parent / "cmudict_encoder_decoder",
}
CMUDICT_LENGTH = Path(__file__).parent / "cmudict_length"


def load_embedded(energy: str = "local", **kwargs: Any) -> tuple[EnergyModel, PreTrainedTokenizerBase]:
    """The embedded masked language model as an `EnergyModel`, with its tokenizer.

    Args:
        energy: one of `hf_ebm.scoring.energies.ENERGIES`.
        kwargs: for `EnergyModel.from_pretrained`; the dtype is float32 unless given (the weights are stored in half).

    Returns:
        `(model, tokenizer)`.

    Example:
        >>> model, tokenizer = load_embedded()
        >>> model.config.energy, tokenizer.mask_token
        ('local', '[MASK]')
    """
    from transformers import AutoTokenizer

    from hf_ebm.models.energy import EnergyModel

    model = EnergyModel.from_pretrained(KJV_MASKED_LM, energy=energy, **{"dtype": torch.float32, **kwargs})
    return model, AutoTokenizer.from_pretrained(KJV_MASKED_LM)


def held_out_clauses() -> list[str]:
    """Clauses of the King James Bible that the embedded model was not trained on, in the order of the book.

    Example:
        >>> held_out_clauses()[0]
        'And God said, Let the waters bring forth abundantly the moving creature that hath life,'
    """
    return (KJV_MASKED_LM / "held_out.txt").read_text(encoding="utf-8").splitlines()


def load_embedded_causal(**kwargs: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The embedded causal language model, with its tokenizer.

    A verse stands between `tokenizer.cls_token` and `tokenizer.sep_token`, the model's end token.

    Args:
        kwargs: for `from_pretrained`; the dtype is float32 unless given (the weights are stored in half).

    Returns:
        `(model, tokenizer)`, the model in evaluation mode.

    Example:
        >>> model, tokenizer = load_embedded_causal()
        >>> model.generation_config.eos_token_id == tokenizer.sep_token_id
        True
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(KJV_CAUSAL_LM, **{"dtype": torch.float32, **kwargs})
    return model, AutoTokenizer.from_pretrained(KJV_CAUSAL_LM)


def held_out_verses() -> tuple[list[str], list[str]]:
    """Verses that neither embedded model was trained on: validation (it chose the causal model's epoch), and test.

    Example:
        >>> validation, test = held_out_verses()
        >>> len(validation), len(test)
        (778, 777)
    """
    return split_held_out((KJV_CAUSAL_LM / "held_out.txt").read_text(encoding="utf-8").splitlines())


def load_embedded_pronunciation(
    kind: str = "masked", energy: str = "local"
) -> tuple[EnergyModel, PreTrainedTokenizerBase, PreTrainedModel]:
    """An embedded model of English pronunciation as an `EnergyModel`, with its tokenizer and its model of lengths.

    Sources are letters, "h e l l o", targets phonemes without stress, "HH AH L OW"; see `generate_from_sources`.

    Args:
        kind: `"masked"` (letters and phonemes in one row) or `"encoder_decoder"` (of BART's shape: the letters in the
            encoder; its decoder is causal, so a phoneme's conditional depends on those before it alone).
        energy: one of `hf_ebm.scoring.energies.ENERGIES`.

    Returns:
        `(model, tokenizer, length_model)`, in float32.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from hf_ebm.models.energy import EnergyModel

    if kind not in PRONUNCIATION:
        raise ValueError(f"kind must be one of {', '.join(PRONUNCIATION)}, got {kind!r}")
    model = EnergyModel.from_pretrained(PRONUNCIATION[kind], energy=energy, dtype=torch.float32)
    lengths = AutoModelForSequenceClassification.from_pretrained(CMUDICT_LENGTH, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(PRONUNCIATION[kind]), lengths.eval()
