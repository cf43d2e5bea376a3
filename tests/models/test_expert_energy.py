"""A product of experts: another model's energy, through its own tokenizer, as a term of the target."""

import itertools

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_ebm import EnergyModel, ExpertEnergy
from hf_ebm.models.energy.configuration_energy import token_roles
from tests.conftest import plain_token_energies, tiny_mlm
from tests.sampling.oracle import total_variation_limit

CHAINS = 250


def made(words: list[str], seed: int) -> tuple[EnergyModel, PreTrainedTokenizerFast]:
    """A tiny model of words, with its tokenizer."""
    names = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", *words]
    vocabulary = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=vocabulary, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
        unk_token="[UNK]",
    )  # fmt: skip
    model = EnergyModel(tiny_mlm(len(names), seed, scale=0.25), **token_roles(tokenizer, len(names)))
    return model, tokenizer


def test_a_product_of_experts_has_its_exact_law():
    """With a budget of changes and three experts: one of the same ids, one of others, and one that lacks a word."""
    model, tokenizer = made(["a", "b", "c"], seed=0)
    same, _ = made(["a", "b", "c"], seed=1)
    other, other_tokenizer = made(["c", "d", "b", "a"], seed=2)
    lacking, lacking_tokenizer = made(["c", "a"], seed=3)
    lacks_b = ExpertEnergy(lacking, lacking_tokenizer, tokenizer)
    start = torch.tensor([[1, 5, 7, 7, 2]])
    out = model.generate(
        start, max_changes=2, num_chains=CHAINS, num_epochs=8, seed=0,
        extra_energies=[(0.5, ExpertEnergy(same)), (-0.4, ExpertEnergy(other, other_tokenizer, tokenizer)),
                        (0.8, lacks_b)],
    )  # fmt: skip
    energies = {}
    for words in itertools.product("ac", repeat=3):  # with a "b" the last one is infinite
        ids = [1, *tokenizer.convert_tokens_to_ids(words), 2]
        if sum(one != first for one, first in zip(ids, start[0].tolist(), strict=True)) <= 2:
            shown = [1, *other_tokenizer.convert_tokens_to_ids(words), 2]
            short = [1, *lacking_tokenizer.convert_tokens_to_ids(words), 2]
            terms = (model, ids, 1.0), (same, ids, 0.5), (other, shown, -0.4), (lacking, short, 0.8)
            energies[tuple(ids)] = sum(
                w * sum(plain_token_energies(m, torch.tensor(i), [1, 2, 3])) for m, i, w in terms
            )
    exact = (-torch.tensor(list(energies.values()))).softmax(0)
    found = [list(energies).index(tuple(ids)) for ids in out.sequences.tolist()]
    shares = torch.bincount(torch.tensor(found), minlength=len(exact)) / CHAINS
    assert float((shares - exact).abs().sum() / 2) < total_variation_limit(exact, CHAINS)
    assert lacks_b(torch.tensor([[1, 5, 6, 7, 2]])).tolist() == [float("inf")]


def test_experts_of_the_same_ids_leave_padding_out():
    model, _ = made(["a", "b", "c"], seed=0)
    found = ExpertEnergy(model)(torch.tensor([[1, 5, 6, 2, 0], [0, 1, 5, 6, 2], [1, 7, 5, 6, 2]]))
    plain = [sum(plain_token_energies(model, torch.tensor(ids), range(1, len(ids) - 1)))
             for ids in ([1, 5, 6, 2], [1, 7, 5, 6, 2])]  # fmt: skip
    assert found.tolist() == pytest.approx([plain[0], *plain], abs=1e-4)


def test_one_tokenizer_of_two_is_refused():
    model, tokenizer = made(["a", "b"], seed=0)
    with pytest.raises(ValueError, match="own_tokenizer and tokenizer go together"):
        ExpertEnergy(model, tokenizer)
    with pytest.raises(ValueError, match="own_tokenizer must be a tokenizer"):
        ExpertEnergy(model, "bert", tokenizer)


def test_what_is_no_expert_is_refused_at_once():
    """Before a chain is run: what has no energies, and ids whose padding the expert would score."""
    model, tokenizer = made(["a", "b"], seed=0)
    with pytest.raises(ValueError, match="model must be an object with the methods score and score_ids"):
        ExpertEnergy(model.mlm)
    unaware = EnergyModel(model.mlm, mask_token_id=3, special_token_ids=[0, 1, 2])
    with pytest.raises(ValueError, match="model: pad_token_id is not set"):
        ExpertEnergy(unaware)
    assert ExpertEnergy(unaware, tokenizer, tokenizer)(torch.tensor([[1, 5, 2]])).isfinite()
