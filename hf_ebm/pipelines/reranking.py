"""`"energy-reranking"`: n-best lists, sorted."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from hf_ebm.models.energy import EnergyModel
from hf_ebm.models.residual import ResidualEnergyModel
from hf_ebm.pipelines.rows import RowPipeline
from hf_ebm.plain_values import listed, number

# What `score` takes a list of, by what an input calls its one; it is the same for all candidates of an input.
_CONTEXT = {"prefix": "prefixes", "suffix": "suffixes", "encoder_text": "encoder_texts"}


class EnergyRerankingPipeline(RowPipeline):
    """N-best lists to their candidates from best to worst, by `rerank` of `EnergyModel` or `ResidualEnergyModel`.

    An input is a dict: `candidates`, a list of texts; `scores`, optional, one number for each by another model, higher
    is better; `prefix`, and for an `EnergyModel` `suffix` and `encoder_text`, optional: the context of all candidates.

    A result is a list of dicts, the best candidate first: `text`; `energy` in nats (of a `ResidualEnergyModel` the
    joint one); `score`, what is sorted by, higher is better; `index`, the candidate's place in the input.

    Arguments of a call: `weight` and `length_normalization` of `rerank`, and what the model's `score` takes for all
    texts alike: `separator`, `variant`, `stride`, `token_budget`, `further_inputs`; of a `ResidualEnergyModel` `ended`.
    """

    model_classes: ClassVar = (ResidualEnergyModel, EnergyModel)
    model: ResidualEnergyModel | EnergyModel

    def arguments(self) -> tuple[str, ...]:
        apart = (*_CONTEXT.values(), "unknown_tokens")
        shared = [name for name in self._score_arguments() if name not in apart]
        return ("weight", "length_normalization", *shared)

    def _score_arguments(self) -> list[str]:
        parameters = inspect.signature(self.model.score).parameters.values()
        return [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]

    def prepared(self, item: object) -> dict:
        if not isinstance(item, dict) or "candidates" not in item:
            given = f"a dict with {', '.join(map(str, item))}" if isinstance(item, dict) else type(item).__name__
            raise ValueError(f"inputs must be dicts with 'candidates', got {given}")
        known = ["candidates", "scores", *(name for name in _CONTEXT if _CONTEXT[name] in self._score_arguments())]
        unknown = sorted(str(name) for name in item if name not in known)
        if unknown:
            raise ValueError(f"inputs hold the unknown {', '.join(unknown)}; known with this model: {', '.join(known)}")
        candidates = item["candidates"]
        if not isinstance(candidates, list) or not candidates or not all(isinstance(one, str) for one in candidates):
            raise ValueError(f"candidates must be a list of at least one text, got {candidates!r}")
        row = {name: value for name, value in item.items() if value is not None}
        if "scores" in row and not _are_numbers(row["scores"], len(candidates)):
            raise ValueError(f"scores must be {len(candidates)} finite numbers, one a candidate, got {row['scores']!r}")
        for name in _CONTEXT:
            if name in row and not isinstance(row[name], str):
                raise ValueError(f"{name} must be a text, got {type(row[name]).__name__}")
        return row

    def texts_of(self, item: dict) -> list[str]:
        return [*item["candidates"], *(item[name] for name in _CONTEXT if item.get(name))]

    def run_batch(self, rows: list[dict], numbers: list[int], **arguments: Any) -> list[list[dict]]:
        candidates = [row["candidates"] for row in rows]
        for name, argument in _CONTEXT.items():
            if any(name in row for row in rows):
                # No context is the empty one; an encoder needs an input, and refuses the `None`.
                absent = None if name == "encoder_text" else ""
                arguments[argument] = [row.get(name, absent) for row in rows for _ in row["candidates"]]
        base = [row.get("scores", [0.0] * len(own)) for row, own in zip(rows, candidates, strict=True)]
        found = self.model.rerank(candidates, self.spelling, base_scores=base, unknown_tokens="ignore", **arguments)
        return [
            [
                {
                    "text": own[index],
                    "energy": found.energies[row][index],
                    "score": found.scores[row][index],
                    "index": index,
                }
                for index in found.order[row]
            ]
            for row, own in enumerate(candidates)
        ]


def _are_numbers(values: object, count: int) -> bool:
    found = [number(value) for value in listed(values) or []]
    return len(found) == count and all(value is not None and abs(value) < float("inf") for value in found)
