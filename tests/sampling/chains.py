"""Settings and helpers that the tests of `generate` share."""

import torch
from transformers import StoppingCriteria

BASE = dict(lengths=4, num_chains=3, num_epochs=4, seed=7)
VARIED = [
    {},
    {"block_size": 2, "block_fill": "sequential", "block_layout": "contiguous"},
    {"delayed_acceptance": 0, "exclude_current": True},
    {"kernel": "gibbs", "proposal_top_k": 2},
    {"decoder": "mask_predict"},
    {"lengths": {3: 0.5, 5: 0.5}, "burn_in": 1, "thinning": 2},
    {"lengths": [2, 5], "warm_start": "mask_predict"},
    {"replica_temperatures": [1.0, 1.5, 4.0], "burn_in": 1, "lengths": [4, 3]},
]


def equal(one, other) -> bool:
    """Outputs hold the same chains."""
    return torch.equal(one.samples, other.samples) and torch.allclose(one.energies, other.energies)


class StopAfter(StoppingCriteria):
    """Stops (or raises) after some epochs."""

    def __init__(self, epochs: int, error: type[BaseException] | None = None):
        self.left, self.error = epochs, error

    def __call__(self, input_ids, scores):
        self.left -= 1
        if self.left == 0 and self.error:
            raise self.error("killed")
        return torch.full((len(input_ids),), self.left <= 0)
