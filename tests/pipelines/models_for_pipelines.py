"""Tiny random models with their tokenizer, and folders of them."""

import functools

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertModel, GPT2Config, GPT2LMHeadModel

from hf_ebm import EnergyModel, ResidualEnergyModel
from tests.models.residual_models import spread
from tests.models.tokenizers_for_tests import small_model, small_tokenizer

TEXTS = ["the cat sat", "the dog sat on the log", "god created the heaven", "", "un", "the mat and the earth."]
PROMPTS = ["the [MASK] sat on the [MASK]", "[MASK] dog", "god [MASK] [MASK] [MASK] earth.", "[MASK] dog", "[MASK]"]


@functools.cache
def tokenizer():
    return small_tokenizer("wordpiece")


def energy_model(energy: str = "local", **fields) -> EnergyModel:
    return small_model(tokenizer(), energy=energy, **fields)


def bert(model_class=BertForMaskedLM):
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=len(tokenizer()), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=40, pad_token_id=tokenizer().pad_token_id,
    )  # fmt: skip
    return spread(model_class(config), 0.3).eval()


def causal_lm() -> GPT2LMHeadModel:
    torch.manual_seed(2)
    own = tokenizer()
    config = GPT2Config(
        vocab_size=len(own), n_positions=40, n_embd=16, n_layer=1, n_head=2, bos_token_id=own.cls_token_id,
        eos_token_id=own.sep_token_id, pad_token_id=own.pad_token_id,
    )  # fmt: skip
    return spread(GPT2LMHeadModel(config), 0.3).eval()


def residual_model() -> ResidualEnergyModel:
    encoder = bert(functools.partial(BertModel, add_pooling_layer=False))
    model = ResidualEnergyModel(causal_lm(), encoder, lm_tokenizer=tokenizer(), encoder_tokenizer=tokenizer())
    torch.manual_seed(3)
    model.head.weight.data.normal_(0, 1)
    return model.eval()


def saved(folder, *parts) -> str:
    """A folder that holds a model, and a tokenizer if it is among the parts, as a name."""
    for part in parts:
        part.save_pretrained(folder)
    return str(folder)


def calls_of(monkeypatch, model, name: str, size) -> list[int]:
    """Sizes of the batches that a method of the model is called with from now on; `size` takes its arguments."""
    sizes, method = [], getattr(model, name)

    @functools.wraps(method)
    def counting(*args, **kwargs):
        sizes.append(size(*args, **kwargs))
        return method(*args, **kwargs)

    monkeypatch.setattr(model, name, counting)
    return sizes


def assert_like(found, expected) -> None:
    """Equal but for rounding in the numbers."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_like(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)
    else:
        assert found == expected
