"""Plots show the numbers they are given, on the axes they are given."""

import matplotlib

matplotlib.use("Agg")

import pytest
import torch
from matplotlib import pyplot

from hf_ebm.plots import (
    plot_acceptance,
    plot_energy_metric,
    plot_energy_trace,
    plot_perplexity_bounds,
    plot_token_changes,
    rank_correlation,
)
from hf_ebm.sampling.output import energy_diagnostics
from tests.conftest import tiny_energy_model
from tests.models.tokenizers_for_tests import small_tokenizer


@pytest.fixture(scope="module")
def chains():
    return tiny_energy_model().generate(lengths=[3, 4], num_chains=3, num_epochs=9, burn_in=2, block_size=2, seed=0)


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


def test_traces_of_a_prompt_with_its_r_hat(chains):
    axes = plot_energy_trace(chains, prompt=1)
    assert len(axes.lines) == 4  # three chains and the end of burn-in
    assert axes.lines[2].get_ydata().tolist() == chains.trace.energy[5].tolist()
    found = energy_diagnostics(chains.energies[3:])
    assert f"R-hat {found.r_hat:.2f}" in axes.get_title()
    with pytest.raises(ValueError, match=r"prompt must be one of \[0, 1\], got 2"):
        plot_energy_trace(chains, prompt=2)


def test_acceptance_and_block_size(chains):
    _, mine = pyplot.subplots()
    axes = plot_acceptance(chains, mine)
    assert axes is mine
    acceptance, novel = (line.get_ydata() for line in axes.lines)
    torch.testing.assert_close(torch.tensor(acceptance), chains.trace.acceptance_rate.mean(0))
    assert all(a >= n for a, n in zip(acceptance, novel, strict=True))
    assert axes.figure.axes[1].lines[0].get_ydata().tolist() == [2.0] * 9


def test_token_changes(chains):
    tokenizer = small_tokenizer("wordpiece")
    axes = plot_token_changes(chains, tokenizer, chain=4)
    shown = torch.tensor(axes.images[0].get_array().filled())
    ids = chains.samples[4][:, chains.attention_mask[4].bool()]
    assert torch.equal(shown[1:].bool(), ids[1:] != ids[:-1]) and not shown[0].any()
    assert bool(shown.any()) and len(axes.texts) == ids.numel()
    assert axes.texts[-1].get_text() == tokenizer.convert_ids_to_tokens([int(ids[-1, -1])])[0]
    with pytest.raises(ValueError, match="chain must be below 6"):
        plot_token_changes(chains, tokenizer, chain=6)


def test_energy_and_metric():
    energies, metric = torch.tensor([1.0, 2.0, 3.0, 10.0]), [0.0, 0.1, 0.1, 0.5]
    axes = plot_energy_metric(energies, metric, "chains")
    assert axes.collections[0].get_offsets().tolist() == [[1, 0], [2, 0.1], [3, 0.1], [10, 0.5]]
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert f"chains, rank correlation {rank_correlation(energies.tolist(), metric):+.2f}" in str(
        axes.get_legend().get_texts()[0]
    )
    with pytest.raises(ValueError, match="equally many"):
        plot_energy_metric(energies, metric[:2])


def test_perplexity_bounds():
    axes = plot_perplexity_bounds([2, 8], [5.0, 5.5], [7.0, 6.0])
    assert [line.get_ydata().tolist() for line in axes.lines] == [[5.0, 5.5], [7.0, 6.0]]
    with pytest.raises(ValueError, match="equally many"):
        plot_perplexity_bounds([2], [5.0, 5.5], [7.0])
