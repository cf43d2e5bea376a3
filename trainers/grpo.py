"""Policy optimization with advantages relative to a group of samples: GRPO, Dr. GRPO (`GRPOTrainer`)."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Unpack

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from transformers.trainer_utils import has_length

from hf_ebm.checks import as_number, as_truth, as_whole, check_choice, shown
from hf_ebm.loading import moved
from hf_ebm.model_facts import num_outputs
from hf_ebm.model_modes import evaluation_mode, state_kept, without_adapters
from hf_ebm.objectives.group_policy import clipped_policy_loss, group_advantages, kl_from_samples, sequence_sums
from hf_ebm.objectives.sequence_costs import SequenceCost
from hf_ebm.publishing.cards import CITATIONS
from hf_ebm.trainers.objective import LossTerms, StockArguments, takes_stock_arguments
from hf_ebm.trainers.rollouts import RepeatedBatches, Rollout, load_rollouts, repeated, save_rollouts
from hf_ebm.trainers.sampled_risk import SampledRiskConfig, advantage_terms, with_advantage_std
from hf_ebm.trainers.sequence_pairs import SequencePairs
from hf_ebm.trainers.task_loss import TaskLossTrainer

LENGTH_NORMALIZATIONS = ("sequence", "tokens", "constant")


@dataclass
class GRPOConfig(SampledRiskConfig):
    """Arguments of `GRPOTrainer`, beside those of `SampledRiskConfig`.

    Args:
        scale_advantages: divide them by the standard deviation of the row's rewards (GRPO); without it and with
            `length_normalization="constant"` the objective is that of Dr. GRPO.
        num_iterations: updates with the samples of one batch, μ; an epoch has so many times as many. Above 1, batches
            at the end of an epoch that don't fill `gradient_accumulation_steps` are left out.
        clip_range: ε; a token's ratio to the policy that drew it has no gradient beyond 1 ± ε. It never is in the first
            of the iterations.
        kl_weight: β, of the KL divergence from the reference; 0 needs no reference. 0.04 in Shao et al. 2024.
        length_normalization: what a sequence's sum over its tokens is divided by: `"sequence"`, its own length (GRPO);
            `"tokens"`, the mean length in the accumulated batch, so that all tokens count alike; `"constant"`.
        length_constant: that constant, in tokens; 1 is the gradient of whole sequences, as of the policy gradient.

    Raises:
        ValueError: for fewer than two candidates, values out of range, and `ignore_data_skip` with several iterations.
    """

    scale_advantages: bool = field(default=True, metadata={"help": "Divide advantages by the group's deviation."})
    num_iterations: int = field(default=1, metadata={"help": "Updates with the samples of one batch."})
    clip_range: float = field(default=0.2, metadata={"help": "How far ratios of probabilities may be from 1."})
    kl_weight: float = field(default=0.0, metadata={"help": "Weight of the KL divergence from the start model."})
    length_normalization: str = field(default="sequence", metadata={"help": "sequence, tokens or constant."})
    length_constant: float = field(default=1.0, metadata={"help": "Divisor of --length_normalization constant."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_candidates = as_whole("num_candidates", self.num_candidates, 2)
        self.scale_advantages = as_truth("scale_advantages", self.scale_advantages)
        self.num_iterations = as_whole("num_iterations", self.num_iterations, 1)
        self.clip_range = as_number("clip_range", self.clip_range, above=0)
        self.kl_weight = as_number("kl_weight", self.kl_weight, least=0)
        check_choice("length_normalization", self.length_normalization, LENGTH_NORMALIZATIONS)
        self.length_constant = as_number("length_constant", self.length_constant, above=0)
        if self.ignore_data_skip and self.num_iterations > 1:
            raise ValueError("ignore_data_skip must be False with num_iterations above 1: samples belong to batches")


class GRPOTrainer(TaskLossTrainer):
    """Clipped policy optimization with group-relative advantages (GRPO, Shao et al. 2024; Dr. GRPO, Liu et al. 2025).

    Of each row `num_candidates` sequences are sampled; their advantages are their rewards (costs with the other sign)
    less the row's mean. The samples of an accumulated batch serve `num_iterations` updates; log probabilities of the
    first of them are those of the policy that drew, so that nothing is scored twice. The reference of the KL penalty is
    the model without its adapters, if it is a `PeftModel`, else a copy of the model as the trainer was given it, unless
    another is given. A checkpoint within the iterations of a batch keeps its samples.

    Logs `candidate_cost`, `advantage_std`, `zero_deviation_share` (of rows whose samples all cost the same),
    `clip_share` (of tokens), `kl` (nats per token) where there is a reference, `decoded_length` and `cut_share` of the
    samples, and `cross_entropy` where it has a weight.

    Args:
        reference_model: of the KL divergence, of the same vocabulary and kind as the model; it isn't trained. With a
            `kl_weight` of 0 the divergence from it is logged alone.

    Raises:
        ValueError: as `PolicyGradientTrainer`; for a `reference_model` that doesn't fit.
    """

    config_class: ClassVar[type[GRPOConfig]] = GRPOConfig
    args: GRPOConfig
    bibtex = (CITATIONS["SHAO_2024"], CITATIONS["LIU_2025"])
    mean_over = "rows"
    scores_its_samples = True
    reference_model: PreTrainedModel | None  # None for the model without its adapters

    @takes_stock_arguments
    def __init__(
        self,
        model: PreTrainedModel | nn.Module | None = None,
        args: GRPOConfig | None = None,
        *,
        cost: str | Callable | SequenceCost | None = None,
        reward_funcs: Any = None,
        reference_model: PreTrainedModel | None = None,
        **kwargs: Unpack[StockArguments],
    ):
        self.reference_model = reference_model
        super().__init__(model, args, cost=cost, reward_funcs=reward_funcs, **kwargs)

    def set_up(self) -> None:
        super().set_up()
        self.candidates.check_sampling()
        if self.reference_model is not None:
            self._check_reference(self.reference_model)
            self.reference_model = moved(self.reference_model, str(self.args.device)).requires_grad_(False)
        elif self.args.kl_weight and not hasattr(self.module, "disable_adapter"):
            self.reference_model = copy.deepcopy(self.module).requires_grad_(False)
        self._rollouts: deque[Rollout] = deque()  # of the accumulated batch, the next one first
        self._mean_length = 1.0  # of its samples, on all processes

    def _check_reference(self, reference: PreTrainedModel) -> None:
        if not isinstance(reference, nn.Module) or reference is self.module:
            raise ValueError(f"reference_model must be a model beside the one that is trained, got {shown(reference)}")
        own, other = (
            (num_outputs(one), bool(one.config.is_encoder_decoder))
            for one in (self.module, without_adapters(reference))
        )
        if own != other:
            raise ValueError(
                f"reference_model must predict {own[0]} ids and have is_encoder_decoder={own[1]}, as the model that is "
                f"trained, got {other[0]} and {other[1]}"
            )
        trained = {id(one): name for name, one in self.module.named_parameters() if one.requires_grad}
        for parameter in reference.parameters():
            if id(parameter) in trained:
                raise ValueError(
                    f"reference_model must not share parameters that are trained, as {trained[id(parameter)]}; the "
                    "reference of adapters is the model without them where no reference_model is given"
                )

    @property
    def reads_targets(self) -> bool:
        """In training for the cross entropy alone; for the cost they may be of any length."""
        return self.args.cross_entropy_weight > 0 or not self.model.training

    def check_memory(self, labels: torch.Tensor) -> None:
        self.candidates.check_scores_fit(labels, self.args.num_candidates)

    def get_train_dataloader(self) -> DataLoader:
        """The Trainer's; the batches of an update come once for each iteration."""
        loader, args = super().get_train_dataloader(), self.args
        if args.num_iterations == 1:
            return loader
        if has_length(loader) and len(loader) < args.gradient_accumulation_steps:
            raise ValueError(
                f"gradient_accumulation_steps must be at most the {len(loader)} batches of an epoch with "
                f"num_iterations above 1, got {args.gradient_accumulation_steps}"
            )
        together, times = args.gradient_accumulation_steps, args.num_iterations
        return repeated(loader, together, times, lambda: int(self.state.epoch or 0))

    def num_examples(self, dataloader: DataLoader) -> int:
        """The Trainer's, of the rows that the batches are made of."""
        batches = dataloader.dataset
        return super().num_examples(batches.loader if isinstance(batches, RepeatedBatches) else dataloader)

    def get_batch_samples(self, epoch_iterator: Iterator, num_batches: int, device: torch.device) -> tuple[list, Any]:
        """The Trainer's; in the first iteration all batches of the update get their samples, whose lengths count."""
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.state.global_step % self.args.num_iterations == 0:
            self.model.train()  # as in the step: it says which checks are made
            self._rollouts = deque(map(self._drawn, batches))
        if self._rollouts:
            lengths = torch.cat([rollout.lengths for rollout in self._rollouts])
            sums = torch.stack([lengths.sum(), torch.tensor(len(lengths), device=lengths.device)])
            tokens, count = self.accelerator.reduce(sums, "sum").tolist()
            self._mean_length = tokens / count
        return batches, items

    def _drawn(self, batch: dict[str, Any]) -> Rollout:
        decoder, inputs = self.candidates, self._prepare_inputs(batch)
        self.checked_rows(inputs)
        pairs = decoder.pairs(inputs)
        samples, ruled_out = decoder.sample(pairs, self.args.num_candidates)
        rollout = Rollout.drawn(samples, ruled_out, decoder.candidate_costs(pairs, samples))
        if self.args.kl_weight or self.reference_model is not None:
            with self._reference() as reference:
                rollout.reference, _ = decoder.score_tokens(reference, pairs, samples, ruled_out)
        return rollout

    @contextmanager
    def _reference(self) -> Iterator[nn.Module]:
        """The reference model, to score with."""
        own: Any = self.module
        given = self.reference_model
        model, adapters_off = (own, own.disable_adapter()) if given is None else (given, nullcontext())
        with torch.no_grad(), self.accelerator.autocast(), adapters_off, evaluation_mode(model), state_kept(model):
            yield model

    def training_terms(self, model: nn.Module, pairs: SequencePairs) -> LossTerms:
        args, decoder = self.args, self.candidates
        rollout = self._rollouts[0]
        self._rollouts.rotate(-1)
        samples, costs, lengths = rollout.samples, rollout.costs, rollout.lengths
        log_probs, cross_entropy = decoder.score_tokens(
            model, pairs, samples, rollout.mask, with_targets=args.cross_entropy_weight > 0
        )
        if rollout.old is None:
            rollout.old = log_probs.detach()
        advantages = group_advantages(-costs, args.scale_advantages)
        of_tokens = advantages.flatten().repeat_interleave(lengths)
        losses, clipped = clipped_policy_loss(log_probs, rollout.old, of_tokens, args.clip_range)
        rows, tokens = torch.tensor(len(pairs), device=costs.device), lengths.sum()
        logged = {
            "candidate_cost": (costs.mean(1).sum(), rows),
            "zero_deviation_share": ((costs == costs[:, :1]).all(1).sum(), rows),
            "clip_share": (clipped.sum(), tokens),
            **advantage_terms(advantages, rows),
            **decoder.length_terms([ids for found in samples for ids in found], decoder.settings(pairs)),
        }
        if rollout.reference is not None:
            kl = kl_from_samples(log_probs, rollout.reference)
            if args.kl_weight:
                losses = losses + args.kl_weight * kl
            logged["kl"] = (kl.sum(), tokens)
        divisors: dict[str, Any] = {"sequence": lengths, "tokens": self._mean_length, "constant": args.length_constant}
        loss = (sequence_sums(losses, lengths) / divisors[args.length_normalization]).sum() / costs.shape[1]
        if cross_entropy is not None:
            loss = loss + args.cross_entropy_weight * cross_entropy.sum()
            logged["cross_entropy"] = (cross_entropy.sum(), rows)
        return LossTerms(loss, rows, logged)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.state.global_step % self.args.num_iterations:
            save_rollouts(self._rollouts, output_dir, self.args.process_index)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.state.global_step % self.args.num_iterations:
            self._rollouts = deque(load_rollouts(checkpoint, self.args.process_index, self.args.device))

    @classmethod
    def derived_logs(cls, averages: dict[str, float]) -> dict[str, float]:
        return with_advantage_std(super().derived_logs(averages))
