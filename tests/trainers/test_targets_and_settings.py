"""What is asked of targets, models and settings by every trainer on sequences, with the reason in the error."""

import pytest
import torch
import transformers as tf
from transformers import LogitsProcessor

from hf_ebm.model_facts import cached_length, source_length
from hf_ebm.trainers import (
    MGSConfig,
    MGSTrainer,
    MinimumRiskConfig,
    MinimumRiskTrainer,
    PolicyGradientConfig,
    PolicyGradientTrainer,
)
from tests.causal_families import collate_right, completion_rows, tiny_causal
from tests.seq2seq_families import FAMILIES, _bart, tiny_seq2seq
from tests.trainers.test_trainers import KINDS, ONE_STEP, collate, rows

pytestmark = pytest.mark.slow

ON_COSTS = {
    "mgs": (MGSTrainer, MGSConfig, {}),
    "risk": (MinimumRiskTrainer, MinimumRiskConfig, {}),
    "gradient": (PolicyGradientTrainer, PolicyGradientConfig, {}),
}
STEPWISE = ("scheduled sampling", "soft beam", "soft beam, hinge")


def trainer_of(kind, tmp_path, model, data=None, collator=collate, **settings):
    trainer, config, own = (KINDS | ON_COSTS)[kind]
    args = config(str(tmp_path), **{**ONE_STEP, **own, **settings})
    return trainer(model, args, train_dataset=rows(4) if data is None else data, data_collator=collator)


@pytest.mark.parametrize("family", ["lstm additive", "bart"])
@pytest.mark.parametrize("kind", [*KINDS, *ON_COSTS])
def test_a_target_is_one_sequence_in_every_trainer(kind, family, tmp_path):
    """Wherever -100 stands before its end; behind it, it is padding."""
    for places in ([1], [0], [0, 1]):
        data = rows(4)
        data[2]["labels"][places] = -100
        trainer = trainer_of(kind, tmp_path, tiny_seq2seq(family), data)
        for act in (trainer.train, lambda: trainer.evaluate(data)):  # noqa: B023
            with pytest.raises(ValueError, match="labels: row 2 has -100 before its end"):
                act()


@pytest.mark.parametrize("kind", ON_COSTS)
def test_a_causal_target_is_one_sequence_too(kind, tmp_path):
    data = completion_rows(4)
    data[2]["labels"][-2] = -100
    with pytest.raises(ValueError, match="labels: row 2 must have all its targets at its end"):
        trainer_of(kind, tmp_path, tiny_causal(), data, collate_right).train()


def long_rows(length):
    """Targets that end after so many tokens."""
    data, generator = rows(2), torch.Generator().manual_seed(0)
    for row in data:
        row["labels"] = torch.cat([torch.randint(4, 28, (length - 1,), generator=generator), torch.tensor([2])])
    return data


@pytest.mark.parametrize("kind", ON_COSTS)
def test_nothing_is_decoded_beyond_the_positions_of_a_decoder(kind, tmp_path):
    """LED calls them by another name; 1.3 times 58 would be 76 of 64."""
    trainer = trainer_of(kind, tmp_path, tiny_seq2seq("led"), long_rows(58))
    trainer.train()
    pairs = trainer.candidates.pairs(collate(long_rows(58)))
    assert trainer.candidates.settings(pairs).max_new_tokens == 63


def test_lengths_stand_under_the_names_that_families_give_them():
    assert cached_length(tf.LEDConfig(max_decoder_position_embeddings=64)) == 64
    assert cached_length(tf.WhisperConfig(max_target_positions=32)) == 32
    assert cached_length(tf.Speech2TextConfig(max_target_positions=32)) == 32
    assert cached_length(tf.XLNetConfig()) is None  # which says -1
    assert cached_length(tf.T5Config()) is None
    assert cached_length(tf.BartConfig(max_position_embeddings=48)) == 48


@pytest.mark.parametrize("family", ["led", "bart", "marian"])
@pytest.mark.parametrize("kind", [*KINDS, "mgs", "risk"])
def test_targets_beyond_a_table_of_positions_are_refused_by_row(kind, family, tmp_path):
    data = [*long_rows(64), *long_rows(65)[:1]]
    with pytest.raises(ValueError, match=r"labels: row 2 has 65 tokens, .*positions for 64"):
        trainer_of(kind, tmp_path, tiny_seq2seq(family), data).train()


def takes(model, length):
    """Whether a forward of the model itself takes a source of so many tokens."""
    ids = torch.full((1, length), 5)
    try:
        with torch.no_grad():
            model(input_ids=ids, attention_mask=torch.ones_like(ids), decoder_input_ids=torch.tensor([[1, 4]]))
    except (IndexError, RuntimeError):
        return False
    return True


