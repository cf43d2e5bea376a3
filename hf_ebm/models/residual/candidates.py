"""Continuations of prefixes: checked ones of callers, ones that a language model samples, with their energies, and one
that is chosen token by token by these.

Work on a prefix is done once for all of its continuations.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from hf_ebm.checks import advice_on_ids, as_list, as_mask, is_dense, shown
from hf_ebm.model_facts import close, is_causal, limit_of, num_embeddings, num_outputs
from hf_ebm.model_modes import evaluation_mode, generated_ids, own_generation_config, state_kept
from hf_ebm.objectives.completions import ends_at, pad_right
from hf_ebm.objectives.losses import check_energies
from hf_ebm.random_state import seeded
from hf_ebm.runtime import check_fits, logit_bytes, where_float64_is

if TYPE_CHECKING:
    from hf_ebm.models.residual.modeling_residual import ResidualEnergyModel


def lm_of(model: ResidualEnergyModel) -> PreTrainedModel:
    """The language model. Raises `ValueError` where it is not loaded."""
    if model.lm is None:
        raise ValueError(
            f"lm: the language model is kept by reference ({model.config.lm_reference}); load the model with "
            "from_pretrained"
        )
    return model.lm


def check_parts(model: ResidualEnergyModel) -> PreTrainedModel:
    """The language model; raises `ValueError` unless it and the encoder are there and on one device."""
    lm = lm_of(model)
    if lm.device != model.encoder.device or model.head.weight.device != model.encoder.device:
        raise ValueError(
            f"lm and encoder must be on one device, got {lm.device}, {model.encoder.device} and, for the head, "
            f"{model.head.weight.device}"
        )
    return lm


def check_prefixes(
    model: ResidualEnergyModel, prefixes: Sequence[Tensor | Sequence[int]], max_new_tokens: int, name: str = "prefixes"
) -> list[Tensor]:
    """Prefixes, which errors call `name`, as tensors on the language model's device; an empty one is its start token.

    Raises:
        ValueError: for none at all, ids outside the vocabulary, an empty one without a start token, and one that leaves
            language model or encoder no positions for `max_new_tokens`.
    """
    lm, rows = check_parts(model), as_id_rows(name, prefixes)
    size, device = num_embeddings(lm), lm.device  # looked up once: it is found among all parameters
    # The encoder's own tokens for the same text are counted when there are some.
    parts = [("language model", lm)] + ([] if model.config.retokenize else [("encoder", model.encoder)])
    limits = [limit_of(part, model.config.max_sequence_length, name=called) for called, part in parts]
    found = []
    for row, prefix in enumerate(rows):
        ids = prefix.to(device)
        if not len(ids):
            if model.config.start_token_id is None:
                raise ValueError(
                    f"{name}: row {row} is empty, and the language model has no bos_token_id to start from"
                )
            ids = torch.tensor([model.config.start_token_id], device=device)
        for limit in limits:
            if limit is not None and len(ids) + max_new_tokens > limit.tokens:
                raise ValueError(
                    f"{name}: row {row} has {len(ids)} tokens, with max_new_tokens {len(ids) + max_new_tokens}; "
                    f"{limit.reason}"
                )
        found.append(ids)
    _check_ids(name, found, size)
    return found


def check_continuations(
    model: ResidualEnergyModel, continuations: Sequence, max_new_tokens: int, count: int
) -> list[Tensor]:
    """Continuations as tensors on the language model's device.

    Raises:
        ValueError: unless each ends with an end token or has `max_new_tokens` tokens, with no end token inside.
    """
    rows = as_id_rows("continuations", continuations)
    if len(rows) != count:
        raise ValueError(f"continuations must be as many as prefixes, got {len(rows)} and {count}")
    lm, ends = lm_of(model), set(model.end_ids)
    size, device = num_embeddings(lm), lm.device
    found = []
    for row, continuation in enumerate(rows):
        ids = continuation.to(device)
        own = ids.tolist()
        if not own or len(own) > max_new_tokens:
            raise ValueError(f"continuations: row {row} has {len(own)} tokens, must have 1 to {max_new_tokens}")
        if ends & set(own[:-1]) or (len(own) < max_new_tokens and own[-1] not in ends):
            raise ValueError(
                f"continuations: row {row} must end with an end token ({', '.join(map(str, sorted(ends)))}) and hold "
                f"none before, or be stopped at {max_new_tokens} tokens; it has {len(own)}"
            )
        found.append(ids)
    _check_ids("continuations", found, size)
    return found


def as_id_rows(name: str, rows: object) -> list[Tensor]:
    """Rows of ids as tensors, where they are. Raises `ValueError`, naming the row, for anything else, and for none."""
    found = [_as_ids(ids, f"{name}: row {row}") for row, ids in enumerate(as_list(name, rows, "rows of ids"))]
    if not found:
        raise ValueError(f"{name} must be one or more, got none")
    return found


def _as_ids(values: Any, place: str) -> Tensor:
    try:
        ids = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        ids = None
    empty = ids is not None and ids.numel() == 0
    if not is_dense(ids) or ids.dim() != 1 or not (empty or ids.dtype in (torch.int64, torch.int32, torch.int16)):
        raise ValueError(f"{place} must be a list of ids, got {shown(values)}")
    return ids.long()


def _check_ids(name: str, rows: list[Tensor], size: int) -> None:
    """Raises `ValueError` for ids that the model has no embedding for."""
    least, most = torch.cat(rows).aminmax()
    if not 0 <= int(least) <= int(most) < size:
        row, wrong = next((row, i) for row, ids in enumerate(rows) for i in ids.tolist() if not 0 <= i < size)
        raise ValueError(f"{name}: row {row} holds the id {wrong}; the language model has ids 0 to {size - 1}")


def unpadded(input_ids: Tensor, attention_mask: Tensor | None) -> list[Tensor]:
    """Rows of a batch without their padding, on whichever side it is."""
    if not is_dense(input_ids) or input_ids.dim() != 2:
        raise ValueError(f"input_ids must be a tensor of ids (B, P), got {shown(input_ids)}{advice_on_ids(input_ids)}")
    mask = as_mask("attention_mask", attention_mask, input_ids)
    return [ids[own] for ids, own in zip(input_ids, mask, strict=True)]


class SamplingParameters(NamedTuple):
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
            # Rows that have ended; what stands after their first end token is cut off.
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
    lm: PreTrainedModel,
    prefixes: Sequence[Tensor],
    count: int,
    sampling: SamplingParameters,
    seed: int,
    batch_size: int,
) -> list[list[Tensor]]:
    """`count` independent continuations of each prefix, each up to its end token.

    Prefixes of one length run together, `batch_size` continuations at a time, on one cache a prefix: no row is
    padded. The samples are the same for the same arguments, `batch_size` among them.

    Args:
        prefixes: B tensors of at least one id.
        seed: of a random stream of its own; the global one is left alone.

    Returns:
        For each prefix, `count` tensors of ids.
    """
    check_batch_fits("batch_size", min(batch_size, count * len(prefixes)), lm)
    found: list[list[Tensor]] = [[] for _ in prefixes]
    by_length: dict[int, list[int]] = {}
    for row, prefix in enumerate(prefixes):
        by_length.setdefault(len(prefix), []).append(row)
    with seeded(seed, lm.device), evaluation_mode(lm), own_generation_config(lm, sampling.generation_config()):
        for _, rows in sorted(by_length.items()):
            together = max(1, batch_size // count)
            for at in range(0, len(rows), together):
                batch = rows[at : at + together]
                ids = torch.stack([prefixes[row] for row in batch]).to(lm.device)
                for drawn in _sample(lm, ids, count, sampling, batch_size):
                    for row, own in zip(batch, drawn, strict=True):
                        found[row] += own
    return found


def _sample(
    lm: PreTrainedModel, prefixes: Tensor, count: int, sampling: SamplingParameters, batch_size: int
) -> Iterator[list[list[Tensor]]]:
    """Yields, for parts of `count`, the continuations of each of the prefixes (B, P)."""
    cache = None
    if prefixes.shape[1] > 1 and can_share_prefix(lm):
        cache, _ = prefix_cache(lm, prefixes[:, :-1])
    config, part = sampling.generation_config(), max(1, batch_size // len(prefixes))
    for done in range(0, count, part):
        times = min(part, count - done)
        rows = prefixes.repeat_interleave(times, 0)
        shared = {} if cache is None else {"cache": repeated(cache, times)}
        mask = torch.ones_like(rows)
        with state_kept(lm):
            ids = generated_ids(lm, input_ids=rows, attention_mask=mask, generation_config=config, **shared)
        drawn = ends_at(ids[:, prefixes.shape[1] :], sampling.end_ids)
        yield [drawn[row * times : (row + 1) * times] for row in range(len(prefixes))]


@torch.no_grad()
def candidate_energies(
    model: ResidualEnergyModel, prefix: Tensor, candidates: Sequence[Tensor], batch_size: int
) -> Tensor:
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
        for at in range(0, len(different), batch_size):
            part = [torch.tensor(ids, dtype=torch.long) for ids in different[at : at + batch_size]]
            if shared is None:
                ids, mask = model.encoder_rows([torch.cat([prefix.cpu(), ids]) for ids in part])
                values = model(input_ids=ids, attention_mask=mask).energy
            else:
                values = _energies_after(model, shared, part)
            energies |= zip(different[at : at + batch_size], values.cpu().double().tolist(), strict=True)
    found = torch.tensor([energies[tuple(ids.tolist())] for ids in candidates], dtype=torch.float64)
    check_energies(found)
    return found


class _EncodedPrefix(NamedTuple):
    cache: DynamicCache
    sum: Tensor  # of hidden states, (1, d)
    length: int


def _encoded_prefix(model: ResidualEnergyModel, prefix: Tensor) -> _EncodedPrefix:
    ids = prefix[None].to(model.encoder.device)
    cache, hidden = prefix_cache(model.encoder, ids)
    return _EncodedPrefix(cache, model.summed(hidden, torch.ones_like(ids)), len(prefix))


def _energies_after(model: ResidualEnergyModel, shared: _EncodedPrefix, candidates: list[Tensor]) -> Tensor:
    """Energies of continuations that share a prefix: a causal encoder reads only what is after it."""
    device = model.encoder.device
    ids, mask = pad_right([ids.to(device) for ids in candidates], model.encoder_pad_id)
    whole = torch.cat([mask.new_ones(len(mask), shared.length), mask], 1)
    cache = repeated(shared.cache, len(candidates))
    with state_kept(model.encoder):
        hidden = model.encoder(input_ids=ids, attention_mask=whole, cache=cache, use_cache=True)[0]
    return model.energy_of_mean((shared.sum + model.summed(hidden, mask)) / whole.sum(1, keepdim=True))


def prefix_cache(model: PreTrainedModel, prefixes: Tensor) -> tuple[DynamicCache, Tensor]:
    """The cache after prefixes (B, P) without padding, and the model's first output for them."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    with state_kept(model):
        output = model(input_ids=prefixes, attention_mask=torch.ones_like(prefixes), cache=cache, use_cache=True)
    return cache, output[0]


