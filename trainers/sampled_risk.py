"""Training on the cost of sampled sequences: minimum risk (`MinimumRiskTrainer`), policy gradient."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import TrainOutput
from transformers.utils import logging

from hf_ebm.checks import as_number, as_truth, as_whole, check_choice, shown
from hf_ebm.objectives.losses import leave_one_out_baseline, length_normalized, minimum_risk, policy_gradient_loss
from hf_ebm.publishing.cards import CITATIONS
from hf_ebm.runtime import check_fits
from hf_ebm.trainers.candidates import CandidateDecoder, by_row
from hf_ebm.trainers.objective import LossTerms
from hf_ebm.trainers.sequence_pairs import SequencePairs
from hf_ebm.trainers.task_loss import TaskLossConfig, TaskLossTrainer

logger = logging.get_logger(__name__)

_HARDLY_MORE, _BATCHES = 1.5, 10  # candidates, and batches in a row with fewer effective ones, after which it warns


@dataclass
class SampledRiskConfig(TaskLossConfig):
    """Arguments of the trainers on sampled sequences, beside those of `TaskLossConfig`.

    Args:
        num_candidates: sequences sampled for each row.
        cross_entropy_weight: weight of the cross entropy that is added, as a mean over each row's target tokens; 0
            leaves it out.

    Raises:
        ValueError: for fewer than one candidate or a negative weight.
    """

    num_candidates: int = field(default=4, metadata={"help": "Sequences sampled for each row."})
    cross_entropy_weight: float = field(default=0.0, metadata={"help": "Weight of the cross entropy that is added."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_candidates = as_whole("num_candidates", self.num_candidates, 1)
        check_fits(
            8 * self.num_candidates, f"num_candidates: {shown(self.num_candidates)} sequences are sampled for each row"
        )
        self.cross_entropy_weight = as_number("cross_entropy_weight", self.cross_entropy_weight, least=0)


CANDIDATES = ("sampling", "beams")


@dataclass
class CandidateSetConfig(SampledRiskConfig):
    """Arguments of the trainers on a set of different candidates, beside those of `SampledRiskConfig`.

    Args:
        candidates: where they come from: `"sampling"`, or `"beams"`, the best `num_candidates` of beam search with as
            many beams, which else goes by the `generation_config`.
        sampling_temperature: of samples.
        include_target: put the target among the candidates.
        length_penalty: power of the length by which log probabilities of candidates are divided; 0 leaves them alone.

    Raises:
        ValueError: for another source of candidates, a temperature that isn't positive, or a single candidate that is
            not joined by the target.
    """

    candidates: str = field(default="sampling", metadata={"help": "Where candidates come from: sampling or beams."})
    sampling_temperature: float = field(default=1.0, metadata={"help": "Temperature at which candidates are sampled."})
    include_target: bool = field(default=True, metadata={"help": "Put the target among the candidates."})
    length_penalty: float = field(
        default=0.0, metadata={"help": "Power of the length by which log probabilities of candidates are divided."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("candidates", self.candidates, CANDIDATES)
        self.include_target = as_truth("include_target", self.include_target)
        self.sampling_temperature = as_number("sampling_temperature", self.sampling_temperature, above=0)
        self.length_penalty = as_number("length_penalty", self.length_penalty)
        if self.num_candidates == 1 and not self.include_target:
            raise ValueError("num_candidates must be 2 or more without include_target: one candidate has no gradient")


class CandidateSets(NamedTuple):
    """Different candidates of a batch's rows, S at most, with what trainers need of them.

    Attributes:
        candidates: of each row.
        scores: log probabilities by the length penalty, (B, S), with their gradient.
        costs: (B, S).
        valid: (B, S) bool, False where a row has fewer candidates.
        cross_entropy: of each row, (B,), where it has a weight.
        logged: terms of lengths, costs and numbers.
    """

    candidates: list[list[torch.Tensor]]
    scores: torch.Tensor
    costs: torch.Tensor
    valid: torch.Tensor
    cross_entropy: torch.Tensor | None
    logged: dict[str, tuple[torch.Tensor, torch.Tensor]]


def candidate_sets(
    decoder: CandidateDecoder, model: nn.Module, pairs: SequencePairs, args: CandidateSetConfig
) -> CandidateSets:
    """Finds, scores and costs the candidates that the arguments ask for."""
    if args.candidates == "beams":
        config = decoder.settings(pairs, do_sample=False, num_beams=args.num_candidates)
        drawn = decoder.decode(pairs, config, num_samples=args.num_candidates)
    else:
        drawn, _ = decoder.sample(pairs, args.num_candidates, args.sampling_temperature)
    targets = [[target] if args.include_target and len(target) else [] for target in pairs.targets]
    candidates = [distinct([*gold, *found]) for gold, found in zip(targets, drawn, strict=True)]
    log_probs, cross_entropy = decoder.score(model, pairs, candidates, with_targets=args.cross_entropy_weight > 0)
    costs = decoder.candidate_costs(pairs, candidates)
    sizes = torch.tensor([len(found) for found in candidates], device=costs.device)
    valid = torch.arange(costs.shape[1], device=costs.device) < sizes[:, None]
    lengths = by_row(torch.tensor([len(ids) for found in candidates for ids in found], device=costs.device), candidates)
    rows = torch.tensor(len(pairs), device=costs.device)
    logged = {
        "candidate_cost": (costs.sum(), sizes.sum()),
        "num_distinct": (sizes.sum(), rows),
        **decoder.length_terms([ids for found in drawn for ids in found], decoder.settings(pairs)),
    }
    if cross_entropy is not None:
        logged["cross_entropy"] = (cross_entropy.sum(), rows)
    scores = length_normalized(log_probs, lengths, args.length_penalty)
    return CandidateSets(candidates, scores, costs, valid, cross_entropy, logged)


@dataclass
class MinimumRiskConfig(CandidateSetConfig):
    """Arguments of `MinimumRiskTrainer`, beside those of `CandidateSetConfig`.

    Args:
        sharpness: α, the power to which probabilities are raised before they are renormalized over the candidates. The
            default is that of Shen et al. 2016. Log probabilities of sequences differ by tens of nats, so that at 1 one
            candidate has all the weight and the others no gradient; sequences of a few tokens need a larger α, by the
            logged `effective_candidates`, and so do log probabilities that a `length_penalty` makes smaller. The
            gradient of the risk is proportional to α: weigh `cross_entropy_weight` against it.

    Raises:
        ValueError: for a sharpness that isn't positive.
    """

    sharpness: float = field(default=0.005, metadata={"help": "Power of the probabilities of candidates."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sharpness = as_number("sharpness", self.sharpness, above=0)


class MinimumRiskTrainer(TaskLossTrainer):
    """`Σ_y q(y) c(y)`, `q ∝ p^α` over sampled candidates (Shen et al. 2016; Welleck and Cho 2020, equation 6).

    Candidates that are equal count once. With a `length_penalty` λ it is `q ∝ exp(α log p / length^λ)`. Logs `risk`,
    `candidate_cost` (the unweighted mean), `num_distinct` (mean number of different candidates of a row),
    `effective_candidates` (mean of 1 / Σ q²), `decoded_length` and `cut_share` of what was drawn, and `cross_entropy`
    where it has a weight. Warns once where ten batches in a row have fewer than 1.5 effective candidates.

    Raises:
        ValueError: for several ids as the forced first or last token: which of them it is would be drawn, not by the
            model.
    """

    config_class: ClassVar[type[MinimumRiskConfig]] = MinimumRiskConfig
    args: MinimumRiskConfig
    bibtex = (CITATIONS["SHEN_2016"], CITATIONS["WELLECK_2021"])
    _near_one: int | None = 0  # batches in a row with hardly more than one effective candidate; None: has warned

    mean_over = "rows"

    def set_up(self) -> None:
        super().set_up()
        self.candidates.check_sampling()

    def check_memory(self, labels: torch.Tensor) -> None:
        self.candidates.check_scores_fit(labels, self.args.num_candidates)

    def training_terms(self, model: nn.Module, pairs: SequencePairs) -> LossTerms:
        args = self.args
        found = candidate_sets(self.candidates, model, pairs, args)
        risk, weights = minimum_risk(found.scores, found.costs, found.valid, args.sharpness)
        rows = torch.tensor(len(pairs), device=risk.device)
        effective = 1 / weights.detach().square().sum(-1)
        self._watch(float(effective.mean()), float(found.valid.sum(1).float().mean()))
        logged = {"risk": (risk.sum(), rows), "effective_candidates": (effective.sum(), rows), **found.logged}
        loss = risk.sum()
        if found.cross_entropy is not None:
            loss = loss + args.cross_entropy_weight * found.cross_entropy.sum()
        return LossTerms(loss, rows, logged)

    def _watch(self, effective: float, different: float) -> None:
        """Warns once of weights that stay on one candidate a row."""
        if self._near_one is None or not self.is_world_process_zero():
            return
        self._near_one = self._near_one + 1 if effective < _HARDLY_MORE else 0
        if self._near_one < _BATCHES:
            return
        self._near_one = None
        cause = f"lower sharpness, which is {self.args.sharpness:g}"
        if different < 2:
            cause = "the model draws one over and over; raise num_candidates or sampling_temperature"
        logger.warning(
            f"{_BATCHES} batches in a row had {effective:.2f} effective candidates a row, of {different:.1f}: the risk "
            f"is that of one sequence and has hardly a gradient; {cause}"
        )


def distinct(sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each different sequence once, in the order of their first appearance."""
    found: dict[tuple, torch.Tensor] = {}
    for ids in sequences:
        found.setdefault(tuple(ids.tolist()), ids)
    return list(found.values())


