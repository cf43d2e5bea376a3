"""Filling masks: where chains start, and the mask-predict decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hf_ebm.sampling.proposals import BlockProposal
from hf_ebm.sampling.target import Target
from hf_ebm.scoring.rows import Index, MaskedRows

# Iterations of mask-predict as a warm start; the same for every chain, whichever run beside it.
_ITERATIONS = 10


class SequentialFill(NamedTuple):
    """Masks filled one at a time, each given those already there, in an order that was drawn before.

    Attributes:
        ids: (C, T).
        log_probs: (C,) of drawing the tokens in this order, float64.
        orders: of each chain the columns as they were filled.
    """

    ids: Tensor
    log_probs: Tensor
    orders: list[NDArray]


def fill_sequentially(
    ids: Tensor, masked: Tensor, generators: list[np.random.Generator], target: Target, proposal: BlockProposal
) -> SequentialFill:
    """Draws the tokens of `masked` (C, T) one at a time in random order, given those already there."""
    orders, uniforms = [], []
    for chain, generator in enumerate(generators):
        positions = masked[chain].nonzero()[:, 0].numpy()
        draws = generator.random((2, len(positions)))
        orders.append(positions[np.argsort(draws[0], kind="stable")])
        uniforms.append(draws[1])
    log_probs = torch.zeros(len(ids), dtype=torch.float64)
    for step, (size, position) in enumerate(_places(orders)):
        uniform = torch.tensor([own[step] if len(own) > step else 0.0 for own in uniforms], dtype=torch.float64)
        # The positions still to be filled hold the mask token in `ids` itself.
        proposed = proposal.unconstrained(ids, position, size, uniform[:, None], target)
        ids, log_probs = proposed.ids, log_probs + proposed.log_forward
    return SequentialFill(ids, log_probs, orders)


def sequential_log_probs(ids: Tensor, orders: list[NDArray], target: Target, proposal: BlockProposal) -> Tensor:
    """(C,) log probabilities, float64, with which `fill_sequentially` draws the tokens of `ids` (C, T) in some orders.

    Args:
        orders: of each chain the columns that are filled.
        proposal: one that may propose the token that is there.
    """
    masked = torch.zeros_like(ids, dtype=torch.bool)
    for chain, order in enumerate(orders):
        masked[chain, torch.from_numpy(order)] = True
    log_probs, nothing = torch.zeros(len(ids), dtype=torch.float64), torch.zeros(len(ids), 1, dtype=torch.float64)
    for size, position in _places(orders):
        here = (size > 0)[:, None]
        masked &= ~torch.zeros_like(masked).scatter(1, position, here)
        shown = ids.masked_fill(masked, target.runner.mask_id)
        log_probs += proposal.unconstrained(shown, position, size, nothing, target).log_reverse
    return log_probs


def _places(orders: list[NDArray]) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each step how many positions of a chain are filled (C,), one or none, and which (C, 1)."""
    for step in range(max(map(len, orders))):
        yield (
            torch.tensor([int(len(order) > step) for order in orders]),
            torch.tensor([order[step] if len(order) > step else 0 for order in orders])[:, None],
        )


def sample_masks(
    ids: Tensor, masked: Tensor, generators: list[np.random.Generator], target: Target, proposal: BlockProposal
) -> Tensor:
    """The ids (C, T) that `fill_sequentially` draws.

    Different chains start from different places, which R-hat needs to mean anything.
    """
    return fill_sequentially(ids, masked, generators, target, proposal).ids


