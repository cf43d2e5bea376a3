"""The tables of kernels and energies: an entry is all that one needs to be sampled, checked and told of."""

from pathlib import Path

import pytest
import torch

import hf_ebm
from hf_ebm import ChainGenerationConfig
from hf_ebm.exact import enumerate_distribution
from hf_ebm.sampling.kernels import KERNELS, Kernel, StepInfo
from hf_ebm.scoring.energies import ENERGIES, Energy
from tests.cli.conftest import run
from tests.conftest import tiny_energy_model
from tests.sampling.oracle import total_variation_limit

WORDS, LENGTH, CHAINS = [5, 6, 7], 3, 1000


def barker(state, block, target, proposal, temperature):
    """Accepts with probability r / (1 + r) where Metropolis–Hastings does with min(1, r) (Barker 1965)."""
    chains = (block.size > 0).nonzero()[:, 0]
    parts = (block.positions[chains], block.size[chains], block.fill[chains])
    proposed = proposal(state.ids[chains], chains, *parts, target)
    new = target.state(state.ids.index_put((chains,), proposed.ids))
    ratio = -(new.energy - state.energy)[chains] / temperature + proposed.log_reverse - proposed.log_forward
    accepted = torch.zeros_like(block.size, dtype=torch.bool)
    accepted[chains] = block.accept[chains, 0] < ratio.sigmoid()
    taken = type(state)(*(torch.where(accepted.view(-1, *[1] * (own.dim() - 1)), own, old)
                          for own, old in zip(new, state, strict=True)))  # fmt: skip
    return taken, StepInfo(accepted, (taken.ids != state.ids).sum(1), torch.zeros_like(accepted))


@pytest.fixture
def toys(monkeypatch):
    """A further kernel and a further energy, a function and an entry each."""
    monkeypatch.setitem(KERNELS, "toy", Kernel(barker, "accepts by half", True, reads=("energy_temperature",)))
    term = lambda logits, tokens: logits.amax(-1, keepdim=True) - logits.gather(-1, tokens)  # noqa: E731
    monkeypatch.setitem(ENERGIES, "toy", Energy(term, "how far the logits are below the largest", is_surprisal=False))


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


@pytest.mark.parametrize("kernel", [*KERNELS, "toy"])
@pytest.mark.parametrize("energy", [*ENERGIES, "toy"])
def test_every_entry_keeps_its_word(kernel, energy, toys):
    """The energies are those of the definition, and where the target is kept, chains reach it."""
    model = tiny_energy_model(energy, vocab_size=8)
    exact = enumerate_distribution(
        lambda words: torch.tensor([plain_energy(model, ids) for ids in framed(words)]), WORDS, LENGTH
    )
    out = model.generate(kernel=kernel, lengths=LENGTH, num_chains=CHAINS, num_epochs=12, seed=0)
    for ids, found in zip(out.sequences[:5], out.energies[:5, -1].tolist(), strict=True):
        assert found == pytest.approx(plain_energy(model, ids), abs=1e-4)
    if KERNELS[kernel].leaves_invariant:
        distance = exact.total_variation(out.sequences[:, 1:-1])
        assert distance < total_variation_limit(exact.log_probabilities.exp(), CHAINS)


def test_a_step_that_breaks_its_word_is_noticed(toys, monkeypatch):
    def hotter(state, block, target, proposal, temperature):
        return barker(state, block, target, proposal, 2 * temperature)

    monkeypatch.setitem(KERNELS, "toy", KERNELS["toy"]._replace(step=hotter))
    with pytest.raises(AssertionError):
        test_every_entry_keeps_its_word("toy", "local", toys)


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


def test_an_entry_is_told_of(toys, capsys):
    with pytest.raises(SystemExit):
        run("sample", "--help")
    assert "toy accepts by half" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ValueError, match="energy must be one of 'raw', 'local', 'toy', got 'none'"):
        tiny_energy_model("none")
    with pytest.raises(ValueError, match="kernel must be one of 'metropolis_hastings', 'gibbs', 'toy', 'mask_predict'"):
        ChainGenerationConfig(kernel="none")


def test_the_guide_has_every_entry():
    guide = (Path(hf_ebm.__file__).parents[1] / "docs" / "guides" / "sampling.md").read_text(encoding="utf-8")
    for name, entry in (KERNELS | ENERGIES).items():
        assert f'| `"{name}"` | {entry.about} |' in guide


def test_the_page_offers_every_kernel(toys):
    gradio = pytest.importorskip("gradio")
    from hf_ebm.demo import build_demo
    from tests.models.tokenizers_for_tests import small_model, small_tokenizer

    tokenizer = small_tokenizer("wordpiece")
    page = build_demo(small_model(tokenizer), tokenizer)
    (choices,) = [b.choices for b in page.blocks.values() if isinstance(b, gradio.Dropdown) and b.label == "Kernel"]
    assert ("toy", "toy") in choices
    assert "`toy` accepts by half" in " ".join(
        str(b.value) for b in page.blocks.values() if isinstance(b, gradio.Markdown)
    )
