"""From what a caller of `generate` hands over to the chains to run, and what settings say that they keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from transformers.utils import logging

from hf_ebm.checks import as_ids, as_whole_numbers, listed, shown, wholes
from hf_ebm.model_facts import limit_of
from hf_ebm.models.energy.inputs import EnergyInputs, check_inputs, context_of, mask_id_of, padding_id
from hf_ebm.sampling.constraints import Constraint, PositionTokens, at_least_away, at_most_changes
from hf_ebm.sampling.convergence import LEAST_CHAINS, import_arviz
from hf_ebm.sampling.sampler import LENGTH, ChainKey, chain_generator, check_run_fits
from hf_ebm.sampling.target import Target
from hf_ebm.scoring.rows import Context, Sequences

if TYPE_CHECKING:
    from hf_ebm.models.energy.modeling_energy import EnergyModel
    from hf_ebm.sampling.configuration import ResolvedChainConfig

logger = logging.get_logger(__name__)


class Chains(NamedTuple):
    """Chains to run, C in all, on the CPU.

    Attributes:
        keys: prompt and chain numbers.
        ids: (C, T) starting tokens, with masks where something is to be filled.
        start, stop: (C,) bounds of the sequences.
        free: (C, T) bool, the positions to sample.
        context: what the model reads of each chain beside its tokens, on its device.
    """

    keys: list[ChainKey]
    ids: Tensor
    start: Tensor
    stop: Tensor
    free: Tensor
    context: Context | None


def proposal_support(model: EnergyModel, suppress_tokens: list[int] | None) -> Tensor:
    """(V,) bool: the tokens a free position may hold.

    Raises:
        ValueError: if the model doesn't know its token roles, or nothing is left.
    """
    config = model.config
    if config.mask_token_id is None or config.special_token_ids is None:
        raise ValueError(
            "sampling needs mask_token_id and special_token_ids, so that special tokens are never proposed; load the "
            "model with its tokenizer beside it, or pass processing_class= to from_pretrained or the ids to EnergyModel"
        )
    never = {
        "mask_token_id": [config.mask_token_id],
        "special_token_ids": config.special_token_ids,
        "excluded_token_ids": config.excluded_token_ids or [],
        "suppress_tokens": suppress_tokens or [],
    }
    support = torch.ones(model.vocab_size, dtype=torch.bool)
    for name, tokens in never.items():
        outside = [i for i in tokens if not 0 <= i < model.vocab_size]
        if outside:
            raise ValueError(f"{name}: {outside} are not ids of the vocabulary (0 to {model.vocab_size - 1})")
        support[torch.tensor(tokens, dtype=torch.long)] = False
    if not bool(support.any()):
        raise ValueError("suppress_tokens: no token is left to propose")
    return support.to(model.input_device)


def build_chains(
    model: EnergyModel,
    config: ResolvedChainConfig,
    chain_keys: Sequence[tuple[int, int]] | None,
    inputs: dict[str, Tensor | None],
    chain_rows: Sequence[int] | None,
    further_inputs: Mapping[str, object],
) -> Chains:
    """The chains for prompts given as inputs, or for `config.lengths` without any.

    Args:
        chain_keys: `(prompt, chain)` of the chains to run; by default `config.num_chains` for every prompt.
        inputs: `input_ids`, `attention_mask`, `free_mask`, `encoder_input_ids`, `encoder_attention_mask`.
        chain_rows: the row of the inputs that each of `chain_keys` starts from; by default its prompt.
        further_inputs: further inputs of the model, see `context_of`.
    """
    input_ids = inputs["input_ids"]
    if input_ids is not None:
        as_ids("input_ids", input_ids)
    if chain_rows is not None:
        chain_rows = _checked_chain_rows(chain_rows, chain_keys, input_ids)
    lengths = config.lengths if isinstance(config.lengths, list) else [config.lengths]
    prompts, longest = (len(lengths), longest_of(config)) if input_ids is None else input_ids.shape
    count = prompts * config.num_chains if chain_keys is None else len(listed(chain_keys) or [])
    check_run_fits(config, count, longest)
    if input_ids is None:
        keys = checked_keys(chain_keys, len(lengths), config.num_chains)
        rows = _unconditional(model, config, lengths, keys, inputs)
        sequences, free = check_inputs(model, *rows)
        source = inputs["encoder_input_ids"], inputs["encoder_attention_mask"]
        _check_numbers(further_inputs)
        sequences = replace(sequences, context=context_of(model, sequences, *source, further_inputs, one_source=True))
    else:  # prompts are checked, and named in errors, before they are copied for their chains
        _check_rows(inputs, prompts)
        keys = checked_keys(chain_keys, prompts if chain_rows is None else None, config.num_chains)
        checked = check_inputs(model, input_ids, inputs["attention_mask"], inputs["free_mask"])
        source = inputs["encoder_input_ids"], inputs["encoder_attention_mask"]
        context = context_of(model, checked.sequences, *source, further_inputs)
        checked = checked._replace(sequences=replace(checked.sequences, context=context))
        sequences, free = _copied(
            checked, torch.tensor([key.prompt for key in keys] if chain_rows is None else chain_rows)
        )
    return chains_of(config, keys, sequences, free, inputs["free_mask"] is None, mask_id_of(model))


def chains_of(
    config: ResolvedChainConfig,
    keys: list[ChainKey],
    sequences: Sequences,
    free: Tensor,
    masks_first: bool,
    mask_id: int,
) -> Chains:
    """Chains that start at sequences, those of the keys, at which some positions (C, T) are free.

    Args:
        masks_first: whether the masks alone are free where a sequence holds some.

    Raises:
        ValueError: for a prompt without a free position, with a fixed mask, or with fewer positions than a block has.
    """
    ids = sequences.ids
    masks = ids.eq(mask_id)  # padding holds none: `check_inputs` has overwritten it
    if masks_first:
        free_masks = masks & free
        free = torch.where(free_masks.any(1, keepdim=True), free_masks, free)
    free = protect(free.cpu(), sequences, config, keys)
    _check_free(free, masks.cpu(), config, keys)
    return Chains(keys, ids.cpu(), sequences.start, sequences.stop, free, sequences.context)


def replicated(chains: Chains, count: int) -> Chains:
    """Rows of `count` replicas of each chain, replica by replica; the chains themselves for less than two."""
    if count < 2:
        return chains
    which = torch.arange(len(chains.keys)).repeat(count)
    ids, start, stop, free = (part[which] for part in chains[1:5])
    context = chains.context and chains.context.rows(which, which)
    return Chains(chains.keys * count, ids, start, stop, free, context)


def longest_of(config: ResolvedChainConfig) -> int:
    """The greatest of `config.lengths`, 0 without any."""
    lengths = config.lengths
    return lengths if isinstance(lengths, int) else max(lengths or [0])


def _checked_chain_rows(
    chain_rows: Sequence[int], chain_keys: Sequence[tuple[int, int]] | None, input_ids: Tensor | None
) -> list[int]:
    if chain_keys is None or input_ids is None:
        raise ValueError("chain_rows was given without chain_keys and input_ids; it says which row each chain takes")
    rows, count = wholes(chain_rows), len(listed(chain_keys) or [])
    if rows is None or len(rows) != count or max(rows, default=0) >= len(input_ids):
        raise ValueError(
            f"chain_rows must be {count} numbers of rows from 0 to {len(input_ids) - 1}, one for each of chain_keys, "
            f"got {shown(chain_rows)}"
        )
    return rows


def checked_keys(
    given: Sequence[tuple[int, int]] | None, prompts: int | None, count: int, of: str = "chain"
) -> list[ChainKey]:
    """The chains, or runs; prompts are numbers below `prompts`, or any from 0 up if that is `None`."""
    if given is None:
        given = [(prompt, number) for prompt in range(prompts or 0) for number in range(count)]
    pairs = listed(given) or []
    keys, wrong = [], []
    for pair in pairs:
        numbers = wholes(pair)
        most = 2**63 if prompts is None else prompts  # the output holds them as int64
        if numbers is None or len(numbers) != 2 or numbers[0] >= most or numbers[1] >= 2**63:
            wrong.append(pair)
        else:
            keys.append(ChainKey(*numbers))
    if wrong or not keys or len(set(keys)) != len(keys):
        allowed = "below 2**63" if prompts is None else f"below {prompts}"
        raise ValueError(
            f"{of}_keys must be different pairs (prompt {allowed}, {of} below 2**63), at least one; "
            f"got {shown(wrong[:3] or pairs[:3] or given)}"
        )
    return keys


def _copied(prompts: EnergyInputs, which: Tensor) -> EnergyInputs:
    """Row `which[n]` of the prompts for chain n."""
    sequences, on_device = prompts.sequences, which.to(prompts.scored.device)
    context = sequences.context and sequences.context.rows(on_device, which)
    copies = Sequences(sequences.ids[on_device], sequences.start[which], sequences.stop[which], context)
    return EnergyInputs(copies, prompts.scored[on_device])


def _check_rows(inputs: dict[str, Tensor | None], prompts: int) -> None:
    """Rows are picked per chain next, so their number must be right before."""
    prompts = max(1, prompts)
    for name, value in inputs.items():
        if value is not None and (not isinstance(value, Tensor) or value.dim() != 2 or len(value) != prompts):
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
            raise ValueError(f"{name} has {found}; it must be a tensor of {prompts} rows, at least one")


def _check_free(free: Tensor, masks: Tensor, config: ResolvedChainConfig, keys: list[ChainKey]) -> None:
    for row, (key, count) in enumerate(zip(keys, free.sum(1).tolist(), strict=True)):
        if count == 0:
            raise ValueError(f"input_ids: prompt {key.prompt} has no free position; there is nothing to sample")
        fixed_masks = (masks[row] & ~free[row]).nonzero()[:, 0].tolist()
        if fixed_masks:
            raise ValueError(
                f"free_mask or protected_positions: prompt {key.prompt} holds a mask token at fixed position "
                f"{fixed_masks[0]}"
            )
        sizes = config.block_size if isinstance(config.block_size, list) else [config.block_size]
        if config.final_block_size is None and max(sizes) > count:
            raise ValueError(
                f"block_size {max(sizes)} is above the {count} free positions of prompt {key.prompt}; only a schedule "
                "(final_block_size) is clamped to them"
            )


def _unconditional(
    model: EnergyModel, config: ResolvedChainConfig, choices: list, keys: list[ChainKey], inputs: dict
) -> tuple[Tensor, Tensor]:
    """Ids and attention mask of one all-masked sequence per chain."""
    given = [name for name in ("attention_mask", "free_mask") if inputs[name] is not None]
    if given:
        raise ValueError(f"{given[0]} was given without input_ids")
    if config.lengths is None:
        raise ValueError("neither input_ids nor lengths was given; there is nothing to say what to sample")
    prefix, suffix = model.config.prefix_token_ids or [], model.config.suffix_token_ids or []
    lengths = [_draw_length(choices[key.prompt], config.seed, key) for key in keys]
    limit = limit_of(model.mlm, model.config.max_sequence_length)
    longest = longest_of(config)
    if limit is not None and longest + len(prefix) + len(suffix) > limit.tokens:
        raise ValueError(
            f"lengths: {longest} free tokens and {len(prefix) + len(suffix)} special ones are too many: {limit.reason}"
        )
    ids = torch.full((len(keys), len(prefix) + max(lengths) + len(suffix)), padding_id(model), dtype=torch.long)
    attention_mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        text = [*prefix, *[mask_id_of(model)] * length, *suffix]
        ids[row, : len(text)] = torch.tensor(text)
        attention_mask[row, : len(text)] = 1
    for name in ("encoder_input_ids", "encoder_attention_mask"):
        value = inputs[name]
        if value is not None and (not isinstance(value, Tensor) or value.dim() != 2 or len(value) != 1):
            raise ValueError(
                f"{name}: with lengths and no input_ids it must have one row, shared by all chains, got {shown(value)}"
            )
    return ids, attention_mask


def _check_numbers(further_inputs: Mapping[str, object]) -> None:
    """How long a sequence that is sampled from nothing is, isn't known to a caller."""
    for name, value in further_inputs.items():
        if value is not None and as_whole_numbers(name, value).dim():
            raise ValueError(f"{name}: with lengths and no input_ids it must be one number, got {shown(value)}")


