"""`EnergyModel.generate_from_sources`: a target text for each source text, of a length given, drawn or chosen."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from hf_ebm.checks import check_tokenizer, shown, whole, wholes
from hf_ebm.model_facts import Limit, limit_of, max_length, num_embeddings, refuse_needed_inputs
from hf_ebm.model_modes import evaluation_mode, model_output, state_kept
from hf_ebm.models.energy.encoding import (
    check_encoded,
    check_same_mask,
    encode_plain,
    fill_placeholder,
    rows_with_placeholder,
    target_placeholder,
)
from hf_ebm.models.energy.inputs import by_row, is_model_input
from hf_ebm.objectives.completions import pad_right
from hf_ebm.sampling.configuration import ChainGenerationConfig
from hf_ebm.sampling.run import ChainGenerationOutput
from hf_ebm.sampling.sampler import LENGTH, chain_generator, check_run_fits
from hf_ebm.texts import as_texts, report_unknown, tokenized

if TYPE_CHECKING:
    from hf_ebm.models.energy.modeling_energy import EnergyModel
    from hf_ebm.sampling.configuration import ResolvedChainConfig

_SOURCES_AT_ONCE = 256
# Settings that say which sequences there are.
_OF_SPACE = ("suppress_tokens", "protected_positions", "allowed_tokens", "avoid", "min_distance")


@model_output
class ConditionalGenerationOutput(ModelOutput):
    """Targets of N sources, C for each.

    Args:
        texts: per source, the final texts of its chains.
        lengths: (N, C) their numbers of tokens.
        energies: (N, C) their energies in nats (float64).
        log_partition: (N, C) with `lengths="probability"`, the estimates of log Z of their lengths; else `None`.
        rows: (N, C) their rows in `chains`.
        chains: all chains that were run, also those of lengths that were not chosen.
    """

    texts: list[list[str]]
    lengths: Tensor
    energies: Tensor
    log_partition: Tensor | None
    rows: Tensor
    chains: ChainGenerationOutput


class _Plan(NamedTuple):
    """Chains to run: for each its source, its number, and its length. `choices` lengths of a source compete.

    `log_probs` (chains,) are those of the lengths, where they compete, and `log_partition` (chains,) their log Z, where
    that counts.
    """

    sources: list[int]
    numbers: list[int]
    lengths: list[int]
    choices: int = 1
    log_probs: Tensor | None = None
    log_partition: Tensor | None = None


@torch.no_grad()
def generate_from_sources(
    model: EnergyModel,
    sources: Iterable[str] | str | os.PathLike,
    tokenizer: PreTrainedTokenizerBase,
    *,
    lengths: Sequence[int] | str,
    length_model: PreTrainedModel | None = None,
    num_lengths: int = 3,
    num_particles: int = 32,
    generation_config: ChainGenerationConfig | None = None,
    unknown_tokens: str = "warn",
    **kwargs: Any,
) -> ConditionalGenerationOutput:
    """Samples a target for each source with a conditional masked language model (thesis sections 6.5 to 6.8).

    The model's row is the tokenizer's pair of source and target, or the target alone, with the source in the
    encoder, for an encoder-decoder; see `hf_ebm.data.conditional` for training one.

    Args:
        sources: texts.
        tokenizer: the model's tokenizer.
        lengths: the number of tokens of each source's target; or `"sample"`: every chain draws its own from
            `length_model`; or `"energy"`: chains of the `num_lengths` most probable lengths are run, and of the
            chains with one number the one with the lowest `E(y) - log p(length)` is taken. That is a heuristic:
            each length has a partition function of its own, which it leaves out; raw energies, whose zero means
            nothing, suit it less than local ones. Or `"probability"`: as `"energy"`, but with log Z of each length,
            so that the most probable pair of a length and a target, `p(length) exp(-E(y)) / Z(length)`, is taken; a
            length whose Z is 0, as of its particles none may be there, isn't.
        length_model: a sequence classifier of sources whose class n stands for n tokens.
        num_lengths: how many lengths compete with `"energy"` and `"probability"`.
        num_particles: fills whose weights estimate log Z of each source and length with `"probability"`, two masked
            rows a token each. It is that of `exp(-E)`, whatever the chains' temperature.
        unknown_tokens: as for `score`.
        generation_config, kwargs: as for `generate`, less what says which chains are run; further inputs of the
            model are one number for all sources, or one for each. A saved run goes on by
            `generate(resume_from=…)`, as chains, without the choice among lengths.

    Raises:
        ValueError: before any chain is run, for what `generate` refuses; a length model that is missing, not
            needed, or gives no finite numbers; sources that are too long or hold special tokens; blocks of a fixed
            size above 1 where lengths are drawn.

    Example:
        >>> from hf_ebm.assets import load_embedded_pronunciation
        >>> model, tokenizer, _ = load_embedded_pronunciation()
        >>> model.generate_from_sources(["c a t"], tokenizer, lengths=[3], num_epochs=10, seed=0).texts
        [['K AE T']]
    """
    rows = as_texts("sources", sources)
    if not rows:
        raise ValueError("sources must hold a text or more, got none")
    asked = ChainGenerationConfig.asked(generation_config)
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    own = [
        name
        for name in ("input_ids", "attention_mask", "free_mask", "encoder_input_ids", "encoder_attention_mask",
                     "chain_keys", "chain_rows", "resume_from")
        if name in kwargs
    ]  # fmt: skip
    if own:
        raise ValueError(f"{own[0]} has no place in generate_from_sources; use generate")
    overrides = {name: kwargs.pop(name) for name in list(kwargs) if name in asked.defaults}
    further = {name: kwargs.pop(name) for name in list(kwargs) if is_model_input(model.mlm, name)}
    further_inputs = by_row(further, len(rows), "sources")
    config = asked.resolved(model.generation_config, overrides)
    config.lengths = None
    config.draw_seed()
    check_tokenizer("tokenizer", tokenizer)
    check_same_mask(tokenizer, model.config.mask_token_id)
    if not isinstance(lengths, str):
        lengths = _whole_lengths(lengths, len(rows))
    num_lengths = _checked_num_lengths(lengths, length_model, num_lengths, config)
    frames = _frames(model, tokenizer, rows)
    report_unknown(tokenizer, "sources", rows, unknown_tokens)
    room = _room(model, tokenizer, frames)
    plan = _plan(rows, tokenizer, lengths, length_model, num_lengths, config, room)
    inputs = _conditional_inputs(model, tokenizer, frames, plan, further_inputs)
    if lengths == "probability":
        plan = plan._replace(log_partition=_log_partition(model, config, inputs, num_particles, kwargs))
    chains = model.generate(generation_config=config, **inputs, **kwargs)
    return _chosen(chains, plan, len(rows), tokenizer)


def _log_partition(
    model: EnergyModel, config: ResolvedChainConfig, inputs: dict[str, Any], num_particles: int, given: dict[str, Any]
) -> Tensor:
    """(chains,) log Z of `exp(-E)` of each chain's row of the inputs of `generate`, estimated once for each row.

    Fills given a source are near the target, so their weights alone estimate it: annealing takes five times the rows.
    """
    rows = {name: value for name, value in inputs.items() if name not in ("chain_keys", "chain_rows")}
    same = {name: getattr(config, name) for name in _OF_SPACE} | {
        name: given[name] for name in ("extra_energies", "token_budget") if name in given
    }
    found = model.sample_smc(
        **rows, num_particles=num_particles, num_runs=1, num_moves=0, ladder=[1.0], energy_temperature=1.0,
        seed=config.seed, **same,
    )  # fmt: skip
    return found.log_partition[inputs["chain_rows"]]


def _conditional_inputs(
    model: EnergyModel,
    tokenizer: PreTrainedTokenizerBase,
    frames: list[list[int]],
    plan: _Plan,
    further_inputs: dict[str, Tensor],
) -> dict[str, Any]:
    """Arguments of `generate`: one row for each source and length that is needed."""
    encoder_decoder = model.mlm.config.is_encoder_decoder
    needed = sorted(set(zip(plan.sources, plan.lengths, strict=True)))
    masks = [[tokenizer.mask_token_id] * length for _, length in needed]
    whole = [target_placeholder(tokenizer)] * len(frames) if encoder_decoder else frames
    filled = [fill_placeholder(tokenizer, whole[source], mask) for (source, _), mask in zip(needed, masks, strict=True)]
    pad = model.config.pad_token_id or 0
    ids, attention_mask = pad_right([torch.tensor(ids) for ids, _ in filled], pad)
    free, _ = pad_right([torch.tensor(free).long() for _, free in filled], 0)
    row_of = {pair: row for row, pair in enumerate(needed)}
    inputs = {
        **{name: values[[source for source, _ in needed]] for name, values in further_inputs.items()},
        "input_ids": ids,
        "attention_mask": attention_mask,
        "free_mask": free,
        "chain_keys": list(zip(plan.sources, plan.numbers, strict=True)),
        "chain_rows": [row_of[pair] for pair in zip(plan.sources, plan.lengths, strict=True)],
    }
    if encoder_decoder:
        encoder_ids, encoder_mask = pad_right([torch.tensor(frames[source]) for source, _ in needed], pad)
        inputs |= {"encoder_input_ids": encoder_ids, "encoder_attention_mask": encoder_mask}
    return inputs


def length_log_probs(
    length_model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sources: Sequence[str]
) -> Tensor:
    """Log probabilities (N, L) of lengths 1 to L, float64, by a sequence classifier whose class n stands for n tokens.

    Class 0 is left out and the others normalized. Sources of one length are a batch, so nothing is padded.

    Raises:
        ValueError: for no sources, sources longer than the classifier's positions or with other tokens than it has,
            another shape of its logits than one row a source and one class a length, and numbers that aren't finite.

    Example:
        >>> from hf_ebm.assets import load_embedded_pronunciation
        >>> _, tokenizer, length_model = load_embedded_pronunciation()
        >>> int(length_log_probs(length_model, tokenizer, ["c a t"]).argmax()) + 1  # phonemes
        3
    """
    check_tokenizer("tokenizer", tokenizer)
    if not isinstance(length_model, PreTrainedModel):
        raise ValueError(f"length_model must be a sequence classifier of lengths, got {shown(length_model)}")
    texts = as_texts("sources", sources)
    if not texts:
        raise ValueError("sources must hold a text or more, got none")
    rows = [list(tokenized(tokenizer, "sources", row, text)["input_ids"]) for row, text in enumerate(texts)]
    limit, vocabulary = max_length(length_model), num_embeddings(length_model)
    for row, ids in enumerate(rows):
        if limit is not None and len(ids) > limit:
            raise ValueError(f"sources: row {row} has {len(ids)} tokens, length_model has positions for {limit}")
        if max(ids, default=0) >= vocabulary:
            raise ValueError(f"sources: row {row} has the token {max(ids)}, length_model knows {vocabulary}")
    found: dict[int, Tensor] = {}
    device = next(length_model.parameters()).device
    by_length = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    with evaluation_mode(length_model), torch.no_grad():
        for _, group in groupby(by_length, key=lambda row: len(rows[row])):
            alike = list(group)
            for at in range(0, len(alike), _SOURCES_AT_ONCE):
                part = alike[at : at + _SOURCES_AT_ONCE]
                batch = torch.tensor([rows[row] for row in part], device=device)
                for row, logits in zip(part, _length_logits(length_model, batch), strict=True):
                    found[row] = logits
    stacked = torch.stack([found[row] for row in range(len(rows))])
    if not bool(stacked.isfinite().all()):
        row = int((~stacked.isfinite()).any(1).nonzero()[0])
        raise ValueError(f"length_model gives numbers that aren't finite for the source of row {row}, {texts[row]!r}")
    return stacked.log_softmax(-1)


def _length_logits(length_model: PreTrainedModel, ids: Tensor) -> Tensor:
    with state_kept(length_model):
        logits = length_model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    if logits.dim() != 2 or logits.shape[1] < 2:
        raise ValueError(
            f"length_model must be a sequence classifier of lengths, got {type(length_model).__name__}, whose logits "
            f"have the shape {tuple(logits.shape)}"
        )
    return logits[:, 1:].cpu().double()


def _whole_lengths(lengths: object, rows: int) -> list[int]:
    found = wholes(lengths, 1)
    if found is None or len(found) != rows:
        raise ValueError(f"lengths must be {rows} whole numbers from 1 up, one for each source, got {lengths!r}")
    return found


def _checked_num_lengths(
    lengths: list[int] | str, length_model: PreTrainedModel | None, num_lengths: int, config: ResolvedChainConfig
) -> int:
    """How many lengths compete, of a length model that is there where one is needed."""
    if not isinstance(lengths, str):
        if length_model is not None:
            raise ValueError("length_model was given together with lengths as numbers")
        return 1
    if lengths not in ("sample", "energy", "probability"):
        raise ValueError(f'lengths must be numbers, "sample", "energy" or "probability", got {lengths!r}')
    if not isinstance(length_model, PreTrainedModel):
        given = type(length_model).__name__
        raise ValueError(f"length_model must be a sequence classifier of lengths with lengths={lengths!r}, got {given}")
    refuse_needed_inputs("length_model", length_model)
    classes = int(length_model.config.num_labels or 0) - 1
    choices = whole(num_lengths)
    if lengths != "sample" and not (choices is not None and 1 <= choices <= classes):
        raise ValueError(f"num_lengths must be from 1 to the length model's {classes}, got {num_lengths!r}")
    sizes = config.block_size if isinstance(config.block_size, list) else [config.block_size]
    if max(sizes) > 1 and config.final_block_size is None:
        raise ValueError(
            f"block_size {config.block_size} may be above a length that is drawn; with lengths={lengths!r} blocks are "
            "of size 1 or a schedule (final_block_size), which is clamped"
        )
    return choices or 1


def _frames(model: EnergyModel, tokenizer: PreTrainedTokenizerBase, sources: list[str]) -> list[list[int]]:
    """Each source's row with one mask for its target, or its encoder's ids."""
    special = {token for token in tokenizer.all_special_tokens if token != tokenizer.unk_token}
    for row, source in enumerate(sources):
        held = sorted(token for token in special if token in source)
        if held:
            raise ValueError(f"sources: row {row} holds the special token {held[0]!r}, {source!r}")
    if model.mlm.config.is_encoder_decoder:
        return encode_plain(model, tokenizer, "sources", sources)
    frames = rows_with_placeholder(tokenizer, sources)
    limit = limit_of(model.mlm, model.config.max_sequence_length, tokenizer)
    for row, ids in enumerate(frames):
        check_encoded(model, limit, "sources", row, ids)
    return frames


def _room(model: EnergyModel, tokenizer: PreTrainedTokenizerBase, frames: list[list[int]]) -> list[Limit | None]:
    """How many tokens each source's target may have at most, and why; `None` without a limit."""
    stated = limit_of(model.mlm, model.config.max_sequence_length, tokenizer)
    if stated is None:
        return [None] * len(frames)
    whole_rows = [target_placeholder(tokenizer)] * len(frames) if model.mlm.config.is_encoder_decoder else frames
    return [stated._replace(tokens=stated.tokens - len(ids) + 1) for ids in whole_rows]


