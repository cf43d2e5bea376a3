"""Writes the card of an embedded model from what was measured: `python -m hf_ebm.assets.write_card KIND`.

KIND is masked or causal (the King James Bible), or one of pronunciation, pronunciation_encoder_decoder and
pronunciation_length. Reads `training_results.json`, draws samples (the first ones of a fixed seed, unpicked) and fills
the template of `hub_cards`. About two minutes on one core.
"""

from __future__ import annotations

import json
import math
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard, ModelCardData
from transformers import set_seed

from hf_ebm.assets import (
    CMUDICT_LENGTH,
    KJV_CAUSAL_LM,
    KJV_MASKED_LM,
    PRONUNCIATION,
    held_out_verses,
    load_embedded,
    load_embedded_causal,
    load_embedded_pronunciation,
)
from hf_ebm.data.bibles import completion_rows
from hf_ebm.data.cmudict_tasks import load_g2p
from hf_ebm.data.metrics import transcription_scores
from hf_ebm.model_modes import generated_ids
from hf_ebm.models.energy import length_log_probs
from hf_ebm.objectives.completions import ends_at
from hf_ebm.objectives.sequence_costs import non_termination, repetition
from hf_ebm.sampling.convergence import energy_diagnostics

SAMPLING: dict[str, Any] = {
    "lengths": {10: 0.2, 12: 0.2, 14: 0.2, 16: 0.2, 18: 0.2},
    "num_chains": 20,
    "num_epochs": 40,
    "burn_in": 10,
    "block_size": [1, 3],
    "block_fill": "sequential",
    "block_layout": "contiguous",
    "seed": 0,
}
WORDS, CHAINS = 200, 4
TRANSCRIPTION: dict[str, Any] = {"num_chains": CHAINS, "num_epochs": 20, "burn_in": 5, "seed": 0}
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
    drawn = generated_ids(model, input_ids=start, do_sample=True, top_k=0, max_new_tokens=MAX_NEW_TOKENS)
    rows = completion_rows(held_out_verses()[1], tokenizer, PROMPT_LENGTH)[:GREEDY_VERSES]
    prompts = torch.tensor([row["input_ids"][:PROMPT_LENGTH] for row in rows])
    mask = torch.ones_like(prompts)
    rest = generated_ids(model, input_ids=prompts, attention_mask=mask, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
    greedy = [ids.tolist() for ids in ends_at(rest[:, PROMPT_LENGTH:], [tokenizer.sep_token_id])]
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


def pronunciation_findings(kind: str) -> dict:
    """How well test words are transcribed, by mask-predict and by sampling, and the first ten of them."""
    model, tokenizer, _ = load_embedded_pronunciation(kind)
    words = load_g2p()["test"][:WORDS]
    lengths = [len(target.split()) for target in words["target"]]
    best = model.generate_from_sources(
        words["source"], tokenizer, lengths=lengths, decoder="mask_predict", num_epochs=10, seed=0
    )
    drawn = model.generate_from_sources(words["source"], tokenizer, lengths=lengths, **TRANSCRIPTION)
    rows = []
    for name, texts in (("mask-predict, 10 iterations", best.texts), ("sampling", drawn.texts)):
        by_chain = zip(*texts, strict=True)
        scores = [transcription_scores(list(column), words["references"]) for column in by_chain]
        error, accuracy = (
            f"{100 * sum(score[metric] for score in scores) / len(scores):.1f}"
            for metric in ("phoneme_error_rate", "word_accuracy")
        )
        rows.append({"name": name, "error": error, "accuracy": accuracy})
    trace = drawn.chains.trace
    r_hats = [energy_diagnostics(drawn.chains.energies[own]).r_hat for own in drawn.rows]
    return {
        "words": WORDS,
        "decoders": rows,
        "sampling": ", ".join(f"{name}={value!r}" for name, value in TRANSCRIPTION.items()),
        "acceptance": f"{float(trace.acceptance_rate.mean()):.2f}",
        "novel": f"{float(trace.novel_rate.mean()):.2f}",
        "r_hat": f"{float(torch.tensor(r_hats).nanmedian()):.2f}",
        "samples": [
            {
                "word": words["source"][row].replace(" ", ""),
                "reference": words["target"][row],
                "chains": "; ".join(
                    f"{text} ({float(energy):.1f})"
                    for text, energy in list(zip(drawn.texts[row], drawn.energies[row], strict=True))[:2]
                ),
            }
            for row in range(10)
        ],
    }


def length_findings() -> dict:
    """How often the number of phonemes is among the most probable ones."""
    _, tokenizer, length_model = load_embedded_pronunciation()
    words = load_g2p()["test"]
    best = 1 + length_log_probs(length_model, tokenizer, words["source"]).topk(3).indices
    right = best == torch.tensor([len(target.split()) for target in words["target"]])[:, None]
    return {
        "accuracy": f"{100 * float(right[:, 0].double().mean()):.1f}",
        "top_three": f"{100 * float(right.any(1).double().mean()):.1f}",
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


PRONUNCIATION_CARDS = {
    "masked": (
        "a masked language model",
        'A ModernBERT that fills in phonemes in the row "letters </s> phonemes </s>".',
    ),
    "encoder_decoder": (
        "an encoder-decoder",
        "A BART whose encoder reads the letters and whose decoder fills in phonemes.",
    ),
    "length": (
        "how many phonemes",
        "A GPT-2 with a classification head: the log probabilities of a word's number of phonemes.",
    ),
}


def main(kind: str) -> None:
    """Measures, and writes the card of a model."""
    shared: dict[str, Any] = {"language": "en", "license": "apache-2.0", "library_name": "transformers"}
    if kind in ("masked", "causal"):
        folder, template = {"masked": KJV_MASKED_LM, "causal": KJV_CAUSAL_LM}[kind], f"{kind}_lm.md"
    else:
        own = kind.removeprefix("pronunciation").removeprefix("_") or "masked"
        folder, template = {**PRONUNCIATION, "length": CMUDICT_LENGTH}[own], "pronunciation.md"
    results = json.loads((folder / "training_results.json").read_text(encoding="utf-8"))
    if kind == "masked":
        tags = ["hf_ebm", "energy-based-model", "masked-lm", "modernbert"]
        data, findings = ModelCardData(**shared, pipeline_tag="fill-mask", tags=tags), masked_findings()
    elif kind == "causal":
        data = ModelCardData(**shared, pipeline_tag="text-generation", tags=["hf_ebm", "causal-lm", "gpt2"])
        findings = causal_findings(results)
    else:
        data = ModelCardData(**shared, tags=["hf_ebm", "grapheme-to-phoneme", "cmudict"])
        findings = length_findings() if own == "length" else pronunciation_findings(own)
        title, description = PRONUNCIATION_CARDS[own]
        findings |= {"kind": own, "title": title, "description": description}
    write_card(folder, template, data, results, findings)


KINDS = ("masked", "causal", "pronunciation", "pronunciation_encoder_decoder", "pronunciation_length")

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in KINDS:
        sys.exit(f"usage: python -m hf_ebm.assets.write_card {'|'.join(KINDS)}")
    main(sys.argv[1])
