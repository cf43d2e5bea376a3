"""Noise-contrastive training of residual energy models: `ResidualNCEConfig`, `ResidualNCETrainer`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from hf_ebm.checks import as_truth, as_whole
from hf_ebm.models.adapters import refuse_adapters
from hf_ebm.models.residual import ResidualEnergyModel
from hf_ebm.models.residual.candidates import (
    SamplingParameters,
    as_id_rows,
    check_continuations,
    check_prefixes,
    lm_of,
    sample_continuations,
)
from hf_ebm.objectives.losses import check_energies, log_self_normalizer, noise_contrastive_loss
from hf_ebm.publishing.cards import CITATIONS
from hf_ebm.random_state import batch_seed
from hf_ebm.trainers.objective import LossTerms, ObjectiveTrainer


@dataclass
class ResidualNCEConfig(TrainingArguments):
    """Arguments of `ResidualNCETrainer`, beside those of `TrainingArguments`.

    Defaults that differ from the stock ones are the paper's (Deng et al. 2020, appendix A.3): a cosine schedule with a
    warm-up of 2% of the steps, and gradients clipped at 0.25.

    Args:
        max_new_tokens: the length at which continuations are stopped, of the data as of samples.
        online: sample the negatives of each batch while training, and not from the rows' `negatives`.

    Raises:
        ValueError: for a length below 1, and label smoothing, which the objective doesn't define.
    """

    max_new_tokens: int = field(default=20, metadata={"help": "Length at which continuations are stopped."})
    online: bool = field(default=False, metadata={"help": "Sample negatives while training."})
    lr_scheduler_type: str = field(default="cosine", metadata={"help": "Schedule of the learning rate."})
    warmup_steps: float = field(default=0.02, metadata={"help": "Steps of warm-up, or below 1 their share."})
    max_grad_norm: float = field(default=0.25, metadata={"help": "Norm that gradients are clipped to."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Has no effect: the rows are the trainer's."})

    @property
    def no_sharding(self) -> str:
        """Why weights can't be sharded; nothing where they can."""
        return "with online=True the language model is read outside of the model's forward" if self.online else ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.online = as_truth("online", self.online)
        self.max_new_tokens = as_whole("max_new_tokens", self.max_new_tokens, 1)
        if self.label_smoothing_factor:
            raise ValueError(f"label_smoothing_factor must be 0, got {self.label_smoothing_factor}")
        self.remove_unused_columns = False