def _plan(
    sources: list[str],
    tokenizer: PreTrainedTokenizerBase,
    lengths: list[int] | str,
    length_model: PreTrainedModel | None,
    num_lengths: int,
    config: ResolvedChainConfig,
    room: list[Limit | None],
) -> _Plan:
    count = config.num_chains
    check_run_fits(config, len(sources) * count * num_lengths, 1)  # of a token or more
    pairs = [(source, chain) for source in range(len(sources)) for chain in range(count)]
    if not isinstance(lengths, str):
        for row, (length, most) in enumerate(zip(lengths, room, strict=True)):
            if most is not None and length > most.tokens:
                raise ValueError(
                    f"lengths: {length} tokens for row {row}, beside its source there is room for {most.tokens}: "
                    f"{most.reason}"
                )
        return _plan_of(pairs, [lengths[source] for source, _ in pairs])
    if length_model is None:
        raise ValueError(f"length_model must be given with lengths={lengths!r}")
    log_probs = length_log_probs(length_model, tokenizer, sources)
    for row, most in enumerate(room):  # a target longer than the model has positions for can't be
        if most is not None:
            log_probs[row, most.tokens :] = -torch.inf
            if lengths != "sample" and most.tokens < num_lengths:
                raise ValueError(
                    f"num_lengths is {num_lengths}, with row {row} there is room for {most.tokens}: {most.reason}"
                )
    log_probs = log_probs.log_softmax(-1)
    if lengths == "sample":
        probs = log_probs.exp().numpy()
        drawn = [
            1 + int(chain_generator(config.seed, source, chain, LENGTH).choice(probs.shape[1], p=probs[source]))
            for source, chain in pairs
        ]
        return _plan_of(pairs, drawn)
    best = 1 + log_probs.topk(num_lengths, dim=1).indices
    # Chains of one number compete; each has a stream of its own, which doesn't depend on how many chains there are.
    runs = [(source, chain * num_lengths + k) for source, chain in pairs for k in range(num_lengths)]
    plan = _plan_of(runs, [int(best[source, k]) for source, _ in pairs for k in range(num_lengths)])
    return plan._replace(choices=num_lengths, log_probs=log_probs[plan.sources, torch.tensor(plan.lengths) - 1])


