"""One-step transition matrices, computed exactly from the kernel's own code, satisfy detailed balance.

The random numbers of a step are inputs of the kernel. Scanning the one that draws a token finds every proposal, and its
probability is what the kernel says it is (they must sum to 1); bisecting the one that decides finds the acceptance
probability to 2.4e-7. Nothing is sampled.
"""

from functools import cache

import pytest
import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from hf_ebm import ChainGenerationConfig
from hf_ebm.exact import enumerate_distribution
from hf_ebm.models.energy.chains import constrained
from hf_ebm.sampling import kernels
from hf_ebm.sampling.kernels import StepBlock, WorkSaving, metropolis_hastings
from hf_ebm.sampling.proposals import BlockProposal, ProposalDistribution
from hf_ebm.sampling.sampler import ChainKey
from hf_ebm.sampling.target import Target
from hf_ebm.scoring.masked_batches import MaskedBatchRunner
from tests.conftest import tiny_energy_model
from tests.sampling.oracle import exact_target, total_variation_limit

pytestmark = pytest.mark.slow

WORDS = [5, 6, 7]
LENGTH = 3
GRID = 40  # a token of probability below about 1/40 would be missed, and the sum to 1 would then fail
BISECTIONS = 22
START = torch.tensor([[1, 5, 6, 6, 2]])
# Settings, and what they say of a sequence.
CONSTRAINTS = {
    "max_changes": ({"max_changes": 2}, lambda ids: sum(ids != START[0]) <= 2),
    "allowed_tokens": (
        {"allowed_tokens": {1: [5, 7], 3: [6, 5]}}, lambda ids: int(ids[1]) != 6 and int(ids[3]) != 7,
    ),
    "avoid": (
        {"avoid": [[1, 5, 6, 7, 2], [1, 6, 6, 6, 2], [5, 6]], "min_distance": 2},
        lambda ids: all(sum(ids != torch.tensor(other)) >= 2 for other in ([1, 5, 6, 7, 2], [1, 6, 6, 6, 2])),
    ),
}  # fmt: skip


@cache
def exact_for(energy: str, temperature: float, keeps: str | None):
    model = tiny_energy_model(energy, vocab_size=8, dtype=torch.float64, seed=5, scale=0.3)
    extra = None
    if keeps:
        extra = lambda ids: torch.tensor([0.0 if CONSTRAINTS[keeps][1](row) else torch.inf for row in ids])  # noqa: E731
    return model, exact_target(model, WORDS, LENGTH, temperature=temperature, extra=extra)