def two_robertas():
    """Positions of this kind begin behind the padding index: fewer than the configuration says."""
    sizes = dict(vocab_size=41, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    decoder = tf.RobertaConfig(**sizes, is_decoder=True, add_cross_attention=True)
    encoder = tf.RobertaModel(tf.RobertaConfig(**sizes, max_position_embeddings=66))
    return tf.EncoderDecoderModel(encoder=encoder, decoder=tf.RobertaForCausalLM(decoder))


@pytest.mark.parametrize("family", [*FAMILIES, "two robertas"])
def test_an_encoder_s_positions_are_those_that_its_forward_has(family):
    model = (two_robertas() if family == "two robertas" else tiny_seq2seq(family)).eval()
    limit = source_length(model)
    if limit is None:
        assert takes(model, 600)
    else:
        assert takes(model, limit) and not takes(model, limit + 1)


@pytest.mark.parametrize("kind", [*KINDS, *ON_COSTS])
def test_sources_beyond_a_table_of_positions_are_refused_by_row(kind, tmp_path):
    data = rows(3)
    data[1] |= {"input_ids": torch.full((65,), 5), "attention_mask": torch.ones(65, dtype=torch.long)}
    with pytest.raises(ValueError, match=r"input_ids: row 1 makes the batch 65 .*positions for 64"):
        trainer_of(kind, tmp_path, tiny_seq2seq("bart"), data).train()


def test_targets_that_no_decoder_reads_may_be_of_any_length(tmp_path):
    """The reference of a cost, and what lies beyond the steps of a search; or where positions are computed."""
    data = long_rows(70)
    trainer_of("gradient", tmp_path, tiny_seq2seq("bart"), data).train()
    trainer_of("soft beam", tmp_path, tiny_seq2seq("bart"), data, max_search_steps=4).train()
    trainer_of("cross-entropy", tmp_path, tiny_seq2seq("t5"), data).train()
    for kind, settings in (("gradient", {"cross_entropy_weight": 1.0}), ("soft beam, hinge", {"max_search_steps": 4})):
        with pytest.raises(ValueError, match="labels: row 0 has 70 tokens, the model has positions for 64"):
            trainer_of(kind, tmp_path, tiny_seq2seq("bart"), data, **settings).train()
    row = {name: value.repeat(20)[:70] for name, value in completion_rows(1)[0].items()}
    row["labels"][:60] = -100
    with pytest.raises(ValueError, match=r"input_ids: row 0 has 70 tokens, .*positions for 64"):
        trainer_of("mgs", tmp_path, tiny_causal(), [row], collate_right).train()


@pytest.mark.parametrize("kind", [*KINDS, *ON_COSTS])
def test_layers_that_are_dropped_are_refused_where_steps_have_a_cache(kind, tmp_path):
    """M2M100's default. Full-sequence passes have no use for a cache."""
    model = _bart("M2M100")()
    assert model.config.decoder_layerdrop > 0
    if kind in STEPWISE:
        message = "load M2M100ForConditionalGeneration with decoder_layerdrop=0.0"
        for given in (model, tf.EncoderDecoderModel(encoder=tiny_bert(), decoder=dropping_decoder())):
            with pytest.raises(ValueError, match=message if given is model else "decoder_layerdrop must be 0"):
                trainer_of(kind, tmp_path, given)
        trainer_of(kind, tmp_path, FAMILIES["m2m_100"]())
    else:
        trainer_of(kind, tmp_path, model).train()


def tiny_bert():
    return tf.BertModel(
        tf.BertConfig(vocab_size=41, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    )


def dropping_decoder():
    return tf.BartForCausalLM(
        tf.BartConfig(
            vocab_size=41, d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16, is_decoder=True,
            decoder_layerdrop=0.2, add_cross_attention=True, is_encoder_decoder=False,
        )
    )  # fmt: skip


class Only(LogitsProcessor):
    """Leaves one token."""

    def __call__(self, input_ids, scores):
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([7]), 0.0)


@pytest.mark.parametrize("kind", [*KINDS, *ON_COSTS])
def test_predictions_obey_logits_processors(kind, tmp_path):
    cases = [(tiny_seq2seq("bart"), rows(2), collate)]
    if kind in ON_COSTS:
        cases.append((tiny_causal(), completion_rows(2), collate_right))
    for model, data, collator in cases:
        trainer = trainer_of(kind, tmp_path, model, data, collator, predict_with_generate=True)
        for processors in ([Only()], tf.LogitsProcessorList([Only()])):
            found = trainer.predict(data, max_new_tokens=4, logits_processor=processors).predictions
            assert all([token for token in row if token not in (1, 2)] == [7] * 4 for row in found.tolist())
    if kind in ON_COSTS:
        with pytest.raises(ValueError, match="logits_processor must be callable, got 3"):
            trainer.predict(data, logits_processor=3)
        with pytest.raises(ValueError, match=r"GenerationConfig.*, got stopping_criteria"):
            trainer.predict(data, stopping_criteria=[])
