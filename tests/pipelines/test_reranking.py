"""`"energy-reranking"` against `rerank` of both kinds of models."""

import pytest
from datasets import Dataset
from transformers import BartConfig, BartForConditionalGeneration, pipeline
from transformers.pipelines.pt_utils import KeyDataset

from hf_ebm import EnergyModel
from hf_ebm.assets import load_embedded
from hf_ebm.models.energy.configuration_energy import token_roles
from hf_ebm.pipelines import EnergyRerankingPipeline
from tests.models.residual_models import spread
from tests.pipelines.models_for_pipelines import assert_like, calls_of, energy_model, residual_model, tokenizer

LISTS = [["the cat sat", "sat cat the", "the the"], ["god created"], ["the dog", "dog the"], ["earth", "the earth."]]
SCORES = [[0.5, -1.0, 3.0], [0.0], [2.0, 2.5], [-1.0, -2.0]]
PREFIXES = ["in the beginning", "", "and", "the heaven and"]
MODELS = {"energy": energy_model, "residual": residual_model}


@pytest.fixture(params=MODELS)
def reranking(request):
    return EnergyRerankingPipeline(model=MODELS[request.param](), tokenizer=tokenizer())


def as_lists(candidates, result) -> list[list[dict]]:
    """A `RerankOutput` as the pipeline gives it."""
    return [
        [
            {"text": own[i], "energy": result.energies[row][i], "score": result.scores[row][i], "index": i}
            for i in result.order[row]
        ]
        for row, own in enumerate(candidates)
    ]


@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_results_are_those_of_rerank_whatever_the_batch_size(reranking, batch_size):
    inputs = [
        {"candidates": own, "scores": scores, "prefix": prefix}
        for own, scores, prefix in zip(LISTS, SCORES, PREFIXES, strict=True)
    ]
    how = {"weight": 0.5, "length_normalization": 1.0}
    flat = [prefix for prefix, own in zip(PREFIXES, LISTS, strict=True) for _ in own]
    expected = reranking.model.rerank(LISTS, tokenizer(), base_scores=SCORES, prefixes=flat, **how)
    found = reranking(inputs, batch_size=batch_size, **how)
    assert_like(found, as_lists(LISTS, expected))
    assert all(own[0]["score"] == max(one["score"] for one in own) for own in found)
    assert [own[0]["index"] for own in found] == expected.best.tolist()
    assert any(own[0]["index"] > 0 for own in found)  # so that the order is not the inputs'


def test_what_is_optional_may_be_absent_in_some_inputs_of_a_batch(reranking):
    inputs = [
        {"candidates": LISTS[0], "prefix": PREFIXES[0]},
        {"candidates": LISTS[1], "scores": SCORES[1], "prefix": None},
        {"candidates": LISTS[2], "scores": SCORES[2]},
    ]
    assert_like(reranking(inputs, batch_size=3), [reranking(one) for one in inputs])
    expected = reranking.model.rerank(LISTS[2:3], tokenizer(), base_scores=SCORES[2:3])
    assert_like(reranking(inputs[2]), as_lists(LISTS[2:3], expected)[0])


def test_a_column_and_the_rows_of_a_data_set(reranking):
    rows = Dataset.from_dict({"candidates": LISTS, "scores": SCORES})
    expected = [reranking(row) for row in rows.to_list()]
    assert_like(list(reranking(rows, batch_size=2)), expected)
    nested = Dataset.from_dict({"nbest": rows.to_list()})
    assert_like(list(reranking(KeyDataset(nested, "nbest"), batch_size=2)), expected)


def test_a_batch_is_one_call_of_the_model(reranking, monkeypatch):
    sizes = calls_of(monkeypatch, reranking.model, "rerank", lambda candidates, *args, **kwargs: len(candidates))
    reranking([{"candidates": own} for own in LISTS], batch_size=3)
    assert sizes == [3, 1]