class Kernel:
    """A Metropolis–Hastings kernel on the 27 states of a tiny model, every state being a chain."""

    def __init__(
        self, energy, fill="parallel", temperature=1.0, window=None, warp=(), epsilon=0.0, exclude=False, keeps=None
    ):
        self.temperature, self.window = temperature, window
        self.settings, _ = CONSTRAINTS[keeps] if keeps else ({}, None)
        self.model, self.exact = exact_for(energy, temperature, keeps)
        self.states = torch.nn.functional.pad(self.exact.sequences, (1, 1), value=0)
        self.states[:, 0], self.states[:, -1] = 1, 2
        support = torch.zeros(8, dtype=torch.bool)
        support[WORDS] = True
        self.support = support
        self.proposal = BlockProposal(ProposalDistribution(LogitsProcessorList(warp), support, epsilon, exclude), fill)

    def target(self, count: int) -> Target:
        free = torch.zeros(count, LENGTH + 2, dtype=torch.bool)
        free[:, 1:-1] = True
        start = torch.zeros(count, dtype=torch.long)
        runner = self.model.masked_batch_runner()
        target = Target(runner, self.model.config.energy, free, start, start + LENGTH + 2, self.support)
        config = ChainGenerationConfig().resolved(ChainGenerationConfig(), self.settings)
        return constrained(target, config, [ChainKey(0, 0)] * count, START.expand(count, -1))

    @torch.no_grad()
    def moves(self, block: list[int]) -> dict[tuple[int, int], tuple[float, torch.Tensor]]:
        """`(from state, to state)`: probability of proposing it, numbers that draw it; of every possible move.

        Place by place: of the numbers that draw a token there, the first, as those of later places don't matter yet;
        all, where the later ones decide whether the whole is refused.
        """
        ticks = ((torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID).tolist()
        found: list[tuple] = [(number, ()) for number in range(len(self.states))]
        for place, position in enumerate(block):
            tried = [(number, (*own, tick)) for number, own in found for tick in ticks]
            origin = torch.tensor([number for number, _ in tried])
            draws = torch.tensor([[*own, *[0.5] * (len(block) - place - 1)] for _, own in tried], dtype=torch.float64)
            positions = torch.tensor(block).repeat(len(tried), 1)
            size = torch.full((len(tried),), len(block))
            moves = self.proposal(self.states[origin], positions, size, draws, self.target(len(tried)))
            first: dict[tuple, int] = {}
            for row, ((number, own), token) in enumerate(zip(tried, moves.ids[:, position].tolist(), strict=True)):
                first.setdefault((number, own if self.settings else own[:-1], token), row)
            found = [tried[row] for row in first.values()]
        rows = list(first.values())
        goal = self.exact.index(moves.ids[rows, 1:-1]).tolist()
        shares = zip(moves.log_forward[rows].exp().tolist(), draws[rows], strict=True)
        drawn: dict[tuple[int, int], tuple[float, torch.Tensor]] = {}
        for pair, share in zip(zip(origin[rows].tolist(), goal, strict=True), shares, strict=True):
            drawn.setdefault(pair, share)
        for number in range(len(self.states)) if self.settings else ():
            # What is refused leaves a chain where it is, whatever was drawn.
            away = sum(share for (one, to), (share, _) in drawn.items() if one == number != to)
            drawn[number, number] = (1 - away, draws[0])
            assert away < 1 + 1e-9
        return drawn

    @torch.no_grad()
    def transition_matrix(self, block: list[int], step=metropolis_hastings, **options) -> torch.Tensor:
        moves = self.moves(block)
        origin = torch.tensor([a for a, _ in moves])
        goal = torch.tensor([b for _, b in moves])
        probability = torch.tensor([p for p, _ in moves.values()], dtype=torch.float64)
        draws = torch.stack([u for _, u in moves.values()])
        total = torch.zeros(len(self.states), dtype=torch.float64).index_add(0, origin, probability)
        torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-9)

        target = self.target(len(origin))
        start = target.state(self.states[origin])
        positions = torch.tensor(block).repeat(len(origin), 1)
        size = torch.full((len(origin),), len(block))

        def accepts(accept: torch.Tensor) -> torch.Tensor:
            given = StepBlock(positions, size, draws, accept)
            new, _ = step(start, given, target, self.proposal, self.temperature, self.window, **options)
            return (new.ids == self.states[goal]).all(1)

        # Stage by stage: the other stage's number is 0, with which it accepts whatever can be accepted at all.
        acceptance = torch.ones_like(probability)
        for stage in (0, 1) if self.window is not None else (0,):
            low, high = torch.zeros_like(probability), torch.ones_like(probability)
            for _ in range(BISECTIONS):
                middle = (low + high) / 2
                numbers = torch.zeros(len(middle), 2, dtype=torch.float64)
                numbers[:, stage] = middle
                yes = accepts(numbers)
                low, high = torch.where(yes, middle, low), torch.where(yes, high, middle)
            acceptance = acceptance * low
        matrix = torch.zeros(len(self.states), len(self.states), dtype=torch.float64)
        moved = origin != goal
        matrix[origin[moved], goal[moved]] = (probability * acceptance)[moved]
        return matrix + torch.diag(1 - matrix.sum(1))

    def imbalance(self, matrix: torch.Tensor) -> float:
        flow = self.exact.log_probabilities.exp()[:, None] * matrix
        return float((flow - flow.T).abs().max())


