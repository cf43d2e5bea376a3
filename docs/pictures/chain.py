"""Draws the README's picture, a chain of the embedded model with its energies: `python docs/pictures/chain.py`."""

from pathlib import Path

from matplotlib import pyplot

from hf_ebm.assets import load_embedded
from hf_ebm.plots import plot_token_changes

model, tokenizer = load_embedded()
start = tokenizer("let god light there said and be and it was so", return_tensors="pt")
pairs = dict(block_size=2, block_fill="sequential", block_layout="contiguous", delayed_acceptance=1)
out = model.generate(**start, num_chains=2, num_epochs=16, seed=1, **pairs)

pyplot.rcParams["svg.fonttype"], pyplot.rcParams["svg.hashsalt"] = (
    "none",
    "chain",
)  # letters stay text; the same file each time
figure, (texts, energies) = pyplot.subplots(
    1, 2, figsize=(9, 4), sharey=True, width_ratios=(4, 1), layout="constrained"
)
plot_token_changes(out, tokenizer, chain=0, axes=texts)
texts.set(title="a chain of sentences, epoch by epoch (shaded: just changed)", xlabel="", xticks=[], ylabel="epoch")
texts.images[0].set(interpolation="none", clim=(0, 3))  # one pixel a token
energies.plot(out.energies[0].tolist(), range(16), marker="o", markersize=3)
energies.set(title="energy, nats", xlim=(0, None))
energies.grid(alpha=0.3)
figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})
