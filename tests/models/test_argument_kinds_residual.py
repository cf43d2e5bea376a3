"""Arguments of a wrong kind to residual models, their perplexity, and products: errors name them, before any work."""

import pytest
import torch

from hf_ebm import ProductLM, ResidualEnergyModel
from hf_ebm.models.energy.conditional_energy import length_log_probs
from hf_ebm.models.residual.scoring_residual import position_log_probs, residual_perplexity
from tests.models.residual_models import PREFIX, toy_encoder, toy_lm, toy_residual
from tests.models.tokenizers_for_tests import small_tokenizer

IDS = PREFIX[None]
ADDITIVE = torch.tensor([[0.0, 0.0, -1e9]])


@pytest.fixture(scope="module")
def model():
    return toy_residual()


@pytest.fixture(scope="module")
def product():
    return ProductLM(toy_lm(), toy_lm(seed=3))


@pytest.fixture
def silent(model, monkeypatch):
    """A model whose parts may not run."""
    for part in (model.lm, model.encoder):
        monkeypatch.setattr(part, "forward", None)
    return model


GENERATE = {"input_ids": IDS, "num_candidates": 4, "max_new_tokens": 3}
FORWARD = {"input_ids": IDS}
SCORE = {"texts": ["a"], "tokenizer": None}
PERPLEXITY = {"prefixes": [PREFIX], "continuations": [[3, 1]], "max_new_tokens": 3, "num_samples": 4}


@pytest.mark.parametrize(
    "method,reference,argument,value,message",
    [
        ("generate", GENERATE, "input_ids", IDS.to_sparse(), "got a sparse tensor"),
        ("generate", GENERATE, "input_ids", IDS.to("meta"), "got a meta tensor"),
        ("generate", GENERATE, "attention_mask", 7, "got 7"),
        ("generate", GENERATE, "attention_mask", ADDITIVE, "must hold 0 and 1"),
        ("generate", GENERATE, "generation_config", 7, "must be a JointGenerationConfig, got int"),
        ("generate", GENERATE, "return_candidates", "no", "must be True or False, got 'no'"),
        ("generate", GENERATE, "method", ["stepwise"], "must be one of 'resampling'"),
        ("forward", FORWARD, "input_ids", [[0, 3]], 'return_tensors="pt"'),
        ("forward", FORWARD, "input_ids", IDS.float(), "got a tensor of shape"),
        ("forward", FORWARD, "attention_mask", ADDITIVE, "must hold 0 and 1 .* got -10+"),
        ("forward", FORWARD, "attention_mask", torch.ones(2, 3), "shape .1, 3., got a tensor of shape .2, 3."),
        ("encoder_rows", {}, "rows", None, "must be a list of rows of ids, got None"),
        ("encoder_rows", {}, "rows", [torch.rand(3)], "row 0 must be a list of ids, got a tensor"),
        ("encoder_rows", {}, "rows", [], "one or more, got none"),
        ("score", SCORE, "tokenizer", "gpt2", "got 'gpt2'"),
        ("score", SCORE, "ended", None, "must be True or False|got None"),
    ],
)
def test_residual_models(silent, method, reference, argument, value, message):
    arguments = {**reference, argument: value}
    if argument != "tokenizer" and method == "score":
        arguments["tokenizer"] = small_tokenizer("wordpiece")
    with pytest.raises(ValueError, match=f"{argument}.*({message})"):
        getattr(silent, method)(**arguments)


@pytest.mark.parametrize("function", [residual_perplexity, position_log_probs])
@pytest.mark.parametrize("argument", ["prefixes", "continuations"])
@pytest.mark.parametrize("value", [None, 7, "the cat", {1: 2}, [[0.5]], [None], torch.tensor(1)])
def test_rows_of_ids(silent, function, argument, value):
    with pytest.raises(ValueError, match=f"{argument}.* must be a list of"):
        function(silent, **{**PERPLEXITY, argument: value})


@pytest.mark.parametrize("argument", ["lm_tokenizer", "encoder_tokenizer", "lm_revision"])
def test_joining(argument):
    lm, encoder = toy_lm(), toy_encoder()
    with pytest.raises(ValueError, match=f"{argument} must be a .* got 7"):
        ResidualEnergyModel(lm, encoder, **{argument: 7})


@pytest.mark.parametrize(
    "argument,value,message",
    [
        ("input_ids", "the cat", 'return_tensors="pt"'),
        ("attention_mask", ADDITIVE, "must hold 0 and 1"),
        ("attention_mask", 7, "got 7"),
        ("labels", IDS.float(), "whole numbers .* got a tensor"),
        ("labels", [[0, 3, 4]], "whole numbers .* got .*0, 3, 4"),
        ("num_items_in_batch", "three", "must be a number from 0 up, got 'three'"),
    ],
)
def test_products(product, argument, value, message):
    with pytest.raises(ValueError, match=f"{argument}.*{message}"):
        product(**{"input_ids": IDS, "labels": IDS, argument: value})


def test_a_product_of_no_model():
    with pytest.raises(ValueError, match="lm must be a causal language model, got str"):
        ProductLM.from_lm("gpt2")


@pytest.mark.parametrize("length_model", [None, "bert", 7])
def test_length_models(length_model):
    with pytest.raises(ValueError, match="length_model must be a sequence classifier of lengths, got"):
        length_log_probs(length_model, small_tokenizer("wordpiece"), ["the cat"])
    with pytest.raises(ValueError, match="tokenizer must be a tokenizer"):
        length_log_probs(length_model, "bert", ["the cat"])


def test_masks_of_any_type_give_one_value(model):
    masks = [torch.tensor([[1, 1, 0]], dtype=dtype) for dtype in (torch.long, torch.float32, torch.bool)]
    energies = [model(IDS, mask).energy for mask in masks]
    assert torch.equal(energies[0], energies[1]) and torch.equal(energies[0], energies[2])
