"""`EnergyModel.generate_from_sources`: a target text for each source text, of a length given, drawn or chosen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from hf_ebm.generation_settings import is_whole
from hf_ebm.model_modes import evaluation_mode
from hf_ebm.models.energy.encoding import (
    as_texts,
    check_encoded,
    check_mask_token,
    fill_placeholder,
    rows_with_placeholder,
    target_placeholder,
)
from hf_ebm.models.position_limits import max_length
from hf_ebm.objectives.completions import pad_right
from hf_ebm.sampling.configuration import ChainGenerationConfig
from hf_ebm.sampling.output import ChainGenerationOutput
from hf_ebm.sampling.streams import LENGTH, chain_generator

_SOURCES_AT_ONCE = 256


@dataclass
class ConditionalGenerationOutput(ModelOutput):
    """Targets of N sources, C for each.

    Args:
        texts: per source, the final texts of its chains.
        lengths: (N, C) their numbers of tokens.
        energies: (N, C) their energies in nats (float64).
        rows: (N, C) their rows in `chains`.
        chains: all chains that were run, also those of lengths that were not chosen.
    """

    texts: list[list[str]] | None = None
    lengths: torch.LongTensor | None = None
    energies: torch.DoubleTensor | None = None
    rows: torch.LongTensor | None = None
    chains: ChainGenerationOutput | None = None


class _Plan(NamedTuple):
    """Chains to run: for each its source, its number, and its length. `choices` lengths of a source compete.

    `log_probs` (chains,) are those of the lengths, where they compete.
    """

    sources: list[int]
    numbers: list[int]
    lengths: list[int]
    choices: int = 1
    log_probs: Tensor | None = None


class ConditionalGenerationMixin:
    """Gives a model `generate_from_sources`."""

    @torch.no_grad()
    def generate_from_sources(
        self,
        sources: Iterable[str] | str | Path,
        tokenizer: PreTrainedTokenizerBase,
        *,
        lengths: Sequence[int] | str,
        length_model: PreTrainedModel | None = None,
        num_lengths: int = 3,
        generation_config: ChainGenerationConfig | None = None,
        **kwargs,
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
                nothing, suit it less than local ones.
            length_model: a sequence classifier of sources whose class n stands for n tokens.
            num_lengths: how many lengths compete with `"energy"`.
            generation_config, kwargs: as for `generate`, less what says which chains are run.

        Raises:
            ValueError: before any work, for what `generate` refuses; a length model that is missing or not needed;
                sources that are too long.
        """
        rows = as_texts("sources", sources)
        if not rows:
            raise ValueError("sources must hold a text or more, got none")
        own = [
            name
            for name in ("input_ids", "attention_mask", "free_mask", "encoder_input_ids", "encoder_attention_mask",
                         "chain_keys", "chain_rows", "resume_from")
            if kwargs.get(name) is not None
        ]  # fmt: skip
        if own:
            raise ValueError(f"{own[0]} has no place in generate_from_sources; use generate")
        config = generation_config or ChainGenerationConfig()
        overrides = {name: kwargs.pop(name) for name in list(kwargs) if name in config.defaults}
        config = config.resolved(self.generation_config, overrides)
        config.lengths = None
        if config.seed is None:
            config.seed = int(torch.randint(0, 2**31, ()))
        check_mask_token(tokenizer)
        if tokenizer.mask_token_id != self.config.mask_token_id:
            raise ValueError(
                f"tokenizer: its mask token has id {tokenizer.mask_token_id}, the model's is "
                f"{self.config.mask_token_id}"
            )
        _check_lengths(lengths, length_model, num_lengths, len(rows))
        frames = _frames(self, tokenizer, rows)
        plan = _plan(rows, tokenizer, lengths, length_model, num_lengths, config)
        inputs = self._conditional_inputs(tokenizer, frames, plan)
        chains = self.generate(generation_config=config, **inputs, **kwargs)
        return _chosen(chains, plan, len(rows), tokenizer)

    def _conditional_inputs(self, tokenizer, frames: list[list[int]], plan: _Plan) -> dict:
        """Arguments of `generate`: one row for each source and length that is needed."""
        encoder_decoder = self.mlm.config.is_encoder_decoder
        needed = sorted(set(zip(plan.sources, plan.lengths, strict=True)))
        masks = [[tokenizer.mask_token_id] * length for _, length in needed]
        whole = [target_placeholder(tokenizer)] * len(frames) if encoder_decoder else frames
        filled = [
            fill_placeholder(tokenizer, whole[source], mask) for (source, _), mask in zip(needed, masks, strict=True)
        ]
        limit = max_length(self.mlm)
        for (source, _), (ids, _) in zip(needed, filled, strict=True):
            check_encoded(self, limit, "sources", source, ids)
        pad = self.config.pad_token_id or 0
        ids, attention_mask = pad_right([torch.tensor(ids) for ids, _ in filled], pad)
        free, _ = pad_right([torch.tensor(free).long() for _, free in filled], 0)
        row_of = {pair: row for row, pair in enumerate(needed)}
        inputs = {
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

    Class 0 is left out and the others normalized. Raises `ValueError` for sources longer than the classifier's
    positions.
    """
    found = []
    limit = max_length(length_model)
    longest = max(len(ids) for ids in tokenizer(list(sources), verbose=False)["input_ids"])
    if limit is not None and longest > limit:
        raise ValueError(f"sources: one has {longest} tokens, length_model has positions for {limit}")
    device = next(length_model.parameters()).device
    with evaluation_mode(length_model), torch.no_grad():
        for at in range(0, len(sources), _SOURCES_AT_ONCE):
            batch = tokenizer(list(sources[at : at + _SOURCES_AT_ONCE]), padding=True, return_tensors="pt")
            batch = {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}
            found.append(length_model(**batch).logits[:, 1:].double().log_softmax(-1).cpu())
    return torch.cat(found)


def _check_lengths(lengths, length_model, num_lengths, rows: int) -> None:
    if isinstance(lengths, str):
        if lengths not in ("sample", "energy"):
            raise ValueError(f'lengths must be numbers, "sample" or "energy", got {lengths!r}')
        if length_model is None or getattr(length_model.config, "num_labels", 0) < 2:
            raise ValueError(f"length_model must be a sequence classifier of lengths with lengths={lengths!r}")
        classes = length_model.config.num_labels - 1
        if lengths == "energy" and not (is_whole(num_lengths) and 1 <= num_lengths <= classes):
            raise ValueError(f"num_lengths must be from 1 to the length model's {classes}, got {num_lengths!r}")
        return
    if length_model is not None:
        raise ValueError("length_model was given together with lengths as numbers")
    found = list(lengths) if isinstance(lengths, Iterable) else lengths
    if not isinstance(found, list) or len(found) != rows or not all(is_whole(n) and n >= 1 for n in found):
        raise ValueError(f"lengths must be {rows} whole numbers from 1 up, one for each source, got {found!r}")


def _frames(model, tokenizer, sources: list[str]) -> list[list[int]]:
    """Each source's row with one mask for its target, or its encoder's ids."""
    if model.mlm.config.is_encoder_decoder:
        frames = tokenizer(text=sources, padding=False, truncation=False, verbose=False)["input_ids"]
    else:
        frames = rows_with_placeholder(tokenizer, sources)
    masks = 0 if model.mlm.config.is_encoder_decoder else 1
    for row, ids in enumerate(frames):
        if ids.count(tokenizer.mask_token_id) != masks:
            raise ValueError(f"sources: row {row} holds the mask token, {sources[row]!r}")
        check_encoded(model, max_length(model.mlm), "sources", row, ids)
    return frames


def _plan(sources: list[str], tokenizer, lengths, length_model, num_lengths: int, config) -> _Plan:
    count = config.num_chains
    pairs = [(source, chain) for source in range(len(sources)) for chain in range(count)]
    if not isinstance(lengths, str):
        return _Plan(*map(list, zip(*pairs, strict=True)), [lengths[source] for source, _ in pairs])
    log_probs = length_log_probs(length_model, tokenizer, sources)
    if lengths == "sample":
        probs = log_probs.exp().numpy()
        drawn = [
            1 + int(chain_generator(config.seed, source, chain, LENGTH).choice(probs.shape[1], p=probs[source]))
            for source, chain in pairs
        ]
        return _Plan(*map(list, zip(*pairs, strict=True)), drawn)
    best = 1 + log_probs.topk(num_lengths, dim=1).indices
    # Chains of one number compete; each has a stream of its own, which doesn't depend on how many chains there are.
    runs = [
        (source, chain * num_lengths + k, int(best[source, k])) for source, chain in pairs for k in range(num_lengths)
    ]
    plan = _Plan(*map(list, zip(*runs, strict=True)), num_lengths)
    return plan._replace(log_probs=log_probs[plan.sources, torch.tensor(plan.lengths) - 1])


def _chosen(chains: ChainGenerationOutput, plan: _Plan, sources: int, tokenizer) -> ConditionalGenerationOutput:
    """Of each group of competing chains the best one."""
    lengths = torch.tensor(plan.lengths)
    final = chains.run.state.energy.double().cpu()
    merit = -final if plan.log_probs is None else plan.log_probs - final
    groups = merit.view(sources, -1, plan.choices)
    first = torch.arange(len(merit)).view_as(groups)[..., 0]
    rows = first + groups.argmax(-1)
    texts = []
    for own in rows.tolist():
        ids = [chains.sequences[row][chains.run.free[row].cpu()].tolist() for row in own]
        texts.append(tokenizer.batch_decode(ids))
    return ConditionalGenerationOutput(
        texts=texts, lengths=lengths[rows], energies=final[rows], rows=rows, chains=chains
    )
