"""The stepwise decoder against the models' own teacher-forced forward pass, logits and gradients."""

import copy

import pytest
import torch
import transformers as tf
from transformers import GPT2Config, GPT2LMHeadModel

from hf_ebm.relaxations.stepwise import StepwiseDecoder
from tests.module_state import state_of
from tests.seq2seq_families import _BART, FAMILIES, SINGLE_PRECISION, seq2seq_batch, tiny_seq2seq

V = _BART["vocab_size"]


def stepwise_logits(decoder, batch):
    gold = decoder.embed(decoder.gold_ids(batch["labels"]))
    logits, state = decoder.begin(gold[:, 0], input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    every = [logits]
    for step in range(1, gold.shape[1]):
        logits, state = decoder.step(gold[:, step], state)
        every.append(logits)
    return torch.stack(every, 1)


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_teacher_forced_equals_the_models_own_forward(family):
    model, batch = tiny_seq2seq(family).train(), seq2seq_batch(family)
    scored = batch["labels"] != -100
    reference = model(**batch).logits
    found = stepwise_logits(StepwiseDecoder(model), batch)
    torch.testing.assert_close(found[scored], reference[scored], atol=1e-5, rtol=1e-5)
    weights = torch.randn(reference[scored].shape, dtype=reference.dtype, generator=torch.Generator().manual_seed(3))
    (reference[scored] * weights).sum().backward()
    wanted = gradients(model)
    (found[scored] * weights).sum().backward()
    got = gradients(model)
    assert set(got) == set(wanted)
    largest = max(float(g.abs().max()) for g in wanted.values())
    tolerance = 1e-4 if family in SINGLE_PRECISION else 1e-5
    for name, gradient in wanted.items():
        assert float((got[name] - gradient).abs().max()) < tolerance * largest, name


@pytest.mark.parametrize("family", ["lstm additive", "lstm fixed", "bart", "t5", "marian"])
def test_gradients_flow_through_earlier_choices(family):
    """Soft inputs: the loss of the last step alone reaches the logits of the first."""
    model, batch = tiny_seq2seq(family), seq2seq_batch(family)
    decoder = StepwiseDecoder(model)
    start = decoder.embed(decoder.gold_ids(batch["labels"])[:, 0])
    logits, state = decoder.begin(start, input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    first = logits
    first.retain_grad()
    for _ in range(3):
        logits, state = decoder.step(decoder.expected_embedding(logits.softmax(-1)), state)
    logits.square().sum().backward()
    assert float(first.grad.abs().max()) > 0


def test_cached_steps_equal_the_full_prefix_on_soft_inputs():
    """The state carries everything: an oracle that runs the whole soft prefix again at every step."""
    model, batch = tiny_seq2seq("bart"), seq2seq_batch("bart")
    decoder = StepwiseDecoder(model)
    encoder_inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    embeddings = [decoder.embed(decoder.gold_ids(batch["labels"])[:, 0])]
    logits, state = decoder.begin(embeddings[0], **encoder_inputs)
    for _ in range(4):
        embeddings.append(decoder.expected_embedding(logits.softmax(-1)))
        logits, state = decoder.step(embeddings[-1], state)
        whole = model(**encoder_inputs, decoder_inputs_embeds=torch.stack(embeddings, 1), use_cache=False).logits
        torch.testing.assert_close(logits, whole[:, -1], atol=1e-10, rtol=0)


def test_dropout_differs_from_call_to_call_and_is_off_in_evaluation():
    model = tf.BartForConditionalGeneration(tf.BartConfig(**{**_BART, "dropout": 0.3})).train()
    decoder, batch = StepwiseDecoder(model), seq2seq_batch("bart")
    assert model.training  # calibration restores the mode
    torch.manual_seed(1)
    first = stepwise_logits(decoder, batch)
    torch.manual_seed(1)
    assert torch.equal(first, stepwise_logits(decoder, batch))
    assert not torch.equal(first, stepwise_logits(decoder, batch))
    model.eval()
    assert torch.equal(stepwise_logits(decoder, batch), stepwise_logits(decoder, batch))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_logits_depend_on_what_ran_before(family):
    model = tiny_seq2seq(family)
    fixed = family == "lstm fixed"  # whose targets are no longer than its sources
    lengths = (62, 50, 60), (8, 5, 7) if fixed else (3, 2, 1)
    batches = [seq2seq_batch(family, source_lengths=own) for own in lengths]
    before = state_of(model)
    with torch.no_grad():
        long, short = (stepwise_logits(StepwiseDecoder(copy.deepcopy(model)), batch) for batch in batches)
        scored, stock = batches[0]["labels"] != -100, copy.deepcopy(model)(**batches[0]).logits
        torch.testing.assert_close(long[scored], stock[scored], atol=1e-5, rtol=1e-5)
        decoder = StepwiseDecoder(model)
        for batch, expected in zip([*batches, batches[0]], (long, short, long), strict=True):
            assert torch.equal(stepwise_logits(decoder, batch), expected)
    assert state_of(model) == before


def test_steps_leave_tables_of_dynamic_positions_alone():
    part = dict(
        vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, layer_types=["full_attention"], max_position_embeddings=6,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    )  # fmt: skip
    ids = dict(vocab_size=V, pad_token_id=0, bos_token_id=2, eos_token_id=1)
    model = tf.T5GemmaForConditionalGeneration(tf.T5GemmaConfig(encoder=dict(part), decoder=dict(part), **ids)).eval()
    batch, before = seq2seq_batch("t5gemma"), state_of(model)
    stepwise_logits(StepwiseDecoder(model), batch)
    assert state_of(model) == before


def test_calibration_leaves_the_mode_of_every_part():
    model = tiny_seq2seq("bart").train()
    model.get_encoder().eval()
    StepwiseDecoder(model)
    assert model.training and not model.get_encoder().training and model.get_decoder().training


@pytest.mark.half_precision
def test_autocast_keeps_logits_in_single_precision():
    model = tiny_seq2seq("bart").float()
    decoder, batch = StepwiseDecoder(model), seq2seq_batch("bart")
    exact = stepwise_logits(decoder, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = stepwise_logits(decoder, batch)
    assert found.dtype == torch.float32
    assert 0 < float((found - exact).detach().abs().max()) < 0.2 * float(exact.detach().abs().max())


def test_a_causal_model_is_refused():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(ValueError, match=r"model must be a sequence-to-sequence model .*GPT2LMHeadModel"):
        StepwiseDecoder(model)


def test_a_model_that_cannot_is_refused():
    sizes = {key: value for key, value in _BART.items() if key != "vocab_size"}
    config = tf.FSMTConfig(langs=["en", "de"], src_vocab_size=V, tgt_vocab_size=V, **sizes)
    with pytest.raises(ValueError, match="FSMTForConditionalGeneration cannot be decoded step by step"):
        StepwiseDecoder(tf.FSMTForConditionalGeneration(config))


def test_checkpointing_and_layerdrop_are_refused_in_training():
    model, batch = tiny_seq2seq("bart"), seq2seq_batch("bart")
    decoder = StepwiseDecoder(model)
    model.train().activation_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient checkpointing drops the decoder's cache"):
        stepwise_logits(decoder, batch)
    model.activation_checkpointing_disable()
    model.get_decoder().layerdrop = 0.1
    with pytest.raises(ValueError, match="decoder_layerdrop must be 0"):
        stepwise_logits(decoder, batch)
