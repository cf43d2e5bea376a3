"""Fills blanks under a hard constraint, a word that must occur, and a soft one: `python examples/infill.py`."""

from argparse import ArgumentParser

import torch
from torch import Tensor

from hf_ebm.assets import load_embedded

parser = ArgumentParser(description=__doc__)
parser.add_argument("--text", default="and the [MASK] [MASK] unto the [MASK] of israel.", help="[MASK] marks a blank")
parser.add_argument("--must_say", default="king", help="a word that the text has to hold")
parser.add_argument("--avoid", default="lord", help="a word that costs 2 nats")
parser.add_argument("--num_chains", type=int, default=6)
parser.add_argument("--num_epochs", type=int, default=30)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

model, tokenizer = load_embedded()


def id_of(option: str, word: str) -> int:
    """The token of a word. What the vocabulary lacks is [UNK] or several pieces, and no sample could hold it."""
    ids = tokenizer(word, add_special_tokens=False).input_ids
    if len(ids) != 1 or ids[0] in tokenizer.all_special_ids:
        parser.error(f"{option} must be a word that is one token of the vocabulary, got {word!r}")
    return ids[0]


wanted, unwanted = id_of("--must_say", args.must_say), id_of("--avoid", args.avoid)


def says_it(ids: Tensor) -> Tensor:
    """(n, T) token ids -> (n,) energies: infinity forbids."""
    return torch.where((ids == wanted).any(1), 0.0, torch.inf)


def times_avoided_word(ids: Tensor) -> Tensor:
    return (ids == unwanted).sum(1).float()


prompt = tokenizer(args.text, return_tensors="pt")
out = model.generate(
    **prompt,
    num_chains=args.num_chains,
    num_epochs=args.num_epochs,
    burn_in=args.num_epochs // 3,
    seed=args.seed,
    extra_energies=[(1.0, says_it), (2.0, times_avoided_word)],  # weights: the target is exp(-(E + f + 2 g))
)
print(f"{args.text} with {args.must_say!r}, and rather without {args.avoid!r}")
texts = tokenizer.batch_decode(out.sequences, skip_special_tokens=True)
for energy, text in sorted(zip(out.energies[:, -1].tolist(), texts, strict=True)):
    print(f"{energy:7.2f}  {text}")
print(f"acceptance rate {float(out.trace.acceptance_rate.mean()):.2f}")
