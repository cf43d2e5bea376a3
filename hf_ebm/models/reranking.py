"""`rerank` of the models that score texts: n-best lists ordered by energies and, with them, others' scores."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.utils import ModelOutput

from hf_ebm.checks import as_list, as_number, listed, number, shown
from hf_ebm.model_modes import model_output

if TYPE_CHECKING:
    pass


@model_output
class RerankOutput(ModelOutput):
    """Reranked n-best lists.

    Args:
        best: (N,) index of the best candidate of each list.
        order: per list, candidate indices from best to worst (ties keep their order).
        scores: per list, the combined scores, higher is better; minus infinity of a candidate without a scored token.
        energies: per list, the energies.
    """

    best: Tensor
    order: list[list[int]]
    scores: list[list[float]]
    energies: list[list[float]]


def rerank(
    model: Any,
    candidates: Sequence[Sequence[str]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    base_scores: Sequence[Sequence[float]] | None = None,
    weight: float = 1.0,
    length_normalization: float = 0.0,
    **score_arguments: Any,
) -> RerankOutput:
    """Reranks n-best lists by `base_score - weight * energy / num_tokens ** length_normalization`.

    Args:
        candidates: n-best lists of texts, possibly of different lengths, none empty.
            A candidate without a scored token comes last, with a score of minus infinity: nothing is to be said
            against it, so its energy of 0 would always win.
        base_scores: scores of another model for each candidate, higher is better (log probabilities, say); 0 if
            not given.
        weight: of the energy.
        length_normalization: 0 compares energies, 1 energies per token.
        score_arguments: as for `score`.

    Raises:
        ValueError: for an empty list, base scores of other sizes than the lists, a negative `length_normalization`.

    Example:
        >>> from hf_ebm.assets import load_embedded
        >>> model, tokenizer = load_embedded()
        >>> model.rerank([["up he went", "he went up", "went up he"]], tokenizer).best
        tensor([1])
    """
    lists = _checked_candidates(candidates)
    base = _checked_base_scores(base_scores, lists)
    weight = as_number("weight", weight)
    length_normalization = as_number("length_normalization", length_normalization, least=0.0)
    scored = model.score([text for texts in lists for text in texts], tokenizer, **score_arguments)
    divisors = scored.num_tokens.clamp(min=1).double() ** length_normalization
    if not bool((divisors.isfinite() & (divisors > 0)).all()):
        longest = int(scored.num_tokens.max())
        raise ValueError(
            f"length_normalization must leave {longest} ** length_normalization within a float's range, got "
            f"{length_normalization}"
        )
    normalized = scored.energy / divisors
    sizes = [len(texts) for texts in lists]
    energies = [part.tolist() for part in scored.energy.split(sizes)]
    scores = [
        [b - weight * e for b, e in zip(own, part.tolist(), strict=True)]
        for own, part in zip(base, normalized.split(sizes), strict=True)
    ]
    if not all(math.isfinite(score) for own in scores for score in own):
        raise ValueError(f"weight must leave finite scores, got {weight}")
    empty = (scored.num_tokens == 0).split(sizes)
    scores = [
        [-math.inf if none else score for score, none in zip(own, part.tolist(), strict=True)]
        for own, part in zip(scores, empty, strict=True)
    ]
    order = [_best_first(own) for own in scores]
    return RerankOutput(torch.tensor([o[0] for o in order], dtype=torch.long), order, scores, energies)


def _best_first(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: -scores[i])


def _checked_candidates(candidates: Iterable[Iterable[str]]) -> list[list[str]]:
    lists = []
    for row, texts in enumerate(as_list("candidates", candidates, "lists of texts")):
        own = as_list(f"candidates: list {row}", texts, of := "at least one text")
        if not own or not all(isinstance(text, str) for text in own):
            raise ValueError(f"candidates: list {row} must be a list of {of}, got {shown(texts)}")
        lists.append(own)
    return lists


def _checked_base_scores(base_scores: Iterable[Sequence[float]] | None, lists: list[list[str]]) -> list[list[float]]:
    if base_scores is None:
        return [[0.0] * len(texts) for texts in lists]
    rows = listed(base_scores)
    if rows is None:
        raise ValueError(f"base_scores must be a list of scores for each list of candidates, got {shown(base_scores)}")
    given = []
    for row, scores in enumerate(rows):
        own = listed(scores)
        found = [number(score) for score in own or []]
        plain = [score for score in found if score is not None and math.isfinite(score)]
        if own is None or len(plain) < len(found):
            raise ValueError(f"base_scores: list {row} must hold finite numbers, got {shown(scores)}")
        given.append(plain)
    if [len(own) for own in given] != [len(texts) for texts in lists]:
        other = next(
            (i for i, (own, texts) in enumerate(zip(given, lists, strict=False)) if len(own) != len(texts)), None
        )
        what = (
            f"{len(given)} lists for {len(lists)}" if other is None else f"{len(given[other])} scores in list {other}"
        )
        raise ValueError(f"base_scores must have one score per candidate; there are {what}")
    return given
