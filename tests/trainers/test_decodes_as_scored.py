"""Models whose decoding depends on padding, or differs from a pass over the whole: what the trainers on costs do.

The oracle are the scores of each step of the stock `generate`, and rows decoded by themselves.
"""

import logging

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model

from hf_ebm.trainers import (
    MGSConfig,
    MGSTrainer,
    MinimumRiskConfig,
    MinimumRiskTrainer,
    PolicyGradientConfig,
    PolicyGradientTrainer,
)
from hf_ebm.trainers.sequence_pairs import decodes_as_scored
from tests.causal_families import CAUSAL, END, PAD, V, collate_right, completion_rows, tiny_causal
from tests.module_state import state_of
from tests.seq2seq_families import tiny_seq2seq
from tests.trainers.test_trainers import ONE_STEP

IDS = dict(vocab_size=V, bos_token_id=0, eos_token_id=END, pad_token_id=PAD)
BERT = dict(
    **IDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, is_decoder=True,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=64,
)  # fmt: skip
PARTS = dict(
    d_model=16, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=64, dropout=0.0, is_encoder_decoder=False,
    forced_eos_token_id=None,
)  # fmt: skip
LLAMA = dict(
    **IDS, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
)  # fmt: skip
CLASSES = {
    "gradient": (PolicyGradientTrainer, PolicyGradientConfig),
    "risk": (MinimumRiskTrainer, MinimumRiskConfig),
    "mgs": (MGSTrainer, MGSConfig),
}
MAKERS = {
    "bart": lambda: tf.BartForCausalLM(tf.BartConfig(**IDS, **PARTS)),
    "roformer": lambda: tf.RoFormerForCausalLM(tf.RoFormerConfig(**BERT, embedding_size=16)),
    "roberta": lambda: tf.RobertaForCausalLM(tf.RobertaConfig(**BERT)),
    "rwkv": lambda: tf.RwkvForCausalLM(  # whose cache is right for one row alone
        tf.RwkvConfig(**IDS, hidden_size=16, num_hidden_layers=2, attention_hidden_size=16, rescale_every=0)
    ),
    "switch": lambda: tf.SwitchTransformersForConditionalGeneration(
        tf.SwitchTransformersConfig(
            vocab_size=V, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_decoder_layers=2, num_heads=2, num_experts=2,
            expert_capacity=4, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
        )
    ),
    "prophetnet": lambda: tf.ProphetNetForConditionalGeneration(
        tf.ProphetNetConfig(
            vocab_size=V, hidden_size=16, encoder_ffn_dim=16, decoder_ffn_dim=16, num_encoder_layers=1,
            num_decoder_layers=1, num_encoder_attention_heads=2, num_decoder_attention_heads=2, ngram=2,
            max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )
    ),
}  # fmt: skip


def made(name):
    torch.manual_seed(0)
    model = MAKERS[name]()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.4)
    return model.eval()


def trainer_of(kind, tmp_path, model, **settings):
    trainer, config = CLASSES[kind]
    return trainer(model, config(str(tmp_path), **{**ONE_STEP, "num_candidates": 3, **settings}))


@pytest.mark.parametrize("name", ["bart", "roformer"])
def test_a_row_is_decoded_as_it_is_alone_whatever_stands_beside(name, tmp_path):
    model, rows = made(name), completion_rows()
    trainer = trainer_of("mgs", tmp_path, model)
    batch = trainer.candidates.pairs(collate_right(rows))
    assert len({len(prompt) for prompt in batch.prompts}) > 1
    config = trainer.candidates.settings(batch, do_sample=False, max_new_tokens=6)
    beside = [found[0].tolist() for found in trainer.candidates.decode(batch, config)]
    for prompt, found in zip(batch.prompts, beside, strict=True):
        ids = model.generate(prompt[None], generation_config=config)[0, len(prompt) :].tolist()
        assert found == (ids[: ids.index(END) + 1] if END in ids else ids)


@pytest.mark.parametrize("name", ["bart", "roformer"])
def test_samples_are_scored_by_the_steps_that_drew_them(name, tmp_path, monkeypatch):
    model, logits = made(name), []
    trainer = trainer_of("gradient", tmp_path, model)
    batch = trainer.candidates.pairs(collate_right(completion_rows()))
    generate = model.generate

    def noted(**inputs):
        inputs["generation_config"].update(return_dict_in_generate=True, output_scores=True)
        whole = generate(**inputs)
        logits.append((whole.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(whole.scores, 1)))
        return whole.sequences

    monkeypatch.setattr(model, "generate", noted)
    samples, ruled_out = trainer.candidates.sample(batch, 3)
    with torch.no_grad():
        found, _ = trainer.candidates.score(model, batch, samples, ruled_out)
    drawn = {}  # by the sample; steps are those of the stock `generate`
    for ids, scores in logits:
        each = scores.log_softmax(-1).gather(2, ids[..., None])[..., 0]
        for row, values in zip(ids, each, strict=True):
            tokens = row.tolist()
            length = tokens.index(END) + 1 if END in tokens else len(tokens)
            drawn.setdefault(tuple(tokens[:length]), []).append(float(values[:length].sum()))
    for one, values in zip(samples, found, strict=True):
        for ids, value in zip(one, values, strict=True):
            assert PAD not in ids
            assert min(abs(float(value) - other) for other in drawn[tuple(ids.tolist())]) < 1e-3


