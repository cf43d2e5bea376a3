"""Proposals for a block: what to put in, and the probabilities of going there and back.

All positions of the block are masked in one row, so forward and reverse probabilities of a position come from the same
logits. With parallel fill every position is drawn from that row on its own (thesis ch. 6, alg. 4). With sequential fill
the block is filled one position at a time, later positions still masked; the reverse move fills in the old tokens in
the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_ebm.checks import name_of, shown
from hf_ebm.renamed import renamed_attributes
from hf_ebm.sampling.target import Target
from hf_ebm.scoring.energies import token_energy
from hf_ebm.scoring.rows import Index, MaskedRows, to_device

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
        self.processors, self.forbidden, self.epsilon = processors, ~support, epsilon
        self.exclude_current = exclude_current

    def log_probabilities(self, logits: Tensor, shown: Callable[[], Tensor], forbidden: Tensor | None = None) -> Tensor:
        """Log probabilities (n, V), -inf off the support; NaN where processors leave no token.

        Args:
            logits: (n, V), as many for each of the sequences.
            shown: gives the sequences with the block masked (m, L), for processors.
            forbidden: (n, V) bool, tokens off the support where each stands.
        """
        self.forbidden = self.forbidden.to(logits.device)
        forbidden = self.forbidden if forbidden is None else self.forbidden | forbidden
        logits = logits.masked_fill(forbidden, -torch.inf)
        plain = logits.log_softmax(-1)
        if not self.processors:
            return plain
        ids = to_device(shown(), logits.device)
        ids, warped = ids.repeat_interleave(len(logits) // len(ids), 0), logits
        for processor in self.processors:
            warped = _checked_scores(processor, processor(ids, warped), logits)
        warped = warped.masked_fill(forbidden, -torch.inf).log_softmax(-1)
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
        if not self.exclude_current:
            log_probabilities = log_probabilities.double()
            token = _inverted(log_probabilities, uniform)
            forward, back = log_probabilities.gather(-1, torch.stack([token, current], -1)).unbind(-1)
            return token, forward, back
        forward = _without(log_probabilities, current).double()
        stuck = forward.amax(-1) == -torch.inf
        token = torch.where(stuck, current, _inverted(forward, uniform))
        log_forward, log_back = _pick(forward, token), self.log_back(log_probabilities, current, token)
        return token, log_forward.masked_fill(stuck, 0.0), log_back.masked_fill(stuck, 0.0)

    def log_back(self, log_probabilities: Tensor, old: Tensor, new: Tensor) -> Tensor:
        """(n,) log probability of drawing `old` where `new` stands."""
        return _pick(_without(log_probabilities, new) if self.exclude_current else log_probabilities, old).double()


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


def _inverted(log_probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The tokens (n,) at which the cumulative distributions (n, V), float64, pass `uniform` (n,)."""
    cumulative = log_probabilities.exp().cumsum(-1)
    total = cumulative[:, -1:]
    threshold = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros((), dtype=total.dtype)))
    token = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=cumulative.shape[1] - 1)
    # A parallel cumulative sum need not be monotone where probabilities are 0: never take a token of none.
    impossible = log_probabilities.gather(-1, token) == -torch.inf
    return torch.where(impossible, log_probabilities.argmax(-1, keepdim=True), token)[:, 0]


def _pick(values: Tensor, index: Tensor) -> Tensor:
    return values.gather(-1, index[:, None])[:, 0]


def _without(log_probabilities: Tensor, token: Tensor) -> Tensor:
    """Log probabilities given that `token` (n,) is not drawn; all -inf where nothing else is possible."""
    rest = log_probabilities.scatter(-1, token[:, None], -torch.inf)
    return torch.where(rest.amax(-1, keepdim=True) == -torch.inf, rest, rest.log_softmax(-1))


