"""What every entry of every table keeps, and that an entry is all that one needs to be sampled, checked and told of."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import hf_ebm
from hf_ebm import ChainGenerationConfig
from hf_ebm.exact import enumerate_distribution
from hf_ebm.sampling.blocks import LAYOUTS, ORDERS, Layout, Order
from hf_ebm.sampling.kernels import KERNELS, Kernel, StepBlock, StepInfo, extra_difference
from hf_ebm.sampling.proposals import FILLS, BlockProposal, Fill, ProposalDistribution, Proposed
from hf_ebm.sampling.sampler import ChainKey, epoch_steps
from hf_ebm.sampling.target import Target
from hf_ebm.sampling.warm_start import DECODERS, WARM_STARTS, Decoder, WarmStart
from hf_ebm.scoring.energies import ENERGIES, Energy
from tests.cli.conftest import run
from tests.conftest import tiny_energy_model
from tests.sampling.oracle import total_variation_limit

WORDS, LENGTH, CHAINS = [5, 6, 7], 3, 700


def barker(state, block, target, proposal, temperature):
    """Accepts with probability r / (1 + r) where Metropolis–Hastings does with min(1, r) (Barker 1965)."""
    proposed = proposal(state.ids, block.positions, block.size, block.fill, target)
    new = target.state(proposed.ids)
    visited, outside = block.size > 0, proposed.log_reverse == -torch.inf
    difference = (new.token_energies - state.token_energies).sum(1)
    difference += extra_difference(state.extra_energy, new.extra_energy)
    ratio = -difference / temperature + proposed.log_reverse - proposed.log_forward
    same = (proposed.ids == state.ids).all(1)
    accepted = visited & ~outside & (same | (block.accept[:, 0] < ratio.sigmoid()))
    taken = type(state)(*(torch.where(accepted.view(-1, *[1] * (own.dim() - 1)), own, old)
                          for own, old in zip(new, state, strict=True)))  # fmt: skip
    return taken, StepInfo(accepted, (taken.ids != state.ids).sum(1), visited & outside)


def gap(logits, tokens):
    return logits.amax(-1, keepdim=True) - logits.gather(-1, tokens)


def any_tokens(ids, positions, size, uniforms, target, q):
    """Proposes all supported tokens alike, for a block of one row each."""
    support = target.support.nonzero()[:, 0]
    drawn = support[(uniforms * len(support)).long()]
    last = (
        (size - 1)[:, None].minimum(torch.arange(positions.shape[1])).clamp_min(0)
    )  # padding repeats the last position
    new = torch.where(size[:, None] > 0, ids.scatter(1, positions, drawn.gather(1, last)), ids)
    alike = torch.zeros(len(ids), dtype=torch.float64)
    return Proposed(new, alike, alike, torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids).double())


def ends(visits, order):
    """The first position and the last, then the next ones; for blocks of two."""
    return visits.ordered(np.minimum(visits.place, visits.count[visits.chain] - 1 - visits.place), order)


def lowest(ids, masked, _, target, *proposal):
    return ids.masked_fill(masked, int(target.support.nonzero()[0]))


class Table(NamedTuple):
    """A table, an entry that it hasn't got, and how one is chosen."""

    entries: dict[str, Any]
    toy: Any
    chosen: Callable[[str], dict]
    name: str = "toy"


TABLES = {
    "kernel": Table(
        KERNELS, Kernel(barker, "accepts by half", True, reads=("energy_temperature",)), lambda name: {"kernel": name}
    ),
    "energy": Table(ENERGIES, Energy(gap, "how far the logits are below the largest", False), lambda name: {}),
    "block_fill": Table(
        FILLS, Fill(any_tokens, "draws any tokens"), lambda name: {"block_fill": name, "block_size": 2}
    ),
    "block_layout": Table(
        LAYOUTS, Layout(ends, "takes both ends"), lambda name: {"block_layout": name, "block_size": 2}
    ),
    "order": Table(ORDERS, Order(lambda numbers, _: -numbers, "goes from right to left", False),
        lambda name: {"order": name}),
    "warm_start": Table(WARM_STARTS, WarmStart(lowest, "takes the first token"), lambda name: {"warm_start": name}),
    "decoder": Table(
        DECODERS,
        Decoder(lambda *given: (lowest(*given), torch.zeros(len(given[0])).double()), "takes the first token"),
        lambda name: {"decoder": name},
        "toy_decoder",
    ),
}  # fmt: skip
ENTRIES = [(kind, name) for kind, table in TABLES.items() for name in [*table.entries, table.name]]


