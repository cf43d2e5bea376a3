"""The five tasks, each a thin layer over the model's own method.

- `"energy-scoring"`: `EnergyModel.score`;
- `"energy-reranking"`: `rerank` of `EnergyModel` and `ResidualEnergyModel`;
- `"energy-sampling"`: `EnergyModel.generate`;
- `"joint-fill-mask"`: `EnergyModel.fill`;
- `"joint-sampling"`: `ResidualEnergyModel.generate`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

import torch

from hf_ebm.checks import listed, number, whole
from hf_ebm.generation_settings import GenerationSettings
from hf_ebm.models.energy import EnergyModel
from hf_ebm.models.energy.encoding import encode_plain
from hf_ebm.models.energy.fill_energy import Fill
from hf_ebm.models.energy.inputs import padding_id
from hf_ebm.models.energy.scoring_energy import ScoreOutput
from hf_ebm.models.residual import JointGenerationConfig, JointGenerationOutput, ResidualEnergyModel
from hf_ebm.objectives.completions import pad_right
from hf_ebm.pipelines.base import RowPipeline
from hf_ebm.random_state import stream_seed
from hf_ebm.sampling.configuration import ChainGenerationConfig
from hf_ebm.sampling.run import ChainGenerationOutput
from hf_ebm.texts import prompt_encoder

# What `score` takes a list of, by what an input calls its one; it is the same for all candidates of an input.
_CONTEXT = {"prefix": "prefixes", "suffix": "suffixes", "encoder_text": "encoder_texts"}


class EnergyScoringPipeline(RowPipeline):
    """Texts to their energies, by `EnergyModel.score`.

    A result is a dict: `text`; `energy` in nats; `num_tokens`, how many are scored; `pseudo_perplexity`,
    `exp(energy / num_tokens)`, `None` for raw energies and for a text without tokens; `tokens` and their
    `token_energies`, which sum to `energy`.

    Arguments of a call: `masking`, `stride`, `token_budget` and `further_inputs` of `EnergyModel.score`, the last one
    number for all texts by name.
    """

    model_classes: ClassVar = (EnergyModel,)
    model: EnergyModel

    def arguments(self) -> tuple[str, ...]:
        return ("masking", "stride", "token_budget", "further_inputs", "variant")

    def run_batch(self, rows: list[str], numbers: list[int], **arguments: Any) -> list[dict]:
        found = self.model.score(rows, self.spelling, unknown_tokens="ignore", **arguments)
        return [
            {
                "text": text,
                "energy": float(found.energy[row]),
                "num_tokens": int(found.num_tokens[row]),
                "pseudo_perplexity": _pseudo_perplexity(found, row),
                "tokens": found.tokens[row],
                "token_energies": found.token_energies[row],
            }
            for row, text in enumerate(rows)
        ]


def _pseudo_perplexity(found: ScoreOutput, row: int) -> float | None:
    if found.pseudo_perplexity is None or not int(found.num_tokens[row]):
        return None
    return float(found.pseudo_perplexity[row])


class EnergyRerankingPipeline(RowPipeline):
    """N-best lists to their candidates from best to worst, by `rerank` of `EnergyModel` or `ResidualEnergyModel`.

    An input is a dict: `candidates`, a list of texts; `scores`, optional, one number for each by another model, higher
    is better; `prefix`, and for an `EnergyModel` `suffix` and `encoder_text`, optional: the context of all candidates.

    A result is a list of dicts, the best candidate first: `text`; `energy` in nats (of a `ResidualEnergyModel` the
    joint one); `score`, what is sorted by, higher is better; `index`, the candidate's place in the input.

    Arguments of a call: `weight` and `length_normalization` of `rerank`, and what the model's `score` takes for all
    texts alike: `separator`, `masking`, `stride`, `token_budget`, `further_inputs`; of a `ResidualEnergyModel` `ended`.
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