class Proposed(NamedTuple):
    """A proposed move for C chains.

    Attributes:
        ids: (C, T).
        log_forward, log_reverse: (C,) log probabilities of the move and of its reverse, float64.
        known: (C, T) bool, positions whose energy term at `ids` is known from the proposal's own rows.
        known_terms: (C, T) those terms, 0 elsewhere.
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

    def __call__(self, ids: Tensor, positions: Tensor, size: Tensor, uniforms: Tensor, target: Target) -> Proposed:
        """As `unconstrained`, but a move that breaks a constraint is none, and has no way back."""
        proposed = self.unconstrained(ids, positions, size, uniforms, target)
        if not target.is_constrained:
            return proposed
        kept = target.allows(proposed.ids)
        return proposed._replace(
            ids=torch.where(kept[:, None], proposed.ids, ids),
            log_reverse=proposed.log_reverse.masked_fill(~kept, -torch.inf),
            known=proposed.known & kept[:, None],
            known_terms=proposed.known_terms * kept[:, None],
        )

    def unconstrained(self, ids: Tensor, positions: Tensor, size: Tensor, uniforms: Tensor, target: Target) -> Proposed:
        """Proposes new tokens for one block per chain.

        Args:
            ids: (C, T) current tokens.
            positions: (C, b) columns of the block in filling order, short blocks padded by repeating the last.
            size: (C,) how many of them count; where none does, the chain stays where it is.
            uniforms: (C, b) numbers in [0, 1), float64.
        """
        if not size.numpy().any():
            nothing = torch.zeros(len(ids), dtype=torch.float64)
            return Proposed(ids, nothing, nothing, torch.zeros_like(ids, dtype=torch.bool), ids * 0.0)
        return FILLS[self.fill].propose(ids, positions, size, uniforms, target, self.distribution)


def proposal_of(
    config: ResolvedChainConfig, support: Tensor, further: Sequence[Callable[[Tensor, Tensor], Tensor]] = ()
) -> BlockProposal:
    """How settings say that blocks are proposed.

    Args:
        support: (V,) bool, the tokens that may be proposed, where the model is.
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
    ids: Tensor, positions: Tensor, size: Tensor, uniforms: Tensor, target: Target, q: ProposalDistribution
) -> Proposed:
    columns, sizes, every = positions.numpy(), size.numpy(), np.arange(len(ids))
    chains, number = sizes.nonzero()[0], np.arange(columns.shape[1])
    drawn = _drawn(ids, _rows(chains, columns[chains], columns[chains]), uniforms, target, q, bool((sizes == 1).any()))
    # Padding repeats the last column, so it must repeat the token drawn for it as well.
    last = np.maximum(sizes - 1, 0)[:, None]
    new_ids = ids.numpy().copy()
    new_ids[chains[:, None], columns[chains]] = drawn[every[:, None], np.minimum(number, last), 0][chains]
    log_forward, log_reverse = np.where(number < sizes[:, None], drawn[..., 1:3].transpose(2, 0, 1), 0.0).sum(2)
    return _proposed(new_ids, log_forward, log_reverse, columns[:, 0], sizes == 1, drawn[:, 0, 3])


def _fill_sequentially(
    ids: Tensor, positions: Tensor, size: Tensor, uniforms: Tensor, target: Target, q: ProposalDistribution
) -> Proposed:
    old, columns, sizes = ids.numpy(), positions.numpy(), size.numpy()
    new, number = old.copy(), np.arange(columns.shape[1])
    log_forward, log_reverse, last_term = np.zeros((3, len(old)))
    differs_before = np.zeros(columns.shape, dtype=bool)  # an earlier position of the block has changed
    for j in range(sizes.max()):
        chains = (sizes > j).nonzero()[0]
        here = columns[chains, j]
        rows = _rows(chains, columns[chains, j:], here[:, None])
        drawn = _drawn(torch.from_numpy(new), rows, uniforms[:, j:], target, q, bool((sizes == j + 1).any()))
        token, forward, back, last_term[chains] = drawn[chains, 0].T
        new[chains, here] = token
        log_forward[chains] += forward
        # While the block's earlier tokens are the old ones, going back happens in the same context.
        log_reverse[chains] += np.where(differs_before[chains, j], 0.0, back)
        differs_before[:, j + 1 :] = (new != old).any(1)[:, None]
    differs_before &= number < sizes[:, None]
    log_reverse += _reverse_of_sequential(ids, new, columns, differs_before, target, q)
    last = columns[np.arange(len(old)), np.maximum(sizes - 1, 0)]
    return _proposed(new, log_forward, log_reverse, last, sizes > 0, last_term)