def test_each_model_takes_what_its_score_takes():
    masked = EnergyRerankingPipeline(model=energy_model(), tokenizer=tokenizer())
    inputs = {"candidates": LISTS[0], "prefix": "in the", "suffix": "on the mat"}
    how = {"masking": "unmasked", "separator": "  ", "token_budget": 50}
    context = {"prefixes": ["in the"] * 3, "suffixes": ["on the mat"] * 3}
    expected = masked.model.rerank(LISTS[:1], tokenizer(), **context, **how)
    assert_like(masked(inputs, **how), as_lists(LISTS[:1], expected)[0])
    residual = EnergyRerankingPipeline(model=residual_model(), tokenizer=tokenizer())
    expected = residual.model.rerank(LISTS[:1], tokenizer(), ended=False)
    assert_like(residual({"candidates": LISTS[0]}, ended=False), as_lists(LISTS[:1], expected)[0])
    with pytest.raises(
        ValueError, match=r"no argument masking; it takes weight, length_normalization, ended, unknown_tokens$"
    ):
        residual({"candidates": LISTS[0]}, masking="exact")
    with pytest.raises(ValueError, match="no argument ended"):
        masked({"candidates": LISTS[0]}, ended=True)
    with pytest.raises(ValueError, match=r"unknown suffix; .*: candidates, scores, prefix"):
        residual(inputs)


def test_an_encoder_decoder_takes_its_encoders_text():
    config = BartConfig(
        vocab_size=len(tokenizer()), d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=64, pad_token_id=0,
        bos_token_id=2, eos_token_id=3, decoder_start_token_id=3,
    )  # fmt: skip
    mlm = spread(BartForConditionalGeneration(config), 0.3).eval()
    model = EnergyModel(mlm, **token_roles(tokenizer(), len(tokenizer())))
    made = EnergyRerankingPipeline(model=model, tokenizer=tokenizer())
    inputs = [
        {"candidates": own, "encoder_text": text} for own, text in zip(LISTS, ["god", "a", "the", "b"], strict=True)
    ]
    flat = [one["encoder_text"] for one in inputs for _ in one["candidates"]]
    expected = model.rerank(LISTS, tokenizer(), encoder_texts=flat)
    assert_like(made(inputs, batch_size=3), as_lists(LISTS, expected))
    assert flat[0] == "god" and made(inputs[0]) != made(inputs[0] | {"encoder_text": "heaven"})
    del inputs[1]["encoder_text"]
    with pytest.raises(ValueError, match=r"encoder_texts: row 3 must be a string, got None \(inputs 0 to 3\)"):
        made(inputs, batch_size=4)
    with pytest.raises(ValueError, match=r"encoder_texts: .* conditional on an encoder input \(input 0\)"):
        made(inputs[1])


@pytest.mark.parametrize(
    "wrong,message",
    [
        ("the cat", "inputs must be dicts with 'candidates', got str"),
        (["the cat"], "inputs must be dicts with 'candidates', got list"),
        ({"texts": ["the cat"]}, "got a dict with texts"),
        (
            {"candidates": ["the"], "score": [1.0], "label": 1},
            "unknown label, score; known with this model: candidates",
        ),
        ({"candidates": []}, r"candidates must be a list of at least one text, got \[\]"),
        ({"candidates": "the cat"}, "candidates must be a list of at least one text, got 'the cat'"),
        ({"candidates": ["the", None]}, "candidates must be a list of at least one text, got"),
        (
            {"candidates": ["the", "cat"], "scores": [1.0]},
            r"scores must be 2 finite numbers, one a candidate, got \[1.0",
        ),
        ({"candidates": ["the"], "scores": [float("nan")]}, "scores must be 1 finite numbers"),
        ({"candidates": ["the"], "scores": ["1"]}, "scores must be 1 finite numbers"),
        ({"candidates": ["the"], "prefix": 3}, "prefix must be a text, got int"),
    ],
)
def test_wrong_inputs_are_refused(reranking, wrong, message):
    with pytest.raises(ValueError, match=f"{message}.*\\(input 1\\)"):
        reranking([{"candidates": ["the"]}, wrong], batch_size=2)
    with pytest.raises(ValueError, match=r"weight must be a finite number, got 'much'"):
        reranking({"candidates": ["the"]}, weight="much")


def test_the_embedded_model():
    model, own = load_embedded()
    made = pipeline("energy-reranking", model=model, tokenizer=own)
    found = made({"candidates": ["up he go", "he went up"], "scores": [0.0, 0.0]}, length_normalization=1.0)
    expected = model.rerank([["up he go", "he went up"]], own, length_normalization=1.0)
    assert_like(found, as_lists([["up he go", "he went up"]], expected)[0])
    assert isinstance(made.model, EnergyModel) and found[0]["text"] == "he went up"
