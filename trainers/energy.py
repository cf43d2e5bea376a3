"""Training of masked language models as energies: `EnergyTrainingConfig`, `EnergyTrainer`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Unpack

import torch
from accelerate.utils import AutocastKwargs
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_utils import SaveStrategy
from transformers.utils import logging

from hf_ebm import exact
from hf_ebm.checks import as_truth, as_whole, check_choice
from hf_ebm.exact import DEFAULT_LIMIT
from hf_ebm.model_facts import refuse_needed_inputs
from hf_ebm.models.adapters import has_adapters, read_adapter
from hf_ebm.models.energy import EnergyModel
from hf_ebm.models.energy.chains import proposal_support
from hf_ebm.models.energy.inputs import EnergyInputs, check_energy_inputs, is_model_input
from hf_ebm.objectives.losses import at_least_float32
from hf_ebm.publishing.cards import CITATIONS
from hf_ebm.scoring.conditionals import (
    conditional_log_probs,
    num_context_rows,
    scores_in_contexts,
)
from hf_ebm.scoring.energies import token_energies, token_scores
from hf_ebm.scoring.rows import MaskedRows, Sequences
from hf_ebm.trainers.energy_rows import (
    EnergyCollator,
    check_teacher,
    has_tables,
    ids_by_row,
    num_masked_rows,
    num_packed_rows,
    unusable_tokens,
    usable_rows,
    warn_of_much_work,
)
from hf_ebm.trainers.objective import LossTerms, ObjectiveTrainer, StockArguments, takes_stock_arguments

logger = logging.get_logger(__name__)

OBJECTIVES = ("mle", "pll", "mlm", "kl", "kl+pll")


@dataclass
class EnergyTrainingConfig(TrainingArguments):
    """Arguments of `EnergyTrainer`, beside those of `TrainingArguments` (thesis sections 6.2.1 and 6.2.2).

    Args:
        objective: `"mlm"` (masked conditionals, each position masked alone: degenerate pseudolikelihood; T masked rows
            for a row of T free tokens), `"mle"` (exact likelihood, by enumeration), `"pll"` (pseudolikelihood with the
            true conditionals, `T (1 + V (T - 1))` masked rows), `"kl"` (divergence from a teacher's masked conditionals
            to the true conditionals, as many), `"kl+pll"` (both).
        enumeration_limit: the most sequences that are enumerated.
        masked_row_limit: the most masked rows that are run for one row of the data. A row beyond it is refused before
            training: memory is bounded, but 100,000 masked rows are some minutes of a processor.
        skip_unusable_rows: leave out rows that hold a mask or, but for `"mlm"`, a token that is never proposed ([UNK],
            say), and log how many; else such a row is an error, before training if the data have a length.

    Raises:
        ValueError: for an unknown objective, a limit below 1, and label smoothing, which no objective defines.
    """

    no_sharding: ClassVar[str] = "passes of masked rows read whole weights outside of the model's forward"
    objective: str = field(default="mlm", metadata={"help": f"One of {', '.join(OBJECTIVES)}."})
    enumeration_limit: int = field(default=DEFAULT_LIMIT, metadata={"help": "The most sequences that are enumerated."})
    masked_row_limit: int = field(default=250_000, metadata={"help": "The most masked rows run for a row of the data."})
    skip_unusable_rows: bool = field(
        default=False,
        metadata={"help": "Leave out rows with a mask or, but for mlm, a token that is never proposed, as [UNK]."},
    )
    remove_unused_columns: bool = field(default=False, metadata={"help": "Has no effect: the rows are the trainer's."})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("objective", self.objective, OBJECTIVES)
        for name in ("enumeration_limit", "masked_row_limit"):
            setattr(self, name, as_whole(name, getattr(self, name), 1))
        self.skip_unusable_rows = as_truth("skip_unusable_rows", self.skip_unusable_rows)
        if self.label_smoothing_factor:
            raise ValueError(f"label_smoothing_factor must be 0, got {self.label_smoothing_factor}")
        self.remove_unused_columns = False


class EnergyTrainer(ObjectiveTrainer):
    """Trains the masked language model of an `EnergyModel`, for the energy that the model has.

    Rows are `input_ids`, with the tokenizer's special tokens. The random variable is what is no special token; it
    ranges over the tokens that may be proposed, and a row without it isn't counted. Losses are means over rows, in nats
    a sequence. Where all sequences of a row's length can be enumerated, likelihoods come from all contexts at once, and
    so do conditionals where that is less work; else the conditionals' V evaluations of each position are packed. Passes
    that one token budget doesn't hold are run again on the way back, so memory stays that of one of them. `bf16` and
    `fp16` are of these passes; what is made of them is in float32 or better, and a teacher's are as precise as its
    weights. Beside `loss` it logs `log_partition` with `"mle"`.

    Args:
        teacher: a frozen masked language model as an `EnergyModel`, for `"kl"` and `"kl+pll"`.

    Raises:
        ValueError: for another model or an encoder-decoder; a teacher that is missing, not needed or has other tokens;
            a row beyond `enumeration_limit` or `masked_row_limit` or with a token that has no value, before training if
            the data have a length.
    """

    config_class: ClassVar[type[EnergyTrainingConfig]] = EnergyTrainingConfig
    args: EnergyTrainingConfig
    bibtex = (CITATIONS["GOYAL_2021"],)
    row_must_have = "input_ids: row {row} must have a token that isn't special"

    @takes_stock_arguments
    def __init__(
        self,
        model: PreTrainedModel | nn.Module | None = None,
        args: EnergyTrainingConfig | None = None,
        *,
        teacher: EnergyModel | None = None,
        **kwargs: Unpack[StockArguments],
    ):
        super().__init__(model, args, **kwargs)
        objective = self.args.objective
        if objective == "mle":
            self.evaluated_terms = ("log_partition",)
        if (teacher is not None) != objective.startswith("kl"):
            raise ValueError(f"teacher must be given for the objectives kl and kl+pll alone, got {objective!r}")
        if teacher is not None:
            check_teacher(self.energy_model, teacher)
            teacher = teacher.to(self.args.device)  # type: ignore[arg-type]  # a wrapped method without its self
            self.teacher = teacher.requires_grad_(False).eval()
        if self.args.torch_compile:  # the Trainer compiles `forward`, which isn't traced: its passes are
            self.energy_model.compile(backend=self.args.torch_compile_backend, mode=self.args.torch_compile_mode)
        self.tokens = proposal_support(self.energy_model, None).nonzero()[:, 0]
        self.train_dataset = self._usable("train_dataset", self.train_dataset)
        if isinstance(self.eval_dataset, dict):
            self.eval_dataset = {name: self._usable(name, data) for name, data in self.eval_dataset.items()}
        else:
            self.eval_dataset = self._usable("eval_dataset", self.eval_dataset)
        self._known_work: dict[int, int] = {}  # by the number of free tokens
        self._check_work()
        if self.args.save_strategy != SaveStrategy.NO:
            self.energy_model.check_can_be_saved()  # not at the first save

    def default_collator(self, model: object) -> EnergyCollator:
        return EnergyCollator(model)

    @property
    def energy_model(self) -> EnergyModel:
        """The model without data-parallel wrapper."""
        return self.accelerator.unwrap_model(self.model)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        # The stock one looks for an adapter's weights only if the model is a PeftModel; so does the next.
        if has_adapters(self.energy_model):
            read_adapter(self.energy_model.mlm, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        if has_adapters(self.energy_model) and self.state.best_model_checkpoint is not None:
            read_adapter(self.energy_model.mlm, self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    def check_model(self, model: PreTrainedModel) -> None:
        """An energy model of a masked language model without an encoder input."""
        if not isinstance(model, EnergyModel):
            raise ValueError(f"model must be an EnergyModel, got {type(model).__name__}")
        if model.mlm.config.is_encoder_decoder:
            raise ValueError(f"model: {type(model.mlm).__name__} is an encoder-decoder, whose energy is conditional")
        refuse_needed_inputs("model", model.mlm)
        if has_adapters(model) and not model.mlm._hf_peft_config_loaded:
            raise ValueError(
                "model: adapters must be of its masked language model: EnergyModel(PeftModel), add_adapter"
            )

    def check_batch(self, inputs: dict) -> None:
        """Raises `ValueError` for a batch without ids, or with more than tokens."""
        if "input_ids" not in inputs:
            raise ValueError(f"inputs must have input_ids, got {', '.join(inputs)}")
        for name, value in inputs.items():
            if is_model_input(self.energy_model.mlm, name) and bool(value.any()):
                raise ValueError(f"inputs: {name} must be left out; energies of tokens alone are trained")

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        """The Trainer's, of the rows that can be evaluated."""
        named = eval_dataset is None or isinstance(eval_dataset, str)  # of those looked through already
        return super().get_eval_dataloader(eval_dataset if named else self._usable("eval_dataset", eval_dataset))

    def _usable(self, name: str, data: Any) -> Any:
        tokenizer = self.processing_class if isinstance(self.processing_class, PreTrainedTokenizerBase) else None
        return usable_rows(
            name,
            data,
            unusable_tokens(self.energy_model.config, self.args.objective),
            self.args.skip_unusable_rows,
            tokenizer,
        )

    def _check_work(self) -> None:
        """Looks through the data sets, so that a row that is too much work is found before any; warns of much work."""
        if self.args.objective == "mlm":
            return
        special = set(self.energy_model.config.special_token_ids or [])
        evaluated = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"eval_dataset": self.eval_dataset}
        warn_of_much_work(
            self.args.objective,
            [
                self._work(sum(token not in special for token in ids), f"{name}: row {number}")
                for name, data in {"train_dataset": self.train_dataset, **evaluated}.items()
                for number, ids in enumerate(ids_by_row(data))
            ],
        )

    def _work(self, length: int, place: str) -> int:
        if length not in self._known_work:
            limits = self.args.enumeration_limit, self.args.masked_row_limit
            self._known_work[length] = num_masked_rows(
                self.energy_model, self.args.objective, length, len(self.tokens), limits, place
            )
        return self._known_work[length]

    def scored_rows(self, inputs: dict[str, Any]) -> Tensor:
        """Rows with a free token."""
        return self._sequences(inputs).scored.any(1)

    def _sequences(self, inputs: dict[str, Any]) -> EnergyInputs:
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        return check_energy_inputs(self.energy_model, ids, mask, None, None, None, {})

    def loss_terms(self, model: nn.Module, inputs: dict[str, Any]) -> LossTerms:
        """The objective of a batch, summed over rows."""
        energy_model = self.energy_model
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        sequences, scored = self._sequences(inputs)
        rows = torch.tensor(len(ids), device=ids.device)
        loss = torch.zeros((), device=ids.device)
        logged: dict[str, tuple[Tensor, Tensor]] = {}
        if model is not energy_model:
            # The passes below are of the model itself. A data-parallel wrapper averages gradients only of a step in
            # which it was called, so it is, on one row that counts for nothing.
            loss = 0 * model(input_ids=ids[:1], attention_mask=None if mask is None else mask[:1]).energy.sum()
        if self.args.objective == "mlm":
            with self._autocast():
                terms = token_energies(energy_model.masked_batch_runner(), sequences, scored, "local")
            return LossTerms(loss + terms.sum(), rows)
        for length, group in _by_length(scored).items():
            part = replace(
                sequences,
                ids=sequences.ids[group],
                start=sequences.start[group.cpu()],
                stop=sequences.stop[group.cpu()],
            )
            with self._autocast():
                own, log_z = self._sum(energy_model, part, scored[group], length)
            loss = loss + own
            if log_z is not None:
                total = (log_z * len(group), torch.tensor(len(group), device=ids.device))
                before = logged.get("log_partition", (0.0, 0))
                logged["log_partition"] = (before[0] + total[0], before[1] + total[1])
        return LossTerms(loss, rows, logged)

    def _autocast(self) -> AbstractContextManager:
        """What the arguments say of half precision, for passes that go past the forward in which accelerate puts it.

        Without its cache: where the head is verified weights are cast without gradients, and torch before 2.11 goes on
        with these (pytorch/pytorch#112583).
        """
        return self.accelerator.autocast(AutocastKwargs(cache_enabled=False))

    def _sum(
        self, model: EnergyModel, sequences: Sequences, scored: Tensor, length: int
    ) -> tuple[Tensor, Tensor | None]:
        """The objective summed over rows of one length, and log Z if it was computed."""
        tokens, objective = self.tokens.to(sequences.ids.device), self.args.objective
        free = sequences.ids[scored].view(len(scored), length)
        indices = torch.searchsorted(tokens, free.contiguous()).clamp(max=len(tokens) - 1)
        if not torch.equal(tokens[indices], free):
            raise ValueError(
                f"input_ids: a row holds the token {int(free[tokens[indices] != free][0])}, which is never proposed: "
                f"objective {objective!r} has no value for it, 'mlm' has; a data set with a length is looked through"
            )
        self._work(length, "input_ids")
        framed = self._framed(model, sequences, scored)
        if objective == "mle":
            if not framed:
                raise ValueError(
                    "input_ids: objective 'mle' enumerates rows with the model's special tokens, not others"
                )
            energies = self._energies(model, tokens, length)
            return exact.negative_log_likelihoods(energies, indices).sum(), exact.log_partition(energies)
        packed = len(scored) * num_packed_rows(model, length, len(tokens))
        less = has_tables(model) or num_context_rows(length, len(tokens)) <= packed
        if framed and less and len(tokens) ** length <= self.args.enumeration_limit:
            conditionals = exact.log_conditionals(self._energies(model, tokens, length), indices)
        else:
            runner = model.masked_batch_runner()
            found = conditional_log_probs(runner, sequences, scored, tokens, model.config.energy)
            conditionals = found.view(len(scored), length, len(tokens))
        loss = conditionals.new_zeros(())
        if objective.startswith("kl"):
            theirs = self._teacher_log_probs(sequences, scored, tokens).view_as(conditionals)
            loss = loss + exact.projection_divergences(theirs, conditionals).sum()
        if objective.endswith("pll"):
            loss = loss + exact.negative_pseudolikelihoods(conditionals, indices).sum()
        return loss, None

    @staticmethod
    def _framed(model: EnergyModel, sequences: Sequences, scored: Tensor) -> bool:
        """Whether all rows are free tokens between the model's own special tokens."""
        config = model.config
        before, behind = config.prefix_token_ids or [], config.suffix_token_ids or []
        rows = zip(sequences.ids, sequences.start, sequences.stop, strict=True)
        kept = [ids[start:stop].tolist() for ids, start, stop in rows]
        inner = int(scored[0].sum())
        return all(ids[: len(before)] == before and ids[len(before) + inner :] == behind for ids in kept)

    @staticmethod
    def _energies(model: EnergyModel, tokens: Tensor, length: int) -> Tensor:
        """Energies of all sequences, (V,) * T."""
        config = model.config
        before, behind = config.prefix_token_ids or [], config.suffix_token_ids or []
        context_logits = getattr(model.mlm, "context_logits", None)
        if context_logits is not None:
            tables = context_logits(before, behind, tokens, length)
            tables = [token_scores(at_least_float32(table), tokens, config.energy) for table in tables]
        else:
            left, right = (torch.tensor(part, dtype=torch.long, device=tokens.device) for part in (before, behind))
            tables = scores_in_contexts(model.masked_batch_runner(), left, right, tokens, length, config.energy)
        return exact.energies_from_contexts(tables)

    @torch.no_grad()
    def _teacher_log_probs(self, sequences: Sequences, scored: Tensor, tokens: Tensor) -> Tensor:
        """The teacher's masked conditionals over the tokens, (N, V), as precise as its weights."""
        source, position = scored.nonzero(as_tuple=True)
        rows = MaskedRows(source, position[:, None], position[:, None])
        runner = self.teacher.masked_batch_runner()
        with torch.autocast(scored.device.type, enabled=False):
            return runner(sequences, rows, lambda logits, n: logits[:, 0][:, tokens].log_softmax(-1))


def _by_length(scored: Tensor) -> dict[int, Tensor]:
    """Rows by their number of scored positions."""
    lengths = scored.sum(1)
    return {int(length): (lengths == length).nonzero()[:, 0] for length in lengths.unique().tolist()}