BASELINES = ("self_critical", "running_mean", "leave_one_out")


@dataclass
class PolicyGradientConfig(SampledRiskConfig):
    """Arguments of `PolicyGradientTrainer`, beside those of `SampledRiskConfig`.

    Args:
        baseline: `"self_critical"`, the cost of what is decoded greedily (Rennie et al. 2017), `"running_mean"`, the
            exponentially weighted mean cost of earlier steps, or `"leave_one_out"`, for each sample the mean cost of
            the row's others (RLOO: Kool et al. 2019, Ahmadian et al. 2024), which decodes nothing more.
        running_mean_decay: weight of the past in that mean.

    Raises:
        ValueError: for an unknown baseline, a decay outside [0, 1), or one candidate with `"leave_one_out"`.
    """

    baseline: str = field(
        default="self_critical", metadata={"help": "self_critical, running_mean or leave_one_out (RLOO)."}
    )
    running_mean_decay: float = field(default=0.95, metadata={"help": "Weight of the past in the running mean."})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("baseline", self.baseline, BASELINES)
        self.running_mean_decay = as_number("running_mean_decay", self.running_mean_decay, least=0, below=1)
        if self.num_candidates == 1 and self.baseline == "leave_one_out":
            raise ValueError(
                "num_candidates must be 2 or more with the baseline leave_one_out, got 1: it has no others"
            )


