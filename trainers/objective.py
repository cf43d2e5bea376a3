"""The base of all trainers: losses averaged over items, logged terms, rows without anything to score, cards."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypedDict, TypeVar, Unpack

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    Trainer,
    TrainingArguments,
)
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_utils import EvalLoopOutput, TrainOutput
from transformers.utils import logging

from hf_ebm.checks import shown
from hf_ebm.model_facts import check_recomputes
from hf_ebm.model_modes import state_kept, without_adapters
from hf_ebm.models.adapters import check_in_layers
from hf_ebm.objectives.losses import IGNORED
from hf_ebm.publishing.hub import upload_errors
from hf_ebm.random_state import batch_seed
from hf_ebm.runtime import check_joined, warn_of_fewer
from hf_ebm.trainers.costs import columns_apart, rows_of
from hf_ebm.trainers.prompts import check_data_sets
from hf_ebm.trainers.publishing import FirstStep, create_model_card, training_facts, write_own_code
from hf_ebm.trainers.targets import padded_metrics, without_ignored

logger = logging.get_logger(__name__)


def check_sharding(args: TrainingArguments, sharded: bool) -> None:
    """Raises `ValueError` for weights that processes share between them, where `args.no_sharding` says why not."""
    reason = getattr(args, "no_sharding", "")
    if sharded and reason:
        raise ValueError(f"fsdp and ZeRO-3 of deepspeed must be off: {reason}")


@dataclass
class LossTerms:
    """What an objective gives for one batch.

    `loss` is the sum over the batch's items (tokens, or rows), with its gradient; it is divided by the number of items
    of the whole accumulated batch, over all processes. `logged` maps a name to a sum and the count it is divided by;
    `constants` maps a name to a value that is logged as it is.
    """

    loss: torch.Tensor
    items: torch.Tensor
    logged: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)


class StockArguments(TypedDict, total=False):
    """What every trainer takes beside `model`, `args` and what is its own, as Transformers' `Trainer` does."""

    data_collator: Callable[[list], Any] | None
    train_dataset: Any
    eval_dataset: Any
    processing_class: PreTrainedTokenizerBase | ProcessorMixin | None
    model_init: Callable[..., PreTrainedModel] | None
    compute_loss_func: None
    compute_metrics: Callable[[EvalPrediction], dict] | None
    callbacks: list | None
    optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None]
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None


Constructor = TypeVar("Constructor", bound=Callable[..., None])


