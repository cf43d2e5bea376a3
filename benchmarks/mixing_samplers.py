"""What `benchmarks.mixing` samples with: `SAMPLERS`, an entry each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.gradient_samplers import DiscreteLangevin, GibbsWithGradients, GradientProposal, state_at, step
from benchmarks.loops import CarefulLoop
from benchmarks.mixing_targets import LatticeTarget, Target
from hf_ebm.sampling.replicas import ReplicaReport


class Draws(NamedTuple):
    """What a sampler has made: C chains, D draws each, or C runs of D weighted particles, of L free positions.

    Attributes:
        energies: (C, D) float64.
        states: (C, D, L) tokens at the free positions.
        changed: tokens changed by accepted proposals, those between two draws included.
        rows: masked rows run.
        log_weights: (C, D) of particles.
        replicas: what the chains' replicas did, if they have any.
    """

    energies: Tensor
    states: Tensor
    changed: int
    rows: int
    log_weights: Tensor | None = None
    replicas: ReplicaReport | None = None


# `(target, start (C, T), rows, seed) -> draws`: runs chains from a start until about so many rows are spent.
Sampler = Callable[[Target, Tensor, int, int], Draws]


class LatticeLoop(CarefulLoop):
    """The careful loop on a lattice: a site's new state is drawn from all, and a row is an energy."""

    def __init__(self, target: LatticeTarget, seed: int):
        super().__init__(None, 0, target.columns, torch.ones(len(target.words), dtype=torch.bool), seed)
        self.target = target

    def logits(self, ids: Tensor) -> Tensor:
        return torch.zeros(*ids.shape, len(self.target.words))

    def energy(self, ids: Tensor) -> Tensor:
        self.rows += len(ids)
        return self.target.lattice(ids)


def careful_loop(target: Target, start: Tensor, rows: int, seed: int) -> Draws:
    """Single sites as people write them: see `benchmarks.loops`."""
    if isinstance(target, LatticeTarget):
        loop = LatticeLoop(target, seed)
    else:
        loop = CarefulLoop(target.model.mlm, target.model.config.mask_token_id, target.columns, target.support, seed)
    energies, states, changed = loop.run(start, rows)
    return Draws(energies, states[..., target.columns], changed, loop.rows)


def chains(**settings) -> Sampler:
    """`generate` with these settings; a draw is an epoch."""

    def sample(target: Target, start: Tensor, rows: int, seed: int) -> Draws:
        states: list[Tensor] = []
        most = max(8, rows // len(start))  # where next to nothing costs rows
        with target.counted() as count:

            def spent(ids: Tensor, scores: object) -> Tensor:
                states.append(ids[:, target.columns].clone())
                return torch.full((len(ids),), count["rows"] >= rows or len(states) >= most)

            given = {**target.inputs(start), **settings, **target.settings}
            out = target.model.generate(num_epochs=100_000, seed=seed, stopping_criteria=[spent], **given)
        changed = int(out.trace.tokens_changed.sum())
        return Draws(out.trace.energy, torch.stack(states, 1), changed, count["rows"], replicas=out.replicas)

    return sample


def by_gradients(proposal_of: Callable[[], GradientProposal], every: Callable[[int], int]) -> Sampler:
    """A sampler that reads gradients, whose rows count twice: forward and back.

    A step size is fitted to an acceptance rate of 0.574 over the first quarter of the rows, and fixed then.

    Args:
        every: of the number of free positions, after how many steps a draw is taken.
    """

    def sample(target: Target, start: Tensor, rows: int, seed: int) -> Draws:
        generator, proposal = torch.Generator().manual_seed(seed), proposal_of()
        length = len(target.columns)
        each = 2 * target.rows_each * len(start)
        state = state_at(torch.searchsorted(target.words, start[:, target.columns]), target.energy_and_gradient)
        energies, states, changed, count = [], [], 0, each
        while count < rows:
            for _ in range(every(length)):
                new, accepted = step(state, target.energy_and_gradient, proposal, generator)
                changed += int((new.tokens != state.tokens).sum())
                state, count = new, count + each
                if isinstance(proposal, DiscreteLangevin) and count < rows / 4:
                    proposal.step *= math.exp(float(accepted.double().mean()) - 0.574)
            energies.append(state.energy)
            states.append(target.words[state.tokens])
        return Draws(torch.stack(energies, 1), torch.stack(states, 1), changed, count)

    return sample


def particles(number: int, **settings) -> Sampler:
    """`sample_smc` with so many particles a run; a run after the other, along the ladder of the first, at least two."""
    given_ladder = settings.pop("ladder", None)

    def sample(target: Target, start: Tensor, rows: int, seed: int) -> Draws:
        ladder, runs = given_ladder, []
        with target.counted() as count:
            while count["rows"] < rows or len(runs) < 2:
                given = {"seed": seed, "run_keys": [(0, len(runs))], **settings, **target.settings}
                runs.append(target.model.sample_smc(target.prompt, num_particles=number, ladder=ladder, **given))
                ladder = runs[0].levels.beta[0].tolist()
        energies, weights = (torch.cat([getattr(run, name) for run in runs]) for name in ("energies", "log_weights"))
        states = torch.stack([run.sequences[:, target.columns] for run in runs])
        return Draws(energies, states, 0, count["rows"], weights)

    return sample


_BLOCKS = {"block_fill": "sequential", "block_layout": "contiguous"}
_PAIRS = {"block_size": 2, "delayed_acceptance": 1, **_BLOCKS}
_LADDER = [1.0, 1.25, 1.6, 2.1]

# Every sampler there is, the one that others are compared with first. An entry is all that a new one needs.
SAMPLERS: dict[str, Sampler] = {
    "careful loop": careful_loop,
    "single site": chains(),
    "single site, delayed w=1": chains(delayed_acceptance=1),
    "single site, exclude_current": chains(exclude_current=True),
    "pairs": chains(**_PAIRS),
    "pairs, not delayed": chains(block_size=2, **_BLOCKS),
    "3 scattered, parallel": chains(block_size=3),
    "3 contiguous": chains(block_size=3, delayed_acceptance=1, **_BLOCKS),
    "1 and 3": chains(block_size=[1, 3], delayed_acceptance=1, **_BLOCKS),
    "2, 4 and 6": chains(block_size=[2, 4, 6], delayed_acceptance=1, **_BLOCKS),
    "single site, 4 replicas": chains(replica_temperatures=_LADDER),
    "pairs, 4 replicas": chains(replica_temperatures=_LADDER, **_PAIRS),
    "pairs, 4 replicas to 1.5": chains(replica_temperatures=[1.0, 1.14, 1.31, 1.5], **_PAIRS),
    "pairs, 4 replicas, fitted": chains(replica_temperatures=4, burn_in=30, **_PAIRS),
    "SMC of 16": particles(16, **_PAIRS),
    "SMC of 64": particles(64, **_PAIRS),
    # No annealing: as many draws of the fill as cost about what all sequences of four positions of 16 words do.
    "30,000 weighted fills": particles(30_000, ladder=[1.0], num_moves=0),
    "Gibbs with gradients": by_gradients(GibbsWithGradients, every=lambda length: length),
    "discrete Langevin": by_gradients(lambda: DiscreteLangevin(0.2), every=lambda length: 1),
}