def _plan_of(chains: list[tuple[int, int]], lengths: list[int]) -> _Plan:
    """The plan of pairs of a source and a number."""
    return _Plan([source for source, _ in chains], [number for _, number in chains], lengths)


def _chosen(
    chains: ChainGenerationOutput, plan: _Plan, sources: int, tokenizer: PreTrainedTokenizerBase
) -> ConditionalGenerationOutput:
    """Of each group of competing chains the best one."""
    lengths = torch.tensor(plan.lengths)
    final = chains.run.cold.energy.double().cpu()
    merit = -final if plan.log_probs is None else plan.log_probs - final
    if plan.log_partition is not None:  # a length without a sequence that may be there is none to choose
        merit = torch.where(plan.log_partition > -torch.inf, merit - plan.log_partition, -torch.inf)
    groups = merit.view(sources, -1, plan.choices)
    first = torch.arange(len(merit)).view_as(groups)[..., 0]
    rows = first + groups.argmax(-1)
    texts = []
    for own in rows.tolist():
        ids = [chains.sequences[row][chains.run.free[row].cpu()].tolist() for row in own]
        texts.append(tokenizer.batch_decode(ids))
    return ConditionalGenerationOutput(
        texts=texts, lengths=lengths[rows], energies=final[rows], rows=rows, chains=chains,
        log_partition=None if plan.log_partition is None else plan.log_partition[rows],
    )  # fmt: skip
