"""A run of chains: what it keeps, which is all that it needs to go on; what `generate` returns of it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from transformers.utils import ModelOutput, logging

from hf_ebm.model_modes import model_output
from hf_ebm.renamed import renamed_attributes, warn_of_rename
from hf_ebm.sampling.convergence import import_arviz, r_hats_of
from hf_ebm.sampling.replicas import ReplicaReport, Replicas
from hf_ebm.sampling.report import summary
from hf_ebm.sampling.target import ChainState, Target
from hf_ebm.scoring.rows import Context, attended_mask

if TYPE_CHECKING:
    from hf_ebm.sampling.configuration import ResolvedChainConfig
    from hf_ebm.sampling.sampler import ChainKey

    # Transformers demands what the code of a checkpoint imports, but for what it tries to import.
    try:  # noqa: SIM105
        from arviz import InferenceData
    except ImportError:
        pass

logger = logging.get_logger(__name__)


class Tally(NamedTuple):
    """Counts of the epoch that is going on, (C,) each, float64: see `Trace`; `proposed` are all proposals."""

    accepted: Tensor
    novel: Tensor
    tokens_changed: Tensor
    proposed: Tensor

    @classmethod
    def zeros(cls, chains: int) -> Tally:
        """Of an epoch that has not begun."""
        return cls(*(torch.zeros(chains, dtype=torch.float64) for _ in cls._fields))


class Trace(NamedTuple):
    """Per chain and epoch, each (C, epochs).

    Attributes:
        energy: energy in nats after the epoch (float64).
        acceptance_rate: share of the epoch's proposals that were accepted, no-ops included.
        novel_rate: share of them that were accepted and different from the state before.
        tokens_changed: tokens changed by accepted proposals, summed over the epoch.
        block_size: block size.
        temperature: target temperature.
    """

    energy: Tensor
    acceptance_rate: Tensor
    novel_rate: Tensor
    tokens_changed: Tensor
    block_size: Tensor
    temperature: Tensor

    @classmethod
    def empty(cls, chains: int, epochs: int) -> Trace:
        """Room for `epochs` epochs, all NaN, on the CPU."""
        return cls(*(torch.full((chains, epochs), torch.nan, dtype=torch.float64) for _ in cls._fields))

    def first(self, epochs: int) -> Trace:
        """The trace of the first `epochs` epochs."""
        return Trace(*(values[:, :epochs] for values in self))


@dataclass(frozen=True)
class ChainRun:
    """Everything a run has computed so far, on the CPU but for `context`, which is where the model is.

    Attributes:
        state: current state of all chains.
        epoch: epochs done.
        step: steps done of the epoch that is going on.
        tally: what is counted of that epoch.
        kept: samples kept so far.
        trace: what happened, (C, epochs done or more); what lies beyond is room for epochs to come.
        samples: (C, kept or more, T) tokens kept.
        sample_energies: (C, kept or more) their energies.
        num_masked_rows: masked rows run.
        num_rows_asked: rows whose results were needed, though some were kept from before and not run again: as many
            after an interruption as without one. Each visit of a chain, or replica, counts as one at least.
        run_config: what the run is of: settings, seed, chain keys; a state only continues the same one.
        start, stop, free: the sequences' bounds (C,) and free positions (C, T).
        context: what the model reads of each chain beside its tokens.
        begun_at: (C, T) tokens of the prompts, where changes are counted from them.
        replicas: where chains have R of them; states, counts, bounds and context are then of R C rows, replica by
            replica, trace and samples of the coldest ones.
    """

    state: ChainState
    epoch: int
    step: int
    tally: Tally
    kept: int
    trace: Trace
    samples: Tensor
    sample_energies: Tensor
    num_masked_rows: int
    run_config: dict
    start: Tensor
    stop: Tensor
    free: Tensor
    context: Context | None = None
    begun_at: Tensor | None = None
    replicas: Replicas | None = None
    num_rows_asked: int = 0

    @classmethod
    def begin(
        cls,
        state: ChainState,
        run_config: dict,
        target: Target,
        begun_at: Tensor | None = None,
        replicas: Replicas | None = None,
    ) -> Self:
        """A run that has done nothing yet."""
        rows, length = state.ids.shape
        chains = rows if replicas is None else len(replicas.level)
        samples = torch.empty(chains, 0, length, dtype=torch.long)
        energies = torch.empty(chains, 0, dtype=torch.float64)
        where = (target.start, target.stop, target.free, target.context)
        done = (0, 0, Tally.zeros(rows), 0, Trace.empty(chains, 0), samples, energies, 0)
        return cls(state, *done, run_config, *where, begun_at, replicas)

    @property
    def recipe(self) -> dict:
        """The old name of `run_config`."""
        warn_of_rename("recipe", "run_config")
        return self.run_config

    @property
    def cold_rows(self) -> Tensor:
        """(C,) the rows at the chains' own temperature: all, but for replicas."""
        return torch.arange(len(self.state.ids)) if self.replicas is None else self.replicas.rows[:, 0]

    @property
    def cold(self) -> ChainState:
        """The state of the chains at their own temperature, of C rows."""
        return self.state if self.replicas is None else ChainState(*(part[self.cold_rows] for part in self.state))

    @property
    def has_begun(self) -> bool:
        """Whether the chains are at a state whose energies have been evaluated."""
        return not bool(self.state.extra_energy.isnan().any())

    def to(self, device: torch.device) -> Self:
        """The run of a model on a device."""
        return replace(self, context=self.context and self.context.to(device))

    def with_room(self, epochs: int, samples: int) -> Self:
        """The run with room for so many epochs and kept samples in all."""
        chains, _, length = self.samples.shape
        more_samples = max(0, samples - self.samples.shape[1])
        room = Trace.empty(chains, max(0, epochs - self.trace.energy.shape[1]))
        return replace(
            self,
            trace=Trace(*(torch.cat(pair, 1) for pair in zip(self.trace, room, strict=True))),
            samples=torch.cat([self.samples, self.samples.new_zeros(chains, more_samples, length)], 1),
            sample_energies=torch.cat(
                [self.sample_energies, self.sample_energies.new_full((chains, more_samples), torch.nan)], 1
            ),
            replicas=self.replicas and self.replicas.with_room(epochs),
        )

    def parts(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What has been computed, as contiguous tensors on the CPU and as plain values, by name; without any room."""
        tensors = {f"trace.{name}": value for name, value in self.trace.first(self.epoch)._asdict().items()}
        tensors |= {f"state.{name}": value for name, value in self.state._asdict().items()}
        tensors |= {f"tally.{name}": value for name, value in self.tally._asdict().items()}
        tensors |= {name: getattr(self, name) for name in ("start", "stop", "free")}
        tensors |= {name: getattr(self, name)[:, : self.kept] for name in ("samples", "sample_energies")}
        if self.context is not None:
            tensors |= _context_tensors(self.context)
        if self.begun_at is not None:
            tensors["begun_at"] = self.begun_at
        if self.replicas is not None:
            own = self.replicas.first(self.epoch)._asdict()
            tensors |= {f"replicas.{name}": value for name, value in own.items()}
        names = ("epoch", "step", "kept", "num_masked_rows", "num_rows_asked", "run_config")
        values = {name: getattr(self, name) for name in names}
        return {name: value.cpu().contiguous() for name, value in tensors.items()}, values

    @classmethod
    def of_parts(cls, tensors: dict[str, Tensor], values: dict[str, Any]) -> Self:
        """The run that `parts` are of. Raises `KeyError` or `TypeError` where some are missing."""
        parts: dict[str, Any] = {
            "state": ChainState(*(tensors[f"state.{name}"] for name in ChainState._fields)),
            "tally": Tally(*(tensors[f"tally.{name}"] for name in Tally._fields)),
            "trace": Trace(*(tensors[f"trace.{name}"] for name in Trace._fields)),
            "context": _context_of(tensors),
        }
        if "replicas.level" in tensors:
            parts["replicas"] = Replicas(*(tensors[f"replicas.{name}"] for name in Replicas._fields))
        given = {**values, **tensors}
        return cls(**parts, **{field.name: given[field.name] for field in fields(cls) if field.name in given})


def _context_tensors(context: Context) -> dict[str, Tensor]:
    tensors = {f"context.by_token.{name}": value for name, value in context.by_token.items()}
    tensors |= {f"context.by_sequence.{name}": value for name, value in context.by_sequence.items()}
    encoder = {"context.states": context.states, "context.lengths": context.lengths}
    return tensors | {name: value for name, value in encoder.items() if value is not None}


def _context_of(tensors: dict[str, Tensor]) -> Context | None:
    def inputs(kind: str) -> dict[str, Tensor]:
        return {name.removeprefix(kind): value for name, value in tensors.items() if name.startswith(kind)}

    if not inputs("context."):
        return None
    by_token, by_sequence = inputs("context.by_token."), inputs("context.by_sequence.")
    return Context(by_token, by_sequence, tensors.get("context.states"), tensors.get("context.lengths"))


@model_output
class ChainGenerationOutput(ModelOutput):
    """C chains and what is known about them, all on the CPU: those of the first prompt, then those of the second, …

    Args:
        sequences: (C, T) tokens after the last epoch, padded on the right with the pad token.
        attention_mask: (C, T), 0 at padding.
        samples: (C, kept, T) tokens kept after burn-in and thinning.
        energies: (C, kept) their energies in nats, extra energies included (float64).
        satisfied: (C, kept) bool, whether they meet the constraints: extra energies that are infinite where they don't.
        trace: per chain and epoch, see `Trace`.
        kept_epochs: numbers of the epochs the samples were kept after.
        prompt_indices, chain_indices: (C,) prompt of each chain and its number among that prompt's chains.
        mean_log_probabilities: (C,) with a decoder, mean log probability of the filled tokens (float64); else `None`.
        num_masked_rows: masked rows run through the masked language model.
        seed: the seed used.
        run: the run itself; `run.save(folder)` writes a state that `generate(resume_from=folder)` goes on from.
        replicas: with `replica_temperatures`, what the replicas did, see `ReplicaReport`; else `None`.
    """

    sequences: Tensor
    attention_mask: Tensor
    samples: Tensor
    energies: Tensor
    satisfied: Tensor
    trace: Trace
    kept_epochs: tuple[int, ...]
    prompt_indices: Tensor
    chain_indices: Tensor
    mean_log_probabilities: Tensor | None
    num_masked_rows: int
    seed: int
    run: ChainRun
    replicas: ReplicaReport | None

    summary = summary

    def to_inference_data(self) -> InferenceData:
        """The kept energies as `arviz.InferenceData`: variable `energy` with dimensions (chain, draw, prompt).

        `arviz.rhat(data)` and `arviz.ess(data, method="bulk")`, or `"tail"`, then diagnose each prompt; see `summary`.

        Raises:
            ValueError: if prompts have different numbers of chains, or nothing was kept.
        """
        prompts, counts = self.prompt_indices.unique(return_counts=True)
        if self.energies.shape[1] == 0 or len(counts.unique()) != 1:
            raise ValueError("to_inference_data needs kept samples and the same number of chains for every prompt")
        kept = torch.tensor(self.kept_epochs)

        def by_prompt(values: Tensor) -> np.ndarray:
            chains = [values[self.prompt_indices == prompt] for prompt in prompts]
            return torch.stack(chains, -1).numpy()  # (chain, draw, prompt)

        stats = {name: by_prompt(getattr(self.trace, name)[:, kept]) for name in ("acceptance_rate", "novel_rate")}
        names = ("energy", *stats)
        return import_arviz().from_dict(
            posterior={"energy": by_prompt(self.energies)},
            sample_stats=stats,
            coords={"prompt": prompts.tolist()},
            dims={name: ["prompt"] for name in names},
        )


def output_of(
    run: ChainRun, config: ResolvedChainConfig, keys: list[ChainKey], mean_log_probabilities: Tensor | None
) -> ChainGenerationOutput:
    """What a run with these settings and chains returns; with a decoder also its mean log probabilities (C,)."""
    ids, rows, fixed = run.cold.ids, run.cold_rows, max(config.burn_in, config.accept_all_epochs)
    attended = attended_mask(run.start[rows], run.stop[rows], ids.shape[1])
    kept = tuple(range(config.burn_in, run.epoch, config.thinning)) if mean_log_probabilities is None else (0,)
    return ChainGenerationOutput(
        sequences=ids.to("cpu", copy=True),
        attention_mask=attended.long(),
        samples=run.samples[:, : run.kept],
        energies=run.sample_energies[:, : run.kept],
        satisfied=run.sample_energies[:, : run.kept] < torch.inf,
        trace=run.trace.first(run.epoch),
        kept_epochs=kept,
        prompt_indices=torch.tensor([key.prompt for key in keys]),
        chain_indices=torch.tensor([key.chain for key in keys]),
        mean_log_probabilities=mean_log_probabilities,
        num_masked_rows=run.num_masked_rows,
        seed=config.seed,
        run=run,
        replicas=run.replicas and ReplicaReport.of(run.replicas.first(run.epoch), min(fixed, run.epoch)),
    )


def warn_of_poor_samples(output: ChainGenerationOutput, config: ResolvedChainConfig) -> None:
    """Warns where there are no samples, some that a constraint forbids, or where `target_rhat` was missed."""
    epochs = output.run.epoch
    if not output.samples.shape[1]:
        logger.warning(f"No sample was kept: the run ended after epoch {epochs}, burn_in is {config.burn_in}.")
    if config.target_rhat is not None:
        accepted = output.trace.acceptance_rate[:, torch.tensor(output.kept_epochs, dtype=torch.long)]
        found = r_hats_of(output.samples, output.energies, accepted, output.prompt_indices)
        missed = [(own, prompt) for prompt, own in found.items() if own > config.target_rhat]
        if missed:
            worst, prompt = max(missed)
            logger.warning(
                f"target_rhat={config.target_rhat:g} was missed by {worst - config.target_rhat:.3f}: R-hat is "
                f"{worst:.3f} in prompt {prompt} after {epochs} epochs and {output.run.num_rows_asked} rows, of "
                f"max_rows={config.max_rows}. With hf_ebm installed, `print(out.summary())` says more."
            )
    chains = (~output.satisfied).any(1)
    if bool(chains.any()):
        logger.warning(
            f"{int(chains.sum())} of {len(chains)} chains have samples of infinite energy, which the constraints among "
            "extra_energies forbid: they have not met them by then. See `satisfied` in the output; more epochs, a "
            "start that meets them or a finite penalty may help."
        )


__getattr__ = renamed_attributes(
    __name__,
    {name: f"hf_ebm.sampling.convergence:{name}" for name in ("energy_diagnostics", "EnergyDiagnostics")},
)