def takes_stock_arguments(constructor: Constructor) -> Constructor:
    """Shows `StockArguments` by name in the signature of a constructor whose `**kwargs` they are."""
    *own, others = inspect.signature(constructor).parameters.values()
    theirs = inspect.signature(Trainer).parameters
    named = [theirs[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in StockArguments.__annotations__]
    vars(constructor)["__signature__"] = inspect.Signature([*own, *named, others])
    return constructor


class ObjectiveTrainer(Trainer):
    """Base of all trainers: `compute_loss` is made of a method `loss_terms`, which returns `LossTerms`.

    The loss is a mean over items, whatever the accumulation, the batch sizes and the number of processes. Terms are
    logged under their names, averaged over what was trained since the last log. Subclasses have a `config_class`.

    A row without anything to score (no label, no free token) counts for nothing. A training batch without any other row
    is an error that names a row. An evaluation set without any other is nan, with a warning.

    Args:
        model: what is trained; `model_init` makes it where it is None.
        args: of the trainer's `config_class`.
        data_collator, train_dataset, eval_dataset, processing_class, model_init, compute_metrics, callbacks: as of
            Transformers' `Trainer`, whose other arguments are taken as well.

    There is a warning where `accelerate launch` was asked for several processes and started this one alone.

    Raises:
        ValueError: for arguments that aren't those of the trainer, a `compute_loss_func`, `compute_metrics` without
            predictions, a model that `model_init` made as for one that is given, adapters that aren't layers of the
            model (prompts, prefixes), activation checkpointing of a model that has no layers to recompute, several data
            sets to train on, tables and names in place of a data set, where a
            launcher started processes that these arguments leave unjoined (on CPUs without `use_cpu=True`), and for
            FSDP and ZeRO-3 of DeepSpeed where weights can't be sharded.
    """

    loss_is_scaled_for_ga = True  # the loss is divided by `num_items_in_batch` here
    config_class: ClassVar[type[TrainingArguments]]
    bibtex: ClassVar[Sequence[str]] = ()
    mean_over: ClassVar[Literal["rows", "tokens"]] = "rows"  # the items
    row_must_have: str  # "{row}" stands for its number
    needs_every_row: ClassVar[bool] = False  # in training
    evaluated_terms: tuple[str, ...] = ()  # what an evaluation logs beside its loss
    # Whether columns that the model doesn't take are kept, for a cost; None where the collator sees to them itself.
    reads_columns: bool | None = None
    model: PreTrainedModel  # or an adapter of PEFT on one, which passes on what it doesn't have itself

    @takes_stock_arguments
    def __init__(
        self,
        model: PreTrainedModel | nn.Module | None = None,
        args: TrainingArguments | None = None,
        **kwargs: Unpack[StockArguments],
    ):
        if not isinstance(args, self.config_class):
            raise ValueError(f"args must be a {self.config_class.__name__}, got {type(args).__name__}")
        check_joined(args.world_size)
        warn_of_fewer()
        generates = getattr(args, "predict_with_generate", None)  # None of what makes no predictions at all
        if kwargs.get("compute_metrics") is not None and not generates:
            raise ValueError(
                f"compute_metrics must be None: {type(self).__name__} makes no predictions"
                if generates is None
                else "compute_metrics needs predict_with_generate=True: its predictions are generated tokens"
            )
        if kwargs.get("compute_loss_func") is not None:
            raise ValueError(f"compute_loss_func must be None: {type(self).__name__} has its own objective")
        check_data_sets(kwargs.get("train_dataset"), kwargs.get("eval_dataset"))
        if model is not None and not isinstance(model, nn.Module):
            raise ValueError(f"model must be a model object, got {shown(model)}")
        if model is not None:
            self._check_base(model, args)
        if kwargs.get("data_collator") is None:
            kwargs["data_collator"] = self.default_collator(model)
        check_sharding(args, bool(args.fsdp))
        super().__init__(model=model, args=args, **kwargs)
        check_sharding(args, self.is_fsdp_enabled or is_deepspeed_zero3_enabled())  # by accelerate's settings
        # So that the Trainer counts the items of the accumulated batch, whether or not the model's forward would
        # take the number: the losses here are sums that are divided by it.
        self.model_accepts_loss_kwargs = True
        self._sums: dict[bool, dict[str, torch.Tensor]] = {True: {}, False: {}}
        self._constants: dict[bool, dict[str, float]] = {True: {}, False: {}}
        self._batches_seen = (-1, 0)  # global step, batches of it so far
        self.set_up()

    def default_collator(self, model: object) -> Callable[[list], Any] | None:
        """What makes batches where no collator is given; None for the Trainer's."""
        return None

    def set_up(self) -> None:
        """What a trainer has beside the stock one, which is made by then; subclasses go on from this."""

    def loss_terms(self, model: nn.Module, inputs: dict[str, Any]) -> LossTerms:
        """The objective of a batch; `model` may be a data-parallel wrapper of `self.model`.

        Not called `objective`: in a hyperparameter search the Trainer keeps the value that is searched for there.
        """
        raise NotImplementedError

    def check_model(self, model: PreTrainedModel) -> None:
        """Raises `ValueError` for a model of another kind; of a `PeftModel` it gets the base model."""

    def check_batch(self, inputs: dict[str, Any]) -> None:
        """Raises `ValueError` for a batch the objective cannot take."""

    def scored_rows(self, inputs: dict[str, Any]) -> torch.Tensor:
        """In which rows of a batch there is something to score, (B,) bool."""
        raise NotImplementedError

    @classmethod
    def derived_logs(cls, averages: dict[str, float]) -> dict[str, float]:
        """What is logged, from the averages of the terms."""
        return averages

    @property
    def module(self) -> PreTrainedModel:
        """The model without data-parallel wrapper; inside autocast, where the arguments say so."""
        return self.accelerator.unwrap_model(self.model)

    @property
    def pad_id(self) -> int:
        """What predictions are padded with, of trainers that make some."""
        return IGNORED

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        """The Trainer's; columns that the model doesn't take never get into its forward."""
        with columns_apart(self, self.reads_columns):
            return super()._get_dataloader(*args, **kwargs)

    def _check_base(self, model: nn.Module, args: TrainingArguments) -> None:
        """Every model that is trained, given or made, is checked without what is around it."""
        inner = extract_model_from_parallel(model, keep_torch_compile=False)
        base = without_adapters(inner)
        if not isinstance(base, PreTrainedModel):
            raise ValueError(f"model must be a model of Transformers, or a PeftModel of one, got {type(base).__name__}")
        self.check_model(base)
        check_in_layers("model", inner)
        if args.activation_checkpointing:
            check_recomputes("model", base)

    def call_model_init(self, *args: Any, **kwargs: Any) -> nn.Module:
        """The Trainer's; the model is checked as one that is given."""
        model = super().call_model_init(*args, **kwargs)
        self._check_base(model, self.args)
        return model

    def checked_rows(self, inputs: dict[str, Any]) -> torch.Tensor:
        """`scored_rows` of a batch that is as it has to be.

        Raises:
            ValueError: in training, naming a row without anything to score, where there is no other or all are needed.
        """
        self.check_batch(inputs)
        scored = self.scored_rows(inputs)
        if self.model.training and not bool(scored.all() if self.needs_every_row else scored.any()):
            missing = self.row_must_have.format(row=int((~scored).nonzero()[0]))
            raise ValueError(missing if self.needs_every_row else f"{missing}, or else another row of the batch")
        return scored

    def num_rows(self, inputs: dict[str, Any]) -> int:
        """How many rows of a batch a loss that is a mean over rows counts."""
        return int(self.scored_rows(inputs).sum())

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | int | None:
        if self.mean_over == "tokens":
            return super()._get_num_items_in_batch(batch_samples, device)
        rows = torch.tensor(sum(map(self.num_rows, batch_samples)), device=device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            rows = self.accelerator.gather(rows).sum()
        return rows

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """The Trainer's; nothing is left over from a run before, and where it began is noted for the card."""
        self._sums[True] = {}
        self._batches_seen = (-1, 0)
        self.pop_callback(FirstStep)
        self.add_callback(FirstStep)
        return super().train(*args, **kwargs)

    def next_batch_seed(self, *key: int) -> int:
        """A seed for the random draws of the next batch, from the seed, the step and `key`: a resumed run is the same.

        To be called once a batch.
        """
        step, batches = self._batches_seen
        batches = batches + 1 if step == self.state.global_step else 0
        self._batches_seen = (self.state.global_step, batches)
        return batch_seed(self.args.seed, self.state.global_step, batches, *key)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The Trainer's; a model that its own forward changes is put back after the backward pass."""
        with state_kept(self.model):
            return super().training_step(*args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """The objective's sum over the number of items."""
        scored, training = self.checked_rows(inputs), self.model.training
        if bool(scored.any()):
            with nullcontext() if training else state_kept(self.model):
                terms = self.loss_terms(model, inputs if bool(scored.all()) else rows_of(inputs, scored))
            self._constants[training] = terms.constants
        else:
            dtype = torch.promote_types(self.model.dtype, torch.float32)  # that of losses: processes gather them
            nothing = torch.zeros((), dtype=dtype, device=scored.device)
            terms = LossTerms(nothing, nothing, dict.fromkeys(self.evaluated_terms, (nothing, nothing)))
        self.add_terms(training, {"loss": (terms.loss, terms.items), **terms.logged})
        loss = terms.loss / (terms.items if num_items_in_batch is None else num_items_in_batch)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # gradients are averaged over processes, this undoes it
        return (loss, {}) if return_outputs else loss

    def evaluated_loss(self, model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
        """`compute_loss` of a batch in evaluation."""
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, inputs).detach()

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """The objective, without predictions."""
        return self.evaluated_loss(model, self._prepare_inputs(inputs)), None, None

    def add_terms(self, training: bool, terms: Mapping[str, tuple[torch.Tensor, torch.Tensor | int]]) -> None:
        """Takes in sums, and the counts they are divided by, for the next log or the end of the evaluation."""
        sums = self._sums[training]
        for name, (value, count) in terms.items():
            pair = torch.stack([value.detach().double(), torch.as_tensor(count, device=value.device).double()])
            sums[name] = sums[name] + pair if name in sums else pair

    def averages(self, training: bool) -> dict[str, float]:
        """Averages since the last call, over all processes."""
        sums, self._sums[training] = self._sums[training], {}
        averages = {}
        for name in sorted(sums):
            total, count = self.accelerator.reduce(sums[name], "sum").tolist()
            averages[name] = total / count if count else math.nan
        return self.derived_logs(averages)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds the terms of the objective to the Trainer's training logs."""
        if "loss" in logs and self._sums[True]:
            averages = self.averages(training=True)
            averages.pop("loss")
            logs = {**logs, **averages, **self._constants[True]}
        super().log(logs, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """The Trainer's loop, but losses are averaged over items, not over batches.

        Predictions are padded with a token, not with -100, which no tokenizer decodes.
        """
        self._sums[False] = {}
        with padded_metrics(self, self.pad_id):
            output = super().evaluation_loop(*args, **kwargs)
        output = output._replace(predictions=without_ignored(output.predictions, self.pad_id))
        prefix = kwargs.get("metric_key_prefix", "eval")
        averages = {**self.averages(training=False), **self._constants[False]} if self._sums[False] else {}
        if output.metrics is not None:
            output.metrics.update({f"{prefix}_{name}": value for name, value in averages.items()})
        if math.isnan(averages.get("loss", 0.0)) and self.is_world_process_zero():
            names = ", ".join(f"{prefix}_{name}" for name in sorted(averages) if math.isnan(averages[name]))
            missing = self.row_must_have.format(row=0)
            logger.warning(f"{names}: nan, as there is nothing to score. {missing}, or else another row.")
        return output

    create_model_card = create_model_card
    training_facts = training_facts

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's, with the model's code for those who don't have `hf_ebm`.

        Raises:
            OSError: if the upload fails; what is in the output folder is whole.
        """
        advice = f"the model, its card and its settings in {self.args.output_dir} are whole; call push_to_hub again"
        with upload_errors(advice):
            return super().push_to_hub(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The Trainer's; on the way to the Hub the model's code is written beside the weights."""
        super().save_model(output_dir, _internal_call)
        write_own_code(self, output_dir)
