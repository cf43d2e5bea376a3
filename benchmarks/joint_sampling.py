"""What joint sampling costs, against its parts done apart: sampling from the language model, and encoder scoring.

Tokens a second of `ResidualEnergyModel.generate` at n = 64, by those of the two parts alone: the language model's own
`generate` with 64 return sequences, and the encoder on 64 whole rows, each timed by itself. The bound is 0.8.
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModel, GenerationConfig

from benchmarks.common import begin_timing, medians, print_table
from hf_ebm.assets import KJV_MASKED_LM, load_embedded_causal
from hf_ebm.models.residual import ResidualEnergyModel

CANDIDATES = 64
PREFIX, LENGTH = 32, 32


def models() -> dict[str, ResidualEnergyModel]:
    """The embedded models, with a bidirectional and a causal encoder."""
    lm, _ = load_embedded_causal()
    lm.config.eos_token_id = lm.generation_config.eos_token_id = None  # every candidate has the full length
    other, _ = load_embedded_causal()
    bidirectional = AutoModel.from_pretrained(KJV_MASKED_LM, dtype=torch.float32)
    return {
        "ModernBERT 6 x 256": ResidualEnergyModel(lm, bidirectional).eval(),
        "GPT-2 6 x 256": ResidualEnergyModel(lm, other.transformer).eval(),
    }


def row_of(model: ResidualEnergyModel, repeats: int, candidates: int = CANDIDATES, length: int = LENGTH) -> list[float]:
    """Milliseconds of the parts and of the whole, tokens a second, and the ratio that is bounded."""
    device = model.lm.device
    prefix = torch.randint(5, 4000, (1, PREFIX), generator=torch.Generator().manual_seed(0)).to(device)
    config = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=length, num_return_sequences=candidates, pad_token_id=0, use_cache=True
    )

    def sampling() -> torch.Tensor:
        return model.lm.generate(prefix, attention_mask=torch.ones_like(prefix), generation_config=config)

    rows = sampling()

    def scoring() -> None:
        with torch.no_grad():
            model(input_ids=rows, attention_mask=torch.ones_like(rows))

    def joint() -> None:
        model.generate(prefix, num_candidates=candidates, max_new_tokens=length, seed=0)

    found = medians({"sampling": sampling, "scoring": scoring, "joint": joint}, repeats)
    apart = found["sampling"] + found["scoring"]
    milliseconds = [1e3 * seconds for seconds in found.values()]
    return [*milliseconds, candidates * length / found["joint"], apart / found["joint"]]


HEADER = ["encoder", "sampling alone, ms", "scoring alone, ms", "joint, ms", "joint, tokens/s", "apart / joint"]


def main() -> None:
    """Prints the table."""
    repeats = begin_timing(argparse.ArgumentParser(description=__doc__)).repeats
    print(f"{CANDIDATES} candidates of {LENGTH} tokens behind {PREFIX}")
    print_table(HEADER, ([name, *row_of(model, repeats)] for name, model in models().items()))


if __name__ == "__main__":
    main()