@pytest.fixture
def toys(monkeypatch):
    """A further entry in each table."""
    for table in TABLES.values():
        monkeypatch.setitem(table.entries, table.name, table.toy)


def plain_energy(model, ids: torch.Tensor) -> float:
    """Of one row, each of its free positions masked alone."""
    total = 0.0
    for position in range(1, LENGTH + 1):
        masked = ids.clone()[None]
        masked[0, position] = model.config.mask_token_id
        with torch.no_grad():
            logits = model.mlm(input_ids=masked).logits[0, position].double()
        total += float(ENERGIES[model.config.energy].term(logits, ids[position : position + 1]))
    return total


def framed(words: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.full((len(words), 1), 1), words, torch.full((len(words), 1), 2)], 1)


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_every_entry_keeps_its_word(kind, name, toys):
    """Energies are those of the definition, and where the target is kept, chains reach it, wherever they start."""
    model = tiny_energy_model(name if kind == "energy" else "local", vocab_size=8)
    settings = TABLES[kind].chosen(name)
    out = model.generate(lengths=LENGTH, num_chains=CHAINS, num_epochs=12, seed=0, **settings)
    for ids, found in zip(out.sequences[:5], out.energies[:5, -1].tolist(), strict=True):
        assert found == pytest.approx(plain_energy(model, ids), abs=1e-4)
    assert set(out.sequences[:, 1:-1].unique().tolist()) <= set(WORDS)
    if kind == "decoder":
        assert (out.sequences == out.sequences[0]).all() and out.mean_log_probabilities.shape == (CHAINS,)
    elif KERNELS[settings.get("kernel", "metropolis_hastings")].leaves_invariant:
        exact = enumerate_distribution(
            lambda words: torch.tensor([plain_energy(model, ids) for ids in framed(words)]), WORDS, LENGTH
        )
        distance = exact.total_variation(out.sequences[:, 1:-1])
        assert distance < total_variation_limit(exact.log_probabilities.exp(), CHAINS)


def hotter(state, block, target, proposal, temperature):
    return barker(state, block, target, proposal, 2 * temperature)


def one_way(*given):
    """A proposal that says of the way back what isn't so."""
    found = FILLS["parallel"].propose(*given)
    return found._replace(log_reverse=found.log_forward)


@pytest.mark.parametrize(
    ("kind", "broken"), [("kernel", {"step": hotter}), ("block_fill", {"propose": one_way})], ids=["kernel", "fill"]
)
def test_a_broken_word_is_noticed(kind, broken, toys, monkeypatch):
    entries = TABLES[kind].entries
    monkeypatch.setitem(entries, "toy", entries["toy"]._replace(**broken))
    with pytest.raises(AssertionError):
        test_every_entry_keeps_its_word(kind, "toy", toys)


@pytest.mark.parametrize("layout", [*LAYOUTS, "toy"])
@pytest.mark.parametrize("order", [*ORDERS, "toy"])
def test_an_epoch_visits_every_free_position_once(layout, order, toys):
    draw = np.random.default_rng(0)
    free = torch.from_numpy(draw.random((30, 9)) < 0.6)
    free[:, 4] = True
    config = ChainGenerationConfig(seed=1, block_layout=layout, order=order)
    steps = epoch_steps(free, [ChainKey(0, chain) for chain in range(30)], config, 2, 0)
    visits = torch.zeros(free.shape, dtype=torch.long)
    for step in steps:
        for chain, (columns, size) in enumerate(zip(step.positions.tolist(), step.size.tolist(), strict=True)):
            assert size <= 2
            for column in columns[:size]:
                visits[chain, column] += 1
    assert torch.equal(visits, free.long())


