"""Draws sentences from a masked language model, and says whether the chains have met: `python examples/sample.py`."""

from argparse import ArgumentParser

from transformers import AutoTokenizer

from hf_ebm import EnergyModel
from hf_ebm.assets import load_embedded
from hf_ebm.sampling.convergence import energy_diagnostics

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
chains, samples = out.energies.shape
if chains >= 2 and samples >= 4:
    found = energy_diagnostics(out.energies)  # `out.to_inference_data()` is for ArviZ
    told = f"split R-hat {found.r_hat:.2f} (above 1.1: take more epochs)"
    print(f"{told}, {found.ess_bulk:.0f} effective samples of the energy")
else:
    print(f"R-hat needs at least 2 chains of 4 samples; --num_chains and --num_epochs gave {chains} of {samples}")
