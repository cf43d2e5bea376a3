"""Joints of two positions: how far each is from the masked conditionals, and what it is worth as a proposal of pairs.

In each text two neighbouring tokens are masked, and may be the `--words` likeliest at their position or what stands
there. The first table has means over texts of `EnergyModel.pair_joints`: divergences, and the surprisal of what stood
there. The second takes each joint as a proposal for the pair in chains whose free positions are all tokens. Such a
step is an independence sampler, so the share of steps that move, in the stationary chain, is a sum over all pairs:
`Σ_{y≠y'} min(π(y) q(y'), π(y') q(y))`, the π of a pair given the rest being computed. A step's rows are those of the
proposal and of the energy terms that it doesn't know yet.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.common import begin_timing, print_table
from hf_ebm import EnergyModel
from hf_ebm.assets import held_out_clauses, load_embedded
from hf_ebm.models.energy.chains import proposal_support
from hf_ebm.scoring.joint_fills import FillSpace, Slot, fill_energies, independent_log_probs

# Reactions of textbooks: acylations, a hydrolysis, couplings, a substitution, a reduction.
REACTIONS = [
    "CC(=O)Cl.NCc1ccccc1>>CC(=O)NCc1ccccc1",
    "CC(=O)O.OCC>>CC(=O)OCC",
    "CCOC(=O)c1ccccc1.[Na+].[OH-]>>O=C(O)c1ccccc1",
    "Brc1ccccc1.OB(O)c1ccncc1>>c1ccc(-c2ccncc2)cc1",
    "Clc1ncccn1.CNC>>CN(C)c1ncccn1",
    "CCBr.Oc1ccccc1>>CCOc1ccccc1",
    "O=Cc1ccccc1.[BH4-].[Na+]>>OCc1ccccc1",
    "O=C(O)c1ccccc1.CN>>CNC(=O)c1ccccc1",
]


class Pair:
    """Two neighbouring tokens of a text: their joints, and the target's distribution of them given the rest."""

    @torch.no_grad()
    def __init__(self, model: EnergyModel, tokenizer, text: str, place: int, words: int):
        ids = tokenizer(text, return_tensors="pt").input_ids[0]
        at = torch.tensor([place, place + 1])
        support, runner = proposal_support(model, None).nonzero(), model.masked_batch_runner()
        masked = ids.index_fill(0, at, tokenizer.mask_token_id)
        whole = FillSpace(masked, tuple(Slot(own[None], support) for own in at))
        log_probs = independent_log_probs(runner, whole)
        likeliest = [support[log.topk(words).indices, 0] for log in log_probs]
        sets = [torch.cat([own, ids[spot, None]]).unique() for own, spot in zip(likeliest, at, strict=True)]
        names = [tokenizer.convert_ids_to_tokens(own.tolist()) for own in sets]
        self.found = model.pair_joints(masked[None], tokenizer, words=names)
        self.true = tuple(int((own == ids[spot]).nonzero()) for own, spot in zip(self.found.tokens, at, strict=True))
        self.length = len(ids) - 2
        fills = torch.cartesian_prod(*self.found.tokens)
        rows = ids.repeat(len(fills), 1)
        rows[:, at] = fills
        every = FillSpace(ids, tuple(Slot(torch.tensor([column]), fills[:1, :1]) for column in range(1, len(ids) - 1)))
        energies = fill_energies(runner, every, rows, model.config.energy)
        self.target = (-energies).log_softmax(0).view(len(sets[0]), -1)

    def proposals(self) -> dict[str, tuple[Tensor, int]]:
        """Log probabilities of pairs, and masked rows of a step."""
        joints, others = self.found.joints, self.length - 2
        first = joints["independent"].logsumexp(1)
        sequential = first[:, None] + self.found.conditionals.second
        pairs = sum(self.target.shape) + 1 + others
        return {
            "parallel": (joints["independent"], 1 + 2 + others),
            # Rows for the second token there and back; the first of them gives its energy term.
            "sequential": (sequential, 1 + 2 + 1 + others),
            **{name: (joints[name], pairs) for name in ("random_field", "arnold_gokhale", "besag")},
            "target": (self.target, pairs),
        }


def moves(target: Tensor, proposal: Tensor) -> float:
    """The share of steps that move, in the stationary chain."""
    there = target.flatten()[:, None] + proposal.flatten()
    flow = torch.minimum(there, there.T).exp()
    return float(flow.sum() - flow.diagonal().sum())


def pairs_of(model: EnergyModel, tokenizer, texts: list[str], words: int) -> list[Pair]:
    """A pair of each text, at a place that the text decides."""
    found = []
    for text in texts:
        count = len(tokenizer(text).input_ids)
        found.append(Pair(model, tokenizer, text, random.Random(text).randrange(1, count - 2), words))
    return found


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", type=int, nargs="+", default=[8, 24], help="candidates of each position")
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--reactions", type=Path, help="folder that examples/reactions.py writes, for its model, too")
    arguments = begin_timing(parser)
    models = {"embedded": (*load_embedded(), random.Random(0).sample(held_out_clauses(), arguments.texts))}
    if arguments.reactions:
        model, tokenizer = (
            EnergyModel.from_pretrained(arguments.reactions),
            AutoTokenizer.from_pretrained(arguments.reactions),
        )
        models["reactions"] = model, tokenizer, REACTIONS[: arguments.texts]
    found = {
        (name, words): pairs_of(model, tokenizer, texts, words)
        for name, (model, tokenizer, texts) in models.items()
        for words in arguments.words
    }

    def mean(values) -> float:
        values = list(values)
        return sum(values) / len(values)

    rows = [
        [name, words, joint, mean(own.found.divergences[joint].mean for own in pairs),
         mean(own.found.divergences[joint].expected for own in pairs),
         mean(-float(own.found.joints[joint][own.true]) for own in pairs)]
        for (name, words), pairs in found.items()
        for joint in ("independent", "random_field", "besag", "arnold_gokhale")
    ]  # fmt: skip
    print_table(
        ["model", "words", "joint", "mean KL, nats", "expected KL, nats", "surprisal of the true pair, nats"], rows
    )
    print()
    steps = []
    for (name, words), pairs in found.items():
        proposals = [own.proposals() for own in pairs]
        for proposal in proposals[0]:
            moved = mean(moves(own.target, all_[proposal][0]) for own, all_ in zip(pairs, proposals, strict=True))
            run = mean(all_[proposal][1] for all_ in proposals)
            steps.append([name, words, mean(own.length for own in pairs), proposal, moved, run, 1000 * moved / run])
    print_table(
        ["model", "words", "free tokens", "proposal", "moves a step", "rows a step", "moves a 1,000 rows"], steps
    )


if __name__ == "__main__":
    main()
