"""Draws the picture of the guide to variants, substitutions in aspirin: `python docs/pictures/variants.py FOLDER`.

The folder is what `examples/reactions.py` writes, a trained model of chemical reactions.
"""

import sys
from pathlib import Path

from matplotlib import pyplot
from transformers import AutoTokenizer

from hf_ebm import EnergyModel
from hf_ebm.plots import plot_substitutions

model, tokenizer = EnergyModel.from_pretrained(sys.argv[1]).eval(), AutoTokenizer.from_pretrained(sys.argv[1])
aspirin, atoms = "CC(=O)Oc1ccccc1C(=O)O", "CNOSFcnos"
sites = [(position, letter) for position, letter in enumerate(aspirin, 1) if letter.isalpha()]
variants = [f"{own}{position}{new}" for position, own in sites for new in atoms if new != own]
found = model.score_variants(aspirin, variants, tokenizer)

pyplot.rcParams["svg.fonttype"], pyplot.rcParams["svg.hashsalt"] = "none", "variants"  # as chain.py
figure, axes = pyplot.subplots(figsize=(9, 3), layout="constrained")
plot_substitutions(variants, found.scores, axes)
axes.set(title=f"atoms of {aspirin}, {found.num_rows} masked rows", ylabel="atom put there")
figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})