@pytest.mark.parametrize("name", ["roberta", "rwkv", "prophetnet"])
def test_what_decodes_otherwise_than_it_is_scored_has_no_policy_gradient(name, tmp_path, caplog, monkeypatch):
    message = rf"model: {type(made(name)).__name__} gives tokens other probabilities in decoding"
    with pytest.raises(ValueError, match=message):
        trainer_of("gradient", tmp_path, made(name))
    monkeypatch.setattr(logging.getLogger("hf_ebm"), "propagate", True)
    for kind in ("risk", "mgs"):
        caplog.clear()
        trainer_of(kind, tmp_path, made(name))
        assert "gives tokens other probabilities in decoding" in caplog.text


def test_a_new_model_is_tried_too(tmp_path):
    args = PolicyGradientConfig(str(tmp_path), **ONE_STEP)
    trainer = PolicyGradientTrainer(args=args, model_init=lambda: tiny_causal())
    trainer.model = made("bart")
    assert trainer.candidates.by_length
    trainer.model = made("roberta")
    with pytest.raises(ValueError, match="gives tokens other probabilities"):
        trainer.candidates.pairs(collate_right(completion_rows()))
    with pytest.raises(ValueError, match="gives tokens other probabilities"):
        PolicyGradientTrainer(args=args, model_init=lambda: made("roberta"))
    with pytest.raises(ValueError, match="model must be a sequence-to-sequence or a causal language model"):
        encoder = tf.BertModel(tf.BertConfig(**{**BERT, "is_decoder": False}))
        PolicyGradientTrainer(args=args, model_init=lambda: encoder)


def test_experts_with_a_capacity_have_no_policy_gradient(tmp_path):
    with pytest.raises(ValueError, match=r"SwitchTransformers.* expert_capacity=4"):
        trainer_of("gradient", tmp_path, made("switch"))
    trainer_of("risk", tmp_path, made("switch"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt2 with adapters", "bart", "lstm additive", "lstm fixed"])
def test_the_trial_passes_and_leaves_nothing_behind(family, dtype, tmp_path):
    causal = family.removesuffix(" with adapters") in CAUSAL
    model = (tiny_causal(family.split()[0]) if causal else tiny_seq2seq(family)).to(dtype)
    if "adapters" in family:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"]))
    model.train()
    trainer = trainer_of("gradient", tmp_path, model)
    before, config, seed = state_of(model), model.generation_config.to_dict(), torch.get_rng_state()
    assert decodes_as_scored(model, trainer.candidates.pad_id, trainer.candidates.end_ids)
    assert not trainer.candidates.by_length and model.training
    assert torch.equal(torch.get_rng_state(), seed)
    assert model.generation_config.to_dict() == config and state_of(model) == before


LONG = dict(
    rope_type="longrope", rope_theta=10000.0, short_factor=[1.0] * 4, long_factor=[4.0] * 4,
    original_max_position_embeddings=8,
)  # fmt: skip
DYNAMIC = dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0)
SCALED = {
    "longrope": lambda: tf.Phi3ForCausalLM(
        tf.Phi3Config(
            **LLAMA, max_position_embeddings=64, original_max_position_embeddings=8, rope_parameters=dict(LONG)
        )
    ),
    "dynamic": lambda: tf.LlamaForCausalLM(
        tf.LlamaConfig(**LLAMA, max_position_embeddings=8, rope_parameters=dict(DYNAMIC))
    ),
}


@pytest.mark.parametrize("kind", SCALED)
def test_nothing_is_decoded_where_rotary_frequencies_change(kind, tmp_path):
    trainer = trainer_of("gradient", tmp_path, SCALED[kind](), max_length_ratio=9.0)
    ids = torch.tensor([[4, 5, 6, 7, 8, END]])
    pairs = trainer.candidates.pairs({"input_ids": ids, "labels": torch.tensor([[-100] * 5 + [END]])})
    assert trainer.candidates.settings(pairs).max_new_tokens == 3
    # Of models with a kind of frequencies for each type of layer.
    config = trainer.model.config
    config.rope_parameters = {"full_attention": config.rope_parameters, "sliding_attention": {"rope_type": "default"}}
    assert trainer.candidates.settings(pairs).max_new_tokens == 3
