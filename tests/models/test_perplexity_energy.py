"""Perplexity of masked models as distributions over texts, against enumeration by the forward pass."""

import math
from itertools import product

import pytest
import torch

from hf_ebm import ChainGenerationConfig, EnergyModel
from hf_ebm.data.symbols import symbol_tokenizer
from tests.conftest import plain_token_energies, tiny_mlm

WORDS = ["a", "b", "c"]
TEXTS = ["a b", "c c", "c a b", "b c"]
FEW = dict(num_particles=16, num_runs=4, num_chains=4, num_epochs=6)


@pytest.fixture(scope="module")
def tokenizer():
    return symbol_tokenizer(WORDS, [], masks=True)


@pytest.fixture(params=["raw", "local"])
def model(request, tokenizer):
    mask = tokenizer.mask_token_id
    mlm = tiny_mlm(len(tokenizer), scale=0.3)
    roles = dict(mask_token_id=mask, pad_token_id=0, special_token_ids=[0, 1, 2, mask], excluded_token_ids=[3])
    return EnergyModel(mlm, energy=request.param, **roles)


def plain_log_prob(model, tokenizer, text, before="", temperature=1.0) -> float:
    """`-E/τ - log Z` by all sequences of as many words behind the context."""
    context, count = before.split(), len(text.split())

    def energy(words) -> float:
        ids = tokenizer(" ".join([*context, *words]), return_tensors="pt")["input_ids"][0]
        own = range(len(context), len(context) + count)
        return sum(plain_token_energies(model, ids, own)) / temperature

    energies = torch.tensor([energy(words) for words in product(WORDS, repeat=count)], dtype=torch.float64)
    return -energy(text.split()) - float((-energies).logsumexp(0))


def test_exact_is_enumeration(model, tokenizer):
    found = model.perplexity(TEXTS, tokenizer, method="exact", temperature=1.3)
    expected = [plain_log_prob(model, tokenizer, text, temperature=1.3) for text in TEXTS]
    torch.testing.assert_close(found.log_probs, torch.tensor(expected, dtype=torch.float64), atol=1e-5, rtol=1e-5)
    assert found.lower == found.upper == pytest.approx(math.exp(-sum(expected) / 9), rel=1e-5)
    assert len(found.log_partition) == 2 and found.lower_sampling_error == 0
    assert found.num_masked_rows == 2 * 3 + 3 * 9 + 9
    behind = model.perplexity(TEXTS[:2], tokenizer, method="exact", prefixes=["a", "b b"])
    expected = [plain_log_prob(model, tokenizer, *pair) for pair in zip(TEXTS[:2], ["a", "b b"], strict=True)]
    torch.testing.assert_close(behind.log_probs, torch.tensor(expected, dtype=torch.float64), atol=1e-5, rtol=1e-5)


def test_log_z_of_another_length_is_noticed(model, tokenizer, monkeypatch):
    plain = type(model).log_partition
    other = lambda self, ids, free_mask, **how: plain(self, ids[:, :4], free_mask=free_mask[:, :4], **how)  # noqa: E731
    monkeypatch.setattr(type(model), "log_partition", other)
    with pytest.raises(AssertionError):
        test_exact_is_enumeration(model, tokenizer)


def test_estimates_enclose_it(model, tokenizer):
    exact = math.log(model.perplexity(TEXTS, tokenizer, method="exact").lower)
    found = model.perplexity(TEXTS, tokenizer, **FEW)
    for value, error in ((found.lower, found.lower_sampling_error), (found.upper, found.upper_sampling_error)):
        assert abs(math.log(value) - exact) < 4 * error < 0.4
    some = model.perplexity(TEXTS[2:3], tokenizer, **FEW)  # a length's estimate is its own
    assert torch.equal(some.log_partition, found.log_partition[1:])
    alone = model.perplexity(TEXTS, tokenizer, upper=False, num_particles=16, num_runs=4)
    assert math.isnan(alone.upper) and alone.lower == found.lower


def test_texts_of_probability_0(model, tokenizer):
    texts = ["a b", "a z", ""]
    with pytest.raises(ValueError, match="row 1 holds"):
        model.perplexity(texts, tokenizer, unknown_tokens="ignore")
    found = model.perplexity(texts, tokenizer, method="exact", skip_unusable_rows=True, unknown_tokens="ignore")
    assert found.left_out == [1, 2] and found.log_probs.shape == (1,)
    with pytest.raises(ValueError, match="none of 1"):
        model.perplexity([""], tokenizer, skip_unusable_rows=True)


def test_rows_are_estimated_beforehand(model, tokenizer, rows_run):
    for settings, named in (({"row_limit": 10_000}, "row_limit"), ({"temperature": 0}, "temperature"),
                            ({"method": "guess"}, "method"), ({"num_runs": 0}, "num_runs"),
                            ({"num_moves": -1}, "num_moves must be a whole number from 0 up")):  # fmt: skip
        with pytest.raises(ValueError, match=f"^{named}"):
            model.perplexity(TEXTS, tokenizer, **settings)
    assert not rows_run


@pytest.fixture
def settings_of(model):
    """Sets settings of the model, which are its own again after the test."""
    before = model.generation_config
    yield lambda **settings: setattr(model, "generation_config", ChainGenerationConfig(**settings))
    model.generation_config = before


def test_moves_of_the_model_do_not_count(model, tokenizer, settings_of):
    """Those of its chains, which they may suit, say nothing of particles; neither do positions that stay."""
    few = dict(num_particles=2, num_runs=1, num_chains=2, num_epochs=2)
    expected = model.perplexity(TEXTS[:1], tokenizer, **few)
    for settings in (
        {"block_size": 4, "final_block_size": 1}, {"kernel": "gibbs"}, {"max_changes": 1}, {"decoder": "mask_predict"},
        {"protected_positions": [1]},
    ):  # fmt: skip
        settings_of(**settings)
        found = model.perplexity(TEXTS[:1], tokenizer, **few)
        assert found.lower == expected.lower and found.upper == expected.upper
        assert model.perplexity(TEXTS[:1], tokenizer, method="exact").lower > 0


def test_what_may_not_stand_has_probability_0(model, tokenizer, settings_of):
    """By the model's settings; what is left adds up to 1."""
    a, b, c = tokenizer.convert_tokens_to_ids(WORDS)
    frame = tokenizer("a a")["input_ids"]
    first = frame.index(a)
    every = [" ".join(pair) for pair in product(WORDS, repeat=2)]
    both = [[*frame[:first], b, b, *frame[first + 2 :]]]
    for settings, left in (
        ({"suppress_tokens": [c]}, 4), ({"allowed_tokens": {first: [a, b]}}, 6),
        ({"avoid": both}, 8), ({"avoid": both, "min_distance": 2}, 4),
    ):  # fmt: skip
        settings_of(**settings)
        found = model.perplexity(every, tokenizer, method="exact", skip_unusable_rows=True)
        assert len(found.log_probs) == left
        assert float(found.log_probs.exp().sum()) == pytest.approx(1, rel=1e-5)
        with pytest.raises(ValueError, match="texts: row"):
            model.perplexity(every, tokenizer, method="exact")
    settings_of(allowed_tokens={first + 1: [a]})
    with pytest.raises(ValueError, match="allowed_tokens"):
        model.perplexity(["a a", "a"], tokenizer)
