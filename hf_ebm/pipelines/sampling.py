"""`"energy-sampling"`: masks of prompts filled, or texts from nothing, by chains."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from hf_ebm.models.energy import EnergyModel
from hf_ebm.models.energy.encoding import encode_plain
from hf_ebm.models.energy.inputs import padding_id
from hf_ebm.objectives.completions import pad_right
from hf_ebm.pipelines.generating import GeneratingPipeline
from hf_ebm.plain_values import whole
from hf_ebm.sampling.configuration import ChainGenerationConfig
from hf_ebm.sampling.output import ChainGenerationOutput


class EnergySamplingPipeline(GeneratingPipeline):
    """Prompts to samples, by `EnergyModel.generate`.

    An input is a text with mask tokens, which are what is sampled; or a whole number, alone or as `{"length": n}`, of
    tokens to sample from nothing.

    A result is the list of an input's samples, chain by chain, as burn-in and thinning leave them, each a dict: `text`;
    `energy` in nats; `chain` and `epoch` it is of; `acceptance_rate` and `novel_rate` of that epoch, `None` with
    `kernel="mask_predict"`.

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
