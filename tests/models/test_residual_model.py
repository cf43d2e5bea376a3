"""Energies of residual models against a plain loop, round trips, and what is refused."""

import math

import pytest
import torch
import transformers as tf
from safetensors import safe_open
from tokenizers import processors

from hf_ebm.models.residual import ResidualEnergyConfig, ResidualEnergyModel
from hf_ebm.models.residual.candidates import can_share_prefix, candidate_energies
from hf_ebm.models.residual.joined_models import Retokenizer
from tests.models.residual_models import (
    BIDIRECTIONAL,
    ENCODERS,
    PREFIX,
    VOCAB,
    all_continuations,
    exact_energies,
    exact_log_probs,
    toy_encoder,
    toy_lm,
    toy_residual,
)
from tests.models.tokenizers_for_tests import small_tokenizer

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("family", ENCODERS)
def test_energies_equal_a_loop_over_rows_without_padding(family):
    model = toy_residual(family)
    continuations = all_continuations()
    expected = exact_energies(model, PREFIX)
    candidates = [torch.tensor(ids) for ids in continuations]
    found = candidate_energies(model, PREFIX, candidates, batch_size=7)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    ids, mask = model.encoder_rows([torch.cat([PREFIX, own]) for own in candidates])
    torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).energy, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ENCODERS)
def test_only_causal_encoders_share_a_prefix(family):
    assert can_share_prefix(toy_encoder(family)) == (family not in BIDIRECTIONAL)
    assert can_share_prefix(toy_lm())


@pytest.mark.half_precision
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_bidirectional_encoder_is_not_taken_for_a_causal_one(dtype):
    # Weights as they are initialized: what stands behind hardly matters yet.
    torch.manual_seed(0)
    shape = dict(vocab_size=50, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    for model in (
        tf.BertModel(tf.BertConfig(**shape)),
        tf.ModernBertModel(tf.ModernBertConfig(**shape, pad_token_id=0)),
    ):
        model = model.eval()
        assert not can_share_prefix(model)
        assert not can_share_prefix(model.to(dtype))
    assert can_share_prefix(toy_lm(dtype=torch.float32).to(dtype))


def test_equal_candidates_are_computed_once_and_a_shared_prefix_once(monkeypatch):
    for family in ("bert", "gpt2"):
        model, seen = toy_residual(family), []
        forward = model.encoder.forward

        def counted(*args, _forward=forward, _seen=seen, **kwargs):
            _seen.append(tuple(kwargs["input_ids"].shape))
            return _forward(*args, **kwargs)

        can_share_prefix(model.encoder)
        monkeypatch.setattr(model.encoder, "forward", counted)
        candidates = [torch.tensor(ids) for ids in ((3, 4, 5), (1,), (3, 4, 5), (4, 4, 1), (1,))]
        energies = candidate_energies(model, PREFIX, candidates, batch_size=8)
        assert energies[0] == energies[2] and energies[1] == energies[4]
        assert seen == ([(3, 6)] if family == "bert" else [(1, 3), (3, 3)])


def test_gradients_reach_encoder_and_head_only():
    model = toy_residual().train()
    assert model.encoder.training and not model.lm.training
    ids, mask = model.encoder_rows([torch.tensor([0, 3, 4]), torch.tensor([0, 5])])
    model(input_ids=ids, attention_mask=mask).energy.sum().backward()
    assert all(parameter.grad is None for parameter in model.lm.parameters())
    # The last layer's own normalization aside, everything that is used has a gradient.
    assert model.head.weight.grad.abs().sum() > 0
    assert model.encoder.embeddings.word_embeddings.weight.grad.abs().sum() > 0


@pytest.mark.half_precision
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_energies_of_half_precision_are_float32(dtype):
    model = toy_residual(dtype=torch.float32).to(dtype)
    ids, mask = model.encoder_rows([PREFIX])
    assert model(input_ids=ids, attention_mask=mask).energy.dtype == torch.float32


@pytest.mark.half_precision
def test_autocast_leaves_mean_and_head_in_float32():
    model = toy_residual(dtype=torch.float32)
    model.head.bias.data.fill_(1000.0)  # whose last digits bfloat16 would drop
    ids, mask = model.encoder_rows([PREFIX])
    with torch.autocast("cpu", torch.bfloat16):
        energy = model(input_ids=ids, attention_mask=mask).energy
    assert energy.dtype == torch.float32 and float(energy) != round(float(energy) / 8) * 8


# --- saving and loading


def same_weights(first, second) -> bool:
    mine, theirs = first.state_dict(), second.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in mine.items())


