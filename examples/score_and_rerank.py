"""Scores sentences, and finds each among shuffles of its words: `python examples/score_and_rerank.py`."""

import random
from argparse import ArgumentParser

from hf_ebm.assets import held_out_clauses, load_embedded

parser = ArgumentParser(description=__doc__)
parser.add_argument("--num_texts", type=int, default=20, help="sentences that the model wasn't trained on")
parser.add_argument("--num_candidates", type=int, default=5, help="of each list: the sentence and shuffled ones")
parser.add_argument("--masking", default="exact", choices=["exact", "within_word_l2r", "stride", "unmasked"])
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

model, tokenizer = load_embedded()
shuffle = random.Random(args.seed)


def shuffled(text: str) -> str:
    words = text.split()
    return " ".join(shuffle.sample(words, len(words)))


texts = held_out_clauses()[: args.num_texts]
scores = model.score(texts, tokenizer, masking=args.masking)
for text, energy, perplexity in zip(texts[:5], scores.energy, scores.pseudo_perplexity, strict=False):
    print(f"{energy:7.2f} nats, pseudo-perplexity {perplexity:8.2f}  {text}")

# The sentence stands first in its list. `base_scores` would be the log probabilities of a model that made the lists.
lists = [[text, *(shuffled(text) for _ in range(args.num_candidates - 1))] for text in texts]
found = model.rerank(lists, tokenizer, masking=args.masking, length_normalization=1.0)
for candidates, best in list(zip(lists, found.best, strict=True))[:5]:
    print(f"best: {candidates[best]}")
right = sum(candidates[best] == candidates[0] for candidates, best in zip(lists, found.best, strict=True))
print(f"{right} of {len(lists)} sentences are found among {args.num_candidates} orders of their words")