def _draw_length(length: int | dict[int, float], seed: int, key: ChainKey) -> int:
    if isinstance(length, int):
        return length
    shares = [weight / sum(length.values()) for weight in length.values()]
    return int(chain_generator(seed, *key, LENGTH).choice(list(length), p=shares))


def protect(free: Tensor, sequences: Sequences, config: ResolvedChainConfig, keys: Sequence[ChainKey]) -> Tensor:
    """Free positions (C, T) without `protected_positions`. Raises `ValueError` for one that a prompt hasn't got."""
    free = free.clone()
    for position in config.protected_positions or []:
        column = sequences.start + min(position, free.shape[1])
        _check_positions("protected_positions", position, column < sequences.stop, keys, "there")
        free[torch.arange(len(free)), column] = False
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
        away = at_least_away(config.avoid, config.min_distance, target.start, target.stop)
        if away is None:
            logger.warning_once(
                "avoid keeps nothing away: none of its sequences has as many tokens as a chain, special ones counted"
            )
        constraints.append(away)
    elif config.min_distance != config.defaults["min_distance"]:
        raise ValueError("min_distance has no effect without avoid; leave it unset")
    return replace(
        target,
        position_tokens=_position_tokens(target, config, keys) if config.allowed_tokens else None,
        constraints=[constraint for constraint in constraints if constraint is not None],
    )


