"""Fills of masks one at a time: their tokens' probabilities, which sequential Monte Carlo weighs by."""

import math
from itertools import permutations, product

import numpy as np
import torch

from hf_ebm.sampling.configuration import ChainGenerationConfig
from hf_ebm.sampling.proposals import proposal_of
from hf_ebm.sampling.target import Target
from hf_ebm.sampling.warm_start import fill_sequentially, sequential_log_probs
from tests.conftest import tiny_energy_model

WORDS = [5, 6, 7, 8]


def plain_log_prob(model, ids: torch.Tensor, order) -> float:
    """Log probability of filling positions of one row in an order, the later ones masked: the inner model alone."""
    row, total = ids.clone(), 0.0
    row[list(order)] = model.config.mask_token_id
    for position in order:
        with torch.no_grad():
            logits = model.mlm(input_ids=row[None]).logits[0, position].double()
        total += float(logits[ids[position]] - logits[WORDS].logsumexp(0))
        row[position] = ids[position]
    return total


def target_and_proposal(model, chains: int, length: int):
    support = torch.zeros(9, dtype=torch.bool).index_fill(0, torch.tensor(WORDS), True)
    free = torch.zeros(chains, length + 2, dtype=torch.bool)
    free[:, 1:-1] = True
    ends = torch.zeros(chains, dtype=torch.long), torch.full((chains,), length + 2)
    target = Target(model.masked_batch_runner(), model.config.energy, free, *ends, support)
    return target, proposal_of(ChainGenerationConfig().resolved(ChainGenerationConfig(), {}), support)


def test_log_probabilities_of_fills_are_those_of_their_order():
    model = tiny_energy_model()
    target, proposal = target_and_proposal(model, 6, 3)
    masked = torch.tensor([[1, 3, 3, 3, 2]] * 6)
    generators = [np.random.default_rng(chain) for chain in range(6)]
    fill = fill_sequentially(masked, target.free, generators, target, proposal)
    expected = [plain_log_prob(model, ids, order) for ids, order in zip(fill.ids, fill.orders, strict=True)]
    torch.testing.assert_close(fill.log_probs, torch.tensor(expected, dtype=torch.float64), atol=1e-5, rtol=1e-5)
    again = sequential_log_probs(fill.ids, fill.orders, target, proposal)
    torch.testing.assert_close(again, fill.log_probs, atol=1e-5, rtol=1e-5)


def test_log_probabilities_of_all_fills_sum_to_one_in_every_order():
    model = tiny_energy_model()
    rows = torch.tensor([[1, *words, 2] for words in product(WORDS, repeat=3)])
    target, proposal = target_and_proposal(model, len(rows), 3)
    for order in permutations([1, 2, 3]):
        log_probs = sequential_log_probs(rows, [np.array(order)] * len(rows), target, proposal)
        assert math.isclose(float(log_probs.exp().sum()), 1, rel_tol=1e-6)
    # With the order drawn, it is no product of conditionals any more: orders differ.
    other = sequential_log_probs(rows, [np.array([1, 2, 3])] * len(rows), target, proposal)
    assert not torch.allclose(log_probs, other)