def repeated(cache: DynamicCache, times: int) -> DynamicCache:
    """A copy with each row `times` times in a row."""
    cache = copy.deepcopy(cache)
    cache.batch_repeat_interleave(times)
    return cache


@torch.no_grad()
def can_share_prefix(model: PreTrainedModel) -> bool:
    """Whether the model computes the same through a cache: it is causal, and has one whose rows can be repeated.

    Tried once for each data type, and kept.
    """
    kept = model.__dict__.setdefault("_hf_ebm_shares_prefix", {})
    if model.dtype not in kept:
        kept[model.dtype] = is_causal(model) and _caches(model)
    return kept[model.dtype]


def _caches(model: PreTrainedModel) -> bool:
    size = num_embeddings(model)
    row = torch.arange(1, 5, device=model.device)[None] % size
    rows, mask = row.repeat(2, 1), torch.ones_like(row.repeat(2, 1))
    with evaluation_mode(model), state_kept(model):
        whole = model(input_ids=rows, attention_mask=mask)[0]
        try:
            cache, before = prefix_cache(model, row[:, :2])
            cached = model(input_ids=rows[:, 2:], attention_mask=mask, cache=repeated(cache, 2), use_cache=True)[0]
        except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError):
            return False  # whatever a model without such a cache raises
    return close(torch.cat([before.repeat(2, 1, 1), cached], 1), whole)