def check_avoid(model: EnergyModel, config: ResolvedChainConfig) -> None:
    """Raises `ValueError` for a sequence of `avoid` with padding, which no chain could ever be at."""
    roles, pad = model.config, model.config.pad_token_id
    if pad in [*(roles.prefix_token_ids or []), *(roles.suffix_token_ids or [])]:
        return
    padded = [number for number, ids in enumerate(config.avoid or []) if pad in (ids[0], ids[-1])]
    if padded:
        raise ValueError(f"avoid: entry {padded[0]} is padded with {pad}; give every sequence at its own length")


def check_judged(config: ResolvedChainConfig, keys: Sequence[ChainKey], lengths: Tensor) -> None:
    """Raises `ValueError` where R-hat of chains of `lengths` (C,) can't be what a run goes by, though it is to be.

    And `ImportError` without ArviZ.
    """
    if (config.target_rhat is None) != (config.max_rows is None):
        raise ValueError("target_rhat and max_rows go together: until when a run goes on, and when it gives up")
    if config.target_rhat is None:
        return
    import_arviz()
    by_prompt: dict[int, list[int]] = {}
    for key, length in zip(keys, lengths.tolist(), strict=False):
        by_prompt.setdefault(key.prompt, []).append(length)
    for prompt, own in by_prompt.items():
        if len(own) < LEAST_CHAINS:
            way = "give chain_keys of all of them" if len(own) < config.num_chains else "set num_chains to 2 or more"
            raise ValueError(
                f"target_rhat compares the chains of a prompt, at least 2; prompt {prompt} has {len(own)}: {way}"
            )
        if len(set(own)) > 1:
            raise ValueError(f"target_rhat compares chains of one length; those of prompt {prompt} have {set(own)}")


def _position_tokens(target: Target, config: ResolvedChainConfig, keys: Sequence[ChainKey]) -> PositionTokens:
    allowed, size = config.allowed_tokens or {}, len(target.support)
    for position, tokens in allowed.items():
        column = (target.start + min(position, target.free.shape[1])).clamp(max=target.free.shape[1] - 1)
        is_there = target.start + min(position, target.free.shape[1]) < target.stop
        is_free = is_there & target.free[torch.arange(len(column)), column]
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
