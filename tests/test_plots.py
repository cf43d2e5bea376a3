"""Plots show the numbers they are given, on the axes they are given."""

import matplotlib

matplotlib.use("Agg")

import numpy as np
import pytest
import torch
from matplotlib import pyplot

from hf_ebm.plots import (
    plot_acceptance,
    plot_energy_metric,
    plot_energy_trace,
    plot_fills,
    plot_perplexity_bounds,
    plot_reward_against_kl,
    plot_substitutions,
    plot_token_changes,
    rank_correlation,
)
from hf_ebm.sampling.convergence import energy_diagnostics
from tests.conftest import tiny_energy_model
from tests.models.tokenizers_for_tests import small_model, small_tokenizer


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


def test_reward_against_kl():
    """Of logs that have both; a cost is minus a reward."""
    history = [
        {"step": 1, "kl": 0.0, "reward": -1.0, "candidate_cost": 1.0},
        {"step": 1, "eval_reward": 5.0},
        {"step": 2, "kl": 0.5, "candidate_cost": 0.25},
        {"step": 2, "train_loss": 1.0},
    ]
    axes = plot_reward_against_kl(history, "beta 0.04")
    assert axes.lines[0].get_xydata().tolist() == [[0.0, -1.0], [0.5, -0.25]]
    assert {text.get_text() for text in axes.texts} == {"step 1", "step 2"}
    assert plot_reward_against_kl(history[:1], axes=axes) is axes and len(axes.lines) == 2
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["beta 0.04"]
    with pytest.raises(ValueError, match="log_history must have a log with kl and reward or candidate_cost"):
        plot_reward_against_kl(history[1:2])


def test_fills_with_and_without_errors():
    tokenizer = small_tokenizer("wordpiece")
    model = small_model(tokenizer)
    exact, chains = (
        model.fill("the [MASK] sat on [MASK]", tokenizer, 4, method=method, row_limit=64, words=words)
        for method, words in (("exact", ["cat", "dog"]), ("chains", None))
    )
    for output, errors in ((exact, 0), (chains, 1)):
        axes = plot_fills(output)
        assert [bar.get_width() for bar in axes.patches] == [fill.probability for fill in output.fills[0]]
        assert next(label.get_text() for label in axes.get_yticklabels()) == " · ".join(output.fills[0][0].token_strs)
        assert len(axes.collections) == errors  # the lines of the errors
    with pytest.raises(ValueError, match="text must be below 1, got 1"):
        plot_fills(exact, text=1)


def test_substitutions_as_a_heat_map():
    axes = plot_substitutions(["K2A", "M1C", "K2C"], torch.tensor([3.0, -1.5, 0.0]))
    image = axes.images[0]
    expected = np.array([[np.nan, 3.0], [-1.5, 0.0]])
    np.testing.assert_array_equal(image.get_array().filled(np.nan), expected)
    assert image.get_clim() == (-3.0, 3.0)  # white is 0
    assert [label.get_text() for label in axes.get_xticklabels()] == ["M\n1", "K\n2"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["A", "C"]
    for variants, scores, message in (
        (["K2A"], [], "equally many, got 1 and 0"),
        ([], [], "equally many, got 0 and 0"),
        (["K2A", "K2A:M1C"], [1.0, 2.0], "row 1: 'K2A:M1C' is no single substitution"),
    ):
        with pytest.raises(ValueError, match=message):
            plot_substitutions(variants, scores)
