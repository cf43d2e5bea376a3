"""`resize_token_embeddings`: energies are those of the stock model that was resized first, and roles follow."""

import copy

import pytest
import torch
from transformers import AutoModel

from hf_ebm import EnergyModel
from tests.models.families import VOCAB, tiny_family_model
from tests.models.test_bilstm import tiny_bilstm
from tests.models.test_families import FAMILIES, context_for, plain_energy, ragged_batch, source_of, wrap
from tests.models.tokenizers_for_tests import small_model, small_tokenizer

pytestmark = pytest.mark.slow

# Stock resizing leaves these with a bias of the old size, or refuses.
NOT_RESIZED = {"esm": "size of tensor", "ibert": "not supported for I-BERT", "perceiver": "no attribute 'weight'"}
BIGGER, SMALLER = VOCAB + 7, VOCAB - 6


def grown_tokenizer(*added: str):
    tokenizer = small_tokenizer("wordpiece")
    tokenizer.add_tokens(list(added))
    return tokenizer


@pytest.mark.parametrize("model_type", FAMILIES)
def test_energies_are_those_of_a_stock_model_resized_first(model_type):
    for size in (BIGGER, SMALLER):
        model, stock = wrap(model_type), copy.deepcopy(tiny_family_model(model_type))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        if model_type in NOT_RESIZED:
            with pytest.raises(ValueError, match=f"can't be resized.*{NOT_RESIZED[model_type]}"):
                model.resize_token_embeddings(size)
            assert model.vocab_size == VOCAB and model.config.excluded_token_ids == [3]
            now = model.state_dict()
            assert all(torch.equal(value, now[name]) for name, value in before.items())
            continue
        (ids, mask), context = ragged_batch(), context_for(model)
        model(ids, mask, **context)  # a runner that knows the old size is kept
        torch.manual_seed(5)
        stock.resize_token_embeddings(size)
        torch.manual_seed(5)
        assert model.resize_token_embeddings(size) is model.get_input_embeddings()
        assert (model.vocab_size, model.mlm.config.vocab_size, model.config.text_config.vocab_size) == (size,) * 3
        assert all(torch.equal(a, b) for a, b in zip(model.mlm.parameters(), stock.parameters(), strict=True))
        if size > VOCAB:
            ids[0, 3] = size - 1
        with torch.no_grad():
            found = model(ids, mask, **context).energy[0]
        own = source_of(context, 0)
        model.mlm = stock
        assert float(found) == pytest.approx(plain_energy(model, ids[0], own), rel=1e-5)


@pytest.mark.parametrize("model_type", ["bert", "deberta-v2", "electra", "modernbert", "xlm-roberta", "bart", "xlm"])
def test_a_resized_model_is_saved_and_loaded(model_type, tmp_path):
    model, (ids, mask) = wrap(model_type), ragged_batch()
    model.resize_token_embeddings(BIGGER)
    ids[0, 3] = BIGGER - 1
    model.save_pretrained(tmp_path)
    for again in (EnergyModel.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert again.vocab_size == BIGGER and again.config.excluded_token_ids == [3, *range(VOCAB, BIGGER)]
        context = context_for(model)
        torch.testing.assert_close(again(ids, mask, **context).energy, model(ids, mask, **context).energy)


def test_a_bilstm_is_resized():
    model = EnergyModel(tiny_bilstm(), mask_token_id=3, special_token_ids=[0, 1, 2, 3])
    ids = torch.tensor([[4, 5, 4]])
    before, size = model.mlm(input_ids=ids).logits, model.vocab_size
    model.resize_token_embeddings(size + 3)
    after = model.mlm(input_ids=ids).logits
    assert after.shape[-1] == model.vocab_size == size + 3
    torch.testing.assert_close(after[..., :size], before)
    assert model(torch.tensor([[4, size + 2]])).energy.isfinite().all()


def test_roles_come_from_the_tokenizer_that_has_grown():
    tokenizer = grown_tokenizer("zebra", "[unused9]")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<extra>"]})
    model = small_model(small_tokenizer("wordpiece"))
    size = model.vocab_size
    model.resize_token_embeddings(len(tokenizer), 8, processing_class=tokenizer)
    zebra, unused, extra = tokenizer.convert_tokens_to_ids(["zebra", "[unused9]", "<extra>"])
    number = -(-len(tokenizer) // 8) * 8
    assert model.vocab_size == number and size < len(tokenizer) < number
    excluded, special = set(model.config.excluded_token_ids), set(model.config.special_token_ids)
    assert {unused, *range(len(tokenizer), number)} <= excluded and extra in special
    assert zebra not in excluded | special
    assert float(model.score(["the zebra sat"], tokenizer).energy) > 0


def test_ids_without_a_token_are_never_proposed():
    """The new ids are made the likeliest; the tokenizer knows none of them."""
    model = small_model(small_tokenizer("wordpiece"))
    size = model.vocab_size
    model.resize_token_embeddings(size + 20)
    model.get_output_embeddings().bias.data[size:] = 50.0
    out = model.generate(lengths=5, num_chains=3, num_epochs=2, seed=0)
    assert int(out.sequences.max()) < size
    model.resize_token_embeddings(size)
    assert max(model.config.excluded_token_ids) < size


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"new_num_tokens": 0}, "new_num_tokens must be a whole number from 1 up, got 0"),
        ({"new_num_tokens": 9.5}, "new_num_tokens must be a whole number"),
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of must be a whole number"),
        ({"new_num_tokens": 4}, r"none would be 4, which is in mask_token_id"),
        ({"new_num_tokens": 20, "processing_class": small_tokenizer("wordpiece")}, "tokens, the model would have 20"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_changes(arguments, message):
    model = small_model(small_tokenizer("wordpiece"))
    before = model.vocab_size, copy.deepcopy(model.config)
    with pytest.raises(ValueError, match=message):
        model.resize_token_embeddings(**arguments)
    assert (model.vocab_size, model.config) == before
    assert model.resize_token_embeddings() is model.get_input_embeddings()
