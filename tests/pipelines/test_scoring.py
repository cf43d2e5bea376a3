"""`"energy-scoring"` against `EnergyModel.score`."""

import pytest
from transformers import pipeline

from hf_ebm.assets import held_out_clauses, load_embedded
from hf_ebm.pipelines import EnergyScoringPipeline
from tests.pipelines.models_for_pipelines import TEXTS, assert_like, energy_model, tokenizer


@pytest.mark.parametrize("arguments", [{}, {"masking": "within_word_l2r"}, {"masking": "stride", "stride": 2}])
def test_results_are_those_of_score(energy, arguments):
    model = energy_model(energy)
    found = EnergyScoringPipeline(model=model, tokenizer=tokenizer())(TEXTS, batch_size=4, **arguments)
    expected = model.score(TEXTS, tokenizer(), **arguments)
    assert_like([one["energy"] for one in found], expected.energy.tolist())
    assert_like([one["token_energies"] for one in found], expected.token_energies)
    assert [one["tokens"] for one in found] == expected.tokens
    assert [one["num_tokens"] for one in found] == expected.num_tokens.tolist()
    assert [one["text"] for one in found] == TEXTS
    perplexities = [one["pseudo_perplexity"] for one in found]
    if energy == "raw":
        assert perplexities == [None] * len(TEXTS)
    else:
        assert [value is None for value in perplexities] == [text == "" for text in TEXTS]  # one has no tokens
        pairs = zip(perplexities, expected.pseudo_perplexity.tolist(), strict=True)
        assert all(value is None or value == pytest.approx(other, rel=1e-4) for value, other in pairs)


def test_arguments_when_it_is_made_are_defaults_of_the_calls():
    model = energy_model()
    made = EnergyScoringPipeline(model=model, tokenizer=tokenizer(), masking="unmasked")
    for arguments, variant in (({}, "unmasked"), ({"masking": "exact"}, "exact")):
        expected = model.score(TEXTS[:1], tokenizer(), masking=variant).energy
        assert made(TEXTS[0], **arguments)["energy"] == pytest.approx(float(expected[0]))
    with pytest.raises(ValueError, match="masking must be one of"):
        made(TEXTS[0], masking="quick")


def test_the_embedded_model():
    model, own = load_embedded()
    texts = held_out_clauses()[:6]
    found = pipeline("energy-scoring", model=model, tokenizer=own)(texts, batch_size=4)
    assert_like([one["energy"] for one in found], model.score(texts, own).energy.tolist())
    assert all(1 < one["pseudo_perplexity"] < 10_000 for one in found)
