"""Writes the card of the embedded masked language model from what was measured.

    python -m hf_ebm.assets.write_card

Reads `training_results.json`, draws twenty samples (the first ones of a fixed seed, unpicked) and fills
`hub_cards/masked_lm.md`. About two minutes on one core.
"""

from __future__ import annotations

import json
from importlib import resources

from huggingface_hub import ModelCard, ModelCardData

from hf_ebm.assets import KJV_MASKED_LM, load_embedded
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


def main() -> None:
    """Draws the samples and writes README.md beside the weights."""
    model, tokenizer = load_embedded()
    out = model.generate(**SAMPLING)
    found = energy_diagnostics(out.energies)
    samples = [
        {"energy": f"{float(energy):.1f}", "text": text}
        for energy, text in zip(
            out.energies[:, -1], tokenizer.batch_decode(out.sequences, skip_special_tokens=True), strict=True
        )
    ]
    card = ModelCard.from_template(
        ModelCardData(
            language="en",
            license="apache-2.0",
            library_name="transformers",
            pipeline_tag="fill-mask",
            tags=["hf_ebm", "energy-based-model", "masked-lm", "modernbert"],
        ),
        template_str=(resources.files("hf_ebm.hub_cards") / "masked_lm.md").read_text(encoding="utf-8"),
        results=json.loads((KJV_MASKED_LM / "training_results.json").read_text(encoding="utf-8")),
        megabytes=f"{(KJV_MASKED_LM / 'model.safetensors').stat().st_size / 1e6:.1f}",
        sampling=", ".join(f"{name}={value!r}" for name, value in SAMPLING.items()),
        acceptance=f"{float(out.trace.acceptance_rate.mean()):.2f}",
        novel=f"{float(out.trace.novel_rate.mean()):.2f}",
        r_hat=f"{found.r_hat:.2f}",
        samples=samples,
    )
    card.save(KJV_MASKED_LM / "README.md")


if __name__ == "__main__":
    main()
