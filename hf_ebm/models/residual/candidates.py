"""Continuations sampled from a language model, and their energies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from hf_ebm.checks import shown
from hf_ebm.memory import check_fits, logit_bytes
from hf_ebm.model_facts import num_outputs
from hf_ebm.model_modes import decoded, evaluation_mode, own_generation_config, state_kept
from hf_ebm.models.residual.prefix_cache import can_share_prefix, prefix_cache, repeated
from hf_ebm.objectives.completions import ends_at, pad_right
from hf_ebm.objectives.partition_function import check_energies
from hf_ebm.random_state import seeded

if TYPE_CHECKING:
    from hf_ebm.models.residual.residual_base import ResidualBase


class Proposal(NamedTuple):
    """How continuations are sampled.

    Attributes:
        max_new_tokens: the length at which a continuation is stopped.
        end_ids: tokens that end one.
        temperature, top_k, top_p: warps; without them samples are of the language model itself.
    """

    max_new_tokens: int
    end_ids: tuple[int, ...]
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def generation_config(self) -> GenerationConfig:
        """For `generate`: nothing but what is said here, so that it must stand in place of the model's own as well."""
        return GenerationConfig(
            do_sample=True,
            temperature=float(self.temperature),
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            max_new_tokens=self.max_new_tokens,
            eos_token_id=list(self.end_ids) or None,
            # Rows that have ended; what stands behind their first end token is cut off.
            pad_token_id=self.end_ids[0] if self.end_ids else None,
            use_cache=True,
        )


def check_continuations_fit(names: str, count: int, max_new_tokens: int) -> None:
    """Raises `ValueError` for more continuations than there is memory for; `names` are of the arguments beside."""
    told = f"{names} and max_new_tokens: {shown(count)} continuations of up to {shown(max_new_tokens)} tokens are kept"
    check_fits(8 * count * max_new_tokens, told)


def check_batch_fits(names: str, rows: int, lm: PreTrainedModel) -> None:
    """Raises `ValueError` for more rows that run together than there is memory for the logits of one token of each."""
    told = f"{names}: {shown(rows)} continuations are sampled together, with logits for {num_outputs(lm)} tokens"
    check_fits(logit_bytes(rows, 1, num_outputs(lm)), told, lm.device)


@torch.no_grad()
def sample_continuations(
    lm: PreTrainedModel, prefixes: Sequence[Tensor], count: int, proposal: Proposal, seed: int, rows_at_once: int
) -> list[list[Tensor]]:
    """`count` independent continuations of each prefix, each up to its end token.

    Prefixes of one length run together, `rows_at_once` continuations at a time, on one cache a prefix: no row is
    padded. The samples are the same for the same arguments, `rows_at_once` among them.

    Args:
        prefixes: B tensors of at least one id.
        seed: of a random stream of its own; the global one is left alone.

    Returns:
        For each prefix, `count` tensors of ids.
    """
    check_batch_fits("rows_at_once", min(rows_at_once, count * len(prefixes)), lm)
    found: list[list[Tensor]] = [[] for _ in prefixes]
    by_length: dict[int, list[int]] = {}
    for row, prefix in enumerate(prefixes):
        by_length.setdefault(len(prefix), []).append(row)
    with seeded(seed, lm.device), evaluation_mode(lm), own_generation_config(lm, proposal.generation_config()):
        for _, rows in sorted(by_length.items()):
            together = max(1, rows_at_once // count)
            for at in range(0, len(rows), together):
                batch = rows[at : at + together]
                ids = torch.stack([prefixes[row] for row in batch]).to(lm.device)
                for drawn in _sample(lm, ids, count, proposal, rows_at_once):
                    for row, own in zip(batch, drawn, strict=True):
                        found[row] += own
    return found


def _sample(
    lm: PreTrainedModel, prefixes: Tensor, count: int, proposal: Proposal, rows_at_once: int
) -> Iterator[list[list[Tensor]]]:
    """Yields, for parts of `count`, the continuations of each of the prefixes (B, P)."""
    cache = None
    if prefixes.shape[1] > 1 and can_share_prefix(lm):
        cache, _ = prefix_cache(lm, prefixes[:, :-1])
    config, part = proposal.generation_config(), max(1, rows_at_once // len(prefixes))
    for done in range(0, count, part):
        times = min(part, count - done)
        rows = prefixes.repeat_interleave(times, 0)
        shared = {} if cache is None else {"cache": repeated(cache, times)}
        mask = torch.ones_like(rows)
        with state_kept(lm):
            ids = decoded(lm, input_ids=rows, attention_mask=mask, generation_config=config, **shared)
        drawn = ends_at(ids[:, prefixes.shape[1] :], proposal.end_ids)
        yield [drawn[row * times : (row + 1) * times] for row in range(len(prefixes))]


@torch.no_grad()
def candidate_energies(model: ResidualBase, prefix: Tensor, candidates: Sequence[Tensor], rows_at_once: int) -> Tensor:
    """Energies (n,) of continuations of one prefix, in nats, on the CPU in float64; equal ones are computed once.

    Raises:
        ValueError: naming the candidate, for NaN.
    """
    different = list(dict.fromkeys(tuple(ids.tolist()) for ids in candidates))
    different.sort(key=len)  # rows of like length run together
    energies: dict[tuple, float] = {}
    shared = None
    with evaluation_mode(model):
        if not model.config.retokenize and len(prefix) and can_share_prefix(model.encoder):
            shared = _encoded_prefix(model, prefix)
        for at in range(0, len(different), rows_at_once):
            part = [torch.tensor(ids, dtype=torch.long) for ids in different[at : at + rows_at_once]]
            if shared is None:
                ids, mask = model.encoder_rows([torch.cat([prefix.cpu(), ids]) for ids in part])
                values = model(input_ids=ids, attention_mask=mask).energy
            else:
                values = _energies_behind(model, shared, part)
            energies |= zip(different[at : at + rows_at_once], values.double().tolist(), strict=True)
    found = torch.tensor([energies[tuple(ids.tolist())] for ids in candidates], dtype=torch.float64)
    check_energies(found)
    return found


class _EncodedPrefix(NamedTuple):
    cache: DynamicCache
    sum: Tensor  # of hidden states, (1, d)
    length: int


def _encoded_prefix(model: ResidualBase, prefix: Tensor) -> _EncodedPrefix:
    ids = prefix[None].to(model.encoder.device)
    cache, hidden = prefix_cache(model.encoder, ids)
    return _EncodedPrefix(cache, model.summed(hidden, torch.ones_like(ids)), len(prefix))


def _energies_behind(model: ResidualBase, shared: _EncodedPrefix, candidates: list[Tensor]) -> Tensor:
    """Energies of continuations that share a prefix: a causal encoder reads only what is behind it."""
    device = model.encoder.device
    ids, mask = pad_right([ids.to(device) for ids in candidates], model.encoder_pad_id)
    whole = torch.cat([mask.new_ones(len(mask), shared.length), mask], 1)
    cache = repeated(shared.cache, len(candidates))
    with state_kept(model.encoder):
        hidden = model.encoder(input_ids=ids, attention_mask=whole, cache=cache, use_cache=True)[0]
    return model.energy_of_mean((shared.sum + model.summed(hidden, mask)) / whole.sum(1, keepdim=True))
