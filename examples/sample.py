"""Draws sentences from a masked language model, and says whether the chains have met: `python examples/sample.py`."""

from argparse import ArgumentParser

from transformers import AutoTokenizer

from hf_ebm import EnergyModel
from hf_ebm.assets import load_embedded

parser = ArgumentParser(description=__doc__)
parser.add_argument("--model", help="a masked language model of the Hub or a folder; default the embedded one")
parser.add_argument("--length", type=int, default=12, help="tokens of a sentence")
parser.add_argument("--num_chains", type=int, default=8)
parser.add_argument("--num_epochs", type=int, default=40, help="how often a chain goes through its sentence")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

if args.model:
    model, tokenizer = EnergyModel.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
else:
    model, tokenizer = load_embedded()

# Two neighbours at a time, the pair decided in two stages: the best settings for sentences that were measured.
pairs = dict(block_size=2, block_fill="sequential", block_layout="contiguous", delayed_acceptance=1)
out = model.generate(
    lengths=args.length,
    num_chains=args.num_chains,
    num_epochs=args.num_epochs,
    burn_in=args.num_epochs // 4,
    seed=args.seed,
    **pairs,
)

texts = tokenizer.batch_decode(out.sequences, skip_special_tokens=True)
for energy, text in sorted(zip(out.energies[:, -1].tolist(), texts, strict=True)):
    print(f"{energy:7.2f}  {text}")
print(out.summary())  # R-hat above 1.1: the last line says what to change; `out.to_inference_data()` is for ArviZ
