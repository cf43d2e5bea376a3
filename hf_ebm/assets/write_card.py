"""Writes the card of an embedded model from what was measured: `python -m hf_ebm.assets.write_card masked|causal`.

Reads `training_results.json`, draws twenty samples (the first ones of a fixed seed, unpicked) and fills the template of
`hub_cards`. About two minutes on one core.
"""

from __future__ import annotations

import json
import math
import sys
from importlib import resources
from pathlib import Path

import torch
from huggingface_hub import ModelCard, ModelCardData
from transformers import set_seed

from hf_ebm.assets import KJV_CAUSAL_LM, KJV_MASKED_LM, held_out_verses, load_embedded, load_embedded_causal
from hf_ebm.data.kjv import completion_rows
from hf_ebm.objectives.completions import ends_at
from hf_ebm.objectives.sequence_costs import non_termination, repetition
from hf_ebm.sampling.diagnostics import energy_diagnostics

SAMPLING = {
    "lengths": {10: 0.2, 12: 0.2, 14: 0.2, 16: 0.2, 18: 0.2},
    "num_chains": 20,
    "num_epochs": 40,
    "burn_in": 10,
    "block_size": [1, 3],
    "block_fill": "sequential",
    "block_layout": "contiguous",
    "seed": 0,
}
PROMPT_LENGTH, GREEDY_VERSES, MAX_NEW_TOKENS = 10, 200, 150


def masked_findings() -> dict:
    """Samples of the masked model, and how its chains went."""
    model, tokenizer = load_embedded()
    out = model.generate(**SAMPLING)
    found = energy_diagnostics(out.energies)
    texts = tokenizer.batch_decode(out.sequences, skip_special_tokens=True)
    return {
        "sampling": ", ".join(f"{name}={value!r}" for name, value in SAMPLING.items()),
        "acceptance": f"{float(out.trace.acceptance_rate.mean()):.2f}",
        "novel": f"{float(out.trace.novel_rate.mean()):.2f}",
        "r_hat": f"{found.r_hat:.2f}",
        "samples": [
            {"energy": f"{float(energy):.1f}", "text": text}
            for energy, text in zip(out.energies[:, -1], texts, strict=True)
        ],
    }


def causal_findings(results: dict) -> dict:
    """Samples of the causal model, and how its greedy continuations degenerate."""
    model, tokenizer = load_embedded_causal()
    seed = 0
    set_seed(seed)
    start = torch.full((20, 1), tokenizer.cls_token_id)
    drawn = model.generate(input_ids=start, do_sample=True, top_k=0, max_new_tokens=MAX_NEW_TOKENS)
    rows = completion_rows(held_out_verses()[1], tokenizer, PROMPT_LENGTH)[:GREEDY_VERSES]
    prompts = torch.tensor([row["input_ids"][:PROMPT_LENGTH] for row in rows])
    mask = torch.ones_like(prompts)
    greedy = model.generate(input_ids=prompts, attention_mask=mask, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
    greedy = [ids.tolist() for ids in ends_at(greedy[:, PROMPT_LENGTH:], [tokenizer.sep_token_id])]
    book = [row["input_ids"][PROMPT_LENGTH:] for row in rows]
    return {
        "perplexities": {name: math.exp(loss) for name, loss in results["loss"].items()},
        "seed": seed,
        "samples": tokenizer.batch_decode(drawn, skip_special_tokens=True),
        "greedy": {
            "verses": len(rows),
            "prompt_length": PROMPT_LENGTH,
            "max_new_tokens": MAX_NEW_TOKENS,
            "model": _degeneration(greedy, tokenizer.sep_token_id),
            "book": _degeneration(book, tokenizer.sep_token_id),
        },
    }


def _degeneration(sequences: list[list[int]], end_id: int) -> dict[str, float]:
    return {
        "non_termination": float(non_termination(sequences, end_id).mean()),
        "repetition": float(repetition(sequences).mean()),
        "length": sum(map(len, sequences)) / len(sequences),
    }


def write_card(folder: Path, template: str, card_data: ModelCardData, results: dict, findings: dict) -> None:
    """Fills a template and writes README.md beside the weights."""
    card = ModelCard.from_template(
        card_data,
        template_str=(resources.files("hf_ebm.hub_cards") / template).read_text(encoding="utf-8"),
        results=results,
        megabytes=f"{(folder / 'model.safetensors').stat().st_size / 1e6:.1f}",
        **findings,
    )
    card.save(folder / "README.md")


def main(kind: str) -> None:
    """Measures, and writes the card of the masked or the causal model."""
    folder = {"masked": KJV_MASKED_LM, "causal": KJV_CAUSAL_LM}[kind]
    results = json.loads((folder / "training_results.json").read_text(encoding="utf-8"))
    shared = {"language": "en", "license": "apache-2.0", "library_name": "transformers"}
    if kind == "masked":
        tags = ["hf_ebm", "energy-based-model", "masked-lm", "modernbert"]
        data, findings = ModelCardData(**shared, pipeline_tag="fill-mask", tags=tags), masked_findings()
    else:
        data = ModelCardData(**shared, pipeline_tag="text-generation", tags=["hf_ebm", "causal-lm", "gpt2"])
        findings = causal_findings(results)
    write_card(folder, f"{kind}_lm.md", data, results, findings)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ("masked", "causal"):
        sys.exit("usage: python -m hf_ebm.assets.write_card masked|causal")
    main(sys.argv[1])