class ResidualNCETrainer(ObjectiveTrainer):
    """Trains E by telling continuations of the data from the language model's (Deng et al. 2020, equation 3).

    Rows have `prefix_ids`, `continuation_ids` and, unless `online`, `negatives`: lists of the language model's ids, the
    last a list of continuations, of which one is chosen at random each time (`hf-ebm negatives` writes such rows). A
    row's loss is `softplus(E(x+)) + softplus(-E(x-))`, averaged over rows. Only encoder and head are trained.

    Besides `loss` it logs `accuracy_real` and `accuracy_generated` (how often E has the right sign), `energy_real` and
    `energy_generated` (means, in nats), and `log_self_normalizer`, `log mean exp(-E)` over what the language model
    generated: 0 at the optimum.

    Raises:
        ValueError: for another model, a model without its language model, and rows that a residual model cannot have.
    """

    config_class: ClassVar[type[ResidualNCEConfig]] = ResidualNCEConfig
    args: ResidualNCEConfig
    bibtex = (CITATIONS["DENG_2020"],)
    row_must_have = "prefix_ids: row {row} must have a prefix"

    def default_collator(self, model: object) -> Callable[[list], Any]:
        return collate_rows

    def set_up(self) -> None:
        super().set_up()
        self._evaluated = 0  # batches of the present evaluation
        self._noise: dict[bool, list[tuple[Tensor, int]]] = {True: [], False: []}

    def check_model(self, model: PreTrainedModel) -> None:
        """A residual model with its language model."""
        if not isinstance(model, ResidualEnergyModel):
            raise ValueError(f"model must be a ResidualEnergyModel, got {type(model).__name__}")
        if model.lm is None:
            raise ValueError("model has no language model; load it with from_pretrained")
        refuse_adapters("model: its encoder", model.encoder)
        refuse_adapters("model: its lm", model.lm)

    def loss_terms(self, model: nn.Module, inputs: dict[str, Any]) -> LossTerms:
        """Energies of the batch's real and generated rows in one forward pass."""
        residual, seed = self.accelerator.unwrap_model(self.model), self._batch_seed()
        prefixes = _unpadded(inputs["prefix_ids"], inputs["prefix_lengths"])
        real = _unpadded(inputs["continuation_ids"], inputs["continuation_lengths"])
        prefixes = check_prefixes(residual, prefixes, self.args.max_new_tokens)
        check_continuations(residual, real, self.args.max_new_tokens, len(prefixes))
        if self.args.online:
            generated = self._sample(residual, prefixes, seed)
        else:
            generated = _choose(inputs["negative_ids"], inputs["negative_lengths"], seed)
            check_continuations(residual, generated, self.args.max_new_tokens, len(prefixes))
        ids, mask = residual.encoder_rows(
            [torch.cat(row) for own in (real, generated) for row in zip(prefixes, own, strict=True)]
        )
        energies = model(input_ids=ids, attention_mask=mask).energy
        check_energies(energies.detach().view(2, -1).T)
        energy_real, energy_generated = energies.chunk(2)
        of_real, of_generated = noise_contrastive_loss(energy_real, energy_generated)
        rows = torch.tensor(len(prefixes), device=energies.device)
        self._noise[self.model.training].append((log_self_normalizer(energy_generated.detach()), len(prefixes)))
        logged = {
            "accuracy_real": ((energy_real < 0).sum(), rows),
            "accuracy_generated": ((energy_generated > 0).sum(), rows),
            "energy_real": (energy_real.sum(), rows),
            "energy_generated": (energy_generated.sum(), rows),
        }
        return LossTerms(of_real.sum() + of_generated.sum(), rows, logged)

    def check_batch(self, inputs: dict) -> None:
        """Raises `ValueError` for a batch that `collate_rows` didn't make, or one without the negatives it needs."""
        if "prefix_ids" not in inputs or "continuation_ids" not in inputs:
            raise ValueError(f"inputs must have prefix_ids and continuation_ids, got {', '.join(inputs)}")
        if not self.args.online and "negative_ids" not in inputs:
            raise ValueError("inputs must have negatives, or args.online must be True: rows have none")

    def scored_rows(self, inputs: dict[str, Any]) -> Tensor:
        """All rows: none is without a prefix and a continuation."""
        return torch.ones_like(inputs["prefix_lengths"], dtype=torch.bool)

    def _batch_seed(self) -> int:
        if self.model.training:
            return self.next_batch_seed(self.accelerator.process_index)
        self._evaluated += 1  # an evaluation is the same each time, but no two batches of it have the same noise
        return batch_seed(self.args.seed, self._evaluated, self.accelerator.process_index)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """The objective, averaged over rows."""
        self._evaluated = 0
        return super().evaluation_loop(*args, **kwargs)

    def _sample(self, residual: ResidualEnergyModel, prefixes: list[Tensor], seed: int) -> list[Tensor]:
        sampling = SamplingParameters(self.args.max_new_tokens, tuple(residual.end_ids))
        drawn = sample_continuations(lm_of(residual), prefixes, 1, sampling, seed, len(prefixes))
        return [own[0] for own in drawn]

    def averages(self, training: bool) -> dict[str, float]:
        averages = super().averages(training)
        seen, self._noise[training] = self._noise[training], []
        if seen:
            # In log space: energies of noise can be far below 0.
            sums = torch.stack([log_mean + math.log(count) for log_mean, count in seen]).logsumexp(0)
            total = torch.tensor(float(sum(count for _, count in seen)), dtype=torch.float64, device=sums.device)
            both = self.accelerator.gather(torch.stack([sums, total.log()])[None])
            averages["log_self_normalizer"] = float(both[:, 0].logsumexp(0) - both[:, 1].logsumexp(0))
        return averages


def collate_rows(rows: list[dict]) -> dict[str, Tensor]:
    """Rows of lists of ids as padded tensors with their lengths: ids (B, T), negatives (B, n, T).

    Raises:
        ValueError: for a row without its ids, and for what are no ids.
    """
    batch = {}
    for number, row in enumerate(rows):
        if "prefix_ids" not in row or "continuation_ids" not in row:
            raise ValueError(f"rows must have prefix_ids and continuation_ids, got {', '.join(row)} in row {number}")
    for name in ("prefix", "continuation"):
        ids = as_id_rows(f"{name}_ids", [row[f"{name}_ids"] for row in rows])
        batch[f"{name}_ids"] = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        batch[f"{name}_lengths"] = torch.tensor([len(own) for own in ids])
    if all(len(row.get("negatives") or ()) for row in rows):
        count = min(len(row["negatives"]) for row in rows)
        negatives = as_id_rows("negatives", [ids for row in rows for ids in row["negatives"][:count]])
        padded = torch.nn.utils.rnn.pad_sequence(negatives, batch_first=True)
        batch["negative_ids"] = padded.view(len(rows), count, -1)
        batch["negative_lengths"] = torch.tensor([len(ids) for ids in negatives]).view(len(rows), count)
    return batch


def _unpadded(ids: Tensor, lengths: Tensor) -> list[Tensor]:
    return [row[:length] for row, length in zip(ids, lengths.tolist(), strict=True)]


def _choose(ids: Tensor, lengths: Tensor, seed: int) -> list[Tensor]:
    """One of each row's negatives."""
    generator = torch.Generator().manual_seed(seed)
    which = torch.randint(ids.shape[1], (len(ids),), generator=generator).to(ids.device)
    rows = torch.arange(len(ids), device=ids.device)
    return _unpadded(ids[rows, which], lengths[rows, which])