@torch.no_grad()
def next_token_log_probs(lm: PreTrainedModel, row: Tensor) -> Tensor:
    """Log probabilities (V,) of the language model's next token, float64."""
    with evaluation_mode(lm), state_kept(lm):
        logits = lm(input_ids=row[None], attention_mask=torch.ones_like(row[None]), use_cache=False).logits
    return logits[0, -1].to(where_float64_is(logits.device)).double().log_softmax(-1)


def clamped_energies(
    model: ResidualEnergyModel,
    prefix: Tensor,
    starts: list[Tensor],
    num_rollouts: int,
    max_new_tokens: int,
    seed: int,
    batch_size: int,
) -> list[Tensor]:
    """Energies of continuations that begin as given and go on as the language model does, float64.

    Args:
        prefix: (P,).
        starts: S beginnings of continuations, all of one length.

    Returns:
        For each beginning, the energies of `num_rollouts` continuations, or the one energy of a beginning that is whole
        (it has an end token, or `max_new_tokens` tokens).
    """
    ends = set(model.end_ids)
    open_ = [number for number, ids in enumerate(starts)
             if len(ids) < max_new_tokens and not (len(ids) and int(ids[-1]) in ends)]  # fmt: skip
    whole: list[list[Tensor]] = [[ids.cpu()] for ids in starts]
    if open_:
        sampling = SamplingParameters(max_new_tokens - len(starts[0]), tuple(ends))
        rows = [torch.cat([prefix, starts[number]]) for number in open_]
        drawn = sample_continuations(lm_of(model), rows, num_rollouts, sampling, seed, batch_size)
        for number, own in zip(open_, drawn, strict=True):
            whole[number] = [torch.cat([starts[number].cpu(), ids.cpu()]) for ids in own]
    energies = candidate_energies(model, prefix, [ids for own in whole for ids in own], batch_size)
    return list(energies.split([len(own) for own in whole]))


