"""What is never proposed: special tokens of every origin, the unknown token, placeholders, ids without a token."""

import pytest
from tokenizers import AddedToken
from transformers import BertConfig, BertForMaskedLM, BertTokenizer

from hf_ebm import EnergyModel
from hf_ebm.models.energy.configuration_energy import token_roles
from tests.models.tokenizers_for_tests import KINDS, small_tokenizer


@pytest.mark.parametrize("kind", KINDS)
def test_roles_of_the_usual_tokenizers(kind):
    tokenizer = small_tokenizer(kind)
    roles = token_roles(tokenizer, len(tokenizer) + 3)
    special = {tokenizer.pad_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id}
    assert set(roles["special_token_ids"]) == special
    beyond = {len(tokenizer), len(tokenizer) + 1, len(tokenizer) + 2}
    assert set(roles["excluded_token_ids"]) == {tokenizer.unk_token_id} | beyond
    assert roles["prefix_token_ids"] == [tokenizer.cls_token_id]
    assert roles["suffix_token_ids"] == [tokenizer.sep_token_id]


def test_added_special_tokens_and_placeholders_are_never_proposed(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused17]", "<unused3>", "cat", "dog"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = BertTokenizer(str(tmp_path / "vocab.txt"))
    tokenizer.add_tokens([AddedToken("<|endoftext|>", special=True)], special_tokens=True)
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    config = BertConfig(
        vocab_size=len(tokenizer) + 2, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    tokenizer.save_pretrained(tmp_path)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    model = EnergyModel.from_pretrained(tmp_path)
    assert end in model.config.special_token_ids
    out = model.generate(lengths=4, num_chains=30, num_epochs=3, seed=0)
    assert set(tokenizer.convert_ids_to_tokens(out.samples[..., 1:-1].unique())) == {"cat", "dog"}


def test_a_tokenizer_without_a_mask_token_is_refused():
    tokenizer = small_tokenizer("bytes")
    tokenizer.mask_token = None
    with pytest.raises(ValueError, match="has no mask token"):
        token_roles(tokenizer, len(tokenizer))
