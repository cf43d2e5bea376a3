"""Pronounces words by sampling phonemes given letters: `python examples/conditional_generation.py`."""

from argparse import ArgumentParser

from hf_ebm.assets import load_embedded_pronunciation

parser = ArgumentParser(description=__doc__)
parser.add_argument("--words", nargs="+", default=["hello", "strength", "energy", "metropolis", "language"])
parser.add_argument("--kind", default="masked", choices=["masked", "encoder_decoder"], help="the embedded model")
parser.add_argument("--num_chains", type=int, default=8, help="for each word, each with a length of its own")
parser.add_argument("--num_epochs", type=int, default=15)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

model, tokenizer, length_model = load_embedded_pronunciation(args.kind)
out = model.generate_from_sources(
    [" ".join(word) for word in args.words],  # a source is letters: "h e l l o"
    tokenizer,
    lengths="sample",  # from the length model
    length_model=length_model,
    num_chains=args.num_chains,
    num_epochs=args.num_epochs,
    seed=args.seed,
)
best = {}
for word, texts, energies, lengths in zip(args.words, out.texts, out.energies, out.lengths, strict=True):
    energy, best[word] = min(zip((energies / lengths).tolist(), texts, strict=True))  # lengths differ, so a phoneme's
    print(f"{word:12}  {best[word]:32}  {energy:5.2f} nats a phoneme, {len(set(texts))} different samples")
print(f"acceptance rate {float(out.chains.trace.acceptance_rate.mean()):.2f}")
