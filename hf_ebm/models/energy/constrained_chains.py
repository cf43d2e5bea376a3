"""What the settings of `generate` say that chains keep, checked against where they start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_ebm.sampling.constraints import Constraint, PositionTokens, at_least_away, at_most_changes
from hf_ebm.sampling.sampler import ChainKey
from hf_ebm.sampling.target import Target
from hf_ebm.scoring.rows import Sequences

if TYPE_CHECKING:
    from hf_ebm.sampling.configuration import ResolvedChainConfig


def protect(free: Tensor, sequences: Sequences, config: ResolvedChainConfig, keys: Sequence[ChainKey]) -> Tensor:
    """Free positions (C, T) without `protected_positions`. Raises `ValueError` for one that a prompt hasn't got."""
    free = free.clone()
    for position in config.protected_positions or []:
        _check_positions("protected_positions", position, sequences.start + position < sequences.stop, keys, "there")
        free[torch.arange(len(free)), sequences.start + position] = False
    return free


def constrained(target: Target, config: ResolvedChainConfig, keys: Sequence[ChainKey], begun_at: Tensor) -> Target:
    """The target restricted to what `max_changes`, `allowed_tokens` and `avoid` let chains be.

    Args:
        begun_at: (C, T) the ids that the chains' prompts have.

    Raises:
        ValueError: for positions that aren't free, and for ids that are never proposed or unknown.
    """
    constraints: list[Constraint | None] = []
    if config.max_changes is not None:
        constraints.append(at_most_changes(begun_at, config.max_changes))
    if config.avoid is not None:
        largest = max(map(max, config.avoid))
        if largest >= len(target.support):
            raise ValueError(f"avoid: {largest} is no id of the vocabulary (0 to {len(target.support) - 1})")
        constraints.append(at_least_away(config.avoid, config.min_distance, target.start, target.stop))
    elif config.min_distance != config.defaults["min_distance"]:
        raise ValueError("min_distance has no effect without avoid; leave it unset")
    return replace(
        target,
        position_tokens=_position_tokens(target, config, keys) if config.allowed_tokens else None,
        constraints=[constraint for constraint in constraints if constraint is not None],
    )


def _position_tokens(target: Target, config: ResolvedChainConfig, keys: Sequence[ChainKey]) -> PositionTokens:
    allowed, size = config.allowed_tokens or {}, len(target.support)
    for position, tokens in allowed.items():
        column = (target.start + position).clamp(max=target.free.shape[1] - 1)
        is_free = (target.start + position < target.stop) & target.free[torch.arange(len(column)), column]
        _check_positions("allowed_tokens", position, is_free, keys, "free")
        never = [token for token in tokens if token >= size or not bool(target.support[token])]
        if never:
            raise ValueError(
                f"allowed_tokens: position {position} lists {never}; ids from 0 to {size - 1} may be proposed that are "
                "neither special nor excluded nor among suppress_tokens"
            )
    return PositionTokens.narrowed(target.support, allowed, target.start, target.free.shape[1])


def _check_positions(name: str, position: int, right: Tensor, keys: Sequence[ChainKey], what: str) -> None:
    if not bool(right.all()):
        prompt = keys[int((~right).nonzero()[0])].prompt
        raise ValueError(f"{name}: position {position}, counted from 0, isn't {what} in prompt {prompt}")


def check_starts(target: Target, config: ResolvedChainConfig, keys: Sequence[ChainKey], ids: Tensor) -> None:
    """Raises `ValueError` for a prompt of `ids` (C, T) from which no start that keeps the constraints can be made."""
    filled = target.free & ~target.holdable(ids)
    for row, key in enumerate(keys if target.constraints else ()):
        masks = (target.free[row] & (ids[row] == target.runner.mask_id)).nonzero()[:, 0].tolist()
        if config.max_changes is not None and masks:
            raise ValueError(
                f"max_changes counts from where a chain starts, which must hold no mask; prompt {key.prompt} holds one "
                f"at position {masks[0] - int(target.start[row])}"
            )
        count = int(filled[row].sum())
        if config.max_changes is not None and count > config.max_changes:
            raise ValueError(
                f"max_changes is {config.max_changes}, but prompt {key.prompt} holds {count} tokens that may not stand "
                "where they do"
            )
    outside = ~target.allows(ids) & ~filled.any(1)
    if bool(outside.any()):
        raise ValueError(
            f"avoid: prompt {keys[int(outside.nonzero()[0])].prompt} starts at fewer than {config.min_distance} "
            "positions, min_distance, from one of its sequences; start elsewhere, or from masks"
        )
