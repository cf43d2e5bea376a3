"""Lengths: what states a limit, and what lifts it. The oracle is the stock forward beyond the configured number."""

import pytest
import torch
import transformers as tf
from transformers import AutoModelForMaskedLM

from hf_ebm import EnergyModel, ResidualEnergyModel
from hf_ebm.cli.training.models import max_positions
from hf_ebm.model_facts import generation_limit, limit_of, max_length
from hf_ebm.trainers.costs import ScorerCost
from tests.models.families import NEEDED_INPUTS, tiny_family_model
from tests.models.test_families import FAMILIES, MASK
from tests.pipelines.models_for_pipelines import energy_model, residual_model, tokenizer

UNLIMITED = ["deberta", "deberta-v2", "esm", "esmc", "eurobert", "gte", "jina_embeddings_v3", "modernbert", "neomme",
             "nomic_bert", "ultrabert"]  # fmt: skip
# Tapas has a table whose last row all further positions share.
OTHERS = {"funnel": "states none", "tapas": "shares positions"}


def runs(mlm: AutoModelForMaskedLM, tokens: int) -> bool:
    ids = torch.full((1, tokens), 7)
    decoder = {"decoder_input_ids": ids} if mlm.config.is_encoder_decoder else {}
    try:
        with torch.no_grad():
            return bool(mlm(input_ids=ids, **decoder).logits.isfinite().all())
    except (RuntimeError, IndexError, ValueError):
        return False


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_override_lifts_what_the_forward_does_not_need(model_type):
    mlm = tiny_family_model(model_type)
    stated = max_length(mlm)
    assert (stated is None) == (model_type == "funnel")
    if stated is None:
        return
    assert runs(mlm, stated) or model_type in NEEDED_INPUTS  # these have tables, which other tests see
    lifted = runs(mlm, stated + 8) and model_type not in OTHERS
    assert lifted == (model_type in UNLIMITED)
    assert limit_of(mlm, stated - 1).tokens == stated - 1
    if lifted:
        assert limit_of(mlm, stated + 8).tokens == stated + 8
    else:
        with pytest.raises(ValueError, match=rf"max_sequence_length must be at most {stated} with .* got {stated + 8}"):
            limit_of(mlm, stated + 8)


def energy_of(model_type: str, **fields) -> EnergyModel:
    roles = dict(mask_token_id=MASK, pad_token_id=0, special_token_ids=[0, 1, 2])
    return EnergyModel(tiny_family_model(model_type), **roles, **fields)


def test_rows_beyond_the_configured_number(tmp_path):
    ids = torch.randint(6, 90, (1, 131), generator=torch.Generator().manual_seed(3))
    free = torch.zeros_like(ids).index_fill(1, torch.tensor([0, 130]), 1)
    model = energy_of("esm")
    for call in (lambda: model.score_ids(ids), lambda: model(ids), lambda: model.generate(ids, num_epochs=1)):
        with pytest.raises(ValueError, match=r"row 0 has 131 tokens, the model has positions for 128 \(by its config.*"
                                             "max_sequence_length lifts that"):  # fmt: skip
            call()
    with pytest.raises(ValueError, match=r"lengths: 131 free tokens .* max_sequence_length lifts"):
        model.generate(lengths=131)
    model.save_pretrained(tmp_path)
    model = EnergyModel.from_pretrained(tmp_path, max_sequence_length=131)
    model.save_pretrained(tmp_path / "again")
    model = EnergyModel.from_pretrained(tmp_path / "again")
    expected = 0.0
    for position in (0, 130):
        masked = ids.clone()
        masked[0, position] = MASK
        with torch.no_grad():
            expected -= float(model.mlm(input_ids=masked).logits[0, position].log_softmax(-1)[ids[0, position]])
    assert float(model.score_ids(ids, free_mask=free).sum()) == pytest.approx(expected, abs=1e-4)
    assert model.generate(ids, free_mask=free, num_epochs=1, seed=0).samples.shape[-1] == 131
    with pytest.raises(ValueError, match="row 0 has 132 tokens, max_sequence_length is 131"):
        model.score_ids(torch.full((1, 132), 7))
    table = energy_of("bert", max_sequence_length=131)
    with pytest.raises(ValueError, match="max_sequence_length must be at most 128"):
        table.score_ids(ids)
    with pytest.raises(ValueError, match="max_sequence_length must be a whole number from 1 up, got 0"):
        energy_of("esm", max_sequence_length=0)


def test_the_tokenizers_limit_is_named(monkeypatch):
    model, own = energy_model(), tokenizer()
    monkeypatch.setattr(own, "model_max_length", 5)
    told = r"texts: row 1 has 6 tokens, the tokenizer allows 5 \(model_max_length\), which max_sequence_length lifts"
    calls = [
        lambda: model.score(["the", "the cat sat on"], own),
        lambda: model.rerank([["the", "the cat sat on"]], own),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=told):
            call()
    monkeypatch.setattr(model.config, "max_sequence_length", 6)
    for call in calls:
        call()
    with pytest.raises(ValueError, match="row 0 has 7 tokens, max_sequence_length is 6"):
        model.score(["the cat sat on the"], own)
    monkeypatch.setattr(model.config, "max_sequence_length", None)
    monkeypatch.setattr(own, "model_max_length", int(1e30))
    assert limit_of(model.mlm, None, own) == limit_of(model.mlm)
    monkeypatch.setattr(own, "model_max_length", 10**6)
    assert limit_of(model.mlm, None, own) == limit_of(model.mlm)


def test_residual_models(tmp_path):
    model = residual_model()
    with pytest.raises(ValueError, match="language model has positions for 40"):
        model.generate([[6, 7]], max_new_tokens=50)
    with pytest.raises(ValueError, match=r"row 0 of the encoder has 41 tokens, .*positions for 40"):
        model.encoder_rows([torch.full((41,), 7)])
    model.save_pretrained(tmp_path)
    shorter = ResidualEnergyModel.from_pretrained(tmp_path, max_sequence_length=8)
    with pytest.raises(ValueError, match="with max_new_tokens 9; max_sequence_length is 8"):
        shorter.generate([[6, 7]], max_new_tokens=7)
    longer = ResidualEnergyModel.from_pretrained(tmp_path, max_sequence_length=50)
    with pytest.raises(ValueError, match="max_sequence_length must be at most 40 with GPT2LMHeadModel"):
        longer.generate([[6, 7]], max_new_tokens=7)


def test_positions_that_start_after_the_padding_index_are_counted_everywhere():
    config = tf.RobertaConfig(
        vocab_size=41, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=18, is_decoder=True, pad_token_id=1,
    )  # fmt: skip
    model = tf.RobertaForCausalLM(config).eval()
    ids = torch.full((1, 17), 7)
    assert model(ids[:, :16]).logits.isfinite().all()
    with pytest.raises((IndexError, RuntimeError)):
        model(ids)
    assert max_length(model) == generation_limit(model) == max_positions(model, tokenizer()) == 16
    cost = ScorerCost(model, pad_token_id=1)
    assert cost([[7] * 6], None, [[7] * 10]).isfinite().all()
    with pytest.raises(ValueError, match=r"16 positions, got a prompt of 10 .*prediction of 7"):
        cost([[7] * 7], None, [[7] * 10])
