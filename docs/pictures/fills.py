"""Draws the picture of the guide to joint fills, two vowels filled in three ways: `python docs/pictures/fills.py`."""

from pathlib import Path

from matplotlib import pyplot

from hf_ebm.assets import load_embedded_pronunciation
from hf_ebm.plots import plot_fills

model, tokenizer, _ = load_embedded_pronunciation()
text = f"p r e s e n t </s> P R {tokenizer.mask_token} Z {tokenizer.mask_token} N T"
readings = {"joint": "together", "independent": "each by itself", "sequential": "from left to right"}

pyplot.rcParams["svg.fonttype"], pyplot.rcParams["svg.hashsalt"] = "none", "fills"  # as chain.py
figure, all_axes = pyplot.subplots(1, 3, figsize=(9, 2.4), sharex=True, layout="constrained")
for axes, (reading, title) in zip(all_axes, readings.items(), strict=True):
    plot_fills(model.fill(text, tokenizer, top_k=6, reading=reading), axes=axes)
    spoken = {"EH · AH": "tab:green", "IY · EH": "tab:green", "IH · EH": "tab:green"}  # noun, verb, verb
    for bar, label in zip(axes.patches, axes.get_yticklabels(), strict=True):
        bar.set_color(spoken.get(label.get_text(), "lightgrey"))
    axes.set_title(title)
figure.savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})