@pytest.mark.parametrize("name", KERNELS)
def test_settings_of_other_kernels_are_refused(name, toys):
    foreign = {"delayed_acceptance": 1, "energy_temperature": 2.0, "exclude_current": True, "accept_all_epochs": 1}
    for setting, value in foreign.items():
        for kernel in (name, "toy"):
            if setting in KERNELS[kernel].settings:
                ChainGenerationConfig(kernel=kernel, **{setting: value})
            else:
                with pytest.raises(ValueError, match=f"{setting} has no effect with kernel '{kernel}'"):
                    ChainGenerationConfig(kernel=kernel, **{setting: value})


def told_by(capsys, *command: str) -> str:
    with pytest.raises(SystemExit):
        run(*command, "--help")
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "command", [("sample",), ("score",), ("rerank",), ("demo",), ("train", "energy")], ids="-".join
)
def test_every_command_tells_of_an_energy_that_comes_later(command, request, capsys):
    assert "toy" not in told_by(capsys, *command)
    request.getfixturevalue("toys")
    assert f"--energy ENERGY {' or '.join(ENERGIES)};" in told_by(capsys, *command)


def test_an_entry_that_comes_later_is_told_of(request, capsys):
    assert "toy" not in told_by(capsys, "sample")
    request.getfixturevalue("toys")
    told = told_by(capsys, "sample")
    for kind, table in TABLES.items():
        known = ", ".join(map(repr, table.entries))
        if kind == "energy":
            with pytest.raises(ValueError, match=f"energy must be one of {known}, got 'none'"):
                tiny_energy_model("none")
            continue
        assert all(f"{name} {entry.about.replace('`', '')}" in told for name, entry in table.entries.items())
        with pytest.raises(ValueError, match=f"{kind} must be one of {known}, got 'none'"):
            ChainGenerationConfig(**{kind: "none"})
        made = ChainGenerationConfig(**{kind: table.name})
        assert made.settings() == ChainGenerationConfig.from_dict(made.to_dict()).settings() == {kind: table.name}


@pytest.mark.parametrize("name", KERNELS | DECODERS | ENERGIES)
def test_the_guide_has_every_entry(name):
    guide = Path(hf_ebm.__file__).parents[1] / "docs" / "guides" / "sampling.md"
    row = f'| `"{name}"` | {(KERNELS | DECODERS | ENERGIES)[name].about} |'
    assert row in guide.read_text(encoding="utf-8"), f"{guide} needs the row {row}"


