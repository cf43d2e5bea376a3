"""From what callers of `sample_smc` and `log_partition` hand over to runs of particles, of models and other targets."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_ebm.checks import as_number, as_whole, listed, number, shown
from hf_ebm.models.energy.chains import Chains, checked_keys, constrained
from hf_ebm.random_state import stream_seed
from hf_ebm.runtime import check_fits
from hf_ebm.sampling.configuration import ChainGenerationConfig
from hf_ebm.sampling.fill_estimates import LogPartition, estimated_log_partition
from hf_ebm.sampling.kernels import KERNELS
from hf_ebm.sampling.proposals import proposal_of
from hf_ebm.sampling.sampler import ChainKey
from hf_ebm.sampling.smc import Annealing, adaptive
from hf_ebm.sampling.target import Target
from hf_ebm.scoring.rows import BadLogitsError

if TYPE_CHECKING:
    from hf_ebm.sampling.configuration import ResolvedChainConfig

# Bytes that a particle takes at least: its random stream's.
_STREAM_BYTES = 1000
# Number of the seed of runs that choose ladders.
_PILOT = 0
# Settings of chains that annealed particles have no use for.
_OF_CHAINS_ALONE = (
    "decoder", "num_chains", "num_epochs", "burn_in", "thinning", "accept_all_epochs", "final_block_size",
    "energy_temperature_decay", "min_energy_temperature", "warm_start", "replica_temperatures",
    "target_rhat", "max_rows",
)  # fmt: skip
# Settings of a model that count: what may stand where, and the seed.
_OF_MODELS = (
    "seed", "lengths", "energy_temperature", "suppress_tokens", "allowed_tokens", "protected_positions", "avoid",
    "min_distance",
)  # fmt: skip


@dataclass(frozen=True)
class AskedParticles:
    """N particles for each of R runs, checked.

    Attributes:
        config: complete settings.
        num_prompts: how many there are.
        keys: prompt and number of each run.
        num_particles: N.
        num_moves: epochs of the kernel at each level.
        length: of the longest sequence, in tokens.
        chains_of: `(settings, chain keys) -> chains`.
        target_of: `(chains, settings) -> target`, without constraints.
    """

    config: ResolvedChainConfig
    num_prompts: int
    keys: list[ChainKey]
    num_particles: int
    num_moves: int
    length: int
    chains_of: Callable[[ResolvedChainConfig, list[tuple[int, int]]], Chains]
    target_of: Callable[[Chains, ResolvedChainConfig], Target]

    @classmethod
    def of(
        cls,
        config: ResolvedChainConfig,
        prompts: int,
        length: int,
        chains_of: Callable[[ResolvedChainConfig, list[tuple[int, int]]], Chains],
        target_of: Callable[[Chains, ResolvedChainConfig], Target],
        num_particles: int,
        num_runs: int,
        run_keys: Sequence[tuple[int, int]] | None,
        num_moves: int,
    ) -> AskedParticles:
        """Particles of some of the prompts' runs.

        Raises:
            ValueError: for numbers out of range, more particles than there is memory for, and unknown runs.
        """
        num_particles = as_whole("num_particles", num_particles, 2)
        num_runs, num_moves = as_whole("num_runs", num_runs, 1), as_whole("num_moves", num_moves, 0)
        particles = num_particles * (prompts * num_runs if run_keys is None else len(listed(run_keys) or []))
        check_fits(
            particles * (_STREAM_BYTES + 8 * length),
            f"num_particles, num_runs and lengths: {shown(particles)} particles of {shown(length)} tokens take",
        )
        keys = checked_keys(run_keys, prompts, num_runs, "run")
        return cls(config, prompts, keys, num_particles, num_moves, length, chains_of, target_of)

    def prepared(self, keys: list[ChainKey], seed: int) -> tuple[Annealing, Chains]:
        """The annealing of some runs with a seed of their own, and the chains that are their particles."""
        config, own = copy.copy(self.config), range(self.num_particles)
        config.seed = seed
        chain_keys = [(prompt, run * self.num_particles + number) for prompt, run in keys for number in own]
        chains = self.chains_of(config, chain_keys)
        target = constrained(self.target_of(chains, config), config, chains.keys, chains.ids)
        proposal = proposal_of(config, target.support)
        return Annealing(keys, self.num_particles, config, target, proposal, self.num_moves), chains

    def ladders(self, target_cess: float, ladder: Sequence[float] | None) -> tuple[Tensor, int]:
        """The β of each run (R, S), and the masked rows that it took to find them.

        Without a given ladder a pilot run for each prompt, which is used for nothing else, finds them: chosen by the
        particles that they weigh, β would favour small estimates.
        """
        schedule, given = adaptive(as_number("target_cess", target_cess, above=0, below=1)), _ladder(ladder)
        if given is not None:
            return given.expand(len(self.keys), -1), 0
        pilots = [ChainKey(prompt, 0) for prompt in dict.fromkeys(key.prompt for key in self.keys)]
        annealing, chains = self.prepared(pilots, stream_seed(self.config.seed, _PILOT))
        with named_rows(annealing):
            _, levels = annealing.annealed(annealing.filled(chains.ids), 0.0, 1.0, schedule)
        found = levels.beta.where(levels.beta.isfinite(), 1.0)  # a run that is done stays at 1
        found = found if found.shape[1] else torch.ones(len(pilots), 1, dtype=torch.float64)
        number = {pilot.prompt: row for row, pilot in enumerate(pilots)}
        return found[[number[key.prompt] for key in self.keys]], annealing.target.runner.num_rows


def settings_of_particles(
    asked: ChainGenerationConfig, base: ChainGenerationConfig, overrides: dict[str, Any], has_prompts: bool
) -> ResolvedChainConfig:
    """Complete settings, those of chains alone at their defaults. Raises `ValueError` for such that are asked for.

    Args:
        asked: the caller's, over which `overrides` go.
        base: those of the model, of which those count that say what may stand where: how its chains move, their blocks
            and their kernel are nothing that particles were asked for.
    """
    own = asked.settings() | {name: value for name, value in overrides.items() if value is not None}
    idle = [name for name in _OF_CHAINS_ALONE if name in own]
    if idle:
        raise ValueError(f"{idle[0]} has no effect with annealed particles; leave it unset")
    if has_prompts and "lengths" in own:
        raise ValueError("lengths was given together with input_ids; it is for sampling from nothing")
    below = {name: value for name, value in base.settings().items() if name in _OF_MODELS}
    config = asked.resolved(ChainGenerationConfig(**below), overrides)
    if not KERNELS[config.kernel].leaves_invariant:
        raise ValueError(f"kernel {config.kernel!r} samples no stated target, so there is nothing to anneal to")
    if config.max_changes is not None:
        raise ValueError("max_changes counts from where a chain starts; particles fill all free positions anew")
    if has_prompts:
        config.lengths = None
    if isinstance(config.lengths, dict):
        raise ValueError("lengths: those that are drawn have no one Z; give a list, with a prompt for each length")
    config.num_epochs = 1  # of what is kept
    config.draw_seed()
    return config


def _ladder(ladder: object) -> Tensor | None:
    """Inverse temperatures (S,), float64. Raises `ValueError` unless they rise from above 0 to 1, and 1/β fall."""
    if ladder is None:
        return None
    numbers = [number(own) for own in listed(ladder) or []]
    found = [own for own in numbers if own is not None]
    temperatures = [1 / own if own > 0 else math.inf for own in found]
    rising = all(one > other for one, other in zip([math.inf, *temperatures], temperatures, strict=False))
    if not found or len(found) < len(numbers) or not rising or found[-1] != 1:
        raise ValueError(
            "ladder must be rising numbers above 0, the last of them 1, of different finite temperatures 1/β, got "
            f"{shown(ladder)}"
        )
    return torch.tensor(found, dtype=torch.float64)


def by_prompt(logs: Tensor, keys: Sequence[ChainKey], num_prompts: int) -> LogPartition:
    """Of each prompt the logarithm of the mean of `exp(logs)` (R,) over its runs, and its standard error.

    Both are NaN for a prompt without any.
    """
    found = LogPartition(*torch.full((2, num_prompts), torch.nan, dtype=torch.float64))
    prompts = torch.tensor([key.prompt for key in keys])
    for prompt in prompts.unique():
        for values, value in zip(found, estimated_log_partition(logs[prompts == prompt]), strict=True):
            values[prompt] = value
    return found


@contextmanager
def named_rows(annealing: Annealing) -> Iterator[None]:
    """Errors of logits say whose they are."""
    try:
        yield
    except BadLogitsError as error:
        key = annealing.keys[error.row // annealing.num_particles]
        raise BadLogitsError(error.row, error.position, f"prompt {key.prompt}, run {key.chain}: row") from error
