"""`ResidualEnergyModel.score`: texts in, joint energies out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from hf_ebm.checks import as_truth, check_tokenizer
from hf_ebm.model_modes import evaluation_mode, model_output, state_kept
from hf_ebm.models.residual.inputs_residual import check_prefixes, lm_of
from hf_ebm.objectives.completions import completion_token_log_probs
from hf_ebm.objectives.partition_function import check_energies
from hf_ebm.texts import as_texts, plain_ids, prompt_encoder, report_unknown

if TYPE_CHECKING:
    from hf_ebm.models.residual.modeling_residual import ResidualEnergyModel

BATCH_SIZE = 64


@model_output
class ResidualScoreOutput(ModelOutput):
    """Joint energies of N texts, in the order of the texts.

    Args:
        energy: (N,) `E(prefix, x) - log P_LM(x | prefix)` in nats, float64: minus the log probability up to log Z,
            which texts of one prefix share.
        residual_energy: (N,) E.
        lm_log_prob: (N,) log P_LM.
        num_tokens: (N,) tokens of the text in the language model's tokens, an end token among them.
    """

    energy: Tensor
    residual_energy: Tensor
    lm_log_prob: Tensor
    num_tokens: Tensor


@torch.no_grad()
def score(
    model: ResidualEnergyModel,
    texts: Iterable[str] | str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prefixes: Iterable[str] | None = None,
    ended: bool = True,
    unknown_tokens: str = "warn",
) -> ResidualScoreOutput:
    """Joint energies of texts: one row in, one row out, in order. Nothing is cut.

    Args:
        texts: strings.
        tokenizer: the language model's tokenizer.
        prefixes: what each text continues; tokenized apart from it. With a byte-level tokenizer a text that begins
            with a new word must begin with its space.
        ended: whether texts are whole, so that an end token stands behind them.
        unknown_tokens: what is done where a text holds something the tokenizer, or that of the encoder, has no
            token for: `"warn"` (one warning that names the rows), `"error"` or `"ignore"`.

    Raises:
        ValueError: before any work, naming the row, for an empty text that isn't ended, texts that are too long or
            no strings; for NaN energies.
    """
    check_tokenizer("tokenizer", tokenizer)
    ended = as_truth("ended", ended)
    rows = as_texts("texts", texts)
    before = [""] * len(rows) if prefixes is None else as_texts("prefixes", prefixes)
    if len(before) != len(rows):
        raise ValueError(f"prefixes has {len(before)} rows, texts has {len(rows)}; they must be equal")
    if ended and not model.end_ids:
        raise ValueError("ended must be False: the language model has no eos_token_id")
    end = model.end_ids[:1] if ended else []
    found = [torch.tensor([*ids, *end]) for ids in plain_ids(tokenizer, rows)] if rows else []
    for row, ids in enumerate(found):
        inner = set(ids[: len(ids) - len(end)].tolist()) & set(model.end_ids)
        if inner:
            raise ValueError(f"texts: row {row} holds the end token {tokenizer.convert_ids_to_tokens(min(inner))!r}")
        if not len(ids):
            raise ValueError(f"texts: row {row} has no token, and ended is False")
    starts = prompt_encoder(tokenizer, end[0] if end else -1)(before) if rows else []
    pairs = [(check_prefixes(model, [start], len(ids))[0], ids) for start, ids in zip(starts, found, strict=True)]
    theirs: Any = model.encoder_tokenizer if model.config.retokenize else None
    for name, own in (("texts", rows), ("prefixes", before)):
        told = report_unknown(tokenizer, name, own, unknown_tokens)
        if theirs is not None and not told:
            report_unknown(theirs, f"{name}, for the encoder", own, unknown_tokens)
    energies = torch.zeros(len(rows), dtype=torch.float64)
    log_probs = torch.zeros(len(rows), dtype=torch.float64)
    by_length = sorted(range(len(rows)), key=lambda row: sum(map(len, pairs[row])))
    with evaluation_mode(model):
        for at in range(0, len(rows), BATCH_SIZE):
            batch = by_length[at : at + BATCH_SIZE]
            values = joint_terms(model, [pairs[row][0] for row in batch], [pairs[row][1] for row in batch])
            energies[batch], log_probs[batch] = values
    check_energies(energies)
    num_tokens = torch.tensor([len(ids) for ids in found], dtype=torch.long)
    return ResidualScoreOutput(energies - log_probs, energies, log_probs, num_tokens)


def joint_terms(
    model: ResidualEnergyModel, prefixes: list[Tensor], continuations: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """Residual energies and log probabilities under the language model, (N,) float64 each, on the CPU."""
    ids, mask = model.encoder_rows(
        [torch.cat([a.cpu(), b.cpu()]) for a, b in zip(prefixes, continuations, strict=True)]
    )
    energies = model(input_ids=ids, attention_mask=mask).energy.double().cpu()
    lm = lm_of(model)
    device = lm.device
    before, after = ([ids.to(device) for ids in rows] for rows in (prefixes, continuations))
    with state_kept(lm):
        terms = completion_token_log_probs(lm, before, after, model.config.lm_pad_token_id)
    return energies, terms.double().sum(1).cpu()