@pytest.mark.parametrize("kernel", [name for name, kernel in KERNELS.items() if kernel.leaves_invariant] + ["toy"])
def test_a_step_says_what_happened(kernel, toys):
    """A proposal of the state itself, one without a way back, and one between states that break a hard constraint."""
    model = tiny_energy_model()
    ids, support = torch.tensor([[1, 5, 6, 2]] * 3), torch.zeros(9, dtype=torch.bool)
    support[WORDS] = True
    free = torch.tensor([[False, True, True, False]] * 3)
    bounds = torch.zeros(3, dtype=torch.long), torch.full((3,), 4)
    never = [(1.0, lambda ids: torch.full((len(ids),), torch.inf))]
    target = Target(model.masked_batch_runner(), model.config.energy, free, *bounds, support, extra=never)
    state, nothing = target.state(ids), torch.zeros(3, dtype=torch.float64)
    proposed = torch.tensor([[1, 5, 6, 2], [1, 7, 6, 2], [1, 7, 6, 2]])
    back = torch.tensor([0.0, -torch.inf, 0.0], dtype=torch.float64)

    def proposal(ids, *given):
        return Proposed(
            proposed, nothing, back, torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids).double()
        )

    numbers = torch.tensor([[0.999, 0.999], [1e-9, 1e-9], [1e-9, 1e-9]], dtype=torch.float64)
    block = StepBlock(torch.ones(3, 1, dtype=torch.long), torch.ones(3, dtype=torch.long), numbers[:, :1], numbers)
    new, info = KERNELS[kernel].step(state, block, target, proposal, 1.0)
    assert new.ids.tolist() == [[1, 5, 6, 2], [1, 5, 6, 2], [1, 7, 6, 2]]
    assert torch.allclose(new.token_energies, target.state(new.ids).token_energies, atol=1e-5)
    assert info.accepted.tolist() == [True, False, True] and info.tokens_changed.tolist() == [0, 0, 1]
    assert info.outside_support.tolist() == [False, True, False]


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_step_without_blocks_leaves_every_chain_alone(kernel, fill):
    model = tiny_energy_model()
    ids, support = torch.tensor([[1, 5, 6, 2], [1, 7, 7, 2]]), torch.zeros(9, dtype=torch.bool)
    support[WORDS] = True
    free = torch.tensor([[False, True, True, False]] * 2)
    bounds = torch.zeros(2, dtype=torch.long), torch.full((2,), 4)
    target = Target(model.masked_batch_runner(), model.config.energy, free, *bounds, support)
    state = target.state(ids)
    numbers = torch.rand(2, 2, dtype=torch.float64)
    nothing = StepBlock(torch.ones(2, 2, dtype=torch.long), torch.zeros(2, dtype=torch.long), numbers, numbers)
    proposal = BlockProposal(ProposalDistribution([], support, 0.0, False), fill)
    new, info = KERNELS[kernel].step(state, nothing, target, proposal)
    assert all(torch.equal(own, old) for own, old in zip(new, state, strict=True))
    assert not any(part.any() for part in info)


@pytest.mark.parametrize("settings", [{}, {"delayed_acceptance": 0}], ids=["plain", "delayed"])
@pytest.mark.parametrize("kernel", [*KERNELS, "toy"])
def test_every_chain_may_have_a_temperature_of_its_own(kernel, settings, toys):
    settings = {name: value for name, value in settings.items() if name in KERNELS[kernel].arguments}
    model, draw = tiny_energy_model(scale=0.5), torch.Generator().manual_seed(0)
    ids = torch.tensor([[1, 5, 6, 7, 2]] * 40)
    free = torch.tensor([[False, True, True, True, False]] * 40)
    support = torch.zeros(9, dtype=torch.bool)
    support[WORDS] = True
    target = Target(model.masked_batch_runner(), "local", free, torch.zeros(40).long(), torch.full((40,), 5), support)
    proposal = BlockProposal(ProposalDistribution([], support, 0.0, False), "parallel")
    numbers = torch.rand(2, 40, 2, dtype=torch.float64, generator=draw)
    block = StepBlock(torch.tensor([[1, 3]] * 40), torch.full((40,), 2), *numbers)
    step, state = KERNELS[kernel].step, target.state(ids)
    cold, hot = (step(state, block, target, proposal, tau, **settings)[0].ids for tau in (0.1, 10.0))
    both = step(state, block, target, proposal, torch.tensor([0.1, 10.0] * 20, dtype=torch.float64), **settings)[0].ids
    assert torch.equal(both[::2], cold[::2]) and torch.equal(both[1::2], hot[1::2])
    assert torch.equal(cold, hot) != KERNELS[kernel].leaves_invariant


def test_the_page_offers_every_kernel(toys):
    gradio = pytest.importorskip("gradio")
    from hf_ebm.demo import build_demo
    from tests.models.tokenizers_for_tests import small_model, small_tokenizer

    tokenizer = small_tokenizer("wordpiece")
    page = build_demo(small_model(tokenizer), tokenizer)
    (choices,) = [b.choices for b in page.blocks.values() if isinstance(b, gradio.Dropdown) and b.label == "Kernel"]
    assert {("toy", "toy"), ("toy_decoder", "toy_decoder")} <= set(choices)
    assert "`toy` accepts by half" in " ".join(
        str(b.value) for b in page.blocks.values() if isinstance(b, gradio.Markdown)
    )