def sample_stepwise(
    model: ResidualEnergyModel,
    prefix: Tensor,
    max_new_tokens: int,
    top_k: int,
    num_rollouts: int,
    seed: int,
    batch_size: int,
) -> Tensor:
    """One continuation, chosen token by token among the language model's `top_k` best (appendix A.1)."""
    generator = torch.Generator().manual_seed(seed)
    chosen = prefix.new_empty(0)
    while len(chosen) < max_new_tokens and not (len(chosen) and int(chosen[-1]) in set(model.end_ids)):
        log_probs = next_token_log_probs(lm_of(model), torch.cat([prefix, chosen]))
        best = log_probs.topk(min(top_k, len(log_probs)))
        starts = [torch.cat([chosen, token[None]]) for token in best.indices]
        step_seed = int(torch.randint(2**62, (), generator=generator))
        energies = clamped_energies(model, prefix, starts, num_rollouts, max_new_tokens, step_seed, batch_size)
        log_z = torch.stack([(-own).logsumexp(0) - math.log(len(own)) for own in energies])
        if bool((log_z == -math.inf).all()):
            raise ValueError(f"energies: everything that may follow {chosen.tolist()} has infinite energy")
        weights = (best.values.cpu() + log_z).softmax(-1)
        token = best.indices[int(torch.multinomial(weights, 1, generator=generator))]
        chosen = torch.cat([chosen, token[None]])
    return chosen


@torch.no_grad()
def log_partition_of_last_token(model: ResidualEnergyModel, prefix: Tensor, start: Tensor, batch_size: int) -> float:
    """log Z before the last token, by enumeration: `log Σ_v P_LM(v | prefix, start) exp(-E(prefix, start, v))`."""
    log_probs = next_token_log_probs(lm_of(model), torch.cat([prefix, start])).cpu()
    candidates = [torch.cat([start.cpu(), torch.tensor([token])]) for token in range(len(log_probs))]
    return float((log_probs - candidate_energies(model, prefix, candidates, batch_size)).logsumexp(0))
