"""A residual model token by token: `P(x_t | x_<t)` with the future marginalized (Deng et al. 2020, equation 5)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_ebm.model_modes import evaluation_mode, state_kept
from hf_ebm.models.residual.candidates import SamplingParameters, candidate_energies, sample_continuations
from hf_ebm.models.residual.inputs_residual import lm_of

if TYPE_CHECKING:
    from hf_ebm.models.residual.modeling_residual import ResidualEnergyModel


@torch.no_grad()
def next_token_log_probs(lm: PreTrainedModel, row: Tensor) -> Tensor:
    """Log probabilities (V,) of the language model's next token, float64."""
    with evaluation_mode(lm), state_kept(lm):
        logits = lm(input_ids=row[None], attention_mask=torch.ones_like(row[None]), use_cache=False).logits
    return logits[0, -1].double().log_softmax(-1)


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