def mask_predict(ids: Tensor, masked: Tensor, iterations: int, target: Target) -> tuple[Tensor, Tensor]:
    """Mask-predict (Ghazvininejad et al. 2019): fills masks by argmax, re-masking the least confident ones.

    Iteration t of N masks the `n (N - t) / N` least confident of the n positions (all of them at t = 0) and predicts
    them anew. One iteration is a greedy fill in one pass.

    Args:
        masked: (C, T) bool, the positions to fill.

    Returns:
        `(ids (C, T), mean log probability (C,) of the filled tokens)`, 0 where a chain has nothing to fill.
    """
    confidence = torch.where(masked, -torch.inf, torch.inf).double()
    count = masked.sum(1)
    for iteration in range(iterations):
        number = (count * (iterations - iteration)) // iterations
        rank = confidence.argsort(dim=1, stable=True).argsort(dim=1, stable=True)
        again = masked & (rank < number[:, None])
        chains = again.any(1).nonzero()[:, 0]
        if len(chains) == 0:
            break
        positions, tokens, log_probabilities = _most_probable(ids, again, chains, target)
        rows = chains[:, None].expand_as(positions)
        ids = ids.index_put((rows, positions), tokens)
        confidence = confidence.index_put((rows, positions), log_probabilities)
    return ids, (confidence.masked_fill(~masked, 0.0)).sum(1) / count.clamp(min=1)


def _most_probable(ids: Tensor, again: Tensor, chains: Tensor, target: Target) -> tuple[Tensor, Tensor, Tensor]:
    """Argmax tokens at the positions of `again` (C, T), masked together: positions, tokens, log probabilities."""
    wanted = again[chains]
    order = torch.sort((~wanted).long(), dim=1, stable=True).indices[:, : int(wanted.sum(1).max())]
    positions = torch.where(wanted.gather(1, order), order, order[:, :1])  # shorter rows repeat their first position

    rows = MaskedRows(chains, positions, positions)

    def reduce(logits: Tensor, n: Index) -> Tensor:
        forbidden = ~target.support.to(logits.device)
        narrowed = target.forbidden(rows, n, logits.device)
        if narrowed is not None:
            forbidden = forbidden | narrowed.unflatten(0, logits.shape[:2])
        best = logits.masked_fill(forbidden, -torch.inf).log_softmax(-1).max(-1)
        return torch.stack([best.indices.double(), best.values.double()], -1)

    found = target.runner(target.sequences(ids), rows, reduce)
    # Repeats must agree with what they repeat: rounding could differ between two reads of one position.
    source = torch.where(wanted.gather(1, order), torch.arange(order.shape[1]), 0)
    return positions, found[..., 0].gather(1, source).long(), found[..., 1].gather(1, source)


def _decoded(iterations: int) -> Callable[..., Tensor]:
    """A warm start by mask-predict, which needs no random numbers and no proposal."""
    return lambda ids, masked, generators, target, proposal: mask_predict(ids, masked, iterations, target)[0]


class WarmStart(NamedTuple):
    """A way to fill masks before the first epoch.

    Attributes:
        fill: `(ids, masked, generators, target, proposal) -> ids`, as `sample_masks`.
        about: what it does, for help texts.
    """

    fill: Callable[..., Tensor]
    about: str


class Decoder(NamedTuple):
    """What fills masks and makes no chain.

    Attributes:
        decode: `(ids, masked, iterations, target) -> (ids, mean log probabilities)`, as `mask_predict`.
        about: what it does, for help texts.
    """

    decode: Callable[..., tuple[Tensor, Tensor]]
    about: str


# Every warm start there is, the default first, and every decoder. An entry is all that a new one needs.
WARM_STARTS: dict[str, WarmStart] = {
    "sample": WarmStart(sample_masks, "draws them one at a time in random order"),
    "greedy": WarmStart(_decoded(1), "takes the most probable tokens in one pass"),
    "mask_predict": WarmStart(_decoded(_ITERATIONS), f"is the decoder of that name, with {_ITERATIONS} iterations"),
}
DECODERS: dict[str, Decoder] = {
    "mask_predict": Decoder(
        mask_predict,
        "is the deterministic iterative decoder of Ghazvininejad et al. (2019), with num_epochs iterations",
    ),
}