@pytest.mark.parametrize("family", ["bert", "gpt2", "modernbert"])
def test_round_trip_by_value(tmp_path, family):
    model = toy_residual(family, torch.float32)
    model.generation_config.num_candidates = 17
    model.save_pretrained(tmp_path)
    again = ResidualEnergyModel.from_pretrained(tmp_path)
    assert same_weights(model, again) and not again.training
    assert again.generation_config.num_candidates == 17
    assert all(not parameter.requires_grad for parameter in again.lm.parameters())
    assert all(parameter.requires_grad for parameter in again.encoder.parameters())
    assert type(tf.AutoModel.from_pretrained(tmp_path)) is ResidualEnergyModel
    continuations = [torch.tensor(ids) for ids in all_continuations()[:20]]
    assert torch.equal(*(candidate_energies(one, PREFIX, continuations, 8) for one in (model, again)))
    torch.testing.assert_close(exact_log_probs(again.lm, PREFIX), exact_log_probs(model.lm, PREFIX), rtol=0, atol=0)


@pytest.fixture
def parts(tmp_path):
    """Folders of a language model and an encoder, with one tokenizer."""
    tokenizer = small_tokenizer("wordpiece")
    size = len(tokenizer)
    for name, model in (
        ("lm", toy_lm(size, dtype=torch.float32)),
        ("encoder", toy_encoder("bert", size, torch.float32)),
    ):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    return tmp_path


def test_round_trip_by_reference_leaves_the_language_model_out(parts):
    model = ResidualEnergyModel.from_lm_and_encoder(parts / "lm", parts / "encoder", keep_lm="reference")
    assert not model.config.retokenize
    model.save_pretrained(parts / "both")
    with safe_open(parts / "both" / "model.safetensors", "pt") as file:
        assert not [name for name in file.keys() if name.startswith("lm.")]  # noqa: SIM118
    again = ResidualEnergyModel.from_pretrained(parts / "both")
    assert same_weights(model, again)
    assert all(not parameter.requires_grad for parameter in again.lm.parameters())
    again.save_pretrained(parts / "again")  # what was loaded is kept by reference as well
    assert same_weights(model, ResidualEnergyModel.from_pretrained(parts / "again"))
    assert again.lm_tokenizer.get_vocab() == model.lm_tokenizer.get_vocab()


def test_another_language_model_in_the_place_of_the_referenced_one_is_refused(parts):
    model = ResidualEnergyModel.from_lm_and_encoder(parts / "lm", parts / "encoder", keep_lm="reference")
    model.save_pretrained(parts / "both")
    toy_lm(model.lm.config.vocab_size, seed=9, dtype=torch.float32).save_pretrained(parts / "lm")
    with pytest.raises(ValueError, match="are not those the energy was made for"):
        ResidualEnergyModel.from_pretrained(parts / "both")


def test_a_model_by_reference_without_its_language_model_says_so(parts):
    config = ResidualEnergyModel.from_lm_and_encoder(parts / "lm", parts / "encoder", keep_lm="reference").config
    with pytest.raises(ValueError, match="kept by reference"):
        ResidualEnergyModel(config).generate([[3]])


