"""Synthetic languages: probabilities against counting and a path-by-path sum, and seeds."""

import itertools

import numpy as np
import pytest

from hf_ebm.data.synthetic import HiddenMarkovModel, palindromes, rows_of


def test_palindromes_have_their_share():
    language = palindromes(num_symbols=3, length=4, share=0.7)
    symmetric = [tuple(s) == tuple(s[::-1]) for s in language.sequences]
    assert sum(symmetric) == 9 and len(symmetric) == 81
    probabilities = np.exp(language.log_probs)
    assert probabilities.sum() == pytest.approx(1) and probabilities[symmetric].sum() == pytest.approx(0.7)
    assert language.entropy == pytest.approx(-0.7 * np.log(0.7 / 9) - 0.3 * np.log(0.3 / 72))


def test_the_forward_algorithm_sums_over_all_paths():
    hmm = HiddenMarkovModel.draw(3, "high", num_states=3, num_symbols=2)
    for symbols in itertools.product(range(2), repeat=4):
        total = 0.0
        for states in itertools.product(range(3), repeat=4):
            nats = hmm.start[states[0]] + sum(hmm.emission[s, o] for s, o in zip(states, symbols, strict=True))
            nats += sum(hmm.transition[a, b] for a, b in itertools.pairwise(states))
            total += np.exp(nats)
        assert float(np.exp(hmm.log_probs(np.array([symbols])))[0]) == pytest.approx(total)
    language = hmm.language(4)
    assert np.exp(language.log_probs).sum() == pytest.approx(1)


def test_samples_are_of_the_language_and_seeded():
    language = HiddenMarkovModel.draw(1, "low").language()
    first, again, other = (language.sample(2000, seed) for seed in (5, 5, 6))
    assert first["symbols"] == again["symbols"] != other["symbols"]
    assert -np.mean(first["true_log_prob"]) == pytest.approx(language.entropy, abs=0.15)
    rows = rows_of(first)
    assert rows[0]["input_ids"] == [1, *(4 + s for s in first["symbols"][0]), 2]
    low, high = (np.mean([HiddenMarkovModel.draw(s, e).language().entropy for s in range(8)]) for e in ("low", "high"))
    assert low + 0.5 < high
    with pytest.raises(ValueError, match="entropy must be one of low, high, got 'mild'"):
        HiddenMarkovModel.draw(0, "mild")