class RunningMean(TrainerCallback, ExportableState):
    """The mean cost of earlier steps; a callback, so that checkpoints keep it and a step's batches share one value."""

    def __init__(self, decay: float, value: float | None = None):
        self.decay, self.value = decay, value
        self._total = self._count = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # The Trainer itself goes on with a callback's state only where `restore_callback_states_from_checkpoint` is on.
        # A checkpoint of another trainer has none, and the Trainer saves only states that are there.
        kept: Any = state.stateful_callbacks  # annotated as the list of callbacks that it is made of
        self.value = kept.setdefault("RunningMean", self.state())["args"]["value"]
        self._total = self._count = 0.0

    def add(self, total: float, count: float) -> None:
        """Takes in the costs of a batch; they count from the next step on."""
        self._total += total
        self._count += count

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._count:
            mean = self._total / self._count
            self.value = mean if self.value is None else self.decay * self.value + (1 - self.decay) * mean
        self._total = self._count = 0.0

    def state(self) -> dict:
        return {"args": {"decay": self.decay, "value": self.value}, "attributes": {}}


class PolicyGradientTrainer(TaskLossTrainer):
    """REINFORCE on sampled sequences with a baseline (Welleck and Cho 2020, equations 5 and 8).

    The baseline never depends on the sample it serves; the first step of a running mean has none (0).
    Logs `candidate_cost`, `baseline` and `advantage_std`, `decoded_length` and `cut_share` of the samples, and
    `cross_entropy` where it has a weight. The logged `loss` is the surrogate whose gradient is the estimate; its value
    means little.

    Raises:
        ValueError: for a model whose tokens have other probabilities in decoding than in one pass over a sequence, as a
            trial shows, or whose experts have a capacity; for several ids as the forced first or last token, of which
            one would be drawn, not by the model.
    """

    config_class: ClassVar[type[PolicyGradientConfig]] = PolicyGradientConfig
    args: PolicyGradientConfig
    bibtex = (CITATIONS["WELLECK_2021"],)
    mean_over = "rows"
    scores_its_samples = True

    def set_up(self) -> None:
        super().set_up()
        self.candidates.check_sampling()
        self.add_callback(RunningMean(self.args.running_mean_decay))

    @property
    def reads_targets(self) -> bool:
        """In training for the cross entropy alone; for the cost they may be of any length."""
        return self.args.cross_entropy_weight > 0 or not self.model.training

    @property
    def running_mean(self) -> RunningMean:
        """The running mean of this trainer, or of the checkpoint it went on from."""
        return next(found for found in self.callback_handler.callbacks if isinstance(found, RunningMean))

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """The Trainer's; nothing is left over from a run before."""
        self.running_mean.value = None  # a checkpoint's is put back when training begins
        return super().train(*args, **kwargs)

    def check_memory(self, labels: torch.Tensor) -> None:
        self.candidates.check_scores_fit(labels, self.args.num_candidates)

    def training_terms(self, model: nn.Module, pairs: SequencePairs) -> LossTerms:
        weight, decoder = self.args.cross_entropy_weight, self.candidates
        samples, ruled_out = decoder.sample(pairs, self.args.num_candidates)
        costs = decoder.candidate_costs(pairs, samples)
        baseline = self._baseline(pairs, costs)
        log_probs, cross_entropy = decoder.score(model, pairs, samples, ruled_out, with_targets=weight > 0)
        loss = policy_gradient_loss(log_probs, costs, baseline).sum()
        rows = torch.tensor(len(pairs), device=costs.device)
        advantages = costs - baseline
        logged = {
            "candidate_cost": (costs.mean(1).sum(), rows),
            "baseline": (baseline.expand(len(pairs), -1).mean(1).sum(), rows),
            **advantage_terms(advantages, rows),
            **decoder.length_terms([ids for found in samples for ids in found], decoder.settings(pairs)),
        }
        if cross_entropy is not None:
            loss = loss + weight * cross_entropy.sum()
            logged["cross_entropy"] = (cross_entropy.sum(), rows)
        return LossTerms(loss, rows, logged)

    def _baseline(self, pairs: SequencePairs, costs: torch.Tensor) -> torch.Tensor:
        """(B, S), (B, 1) or (1, 1)."""
        if self.args.baseline == "leave_one_out":
            return leave_one_out_baseline(costs)
        if self.args.baseline == "self_critical":
            config = self.candidates.settings(pairs, do_sample=False, num_beams=1)
            greedy = [found[0] for found in self.candidates.decode(pairs, config)]
            return self.candidates.costs(pairs, list(range(len(pairs))), greedy)[:, None]
        mean = self.running_mean
        before = 0.0 if mean.value is None else mean.value
        sums = torch.stack([costs.sum(), torch.tensor(float(costs.numel()), device=costs.device)])
        mean.add(*self.accelerator.reduce(sums, "sum").tolist())
        return costs.new_full((1, 1), before)

    @classmethod
    def derived_logs(cls, averages: dict[str, float]) -> dict[str, float]:
        return with_advantage_std(super().derived_logs(averages))


def advantage_terms(advantages: torch.Tensor, rows: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What is logged of advantages, (B, S): terms that `with_advantage_std` makes a deviation of."""
    return {
        "advantage": (advantages.mean(1).sum(), rows),
        "advantage_square": (advantages.square().mean(1).sum(), rows),
    }


def with_advantage_std(averages: dict[str, float]) -> dict[str, float]:
    """Averages with the standard deviation of all advantages in place of their first two moments."""
    if "advantage" in averages:
        square = averages.pop("advantage_square") - averages.pop("advantage") ** 2
        averages["advantage_std"] = max(0.0, square) ** 0.5
    return averages