def test_types_of_a_model_by_reference_are_kept_apart(parts):
    lm = toy_lm(len(small_tokenizer("wordpiece")), dtype=torch.float32).half()
    lm.save_pretrained(parts / "half")
    model = ResidualEnergyModel(
        lm, toy_encoder("bert", lm.config.vocab_size, torch.float32), lm_reference=parts / "half"
    )
    model.save_pretrained(parts / "both")
    again = ResidualEnergyModel.from_pretrained(parts / "both")
    assert (again.lm.dtype, again.encoder.dtype, again.dtype) == (torch.float16, torch.float32, torch.float32)
    assert same_weights(model, again)
    other = ResidualEnergyModel.from_pretrained(parts / "both", dtype=torch.bfloat16)
    assert (other.lm.dtype, other.encoder.dtype) == (torch.bfloat16, torch.bfloat16)
    other.save_pretrained(parts / "other")
    assert ResidualEnergyModel.from_pretrained(parts / "other").lm.dtype == torch.bfloat16
    mixed = toy_residual(dtype=torch.float32)
    mixed.lm.half()
    with pytest.raises(ValueError, match="must have one data type to be saved together"):
        mixed.save_pretrained(parts / "mixed")


def test_a_moved_reference_says_what_to_do(parts):
    model = ResidualEnergyModel.from_lm_and_encoder(parts / "lm", parts / "encoder", keep_lm="reference")
    model.save_pretrained(parts / "both")
    (parts / "lm").rename(parts / "moved")
    with pytest.raises(ValueError, match=r"lm_reference: .* cannot be loaded"):
        ResidualEnergyModel.from_pretrained(parts / "both")
    again = ResidualEnergyModel.from_pretrained(parts / "both", lm_reference=str(parts / "moved"))
    assert same_weights(model, again)


def test_missing_weights_are_never_made_up(tmp_path, parts):
    model = toy_residual(dtype=torch.float32)
    model.save_pretrained(tmp_path / "whole")
    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    model.save_pretrained(tmp_path / "torn", state_dict=state)
    with pytest.raises(ValueError, match=r"no weights for head\.weight"):
        ResidualEnergyModel.from_pretrained(tmp_path / "torn")
    with pytest.raises(ValueError, match="is no saved ResidualEnergyModel"):
        ResidualEnergyModel.from_pretrained(parts / "encoder")
    with pytest.raises(ValueError, match="keep_lm must be"):
        ResidualEnergyModel.from_lm_and_encoder(parts / "lm", parts / "encoder", keep_lm="no")


