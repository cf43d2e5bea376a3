"""`EnergyModel.score` and `rerank`: texts in, energies out. A thin layer over `hf_ebm.scoring`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import ModelOutput, logging

from hf_ebm.checks import as_ids, as_numbers_of, as_whole, check_choice, check_tokenizer, shown
from hf_ebm.model_modes import evaluation_mode, model_output
from hf_ebm.models.energy.encoding import EncodedText, encode_plain, encode_texts
from hf_ebm.models.energy.inputs import by_row, check_energy_inputs
from hf_ebm.objectives.completions import pad_right
from hf_ebm.renamed import warn_of_rename
from hf_ebm.scoring.energies import ENERGIES
from hf_ebm.scoring.masking import MASKINGS, masked_token_energies
from hf_ebm.scoring.rows import BadLogitsError
from hf_ebm.texts import as_texts, report_unknown

if TYPE_CHECKING:
    from hf_ebm.models.energy.modeling_energy import EnergyModel

# Texts whose masked rows form one pool: enough to fill forward passes, few enough to bound memory.
_TEXTS_PER_POOL = 256


@model_output
class ScoreOutput(ModelOutput):
    """Energies of N texts, in the order of the texts.

    Args:
        energy: (N,) energies in nats (float64); with the local energy, minus the pseudo-log-likelihood.
        num_tokens: (N,) scored tokens.
        num_unknown: (N,) those of them that are the unknown token.
        tokens: per text, its scored tokens.
        token_energies: per text, their energy terms; they sum to `energy`.
        words: per text, its words by the tokenizer's own word ids; `None` for tokenizers that have none.
        word_energies: per text, the energies of its words (sums over their tokens).
        pseudo_perplexity: (N,) `exp(energy / num_tokens)`, NaN for a text without tokens; `None` for raw energies.
        masking: which positions were masked in each row, see `hf_ebm.scoring.masking`.
    """

    energy: Tensor
    num_tokens: Tensor
    num_unknown: Tensor
    tokens: list[list[str]]
    token_energies: list[list[float]]
    words: list[list[str]] | None
    word_energies: list[list[float]] | None
    pseudo_perplexity: Tensor | None
    masking: str

    @property
    def variant(self) -> str:
        """The old name of `masking`."""
        warn_of_rename("variant", "masking")
        return self.masking

    @property
    def corpus_pseudo_perplexity(self) -> float:
        """Pseudo-perplexity of all texts together: exponential of the mean energy per token."""
        if self.pseudo_perplexity is None:
            raise ValueError("pseudo-perplexity is defined for the local energy only")
        return float((self.energy.sum() / self.num_tokens.sum()).exp())


@torch.no_grad()
def score(
    model: EnergyModel,
    texts: Iterable[str] | str | os.PathLike,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prefixes: Iterable[str] | None = None,
    suffixes: Iterable[str] | None = None,
    separator: str = " ",
    encoder_texts: Iterable[str] | None = None,
    masking: str | None = None,
    stride: int = 8,
    token_budget: int | None = None,
    further_inputs: Mapping[str, Any] | None = None,
    unknown_tokens: str = "warn",
    variant: str | None = None,
) -> ScoreOutput:
    """Energies of texts: one row in, one row out, in order. Nothing is cut.

    Args:
        texts: strings: a list, a generator, a column of a data set, an open file, or a `Path` (a text per line).
        tokenizer: the model's tokenizer.
        prefixes, suffixes: context per text, excluded from the sum; joined to it by `separator`.
        encoder_texts: per text, what an encoder-decoder model conditions on (required there).
        masking: `"exact"`, `"within_word_l2r"`, or the approximations `"stride"` and `"unmasked"`; by default the
            model's own (`config.masking`).
        stride: rows per text of the masking `"stride"`.
        token_budget: tokens per forward pass; by default from free memory.
        further_inputs: what else the model reads, by name, as `forward` takes it (`{"langs": [0, 1]}`): a number
            for each text, or one for all.
        unknown_tokens: what is done where a text holds something the tokenizer has no token for: `"warn"` (one
            warning that names the rows), `"error"` or `"ignore"`.
        variant: the old name of `masking`, which warns.

    Raises:
        ValueError: before any work, naming the row, for a text that is too long, is no string, can't be tokenized
            or holds a mask token. An empty text has energy 0.

    Example:
        >>> from hf_ebm.assets import load_embedded
        >>> model, tokenizer = load_embedded()
        >>> texts = ["and god said, let there be light", "light said and let god there, be"]
        >>> said, shuffled = model.score(texts, tokenizer).energy
        >>> bool(said < shuffled)
        True
    """
    masking, stride = _checked_masking(model, masking, variant), as_whole("stride", stride, 1)
    check_tokenizer("tokenizer", tokenizer)
    if masking == "within_word_l2r" and not tokenizer.is_fast:
        raise ValueError(f"masking 'within_word_l2r' needs word ids, which {type(tokenizer).__name__} doesn't know")
    encoded, encoder_ids = read_texts(
        model, texts, tokenizer, prefixes, suffixes, separator, encoder_texts, unknown_tokens
    )
    own_inputs = by_row(further_inputs or {}, len(encoded), "texts")
    terms = term_lists(model, encoded, encoder_ids, own_inputs, masking, stride, token_budget)
    return _score_output(model, encoded, terms, tokenizer, masking)


def read_texts(
    model: EnergyModel,
    texts: Iterable[str] | str | os.PathLike,
    tokenizer: PreTrainedTokenizerBase,
    prefixes: Iterable[str] | None,
    suffixes: Iterable[str] | None,
    separator: str,
    encoder_texts: Iterable[str] | None,
    unknown_tokens: str,
) -> tuple[list[EncodedText], list[list[int]] | None]:
    """Texts with their context, and the ids of what an encoder-decoder conditions on: see `score`."""
    if not isinstance(separator, str):
        raise ValueError(f"separator must be a text, got {shown(separator)}")
    rows = as_texts("texts", texts)
    contexts: dict[str, list[str]] = {}
    for name, given in (("prefixes", prefixes), ("suffixes", suffixes), ("encoder_texts", encoder_texts)):
        if given is not None:
            contexts[name] = as_texts(name, given)
            if len(contexts[name]) != len(rows):
                raise ValueError(f"{name} has {len(contexts[name])} rows, texts has {len(rows)}; they must be equal")
    conditional = model.mlm.config.is_encoder_decoder
    if conditional != (encoder_texts is not None):
        role = "is an encoder-decoder, its energy is conditional on" if conditional else "has no encoder to take"
        raise ValueError(f"encoder_texts: {type(model.mlm).__name__} {role} an encoder input")
    encoded = encode_texts(model, tokenizer, rows, contexts.get("prefixes"), contexts.get("suffixes"), separator)
    encoder_ids = encode_plain(model, tokenizer, "encoder_texts", contexts["encoder_texts"]) if conditional else None
    for name, own in {"texts": rows, **contexts}.items():
        report_unknown(tokenizer, name, own, unknown_tokens)
    return encoded, encoder_ids


@torch.no_grad()
def score_ids(
    model: EnergyModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    free_mask: Tensor | None = None,
    *,
    encoder_input_ids: Tensor | None = None,
    encoder_attention_mask: Tensor | None = None,
    words: Tensor | None = None,
    masking: str | None = None,
    stride: int = 8,
    token_budget: int | None = None,
    further_inputs: Mapping[str, Any] | None = None,
    variant: str | None = None,
) -> Tensor:
    """Energy terms (B, T) of token ids, 0 at context positions; their sum over T is the energy.

    Args: as for `forward` and `score`; `words` (B, T) numbers the word of each position for `"within_word_l2r"`.

    Example:
        >>> from hf_ebm.assets import load_embedded
        >>> model, tokenizer = load_embedded()
        >>> ids = tokenizer("let there be light", return_tensors="pt").input_ids
        >>> terms = model.score_ids(ids)
        >>> terms.shape == ids.shape, terms[0, 0].item()  # [CLS] is context
        (True, 0.0)
        >>> torch.allclose(terms.sum(1), model(ids).energy)
        True
    """
    masking, stride = _checked_masking(model, masking, variant), as_whole("stride", stride, 1)
    if words is not None or masking == "within_word_l2r":
        words = as_numbers_of("words", words, as_ids("input_ids", input_ids))
    with evaluation_mode(model):  # an encoder-decoder's context is encoded by the check
        sequences, scored = check_energy_inputs(
            model,
            input_ids,
            attention_mask,
            free_mask,
            encoder_input_ids,
            encoder_attention_mask,
            further_inputs or {},
        )
        words = None if words is None else words.to(sequences.ids.device)
        runner = model.masked_batch_runner(token_budget)
        return masked_token_energies(runner, sequences, scored, model.config.energy, masking, words, stride)


def _checked_masking(model: EnergyModel, masking: str | None, variant: str | None) -> str:
    if variant is not None:
        warn_of_rename("variant", "masking")
        masking = variant
    masking = model.config.masking if masking is None else masking
    check_choice("masking", masking, MASKINGS)
    return masking


def term_lists(
    model: EnergyModel,
    encoded: list[EncodedText],
    encoder_ids: list[list[int]] | None,
    further_inputs: dict[str, Tensor],
    masking: str,
    stride: int,
    token_budget: int | None,
) -> list[list[float]]:
    """Energy terms of the scored tokens of each text."""
    terms: list[list[float]] = [[] for _ in encoded]
    by_length = sorted(range(len(encoded)), key=lambda row: len(encoded[row].ids))
    rows = [row for row in by_length if any(encoded[row].scored)]
    pools = range(0, len(rows), _TEXTS_PER_POOL)
    for first in logging.tqdm(pools, desc="Scoring", unit="pool", delay=2, leave=False):
        pool = rows[first : first + _TEXTS_PER_POOL]
        ids, attention_mask = _padded([encoded[row].ids for row in pool], 0)
        context = _padded([encoder_ids[row] for row in pool], 0) if encoder_ids else (None, None)
        try:
            values = model.score_ids(
                ids,
                attention_mask,
                _padded([[int(s) for s in encoded[row].scored] for row in pool], 0)[0],
                encoder_input_ids=context[0],
                encoder_attention_mask=context[1],
                words=_padded([encoded[row].words for row in pool], -1)[0],
                masking=masking,
                stride=stride,
                token_budget=token_budget,
                further_inputs={name: value[pool] for name, value in further_inputs.items()},
            )
        except BadLogitsError as error:
            raise BadLogitsError(pool[error.row], error.position, "texts: row") from error
        for row, own in zip(pool, values.cpu().double().tolist(), strict=True):
            terms[row] = [value for value, scored in zip(own, encoded[row].scored, strict=False) if scored]
    return terms


def _score_output(
    model: EnergyModel,
    encoded: list[EncodedText],
    terms: list[list[float]],
    tokenizer: PreTrainedTokenizerBase,
    masking: str,
) -> ScoreOutput:
    positions = [[i for i, scored in enumerate(text.scored) if scored] for text in encoded]
    energy = torch.tensor([sum(own) for own in terms], dtype=torch.float64)
    num_tokens = torch.tensor([len(own) for own in terms], dtype=torch.long)
    unknown = [
        sum(text.ids[i] == tokenizer.unk_token_id for i in own) for text, own in zip(encoded, positions, strict=True)
    ]
    words = word_energies = None
    if tokenizer.is_fast:
        pieces = [text.word_pieces() for text in encoded]
        values = [dict(zip(where, own, strict=True)) for where, own in zip(positions, terms, strict=True)]
        words = [[text.word_text(word) for word in own] for text, own in zip(encoded, pieces, strict=True)]
        word_energies = [
            [sum(own[i] for i in word) for word in parts] for own, parts in zip(values, pieces, strict=True)
        ]
    return ScoreOutput(
        energy=energy,
        num_tokens=num_tokens,
        num_unknown=torch.tensor(unknown, dtype=torch.long),
        tokens=[
            list(tokenizer.convert_ids_to_tokens([text.ids[i] for i in where]))
            for text, where in zip(encoded, positions, strict=True)
        ],
        token_energies=terms,
        words=words,
        word_energies=word_energies,
        pseudo_perplexity=(energy / num_tokens).exp() if ENERGIES[model.config.energy].is_surprisal else None,
        masking=masking,
    )


def _padded(rows: list[list[int]], filler: int) -> tuple[Tensor, Tensor]:
    return pad_right([torch.tensor(row) for row in rows], filler)
