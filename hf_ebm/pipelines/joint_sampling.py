"""`"joint-sampling"`: continuations of prompts by a residual energy model."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

from hf_ebm.data.symbols import prompt_encoder
from hf_ebm.models.residual import JointGenerationConfig, ResidualEnergyModel
from hf_ebm.models.residual.generation_residual import stream_seed
from hf_ebm.pipelines.generating import GeneratingPipeline


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
    config_class = JointGenerationConfig
    further_arguments = ("return_candidates",)

    @cached_property
    def _encode(self):
        return prompt_encoder(self.tokenizer, next(iter(self.model.end_ids), -1))

    def prepared(self, item) -> list[int]:
        if not isinstance(item, str):
            raise ValueError(f"inputs must be texts, got {type(item).__name__}")
        return self._encode([item])[0]

    def run_batch(self, rows: list[list[int]], numbers: list[int], *, seed: int, **arguments) -> list[dict]:
        return [
            self._result(self.model.generate([row], seed=stream_seed(seed, number), **arguments))
            for row, number in zip(rows, numbers, strict=True)
        ]

    def _result(self, out) -> dict:
        size, stop = out.effective_sample_size, out.attention_mask.sum(1)
        texts = [
            self.tokenizer.decode(out.sequences[row, out.prompt_lengths[row] : stop[row]], skip_special_tokens=True)
            for row in range(len(out.sequences))
        ]
        energies = out.energies.tolist()
        result = {
            "samples": [{"text": text, "energy": energy} for text, energy in zip(texts, energies, strict=True)],
            "effective_sample_size": None if size is None else float(size[0]),
        }
        if out.candidates is not None:
            texts = self.tokenizer.batch_decode(out.candidates[0], skip_special_tokens=True)
            weights = zip(texts, out.candidate_energies[0].tolist(), out.candidate_log_weights[0].tolist(), strict=True)
            result["candidates"] = [
                {"text": text, "energy": energy, "log_weight": weight} for text, energy, weight in weights
            ]
        return result