def test_an_encoder_from_a_masked_language_model_needs_no_pooling_layer(tmp_path, parts):
    size = len(small_tokenizer("wordpiece"))
    torch.manual_seed(0)
    mlm = tf.BertForMaskedLM(tf.BertConfig(vocab_size=size, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    mlm.save_pretrained(tmp_path / "mlm")
    small_tokenizer("wordpiece").save_pretrained(tmp_path / "mlm")
    model = ResidualEnergyModel.from_lm_and_encoder(parts / "lm", tmp_path / "mlm")
    assert model.encoder.pooler is None
    assert torch.equal(model.encoder.embeddings.word_embeddings.weight, mlm.bert.embeddings.word_embeddings.weight)


def test_the_global_generator_and_the_base_weights_survive_construction():
    lm, encoder = toy_lm(dtype=torch.float32), toy_encoder(dtype=torch.float32)
    before = {name: value.clone() for name, value in [*lm.state_dict().items(), *encoder.state_dict().items()]}
    model = ResidualEnergyModel(lm, encoder)
    for part in (model.lm, model.encoder):
        for name, value in part.state_dict().items():
            assert torch.equal(value, before[name])


# --- different tokenizers


@pytest.mark.parametrize("encoder_kind", ["bytes", "metaspace"])
def test_rows_go_through_text_once(encoder_kind):
    tokenizer, other = small_tokenizer("wordpiece"), small_tokenizer(encoder_kind)
    retokenize = Retokenizer(tokenizer, other, [tokenizer.sep_token_id])
    text = "the cat sat on the mat"
    ended = torch.tensor(tokenizer(text)["input_ids"])
    decoded = tokenizer.decode(ended, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    whole, stopped = retokenize([ended, ended[:-1]])
    assert whole.tolist() == other(decoded)["input_ids"]
    assert stopped.tolist() == whole.tolist()[:-1]  # only a row that ended is closed
    unknown = torch.tensor([tokenizer.cls_token_id, tokenizer.unk_token_id, tokenizer.sep_token_id])
    assert other.unk_token_id in retokenize([unknown])[0].tolist()
    padded = torch.cat([ended, torch.tensor([tokenizer.pad_token_id] * 2)])
    assert retokenize([padded])[0].tolist()[: len(stopped)] == stopped.tolist()


def test_incomplete_characters_become_replacement_characters():
    tokenizer, other = small_tokenizer("bytes"), small_tokenizer("wordpiece")
    retokenize = Retokenizer(tokenizer, other, [tokenizer.sep_token_id])
    ids = tokenizer("天", add_special_tokens=False)["input_ids"]
    assert "\ufffd" in retokenize.text(ids[:1])


def test_an_encoder_tokenizer_without_frame_shows_ends_and_takes_empty_texts():
    tokenizer, other = small_tokenizer("wordpiece"), small_tokenizer("bytes")
    other._tokenizer.post_processor = processors.ByteLevel()  # as GPT-2's: nothing stands around a text
    other.eos_token = "</s>"
    retokenize = Retokenizer(tokenizer, other, [tokenizer.sep_token_id])
    cat = tokenizer("cat", add_special_tokens=False)["input_ids"]
    stopped, ended, empty = retokenize(
        [torch.tensor(cat), torch.tensor([*cat, tokenizer.sep_token_id]), torch.tensor([tokenizer.cls_token_id])]
    )
    assert ended.tolist() == [*stopped.tolist(), other.eos_token_id]
    assert len(empty) == 1


def test_a_model_with_two_tokenizers_scores_saves_and_samples(tmp_path):
    tokenizer, other = small_tokenizer("wordpiece"), small_tokenizer("bytes")
    torch.manual_seed(0)
    lm = toy_lm(len(tokenizer), dtype=torch.float32)
    lm.generation_config.eos_token_id = tokenizer.sep_token_id
    encoder = toy_encoder("roberta", len(other), torch.float32)
    with pytest.raises(ValueError, match="lm_tokenizer and encoder_tokenizer must both be given"):
        ResidualEnergyModel(lm, encoder)
    model = ResidualEnergyModel(lm, encoder, lm_tokenizer=tokenizer, encoder_tokenizer=other)
    assert model.config.retokenize
    model.save_pretrained(tmp_path)
    again = ResidualEnergyModel.from_pretrained(tmp_path)
    assert tf.AutoTokenizer.from_pretrained(tmp_path).get_vocab() == tokenizer.get_vocab()
    texts = ["the cat sat", "the dog"]
    torch.testing.assert_close(again.score(texts, tokenizer).energy, model.score(texts, tokenizer).energy)
    outputs = [one.generate([[2, 7]], num_candidates=4, max_new_tokens=3, seed=0) for one in (model, again)]
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)


# --- refused


def test_other_kinds_of_models_are_refused():
    lm, encoder = toy_lm(), toy_encoder()
    with pytest.raises(ValueError, match="lm must be a causal language model"):
        ResidualEnergyModel(encoder, encoder)
    with pytest.raises(ValueError, match="encoder must be what AutoModel makes"):
        ResidualEnergyModel(lm, toy_lm())
    with pytest.raises(ValueError, match="encoder must be a model"):
        ResidualEnergyModel(lm, torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="must have one data type"):
        ResidualEnergyModel(lm, toy_encoder(dtype=torch.float32))
    with pytest.raises(ValueError, match="takes no attention mask"):
        config = tf.FNetConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, intermediate_size=16)
        ResidualEnergyModel(lm, tf.FNetModel(config).double())
    with pytest.raises(ValueError, match="vocabularies differ"):
        ResidualEnergyModel(lm, toy_encoder(vocab_size=9))


def test_encoders_that_would_not_come_back_or_depend_on_padding_are_refused():
    lm = toy_lm()
    config = toy_encoder().config
    with pytest.raises(ValueError, match="what AutoModel makes of an encoder"):
        ResidualEnergyModel(lm, tf.BertForTokenClassification(config).double())
    with pytest.raises(ValueError, match="what AutoModel makes of an encoder"):
        ResidualEnergyModel(lm, tf.T5EncoderModel(tf.T5Config(vocab_size=VOCAB, d_model=16, num_layers=1)).double())
    conv = tf.ConvBertConfig(
        vocab_size=VOCAB, hidden_size=32, embedding_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=32, conv_kernel_size=3, num_groups=1, head_ratio=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match="depend on how far a row is padded"):
        ResidualEnergyModel(toy_lm(), tf.ConvBertModel(conv).double().eval())
    sizes = dict(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    sparse = tf.BigBirdConfig(**sizes, block_size=4)
    with pytest.raises(ValueError, match=r"encoder: .*BigBirdModel .*original_full"):
        ResidualEnergyModel(lm, tf.BigBirdModel(sparse).double())
    sparse.is_decoder = True
    with pytest.raises(ValueError, match=r"lm: .*BigBirdForCausalLM .*original_full"):
        ResidualEnergyModel(tf.BigBirdForCausalLM(sparse).double(), toy_encoder())
    with pytest.raises(ValueError, match="must not share weights"):
        ResidualEnergyModel(lm, lm.transformer)
    with pytest.raises(ValueError, match="sees the tokens after"):
        ResidualEnergyModel(tf.BertLMHeadModel(config).double(), toy_encoder())
    with pytest.raises(ValueError, match="resize language model and encoder before"):
        toy_residual().resize_token_embeddings(9)
    with_pooler = tf.BertModel(config).double()
    model = ResidualEnergyModel(lm, with_pooler)
    assert model.encoder.pooler is None and not any("pooler" in name for name in model.state_dict())


def test_configuration_alone_makes_a_fresh_model():
    model = toy_residual(dtype=torch.float32)
    fresh = ResidualEnergyModel(ResidualEnergyConfig.from_dict(model.config.to_dict()))
    assert fresh.state_dict().keys() == model.state_dict().keys()
    assert float(fresh.head.bias.detach()) == 0 and 0.001 < float(fresh.head.weight.std()) < 0.06


def test_scores_are_joint_energies_and_rerank(parts):
    model = ResidualEnergyModel.from_lm_and_encoder(parts / "lm", parts / "encoder").eval()
    tokenizer = model.lm_tokenizer
    model.config.end_token_ids = [tokenizer.sep_token_id]
    model.head.weight.data.normal_()
    texts, prefix = ["the cat sat", "on the mat", "dog"], "and"
    found = model.score(texts, tokenizer, prefixes=[prefix] * 3)
    for row, text in enumerate(texts):
        ids = torch.tensor([tokenizer.cls_token_id, *tokenizer(prefix, add_special_tokens=False)["input_ids"]])
        after = tuple([*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.sep_token_id])
        energy, log_prob = exact_energies(model, ids, [after]), exact_log_probs(model.lm, ids, [after])
        assert float(found.residual_energy[row]) == pytest.approx(float(energy), abs=1e-4)
        assert float(found.energy[row]) == pytest.approx(float(energy - log_prob), abs=1e-4)
        assert int(found.num_tokens[row]) == len(after)
    ranked = model.rerank([texts], tokenizer, prefixes=[prefix] * 3)
    assert ranked.order[0] == sorted(range(3), key=lambda row: float(found.energy[row]))
    with pytest.raises(ValueError, match="prefixes has 1 rows"):
        model.score(texts, tokenizer, prefixes=[prefix])
    with pytest.raises(ValueError, match="row 1 has no token"):
        model.score(["a", ""], tokenizer, ended=False)
    with pytest.raises(ValueError, match="row 0 holds the end token"):
        model.score([f"a {tokenizer.sep_token} b"], tokenizer)
    assert math.isfinite(float(model.score([""], tokenizer).energy))  # the end alone