KERNELS = {
    "single_site": ({}, [2]),
    "block": ({}, [1, 3]),
    "sequential_fill": ({"fill": "sequential"}, [3, 1]),
    "tempered": ({"temperature": 0.6}, [1, 2]),
    "warped": ({"warp": [TemperatureLogitsWarper(1.7)]}, [1, 2]),
    "truncated": ({"warp": [TopKLogitsWarper(2)], "epsilon": 0.3}, [2, 3]),
    "truncated_without_mixing": ({"warp": [TopKLogitsWarper(2)], "fill": "sequential"}, [2, 1]),
    "delayed": ({"window": 0}, [2]),
    "delayed_block": ({"window": 0, "fill": "sequential"}, [1, 2]),
    "exclude_current": ({"exclude": True}, [2]),
    "exclude_current_block": ({"exclude": True}, [1, 2]),
    "exclude_current_sequential": ({"exclude": True, "fill": "sequential"}, [2, 1]),
    "everything": (
        {"exclude": True, "fill": "sequential", "window": 0, "warp": [TopKLogitsWarper(2)], "epsilon": 0.8},
        [3, 2],
    ),
}


@cache
def kernel_and_matrix(energy: str, name: str) -> tuple[Kernel, torch.Tensor]:
    settings, block = KERNELS[name]
    kernel = Kernel(energy, **settings)
    return kernel, kernel.transition_matrix(block)


@pytest.mark.parametrize("name", KERNELS)
def test_detailed_balance(energy, name):
    kernel, matrix = kernel_and_matrix(energy, name)
    assert kernel.imbalance(matrix) < 1e-6
    assert float((1 - matrix.diagonal()).max()) > 0.05  # it does move


@pytest.mark.parametrize("keeps", CONSTRAINTS)
@pytest.mark.parametrize("name", ["single_site", "block", "sequential_fill"])
def test_detailed_balance_within_constraints(name, keeps):
    """No mass leaves the set, where every state reaches every other."""
    settings, block = KERNELS[name]
    kernel = Kernel("local", keeps=keeps, **settings)
    matrix = kernel.transition_matrix(block)
    assert kernel.imbalance(matrix) < 1e-6
    inside = kernel.exact.log_probabilities > -torch.inf
    assert 1 < int(inside.sum()) < len(inside) and not bool(matrix[inside][:, ~inside].any())
    assert float((1 - matrix.diagonal())[inside].max()) > 0.05


def test_constrained_proposals_that_are_drawn_again_break_detailed_balance(monkeypatch):
    """The usual mistake: what is left is proposed more often, and that isn't counted."""
    kernel = Kernel("local", keeps="max_changes")
    plain, share = kernel.moves([1, 3]), {}
    for (origin, to), (own, _) in plain.items():
        share[origin] = share.get(origin, 0.0) + own * (origin != to)
    again = {pair: (own / share[pair[0]] * (pair[0] != pair[1]), draws) for pair, (own, draws) in plain.items()}
    monkeypatch.setattr(kernel, "moves", lambda block: again)
    assert kernel.imbalance(kernel.transition_matrix([1, 3])) > 1e-3


@pytest.mark.parametrize("name", ["block", "sequential_fill", "delayed_block", "exclude_current"])
def test_work_saving_leaves_the_matrix_alone(name):
    kernel, saved = kernel_and_matrix("local", name)
    spent = kernel.transition_matrix(KERNELS[name][1], saving=WorkSaving(skip_no_ops=False, share_terms=False))
    torch.testing.assert_close(saved, spent, rtol=0, atol=1e-9)


def test_a_forgotten_reverse_proposal_breaks_detailed_balance(energy, monkeypatch):
    kernel = Kernel(energy)
    plain = BlockProposal.__call__

    def forget(*arguments):
        proposed = plain(*arguments)
        return proposed._replace(log_reverse=torch.zeros_like(proposed.log_reverse))

    monkeypatch.setattr(BlockProposal, "__call__", forget)
    assert kernel.imbalance(kernel.transition_matrix([1, 3])) > 1e-3


