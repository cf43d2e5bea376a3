"""Pseudo-perplexity of texts under a masked language model, for `evaluate.load`."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import evaluate
from transformers import PreTrainedTokenizerBase

from hf_ebm.evaluate_modules import CheckedInputs, described, energy_model, score, texts
from hf_ebm.models.energy import EnergyModel
from hf_ebm.scoring.energies import ENERGIES

_DESCRIPTION = """\
Pseudo-perplexity of texts under a masked language model: the exponential of the mean, over a text's tokens, of minus
the log probability of the token when it is masked and all others are seen.
"""

_CITATION = """\
@inproceedings{salazar-etal-2020-masked,
  title = {Masked Language Model Scoring},
  author = {Salazar, Julian and Liang, Davis and Nguyen, Toan Q. and Kirchhoff, Katrin},
  booktitle = {Proceedings of the 58th Annual Meeting of the Association for Computational Linguistics},
  pages = {2699--2712},
  year = {2020},
  doi = {10.18653/v1/2020.acl-main.240}
}
"""

_INPUTS = """
Args:
    predictions (list of str): texts of one token or more. Nothing is cut.
    model_id (str or path): a masked language model by Hub name, or the folder of one or of an `EnergyModel`. It is
        loaded at every call, in float32, on a GPU if there is one. By default the embedded model of hf_ebm, "embedded".
    model (EnergyModel), tokenizer: a loaded model and its tokenizer, instead of model_id. It runs where it is.
    unknown_tokens (str): where a text holds what the tokenizer has no token for: "warn" (default), "error" or "ignore".
Returns:
    pseudo_perplexities (list of float): for each text, `exp(energy / tokens)` with its energy in nats (minus its
        pseudo-log-likelihood), from 1 up; lower is better.
    mean_pseudo_perplexity (float): their mean, in which every text counts the same.
    corpus_pseudo_perplexity (float): `exp(summed energies / summed tokens)`, in which every token counts the same.
Raises:
    ValueError: naming the argument, for inputs of another form or none; naming the row, for a text without tokens, too
        long for the model, or with a mask token; for a model of raw energies, which are no probabilities.
Examples:

    >>> import evaluate
    >>> from hf_ebm.evaluate_modules import module_path
    >>> pseudo_perplexity = evaluate.load(module_path("pseudo_perplexity"))
    >>> texts = ["And God said, Let there be light", "Let God light there said and be"]
    >>> results = pseudo_perplexity.compute(predictions=texts)
    >>> [round(value) for value in results["pseudo_perplexities"]]
    [39, 3852]
    >>> round(results["mean_pseudo_perplexity"]), round(results["corpus_pseudo_perplexity"])
    (1946, 335)

    A model that is already loaded:

    >>> from hf_ebm.assets import load_embedded
    >>> model, tokenizer = load_embedded()
    >>> pseudo_perplexity.compute(predictions=texts, model=model, tokenizer=tokenizer) == results
    True
"""


@described(_DESCRIPTION, _INPUTS, _CITATION)
class PseudoPerplexity(CheckedInputs, evaluate.Metric):
    checks: ClassVar = {"predictions": texts}

    def _compute(
        self,
        predictions: list[str],
        model_id: str | os.PathLike | None = None,
        model: EnergyModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        unknown_tokens: str = "warn",
    ) -> dict[str, Any]:
        scorer, spelling = energy_model(model_id, model, tokenizer)
        if not ENERGIES[scorer.config.energy].is_surprisal:
            raise ValueError(f"model must have an energy of log probabilities ('local'), got {scorer.config.energy!r}")
        scores = score("predictions", predictions, scorer, spelling, unknown_tokens)
        perplexities = (scores.energy / scores.num_tokens).exp()
        for row in (scores.num_tokens == 0).nonzero()[:1, 0].tolist():
            raise ValueError(f"predictions must hold a token each, got {predictions[row]!r} in row {row}")
        return {
            "pseudo_perplexities": perplexities.tolist(),
            "mean_pseudo_perplexity": perplexities.mean().item(),
            "corpus_pseudo_perplexity": scores.corpus_pseudo_perplexity,
        }