def _reverse_of_sequential(
    ids: Tensor, new: NDArray, columns: NDArray, differs_before: NDArray, target: Target, q: ProposalDistribution
) -> NDArray:
    """(C,) log probability of the reverse moves whose context differs from the forward one: one row each."""
    source, j = differs_before.nonzero()
    if len(source) == 0:
        return np.zeros(len(new))
    here = columns[source, j]
    # The positions from j on are masked; the earlier ones already hold the old tokens, as `ids` has them.
    masked = np.where(np.arange(columns.shape[1]) >= j[:, None], columns[source], here[:, None])
    tokens = torch.from_numpy(np.stack([ids.numpy()[source, here], new[source, here]]))
    rows = _rows(source, masked, here[:, None])

    def reduce(logits: Tensor, n: Index) -> Tensor:
        of, to = to_device(tokens[:, n], logits.device)
        forbidden = target.forbidden(rows, n, logits.device)
        shown = lambda: target.shown(ids, rows.some(n))  # noqa: E731
        return q.log_back(q.log_probabilities(logits[:, 0], shown, forbidden), of, to)

    found = _possible(target.runner(target.sequences(ids), rows, reduce))
    return np.bincount(source, found, len(new))


def _rows(source: NDArray, masked: NDArray, read: NDArray) -> MaskedRows:
    return MaskedRows(*(torch.from_numpy(part) for part in (source, masked, read)))


def _proposed(
    ids: NDArray, log_forward: NDArray, log_reverse: NDArray, column: NDArray, known: NDArray, term: NDArray
) -> Proposed:
    """A move of which the energy term at one column (C,) of each chain is `term` (C,), where it is `known` (C,)."""
    is_known, terms, every = np.zeros(ids.shape, dtype=bool), np.zeros(ids.shape), np.arange(len(ids))
    is_known[every, column] = known
    terms[every, column] = np.where(known, term, 0.0)
    return Proposed(*(torch.from_numpy(part) for part in (ids, log_forward, log_reverse, is_known, terms)))


def _drawn(
    ids: Tensor, rows: MaskedRows, uniforms: Tensor, target: Target, q: ProposalDistribution, with_terms: bool
) -> NDArray:
    """Draws of one row or none a chain, at what it reads: (C, P, 4), float64, 0 where there is none.

    They are the token drawn, its log probability, that of going back to the one in `ids`, and if wanted its term.
    """
    source, read = rows.source.numpy(), rows.read.numpy()
    columns = read.shape[1]
    current = torch.from_numpy(ids.numpy()[source[:, None], read])
    uniform = torch.from_numpy(uniforms.numpy()[source, :columns])

    def reduce(logits: Tensor, n: Index) -> Tensor:
        flat = logits.flatten(0, 1)
        given = (to_device(part[n].flatten(), logits.device) for part in (current, uniform))
        forbidden = target.forbidden(rows, n, flat.device)
        log_probabilities = q.log_probabilities(flat, lambda: target.shown(ids, rows.some(n)), forbidden)
        token, forward, back = q.draw(log_probabilities, *given)
        terms = [token_energy(flat, token, target.energy)] if with_terms and target.energy is not None else []
        return torch.stack([token, forward, back, *terms], -1).unflatten(0, logits.shape[:2])

    found = _possible(target.runner(target.sequences(ids), rows, reduce))
    drawn = np.zeros((len(ids), columns, 4))
    drawn[source, :, : found.shape[2]] = found
    return drawn


def _possible(found: Tensor) -> NDArray:
    """What was found. Raises `ValueError` for NaN, which only logits processors can make of sound logits."""
    values = found.detach().numpy()
    if np.isnan(values).any():
        raise ValueError("logits_processor: it left no token that may be proposed at some position")
    return values


class Fill(NamedTuple):
    """A way to draw the positions of a block.

    Attributes:
        propose: `(ids, positions, size, uniforms, target, q) -> Proposed`, as `BlockProposal` is called.
        about: what it does, for help texts.
        masks_single_sites: whether it reads rows with one position masked of larger blocks, too.
    """

    propose: Callable[..., Proposed]
    about: str
    masks_single_sites: bool = False


# Every fill there is, the default first. An entry is all that a new one needs.
FILLS: dict[str, Fill] = {
    "parallel": Fill(_fill_in_parallel, "draws a block from one row"),
    "sequential": Fill(_fill_sequentially, "draws one position at a time, given those already drawn", True),
}

__getattr__ = renamed_attributes(__name__, {"Warp": "ProposalDistribution"})
