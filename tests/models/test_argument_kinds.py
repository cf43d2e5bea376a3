"""Arguments of a wrong kind: every error names the argument and what was given, before any row is run."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from hf_ebm import ChainGenerationConfig, TextEnergy
from tests.conftest import tiny_energy_model
from tests.models.tokenizers_for_tests import small_model, small_tokenizer

IDS = torch.tensor([[1, 3, 5, 2]])
BARE = SimpleNamespace(put=print)
META, SPARSE = torch.ones(1, 4, device="meta"), torch.ones(1, 4).to_sparse()


def total(ids):
    return ids.double().sum(1)


@pytest.fixture(scope="module")
def pair():
    tokenizer = small_tokenizer("wordpiece")
    return small_model(tokenizer), tokenizer


@pytest.mark.parametrize(
    "argument,value,message",
    [
        ("input_ids", BatchEncoding({"input_ids": IDS}), r"given by its names: \*\*batch"),
        ("input_ids", "the [MASK] sat", "got 'the .MASK. sat'; .* return_tensors=\"pt\""),
        ("input_ids", 7, "must be a tensor of token ids .* got 7"),
        ("input_ids", IDS.to_sparse(), "got a sparse tensor of shape"),
        ("input_ids", IDS.to("meta"), "got a meta tensor"),
        ("input_ids", IDS.numpy(), "got an array of shape"),
        ("attention_mask", torch.tensor([[0.0, 0.0, -1e9, -1e9]]), "must hold 0 and 1 .* got -10+"),
        ("attention_mask", META, "got a meta tensor"),
        ("attention_mask", SPARSE, "got a sparse tensor"),
        ("free_mask", torch.full((1, 4), 0.5), "must hold 0 and 1 .* got 0.5"),
        ("free_mask", torch.full((1, 4), torch.nan), "must hold 0 and 1 .* got nan"),
        ("token_type_ids", 7, "numbers from 0 to 1, got 7"),
        ("token_type_ids", "0", "got '0'"),
        ("token_type_ids", [[0, 1, 0]], r"of shape \(1,\) or \(1, 4\), got shape \(1, 3\)"),
        ("token_type_ids", 0.5, "must be a whole number, .*got 0.5"),
        ("langs", 1, "BertForMaskedLM takes no such input; .* it takes position_ids, token_type_ids"),
        ("input_shape_ids", 1, "gives the masked token away"),
        ("logits_processor", 7, "must be callable, got 7"),
        ("logits_processor", [torch.neg, None], "entry 1 must be callable, got None"),
        ("logits_processor", dict, "must be callable, got <class 'dict'> itself"),
        ("stopping_criteria", ["a"], "entry 0 must be callable, got 'a'"),
        ("stopping_criteria", {}, "must be callable, got {}"),
        ("streamer", BARE, "methods put and end, got"),
        ("streamer", torch.zeros(1), "methods put and end, got a tensor"),
        ("extra_energies", 7, "must be a list of pairs .* got 7"),
        ("extra_energies", {"a": total}, "must be a list of pairs .* got {"),
        ("extra_energies", [("1", total)], "entry 0 must be a pair .* got .'1'"),
        ("extra_energies", [(1.0, total), (1.0, "f")], "entry 1 must be callable, got 'f'"),
        ("chain_keys", [(0.7, 1.9)], "must be different pairs .* got .*0.7, 1.9"),
        ("chain_keys", "00", "must be different pairs .* got '00'"),
        ("chain_keys", [[(0, 0)]], "must be different pairs"),
        ("chain_keys", [(0, 2**70)], "must be different pairs"),
        ("save_state_to", 7, "must be a name or a path, .* got 7"),
        ("generation_config", {"num_epochs": 3}, "must be a ChainGenerationConfig, got dict"),
    ],
)
def test_generate(argument, value, message, rows_run):
    model = tiny_energy_model()
    with pytest.raises(ValueError, match=f"{argument}.*{message}"):
        model.generate(**{"input_ids": IDS, "num_epochs": 1, argument: value})
    assert not rows_run


def test_resuming():
    with pytest.raises(ValueError, match=r"resume_from must be a name or a path, .* got b'folder'"):
        tiny_energy_model().generate(resume_from=b"folder")


WRONG_SCORES = (lambda scores: None, torch.Tensor.long, lambda scores: scores[:, :1], torch.Tensor.tolist)


@pytest.mark.parametrize("processor", WRONG_SCORES)
def test_what_a_processor_returns(processor):
    with pytest.raises(ValueError, match=r"logits_processor: wrong returned .* floats of shape \(1, 9\)"):
        tiny_energy_model().generate(IDS, logits_processor=named(lambda ids, scores: processor(scores)))


WRONG_ENERGIES = ({"a": 1}, "x", [[1.0]], [1.0, 2.0], None, torch.ones(1, device="meta"), ["a"], 1j, {1.0})
SENSELESS_ENERGIES = ([torch.nan], [-torch.inf], [1e300])


@pytest.mark.parametrize("returned", WRONG_ENERGIES)
def test_what_an_extra_energy_returns(returned):
    with pytest.raises(ValueError, match=r"extra_energies: entry 1 \(wrong\) returned .* of shape \(1,\)"):
        tiny_energy_model().generate(IDS, extra_energies=[(0.0, total), (1e10, named(lambda ids: returned))])


@pytest.mark.parametrize("returned", SENSELESS_ENERGIES)
def test_energies_that_are_no_number_of_nats(returned):
    with pytest.raises(ValueError, match=r"entry 0 \(wrong\) returned .*must be no NaN"):
        tiny_energy_model().generate(IDS, extra_energies=(1e10, named(lambda ids: returned)))


@pytest.mark.parametrize("returned", [0.5, 1, torch.ones(3, dtype=torch.bool), torch.ones(1), None, "yes"])
def test_what_a_stopping_criterion_returns_costs_no_epoch(returned, tmp_path):
    """What was sampled before is saved, and goes on."""
    model = tiny_energy_model()
    later = iter([torch.zeros(1, dtype=torch.bool), returned])
    with pytest.raises(ValueError, match=r"stopping_criteria: wrong returned .* of shape \(1,\)"):
        model.generate(
            IDS, stopping_criteria=named(lambda ids, scores: next(later)), num_epochs=4, seed=3, save_state_to=tmp_path
        )
    out = model.generate(resume_from=tmp_path)
    assert out.run.epoch == 4
    assert torch.equal(out.samples, model.generate(IDS, num_epochs=4, seed=3).samples)


@pytest.mark.parametrize("flag", [True, np.True_, torch.tensor(True), [True], torch.tensor([True])])
def test_truth_values_of_any_make_stop_the_chains(flag):
    out = tiny_energy_model().generate(IDS, stopping_criteria=[lambda ids, scores: flag], num_epochs=4)
    assert out.run.epoch == 1


def test_what_is_simply_accepted():
    model, settings = tiny_energy_model(), dict(num_epochs=3, seed=1)
    plain = model.generate(IDS, **settings).samples
    for given in ({"token_type_ids": [[0, 0, 0, 0]]}, {"extra_energies": None}, {"extra_energies": []}):
        assert torch.equal(model.generate(IDS, **settings, **given).samples, plain)
    expected = model.generate(IDS, **settings, extra_energies=[(1.0, total)]).energies
    for one in (total, (1.0, total), [1.0, total], [total], [(1.0, total)]):
        assert torch.equal(model.generate(IDS, **settings, extra_energies=one).energies, expected)
    twice = model.generate(IDS, **settings, extra_energies=[(1.0, total), total]).energies
    assert torch.equal(twice, model.generate(IDS, **settings, extra_energies=[(2.0, total)]).energies)


@pytest.mark.parametrize(
    "argument,value,message",
    [
        ("tokenizer", None, "got None"),
        ("tokenizer", "bert-base-uncased", "got 'bert-base-uncased'"),
        ("texts", 7, "got 7"),
        ("texts", b"the cat", "got b'the cat'"),
        ("texts", {"the cat": 1}, "got {"),
        ("texts", {"the cat"}, "got {"),
        ("texts", torch.ones(2), "row 0 must be a string"),
        ("prefixes", 7, "got 7"),
        ("suffixes", {"a": 1}, "got {"),
        ("separator", None, "must be a text, got None"),
        ("masking", ["exact"], "must be one of 'exact'.* got .'exact'."),
        ("masking", np.array(["exact", "stride"]), "must be one of 'exact'.* got an array"),
    ],
)
def test_score(pair, argument, value, message, rows_run):
    model, tokenizer = pair
    with pytest.raises(ValueError, match=f"{argument}.*{message}"):
        model.score(**{"texts": ["the cat"], "tokenizer": tokenizer, argument: value})
    assert not rows_run


def test_a_processor_is_told_from_its_tokenizer(pair):
    with pytest.raises(ValueError, match=r"tokenizer .* pass its \.tokenizer"):
        pair[0].score(["the cat"], SimpleNamespace(tokenizer=pair[1]))


def test_a_file_that_cannot_be_read(pair, tmp_path):
    with pytest.raises(ValueError, match=f"texts: cannot read {re.escape(str(tmp_path))}"):
        pair[0].score(tmp_path, pair[1])


@pytest.mark.parametrize("words", [None, [[0, 1, 2, 2]], torch.rand(1, 4), torch.zeros(1, 3).long(), META])
def test_words(words, rows_run):
    model = tiny_energy_model()
    with pytest.raises(ValueError, match=r"words must be a tensor .*shape \(1, 4\), got"):
        model.score_ids(torch.tensor([[1, 6, 5, 2]]), words=words, masking="within_word_l2r")
    assert not rows_run


@pytest.mark.parametrize("method", ["forward", "score_ids"])
@pytest.mark.parametrize(
    "argument,value",
    [("input_ids", [[1, 6, 5, 2]]), ("input_ids", "the cat"), ("attention_mask", 7),
     ("attention_mask", torch.tensor([[0.0, 0.0, 0.0, -torch.inf]])), ("free_mask", SPARSE)],
)  # fmt: skip
def test_tensors(method, argument, value, rows_run):
    model = tiny_energy_model()
    with pytest.raises(ValueError, match=f"{argument} must"):
        getattr(model, method)(**{"input_ids": torch.tensor([[1, 6, 5, 2]]), argument: value})
    assert not rows_run


@pytest.mark.parametrize(
    "argument,value,message",
    [
        ("candidates", 7, "must be a list of lists of texts, got 7"),
        ("candidates", None, "must be a list of lists of texts, got None"),
        ("candidates", "the cat", "must be a list of lists of texts, got 'the cat'"),
        ("candidates", ["the cat"], "list 0 must be a list of at least one text, got 'the cat'"),
        ("candidates", [["the cat"], None], "list 1 must be a list of at least one text, got None"),
        ("candidates", [[["the cat"]]], "list 0 must be a list of at least one text"),
        ("candidates", [{"the cat": 1}], "list 0 must be a list of at least one text, got {"),
    ],
)
def test_rerank(pair, argument, value, message, rows_run):
    model, tokenizer = pair
    with pytest.raises(ValueError, match=f"{argument}.*{message}"):
        model.rerank(**{"candidates": [["the cat", "a"], ["b"]], "tokenizer": tokenizer, argument: value})
    assert not rows_run


def test_weights_that_leave_no_scores(pair):
    with pytest.raises(ValueError, match="weight must leave finite scores, got 1e"):
        pair[0].rerank([["the cat", "a"]], pair[1], weight=1e308)


@pytest.mark.parametrize("function,tokenizer", [(None, True), (3, True), (len, False)])
def test_text_energies(pair, function, tokenizer):
    with pytest.raises(
        ValueError,
        match="function must be callable" if tokenizer else "tokenizer must be an object with the methods batch_decode",
    ):
        TextEnergy(function, pair[1] if tokenizer else "bert-base-uncased")


@pytest.mark.parametrize("name", ["kernel", "order", "warm_start"])
def test_choices(name):
    for value in (np.array(["gibbs", "random"]), ["gibbs"], 3):
        with pytest.raises(ValueError, match=f"{name} must be one of"):
            ChainGenerationConfig(**{name: value})


def named(function):
    function.__name__ = "wrong"
    return function
