"""Proposals for a block: what to put in, and the probabilities of going there and back.

All positions of the block are masked in one row, so forward and reverse probabilities of a position come from the same
logits. With parallel fill every position is drawn from that row on its own (thesis ch. 6, alg. 4). With sequential fill
the block is filled one position at a time, later positions still masked; the reverse move fills in the old tokens in
the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_ebm.checks import name_of, shown
from hf_ebm.renamed import renamed_attributes
from hf_ebm.sampling.target import Target
from hf_ebm.scoring.energies import token_energy
from hf_ebm.scoring.rows import MaskedRows, Reducer

if TYPE_CHECKING:
    from hf_ebm.sampling.configuration import ResolvedChainConfig


class ProposalDistribution:
    """The distribution that a token is proposed from: the model's own, tempered, narrowed and mixed.

    Args:
        processors: Transformers logits processors (temperature, top-k, top-p, anything that sees ids and logits). They
            are shown the masked sequence, never the tokens of the block.
        support: (V,) bool, tokens that may be proposed at all.
        epsilon: weight of the unwarped proposal in the mixture, which keeps every supported token possible.
        exclude_current: the proposal never proposes the token that is there; its probabilities are renormalised.
    """

    def __init__(
        self,
        processors: Sequence[Callable[[Tensor, Tensor], Tensor]],
        support: Tensor,
        epsilon: float,
        exclude_current: bool,
    ):
        self.processors, self.support, self.epsilon = processors, support, epsilon
        self.exclude_current = exclude_current

    def log_probabilities(self, logits: Tensor, ids: Tensor) -> Tensor:
        """`logits` (n, V), `ids` (n, L) with the block masked → log probabilities (n, V), -inf off the support."""
        logits = logits.masked_fill(~self.support, -torch.inf)
        plain = logits.log_softmax(-1)
        if not self.processors:
            return plain
        warped = logits
        for processor in self.processors:
            warped = _checked_scores(processor, processor(ids, warped), logits)
        warped = warped.masked_fill(~self.support, -torch.inf).log_softmax(-1)
        if bool(warped.isnan().any()):
            raise ValueError("logits_processor: it left no token that may be proposed at some position")
        if self.epsilon == 0:
            return warped
        share = torch.tensor(self.epsilon, dtype=torch.float64)
        return torch.logaddexp(warped + float((1 - share).log()), plain + float(share.log()))

    def draw(self, log_probabilities: Tensor, current: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draws a token each by inverting the cumulative distribution.

        Args:
            log_probabilities: (n, V).
            current: (n,) the tokens that are there now.
            uniform: (n,) numbers in [0, 1), float64.

        Returns:
            `(token, log q(token), log q(current))`, each (n,), the last for going back from `token`; where nothing but
            the current token is possible, the current token with log probabilities 0 and 0.
        """
        forward = _without(log_probabilities, current) if self.exclude_current else log_probabilities
        stuck = forward.amax(-1) == -torch.inf
        cumulative = forward.double().exp().cumsum(-1)
        total = cumulative[:, -1:]
        threshold = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
        token = torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp(max=forward.shape[1] - 1)
        # A parallel cumulative sum need not be monotone where probabilities are 0: never take a token of none.
        impossible = forward.gather(-1, token[:, None])[:, 0] == -torch.inf
        token = torch.where(impossible, forward.argmax(-1), token)
        token = torch.where(stuck, current, token)
        back = _without(log_probabilities, token) if self.exclude_current else log_probabilities
        log_forward, log_back = _pick(forward, token), _pick(back, current)
        return token, log_forward.masked_fill(stuck, 0.0), log_back.masked_fill(stuck, 0.0)

    def log_back(self, log_probabilities: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """(n,) log probability of drawing `old` where `new` stands."""
        return _pick(_without(log_probabilities, new) if self.exclude_current else log_probabilities, old)


def _checked_scores(processor: object, returned: object, logits: Tensor) -> Tensor:
    if (
        not isinstance(returned, Tensor)
        or (returned.shape, returned.device, returned.layout) != (logits.shape, logits.device, logits.layout)
        or not returned.is_floating_point()
    ):
        raise ValueError(
            f"logits_processor: {name_of(processor)} returned {shown(returned)}, must return scores as floats of shape "
            f"{tuple(logits.shape)} on {logits.device}"
        )
    return returned


def _pick(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(-1, index[:, None])[:, 0].double()


def _without(log_probabilities: Tensor, token: Tensor) -> Tensor:
    """Log probabilities given that `token` (n,) is not drawn; all -inf where nothing else is possible."""
    rest = log_probabilities.scatter(-1, token[:, None], -torch.inf)
    total = rest.logsumexp(-1, keepdim=True)
    return torch.where(total == -torch.inf, rest, rest - total)


class Proposed(NamedTuple):
    """A proposed move for n chains.

    Attributes:
        ids: (n, T).
        log_forward, log_reverse: (n,) log probabilities of the move and of its reverse, float64.
        known: (n, T) bool, positions whose energy term at `ids` is known from the proposal's own rows.
        known_terms: (n, T) those terms, 0 elsewhere.
    """

    ids: Tensor
    log_forward: Tensor
    log_reverse: Tensor
    known: Tensor
    known_terms: Tensor


class BlockProposal(NamedTuple):
    """How a block is proposed: from the masked model's conditionals, in parallel or one position at a time.

    Attributes:
        distribution: what a token is drawn from.
        fill: one of `FILLS`.
    """

    distribution: ProposalDistribution
    fill: str = "parallel"

    def __call__(
        self, ids: Tensor, chains: Tensor, positions: Tensor, size: Tensor, uniforms: Tensor, target: Target
    ) -> Proposed:
        """Proposes new tokens for one block per chain.

        Args:
            ids: (n, T) current tokens; n may be 0.
            chains: (n,) which chains of the target they are.
            positions: (n, b) columns of the block in filling order, short blocks padded by repeating the last.
            size: (n,) how many of them count, at least 1.
            uniforms: (n, b) numbers in [0, 1), float64.
        """
        if not len(chains):
            nothing = torch.zeros(0, dtype=torch.float64, device=ids.device)
            return Proposed(ids, nothing, nothing, torch.zeros_like(ids, dtype=torch.bool), ids.double())
        return FILLS[self.fill].propose(ids, chains, positions, size, uniforms, target, self.distribution)


def proposal_of(
    config: ResolvedChainConfig, support: Tensor, further: Sequence[Callable[[Tensor, Tensor], Tensor]] = ()
) -> BlockProposal:
    """How settings say that blocks are proposed.

    Args:
        support: (V,) bool, the tokens that may be proposed.
        further: logits processors after those of the settings.
    """
    processors: list[Callable[[Tensor, Tensor], Tensor]] = []
    if config.proposal_temperature != 1.0:
        processors.append(TemperatureLogitsWarper(float(config.proposal_temperature)))
    if config.proposal_top_k is not None:
        processors.append(TopKLogitsWarper(config.proposal_top_k))
    if config.proposal_top_p is not None and config.proposal_top_p < 1:
        processors.append(TopPLogitsWarper(config.proposal_top_p))
    distribution = ProposalDistribution(
        [*processors, *further], support, config.proposal_epsilon, config.exclude_current
    )
    return BlockProposal(distribution, config.block_fill)


def _fill_in_parallel(
    ids: Tensor,
    chains: Tensor,
    positions: Tensor,
    size: Tensor,
    uniforms: Tensor,
    target: Target,
    q: ProposalDistribution,
) -> Proposed:
    sequences = target.sequences(ids, chains)
    rows = MaskedRows(torch.arange(len(ids), device=ids.device), positions, positions)
    current = ids.gather(1, positions)
    drawn = target.runner(sequences, rows, _drawer(current, uniforms, target.energy, q))
    counts = torch.arange(positions.shape[1], device=ids.device) < size[:, None]
    # Padding repeats the last column, so it must repeat the token drawn for it as well.
    drawn_at = torch.minimum(torch.arange(positions.shape[1], device=ids.device), size[:, None] - 1)
    new_ids = ids.scatter(1, positions, drawn[..., 0].long().gather(1, drawn_at))
    log_forward, log_reverse = (drawn[..., i].masked_fill(~counts, 0.0).sum(1) for i in (1, 2))
    known = torch.zeros_like(ids, dtype=torch.bool).scatter(1, positions[:, :1], (size == 1)[:, None])
    terms = torch.zeros(ids.shape, dtype=drawn.dtype, device=ids.device).scatter(1, positions[:, :1], drawn[:, :1, 3])
    return Proposed(new_ids, log_forward, log_reverse, known, terms * known)


def _drawer(current: Tensor, uniforms: Tensor, energy: str, q: ProposalDistribution) -> Reducer:
    """Reducer to (n, P, 4): token drawn, its log probability, that of going back, and its energy term."""

    def reduce(logits: Tensor, n: Tensor, ids: Tensor) -> Tensor:
        reads = logits.shape[1]
        flat, old = logits.flatten(0, 1), current[n].flatten()
        log_probabilities = q.log_probabilities(flat, ids.repeat_interleave(reads, 0))
        token, forward, back = q.draw(log_probabilities, old, uniforms[n].flatten())
        term = token_energy(flat, token, energy).double()
        return torch.stack([token.double(), forward, back, term], -1).unflatten(0, (len(n), reads))

    return reduce


def _fill_sequentially(
    ids: Tensor,
    chains: Tensor,
    positions: Tensor,
    size: Tensor,
    uniforms: Tensor,
    target: Target,
    q: ProposalDistribution,
) -> Proposed:
    everyone = torch.arange(len(ids), device=ids.device)
    new_ids = ids.clone()
    log_forward = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
    log_reverse = torch.zeros_like(log_forward)
    known = torch.zeros_like(ids, dtype=torch.bool)
    terms = torch.zeros(ids.shape, dtype=torch.float64, device=ids.device)
    differs_before = torch.zeros_like(positions, dtype=torch.bool)  # an earlier position of the block has changed
    for j in range(int(size.max())):
        who = everyone[size > j]
        here = positions[who, j]
        rows = MaskedRows(torch.arange(len(who), device=ids.device), positions[who, j:], here[:, None])
        current = ids[who, here]
        drawer = _drawer(current[:, None], uniforms[who, j : j + 1], target.energy, q)
        drawn = target.runner(target.sequences(new_ids[who], chains[who]), rows, drawer)[:, 0]
        new_ids[who, here] = drawn[:, 0].long()
        log_forward[who] += drawn[:, 1]
        earlier = positions[who, :j]
        differs_before[who, j] = (new_ids[who].gather(1, earlier) != ids[who].gather(1, earlier)).any(1)
        # While the block's earlier tokens are the old ones, going back happens in the same context.
        log_reverse[who] += torch.where(differs_before[who, j], 0.0, drawn[:, 2])
        last = size[who] == j + 1
        known[who[last], here[last]] = True
        terms[who[last], here[last]] = drawn[last, 3]
    log_reverse += _reverse_of_sequential(ids, new_ids, chains, positions, differs_before, target, q)
    return Proposed(new_ids, log_forward, log_reverse, known, terms)


def _reverse_of_sequential(
    ids: Tensor,
    new_ids: Tensor,
    chains: Tensor,
    positions: Tensor,
    differs_before: Tensor,
    target: Target,
    q: ProposalDistribution,
) -> Tensor:
    """(n,) log probability of the reverse moves whose context differs from the forward one: one row each."""
    result = torch.zeros(len(ids), dtype=torch.float64, device=ids.device)
    source, j = differs_before.nonzero(as_tuple=True)
    if len(source) == 0:
        return result
    columns = torch.arange(positions.shape[1], device=ids.device)
    here = positions[source, j]
    # The positions from j on are masked; the earlier ones already hold the old tokens, as `ids` has them.
    masked = torch.where(columns >= j[:, None], positions[source], here[:, None])
    old, new = ids[source, here], new_ids[source, here]

    def reduce(logits: Tensor, n: Tensor, row_ids: Tensor) -> Tensor:
        return q.log_back(q.log_probabilities(logits[:, 0], row_ids), old[n], new[n])

    back = target.runner(target.sequences(ids, chains), MaskedRows(source, masked, here[:, None]), reduce)
    return result.index_add(0, source, back)


class Fill(NamedTuple):
    """A way to draw the positions of a block.

    Attributes:
        propose: `(ids, chains, positions, size, uniforms, target, q) -> Proposed`, as `BlockProposal` is called.
        about: what it does, for help texts.
    """

    propose: Callable[..., Proposed]
    about: str


# Every fill there is, the default first. An entry is all that a new one needs.
FILLS: dict[str, Fill] = {
    "parallel": Fill(_fill_in_parallel, "draws a block from one row"),
    "sequential": Fill(_fill_sequentially, "draws one position at a time, given those already drawn"),
}

__getattr__ = renamed_attributes(__name__, {"Warp": "ProposalDistribution"})
