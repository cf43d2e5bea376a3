"""Maximum-likelihood guided parameter search: `MGSConfig`, `MGSTrainer`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

import torch
from accelerate.data_loader import BatchSamplerShard
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from hf_ebm.checks import as_number, as_whole, check_choice, shown
from hf_ebm.model_modes import state_kept
from hf_ebm.objectives.mgs import (
    Candidate,
    Density,
    candidate_log_weights,
    combine_,
    draw_candidates,
    log_proposal_density,
    noise_scales,
    perturb_,
    proposal_sums,
)
from hf_ebm.publishing.cards import CITATIONS
from hf_ebm.random_state import seeded
from hf_ebm.runtime import check_fits
from hf_ebm.trainers.sequence_pairs import SequencePairs
from hf_ebm.trainers.task_loss import TaskLossConfig, TaskLossTrainer


@dataclass
class MGSConfig(TaskLossConfig):
    """Arguments of `MGSTrainer`, beside those of `TaskLossConfig`; defaults are the paper's (appendix A.4).

    Args:
        num_candidates: K.
        alpha: α, how sharply candidates are weighted by their cost; mind the unit of the cost.
        mixture: π, the probability of the component around the present parameters; 1 is random search alone, 0 the
            component around the likelihood step alone.
        noise: the scale of the noise of each weight tensor, by the mean absolute value of its gradient.
        density: `"given_noise"`, or `"full"` as the paper prints it, which in high dimension gives one candidate all
            the weight, whatever its cost; see `hf_ebm.objectives.mgs.log_proposal_density`.
        likelihood_max_grad_norm: to which the likelihood gradient is clipped. `max_grad_norm` clips the update.

    Raises:
        ValueError: for what is out of range, fp16, and sharded models.
    """

    no_sharding: ClassVar[str] = "every process perturbs whole weight tensors"
    num_candidates: int = field(default=4, metadata={"help": "Candidate directions of a step."})
    alpha: float = field(default=1.0, metadata={"help": "How sharply candidates are weighted by their cost."})
    mixture: float = field(default=0.5, metadata={"help": "Probability of the component around the parameters."})
    noise: float = field(default=1.0, metadata={"help": "Noise by the mean absolute gradient of a weight tensor."})
    density: str = field(default="given_noise", metadata={"help": "given_noise, or full as the paper prints it."})
    likelihood_max_grad_norm: float = field(default=1.0, metadata={"help": "Norm the likelihood gradient is cut to."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_candidates = as_whole("num_candidates", self.num_candidates, 1)
        check_fits(
            8 * self.num_candidates, f"num_candidates: {shown(self.num_candidates)} directions are drawn for each step"
        )
        self.mixture = as_number("mixture", self.mixture, least=0, most=1)
        for name in ("alpha", "noise", "likelihood_max_grad_norm"):
            setattr(self, name, as_number(name, getattr(self, name), above=0))
        check_choice("density", self.density, get_args(Density))
        if self.fp16:
            raise ValueError("fp16 must be False: its loss scaling has no meaning for a search direction; bf16 works")
        if self.deepspeed or self.fsdp:
            raise ValueError(f"deepspeed and fsdp must be off: {self.no_sharding}")


class MGSTrainer(TaskLossTrainer):
    """Updates by the cost-weighted mean of random directions around θ and around the likelihood step.

    Welleck and Cho 2020, algorithm 1. The direction is handed to the optimizer as minus the gradient, so clipping,
    schedules and checkpoints are the Trainer's; over an accumulated batch directions are averaged. Only parameters that
    train are perturbed, in place, and put back bit for bit.

    With several processes every process sees every batch and decodes for its share of the candidates; only their costs
    and densities travel, and the update is that of one process: more processes make a step faster, not a batch larger.

    Besides `loss` (the cross entropy of the target tokens) it logs `cost` (C(θ)), `decoded_length` and `cut_share` of
    what is decoded at θ, `candidate_cost`, `weight_std`, `effective_candidates` (1 / Σ w²), `likelihood_weight` (weight
    of the candidates around the likelihood step) and `likelihood_wins` (how often one of them has the highest weight):
    figures 1, 2, 3, 6 and 7 of the paper.

    Raises:
        ValueError: for trained weights in half precision, which small steps would not change (use bf16=True); for a
            stream as `train_dataset` with several processes.
    """

    config_class: ClassVar[type[MGSConfig]] = MGSConfig
    args: MGSConfig
    bibtex = (CITATIONS["WELLECK_2021"],)

    def set_up(self) -> None:
        super().set_up()
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:  # by accelerate's settings
            raise ValueError(f"deepspeed and fsdp must be off: {self.args.no_sharding}")

    def check_model(self, model: PreTrainedModel) -> None:
        """Sequence-to-sequence and causal models whose trained weights hold small steps."""
        super().check_model(model)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"trained weights must be in float32, got {parameter.dtype} in {name}: a small step would be "
                    "rounded away; load the model with dtype=torch.float32 and compute with bf16=True"
                )

    @property
    def needs_targets(self) -> bool:
        """Always: of the likelihood step."""
        return True

    def get_train_dataloader(self) -> DataLoader:
        """Every process gets every batch, in the same order."""
        loader = super().get_train_dataloader()
        if self.args.world_size == 1:
            return loader
        if not isinstance(loader.batch_sampler, BatchSamplerShard):
            raise ValueError("train_dataset must have a length to be searched by several processes, got a stream")
        loader.batch_sampler.num_processes, loader.batch_sampler.process_index = 1, 0
        loader.batch_sampler.even_batches = False  # the last batch is as short as with one process
        return loader

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Puts minus the direction where the optimizer looks for the gradient."""
        module = self.module
        module.train()
        begin = getattr(self.optimizer, "train", None)
        if callable(begin):  # schedule-free optimizers have modes
            begin()
        inputs = self._prepare_inputs(inputs)
        self.checked_rows(inputs)
        pairs = self.candidates.pairs(inputs)
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        accumulated = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        # One seed for all processes, so that dropout is the same as well.
        seed = self.next_batch_seed()
        with state_kept(module):
            with seeded(seed, pairs.targets[0].device), self.compute_loss_context_manager():
                loss = -pairs.log_probs(module, range(len(pairs)), pairs.targets).sum()
                loss = loss / sum(map(len, pairs.targets))
            loss.backward()

        searched, directions = [], []
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.contiguous()
                searched.append(parameter)
                directions.append(parameter.grad)
        norm = torch.nn.utils.get_total_norm(directions)
        for direction in directions:
            direction.mul_(-min(1.0, self.args.likelihood_max_grad_norm / (float(norm) + 1e-6)))
        self._search(pairs, searched, directions, seed)
        steps = self.current_gradient_accumulation_steps
        for parameter, earlier in zip(parameters, accumulated, strict=True):
            if parameter.grad is not None:
                parameter.grad.mul_(-1 / steps)
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else parameter.grad.add_(earlier)
        tokens = torch.tensor(float(sum(map(len, pairs.targets))), device=loss.device)
        self.add_terms(True, {"loss": (loss.detach() * tokens, tokens)})
        return loss.detach() / steps

    def _search(
        self, pairs: SequencePairs, parameters: list[nn.Parameter], directions: list[torch.Tensor], seed: int
    ) -> None:
        """Turns the likelihood step in `directions` into the direction of the search."""
        args = self.args
        scales = noise_scales(directions, args.noise)
        candidates = draw_candidates(seed, args.num_candidates, args.mixture)
        found = self._around(pairs, parameters, directions, scales, candidates, seed)
        costs, densities = found[:, 0], found[1:, 1]
        weights = candidate_log_weights(costs[1:], costs[0], args.alpha, densities).exp()
        combine_(directions, scales, candidates, weights.tolist())
        self._log_search(found, weights, torch.tensor([candidate.from_likelihood for candidate in candidates]))

    def _around(
        self,
        pairs: SequencePairs,
        parameters: list[nn.Parameter],
        directions: list[torch.Tensor],
        scales: list[float],
        candidates: list[Candidate],
        seed: int,
    ) -> torch.Tensor:
        """At θ (whose density is 0) and at each candidate, (K + 1, 4), float64, on the CPU.

        The columns: mean cost, log density, mean decoded length, share that was cut off.

        Each process decodes for its share. Sampling, where the decoder samples, has the same noise everywhere.
        """
        decoder, rows = self.candidates, list(range(len(pairs)))
        config = decoder.settings(pairs)
        nothing = torch.zeros((), device=self.args.device)  # of processes that don't decode at θ
        logged = dict.fromkeys(decoder.rewards.names(grouped=False), (nothing, nothing))
        density: Density = "full" if self.args.density == "full" else "given_noise"
        found = torch.zeros(len(candidates) + 1, 4, dtype=torch.float64)
        proposal = proposal_sums(directions, scales)
        weights = [parameter.detach() for parameter in parameters]
        originals = [weight.clone() for weight in weights]
        try:
            for task in range(self.args.process_index, len(found), self.args.world_size):
                if task:
                    candidate = candidates[task - 1]
                    noise = perturb_(weights, originals, directions, scales, candidate, density)
                    found[task, 1] = log_proposal_density(candidate, noise, proposal, self.args.mixture, density)
                decoded = [sequences[0] for sequences in decoder.decode(pairs, config, seed)]
                scores = decoder.scores(pairs, rows, decoded)
                found[task, 0] = scores.costs.double().mean()
                if not task:
                    logged = decoder.reward_terms(scores)
                lengths = decoder.length_terms(decoded, config).values()
                found[task, 2:] = torch.stack([total / count for total, count in lengths])
        finally:
            for weight, original in zip(weights, originals, strict=True):
                weight.copy_(original)
        self.add_terms(True, logged)
        return self.accelerator.reduce(found.to(self.args.device), "sum").cpu()

    def _log_search(self, found: torch.Tensor, weights: torch.Tensor, from_likelihood: torch.Tensor) -> None:
        values = {
            "cost": found[0, 0],
            "decoded_length": found[0, 2],
            "cut_share": found[0, 3],
            "candidate_cost": found[1:, 0].mean(),
            "weight_std": weights.std(correction=0),
            "effective_candidates": 1 / weights.square().sum(),
            "likelihood_weight": weights[from_likelihood].sum(),
            "likelihood_wins": from_likelihood[weights.argmax()],
        }
        self.add_terms(True, {name: (value.to(self.args.device), 1) for name, value in values.items()})