class TestInconsistentConditionals:
    """The standard counterexample: both conditionals are proper, no joint distribution has them.

    What Gibbs sampling from them samples depends on the order of its visits, so it has no stated target. The energies
    made of the same conditionals do define one, and Metropolis–Hastings with the same proposals samples it.
    """

    first_given_second = torch.tensor([[0.99, 0.01], [0.01, 0.99]]).log()  # rows: the second
    second_given_first = torch.full((2, 2), 0.5).log()
    chains = 4000

    def logits(self, ids, positions):
        """A masked language model of two positions and two tokens; id 2 is the mask."""
        other = ids.gather(1, 1 - positions)
        tables = torch.stack([self.first_given_second, self.second_given_first])
        known = tables[positions, other.clamp(max=1)]
        known = torch.where((other == 2)[..., None], torch.zeros(2), known)
        return torch.nn.functional.pad(known, (0, 1), value=-30.0)

    def run(self, kernel, order: list[int]) -> torch.Tensor:
        """Where chains end that visit the two positions in this order, over and over."""
        runner = MaskedBatchRunner(self.logits, mask_token_id=2, vocab_size=3)
        free = torch.ones(self.chains, 2, dtype=torch.bool)
        start = torch.zeros(self.chains, dtype=torch.long)
        target = Target(runner, "local", free, start, start + 2, torch.tensor([True, True, False]))
        proposal = BlockProposal(ProposalDistribution(LogitsProcessorList(), target.support, 0.0, False))
        generator = torch.Generator().manual_seed(0)
        state = target.state(torch.randint(0, 2, (self.chains, 2), generator=generator))
        for _ in range(40):
            for position in order:
                numbers = torch.rand(self.chains, 3, dtype=torch.float64, generator=generator)
                positions = torch.full((self.chains, 1), position)
                block = StepBlock(positions, torch.ones_like(start), numbers[:, :1], numbers[:, 1:])
                state, _ = kernel(state, block, target, proposal)
        return state.ids

    def test_gibbs_depends_on_the_order(self):
        forth, back = (torch.bincount(ids @ torch.tensor([2, 1]), minlength=4) / self.chains
                       for ids in (self.run(kernels.gibbs, [0, 1]), self.run(kernels.gibbs, [1, 0])))  # fmt: skip
        assert float((forth - back).abs().sum() / 2) > 0.4

    def test_metropolis_hastings_samples_the_energies(self):
        def energy(ids):
            first, second = ids.T
            return -self.first_given_second[second, first] - self.second_given_first[first, second]

        exact = enumerate_distribution(energy, [0, 1], 2)
        for order in ([0, 1], [1, 0]):
            ids = self.run(metropolis_hastings, order)
            assert exact.total_variation(ids) < total_variation_limit(exact.log_probabilities.exp(), self.chains)


@pytest.mark.parametrize(
    "block, window, near", [([2], 0, [2]), ([1], 1, [1, 2]), ([2], 1, [1, 2, 3]), ([1, 3], 0, [1, 3])]
)
def test_the_window_of_delayed_acceptance_is_around_the_block(block, window, near, monkeypatch):
    """Any window keeps the target, so only this test sees a wrong one: in the terms that the first stage asks for."""
    kernel, asked, terms = Kernel("local"), [], Target.terms
    monkeypatch.setattr(Target, "terms", lambda self, *given: asked.append(given[-1]) or terms(self, *given))
    target = kernel.target(len(kernel.states))
    state = target.state(kernel.states)
    asked.clear()
    draws = torch.full((len(kernel.states), len(block)), 0.5, dtype=torch.float64)
    size = torch.full((len(kernel.states),), len(block))
    given = StepBlock(torch.tensor(block).repeat(len(size), 1), size, draws, torch.zeros(len(size), 2).double())
    metropolis_hastings(state, given, target, kernel.proposal, 1.0, window, saving=WorkSaving(False, False))
    assert asked[0].any(0).nonzero()[:, 0].tolist() == asked[0].all(0).nonzero()[:, 0].tolist() == near