class GeneratingPipeline(RowPipeline):
    """Base of the samplers. Settings are arguments by name, or a `generation_config`; by name they go first.

    A call has one seed: the settings', else one drawn from torch's generator when it is called. An input's random
    stream is keyed by that seed and the input's number in the call, so samples depend neither on the batch size nor on
    the other inputs, and equal inputs of a call get samples of their own.
    """

    config_class: ClassVar[type[GenerationSettings]]
    further_arguments: ClassVar[tuple[str, ...]]

    def arguments(self) -> tuple[str, ...]:
        return ("generation_config", *self.further_arguments, *self.config_class.defaults)

    def __call__(
        self, inputs: Any, *args: Any, num_workers: int | None = None, batch_size: int | None = None, **kwargs: Any
    ) -> Any:
        # Here, as `generate` would draw a seed for every batch; and what contradicts itself is refused before any work.
        config = self.resolved(**{**self._forward_params, **self._sanitize_parameters(**kwargs)[1]})
        config.draw_seed()
        kwargs["seed"] = config.seed
        return super().__call__(inputs, *args, num_workers=num_workers, batch_size=batch_size, **kwargs)

    def _sanitize_parameters(self, **given: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        self.config_class.asked(given.get("generation_config"))  # which refuses another kind
        return super()._sanitize_parameters(**given)

    def resolved(self, generation_config: GenerationSettings | None = None, **arguments: Any) -> GenerationSettings:
        """The complete settings of a call. Raises `ValueError` for contradictions."""
        overrides = {name: value for name, value in arguments.items() if name in self.config_class.defaults}
        base = self.model.generation_config
        if not isinstance(base, GenerationSettings):
            raise ValueError(f"model must have settings of this package, got {type(base).__name__}")
        return (generation_config or self.config_class()).resolved(base, overrides)


class EnergySamplingPipeline(GeneratingPipeline):
    """Prompts to samples, by `EnergyModel.generate`.

    An input is a text with mask tokens, which are what is sampled; or a whole number, alone or as `{"length": n}`, of
    tokens to sample from nothing.

    A result is the list of an input's samples, chain by chain, as burn-in and thinning leave them, each a dict: `text`;
    `energy` in nats; `chain` and `epoch` it is of; `acceptance_rate` and `novel_rate` of that epoch, `None` with a
    decoder.

    Arguments of a call: the settings of `ChainGenerationConfig` but `lengths`, `generation_config`, `token_budget`, and
    `further_inputs`, what else the model reads: one number for all inputs by name (`{"langs": 1}`).
    Input n runs the chains that `generate` calls `(n, 0)`, `(n, 1)`, …, so a list gets what `generate` gives for the
    same prompts together.
    """

    model_classes: ClassVar = (EnergyModel,)
    model: EnergyModel
    config_class = ChainGenerationConfig
    further_arguments = ("token_budget", "further_inputs")

    def _sanitize_parameters(self, **given: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        parameters = super()._sanitize_parameters(**given)
        for lengths in (given.get("lengths"), getattr(given.get("generation_config"), "lengths", None)):
            if lengths is not None:
                raise ValueError(f"lengths: a length is an input here, n or {{'length': n}}; got lengths={lengths!r}")
        return parameters

    def prepared(self, item: object) -> list[int]:
        if isinstance(item, str):
            ids = encode_plain(self.model, self.spelling, "inputs", [item])[0]
            if self.model.config.mask_token_id not in ids:
                raise ValueError(
                    f"inputs must hold the mask token {self.spelling.mask_token!r} where something is to be sampled, "
                    f"got {item!r}"
                )
            return ids
        length = whole(item.get("length") if isinstance(item, dict) and set(item) == {"length"} else item)
        if length is None or length < 1:
            raise ValueError(f"inputs must be texts, or lengths from 1 up as n or {{'length': n}}, got {item!r}")
        config = self.model.config
        masks = [self.spelling.mask_token_id] * length  # which `ready_model` has seen to be the model's
        return [*(config.prefix_token_ids or []), *masks, *(config.suffix_token_ids or [])]

    def run_batch(self, rows: list[list[int]], numbers: list[int], **arguments: Any) -> list[list[dict]]:
        further_inputs = arguments.pop("further_inputs", None) or {}
        chains = range(self.resolved(**arguments).settings()["num_chains"])
        ids, attention_mask = pad_right([torch.tensor(row) for row in rows], padding_id(self.model))
        out = self.model.generate(
            ids,
            attention_mask,
            chain_keys=[(number, chain) for number in numbers for chain in chains],
            chain_rows=[row for row in range(len(rows)) for _ in chains],
            **further_inputs,
            **arguments,
        )
        firsts = range(0, len(out.samples), len(chains))
        return [[sample for chain in chains for sample in self._samples(out, first + chain)] for first in firsts]

    def _samples(self, out: ChainGenerationOutput, row: int) -> list[dict]:
        texts = self.spelling.batch_decode(out.samples[row], skip_special_tokens=True)
        rates = {name: getattr(out.trace, name)[row].tolist() for name in ("acceptance_rate", "novel_rate")}
        return [
            {
                "text": text,
                "energy": float(out.energies[row, number]),
                "chain": int(out.chain_indices[row]),
                "epoch": epoch,
                **{name: None if values[epoch] != values[epoch] else values[epoch] for name, values in rates.items()},
            }
            for number, (text, epoch) in enumerate(zip(texts, out.kept_epochs, strict=True))
        ]


class JointSamplingPipeline(GeneratingPipeline):
    """Prompts to continuations, by `ResidualEnergyModel.generate`.

    An input is a text, "" for the start token alone. It is tokenized as the prefixes of `score` are.

    A result is a dict: `samples`, `num_samples` of them, each with `text`, the continuation alone, and `energy` in
    nats; `effective_sample_size` of the candidates' weights, `None` with `method="stepwise"`; with
    `return_candidates=True` also `candidates`, each with `text`, `energy` and its normalized `log_weight`.

    Arguments of a call: the settings of `JointGenerationConfig`, `generation_config`, and `return_candidates`. Input n
    is run with the seed `stream_seed(seed, n)`. `generate` runs prompts one after the other, whatever the batch size:
    what it batches are the candidates of a prompt (`candidates_at_once`).
    """

    model_classes: ClassVar = (ResidualEnergyModel,)
    model: ResidualEnergyModel
    config_class = JointGenerationConfig
    further_arguments = ("return_candidates",)

    @cached_property
    def _encode(self) -> Callable[[list[str]], list[list[int]]]:
        return prompt_encoder(self.spelling, next(iter(self.model.end_ids), -1))

    def prepared(self, item: object) -> list[int]:
        return self._encode([super().prepared(item)])[0]

    def run_batch(self, rows: list[list[int]], numbers: list[int], **arguments: Any) -> list[dict]:
        seed = arguments.pop("seed")
        return [
            self._result(self.model.generate([row], seed=stream_seed(seed, number), **arguments))
            for row, number in zip(rows, numbers, strict=True)
        ]

    def _result(self, out: JointGenerationOutput) -> dict[str, Any]:
        size, stop = out.effective_sample_size, out.attention_mask.sum(1)
        texts = [
            self.spelling.decode(out.sequences[row, out.prompt_lengths[row] : stop[row]], skip_special_tokens=True)
            for row in range(len(out.sequences))
        ]
        energies = out.energies.tolist()
        result: dict[str, Any] = {
            "samples": [{"text": text, "energy": energy} for text, energy in zip(texts, energies, strict=True)],
            "effective_sample_size": None if size is None else float(size[0]),
        }
        candidates, energies_of, weights_of = out.candidates, out.candidate_energies, out.candidate_log_weights
        if candidates is not None and energies_of is not None and weights_of is not None:
            spelled = self.spelling.batch_decode([ids.tolist() for ids in candidates[0]], skip_special_tokens=True)
            weights = zip(spelled, energies_of[0].tolist(), weights_of[0].tolist(), strict=True)
            result["candidates"] = [
                {"text": text, "energy": energy, "log_weight": weight} for text, energy, weight in weights
            ]
        return result


class JointFillMaskPipeline(RowPipeline):
    """Texts with masks to their likeliest fills, by `EnergyModel.fill`.

    An input is a text with mask tokens.

    A result is a list of fills, best first, each a dict as of `"fill-mask"`: `score`, the fill's probability; `token`
    and `token_str`; `sequence`; and `energy` in nats. Of a text with one mask `token` is an id and `token_str` a text,
    of several they are lists of so many; of a blank of several pieces `token` is a list of ids. With `marginals=True`
    the result is, as that of `"fill-mask"` for several masks, a list for each blank, of dicts with `score`, `token` and
    `token_str`.

    Arguments of a call: `marginals`, and those of `EnergyModel.fill` for all texts alike.
    """

    model_classes: ClassVar = (EnergyModel,)
    model: EnergyModel

    def arguments(self) -> tuple[str, ...]:
        return (
            "marginals", "top_k", "reading", "method", "temperature", "words", "pieces", "equal", "different",
            "pattern", "extra_energies", "row_limit", "seed", "token_budget", "further_inputs",
        )  # fmt: skip

    def run_batch(self, rows: list[str], numbers: list[int], **arguments: Any) -> list[list]:
        by_blank = arguments.pop("marginals", False)
        found = self.model.fill(rows, self.spelling, unknown_tokens="ignore", **arguments)
        if by_blank:
            return [
                [
                    [{"score": w.probability, "token": _token(w.tokens), "token_str": w.token_str} for w in words]
                    for words in blanks
                ]
                for blanks in found.marginals
            ]
        return [[_as_dict(one) for one in fills] for fills in found.fills]


def _as_dict(one: Fill) -> dict[str, Any]:
    token, text = [_token(word) for word in one.tokens], one.token_strs
    alone = len(token) == 1
    return {
        "score": one.probability,
        "token": token[0] if alone else token,
        "token_str": text[0] if alone else text,
        "sequence": one.sequence,
        "energy": one.energy,
    }


def _token(pieces: list[int]) -> int | list[int]:
    return pieces[0] if len(pieces) == 1 else pieces
