"""Inputs of every kind, in batches of every size; shown with scoring."""

import pytest
from datasets import Dataset, IterableDataset
from transformers.pipelines.pt_utils import KeyDataset

from hf_ebm.pipelines import EnergyScoringPipeline
from tests.models.tokenizers_for_tests import small_tokenizer
from tests.pipelines.models_for_pipelines import TEXTS, assert_like, calls_of, energy_model, tokenizer


@pytest.fixture
def scoring():
    return EnergyScoringPipeline(model=energy_model(), tokenizer=tokenizer())


@pytest.fixture
def expected(scoring):
    return [scoring(text) for text in TEXTS]


COLUMNS = {
    "KeyDataset": lambda: KeyDataset(Dataset.from_dict({"text": TEXTS, "n": list(range(len(TEXTS)))}), "text"),
    "column": lambda: Dataset.from_dict({"text": TEXTS})["text"],
    "streamed column": lambda: IterableDataset.from_generator(lambda: ({"text": text} for text in TEXTS))["text"],
    "generator": lambda: (text for text in TEXTS),
    "iterator": lambda: iter(TEXTS),
    "map": lambda: map(str.lower, TEXTS),
    "tuple": lambda: tuple(TEXTS),
}


@pytest.mark.parametrize("batch_size", [None, 1, 2, 4, 20])
@pytest.mark.parametrize("kind", ["list", *COLUMNS])
def test_all_inputs_come_back_in_order_whatever_the_batch_size(scoring, expected, kind, batch_size):
    found = scoring(TEXTS if kind == "list" else COLUMNS[kind](), batch_size=batch_size)
    assert isinstance(found, list) == (kind == "list")
    assert_like(list(found), expected)


def test_one_input_gives_one_result_and_a_list_of_one_a_list(scoring):
    assert isinstance(scoring("the cat"), dict)
    assert scoring(["the cat"]) == [scoring("the cat")]


@pytest.mark.parametrize("kind", ["list", "KeyDataset", "generator"])
def test_a_batch_is_one_call_of_the_model(scoring, monkeypatch, kind):
    sizes = calls_of(monkeypatch, scoring.model, "score", lambda texts, *args, **kwargs: len(texts))
    list(scoring(TEXTS if kind == "list" else COLUMNS[kind](), batch_size=4))
    assert sizes == [4, 2]


def test_the_batch_size_can_be_given_when_it_is_made(monkeypatch):
    scoring = EnergyScoringPipeline(model=energy_model(), tokenizer=tokenizer(), batch_size=3)
    sizes = calls_of(monkeypatch, scoring.model, "score", lambda texts, *args, **kwargs: len(texts))
    assert len(scoring(TEXTS)) == 6 and sizes == [3, 3]
    with pytest.raises(ValueError, match="batch_size"):
        scoring(TEXTS, batch_size=0)


def test_a_tokenizer_without_a_pad_token_does_not_hinder_batches(expected):
    own = small_tokenizer("wordpiece")
    own.pad_token = None
    assert_like(EnergyScoringPipeline(model=energy_model(), tokenizer=own)(TEXTS, batch_size=3), expected)


def test_inputs_are_read_as_results_are_asked_for(scoring):
    read = []
    results = scoring((read.append(text) or text for text in TEXTS), batch_size=2)
    next(iter(results))
    assert len(read) == 2
    assert len(scoring(COLUMNS["KeyDataset"]())) == len(TEXTS)  # as a progress bar asks


def test_nothing_gives_nothing(scoring):
    assert scoring([]) == []
    for empty in (KeyDataset(Dataset.from_dict({"text": []}), "text"), iter([]), (text for text in [])):
        assert list(scoring(empty, batch_size=2)) == []


def test_workers_read_the_inputs(scoring, expected):
    assert_like(list(scoring(COLUMNS["KeyDataset"](), batch_size=4, num_workers=2)), expected)
    assert_like(list(scoring(COLUMNS["generator"](), batch_size=4, num_workers=2)), expected)


@pytest.mark.parametrize("wrong,message", [(3, "must be texts, got int"), (None, "got NoneType"), ([], "got list")])
def test_inputs_of_another_kind_are_named(scoring, wrong, message):
    with pytest.raises(
        ValueError, match=rf"inputs {'' if 'texts' in message else 'must be texts, '}{message} \(input 4\)"
    ):
        scoring(["the"] * 4 + [wrong], batch_size=2)
    if wrong != []:
        with pytest.raises(ValueError, match=rf"{message} \(input 0\)"):
            scoring(wrong)


def test_errors_of_the_model_name_the_inputs(scoring):
    texts = ["the cat"] * 5 + ["the [MASK]"]
    with pytest.raises(ValueError, match=r"texts: row 1 holds the mask token .*\(inputs 4 to 5\)"):
        list(scoring(iter(texts), batch_size=4))
    with pytest.raises(ValueError, match=r"texts: row 0 holds the mask token .*\(input 5\)"):
        scoring(texts)
