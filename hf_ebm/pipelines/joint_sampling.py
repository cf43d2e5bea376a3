"""`"joint-sampling"`: continuations of prompts by a residual energy model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

from hf_ebm.models.residual import JointGenerationConfig, JointGenerationOutput, ResidualEnergyModel
from hf_ebm.models.residual.generation_residual import stream_seed
from hf_ebm.pipelines.generating import GeneratingPipeline
from hf_ebm.texts import prompt_encoder


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
        if not isinstance(item, str):
            raise ValueError(f"inputs must be texts, got {type(item).__name__}")
        return self._encode([item])[0]

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
