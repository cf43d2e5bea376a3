"""The recurrent encoder-decoder: its equations, its cache, padding, loss, refusals, saving."""

import inspect

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from hf_ebm import LSTMCache, LSTMSeq2SeqConfig, LSTMSeq2SeqForConditionalGeneration

from .lstm_models import KINDS, LENGTHS, equations, tiny_batch, tiny_lstm

SHAPES = [
    dict(bidirectional=bidirectional, encoder_layers=layers, decoder_layers=layers)
    for bidirectional in (True, False)
    for layers in (1, 2)
]


@pytest.mark.parametrize("attention, initial_state", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_follow_the_equations(attention, initial_state, shape):
    model = tiny_lstm(attention, initial_state, **shape)
    source, mask, labels = tiny_batch()
    decoder_ids = model.prepare_decoder_input_ids_from_labels(labels)
    logits = model(input_ids=source, attention_mask=mask, labels=labels).logits.detach()
    for row, length in enumerate(LENGTHS):
        expected = equations(model, source[row, :length].tolist(), decoder_ids[row, :length].tolist())
        torch.testing.assert_close(logits[row, :length], torch.from_numpy(expected), rtol=0, atol=1e-10)


@pytest.mark.parametrize("attention, initial_state", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_cached_steps_equal_one_pass_with_gradients(attention, initial_state, shape):
    model = tiny_lstm(attention, initial_state, **shape)
    source, mask, labels = tiny_batch()
    decoder_ids = model.prepare_decoder_input_ids_from_labels(labels)
    mixing = torch.randn(*source.shape, 7, dtype=torch.float64)

    def gradients(logits):
        model.zero_grad()
        (logits * mixing).sum().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    whole = model(input_ids=source, attention_mask=mask, labels=labels, use_cache=False)
    assert whole.cache is None
    expected = gradients(whole.logits)

    encoder_outputs = model.get_encoder()(source, attention_mask=mask, return_dict=True)
    cache, steps = None, []
    for step, size in enumerate((1, 1, 3, 1)):  # a chunk of several tokens goes through the same state
        start = sum((1, 1, 3, 1)[:step])
        out = model(
            attention_mask=mask, encoder_outputs=encoder_outputs, cache=cache, use_cache=True,
            decoder_input_ids=decoder_ids[:, start : start + size],
        )  # fmt: skip
        cache = out.cache
        steps.append(out.logits)
        assert cache.get_seq_length() == start + size
    torch.testing.assert_close(torch.cat(steps, 1), whole.logits, rtol=0, atol=1e-10)
    for name, gradient in gradients(torch.cat(steps, 1)).items():
        assert expected[name].abs().max() > 0, name
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("attention", ["additive", "fixed"])
def test_a_step_leaves_the_cache_it_reads_alone(attention):
    model = tiny_lstm(attention)
    source, mask, _ = tiny_batch()
    start = torch.ones(len(source), 1, dtype=torch.long)
    before = model(input_ids=source, attention_mask=mask, decoder_input_ids=start, use_cache=True).cache
    copies = before.hidden.clone(), before.cell.clone()
    after = [
        model(input_ids=source, attention_mask=mask, decoder_input_ids=start * token, cache=before, use_cache=True)
        for token in (3, 4, 3)
    ]
    assert torch.equal(before.hidden, copies[0]) and torch.equal(before.cell, copies[1]) and before.length == 1
    assert torch.equal(after[0].logits, after[2].logits) and not torch.equal(after[0].logits, after[1].logits)


def test_caches_can_be_mixed_over_rows_and_differentiated():
    model = tiny_lstm()
    source, mask, _ = tiny_batch()
    source, mask = source[:1].expand(3, -1), mask[:1].expand(3, -1)
    tokens = torch.tensor([[3], [4], [5]])
    common = dict(input_ids=source, attention_mask=mask, use_cache=True)
    cache = model(decoder_input_ids=tokens, **common).cache
    beam_idx = torch.tensor([2, 0, 0])
    weights = torch.nn.functional.one_hot(beam_idx, 3).double().requires_grad_()
    hidden, cell = (torch.einsum("kj,ljh->lkh", weights, state) for state in (cache.hidden, cache.cell))
    mixed = model(decoder_input_ids=tokens, cache=LSTMCache(hidden, cell, cache.length, cache.keys), **common)
    mixed.logits.sum().backward()
    assert weights.grad.abs().min() > 0

    cache.reorder_cache(beam_idx)
    torch.testing.assert_close(mixed.logits, model(decoder_input_ids=tokens, cache=cache, **common).logits)


def test_cache_rows_are_selected_and_repeated():
    model = tiny_lstm()
    source, mask, _ = tiny_batch()
    start = torch.ones(len(source), 1, dtype=torch.long)
    cache = model(input_ids=source, attention_mask=mask, decoder_input_ids=start, use_cache=True).cache
    expected = model(input_ids=source, attention_mask=mask, decoder_input_ids=start, cache=cache).logits
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([4, 1]))
    rows = torch.tensor([2, 0])
    found = model(input_ids=source[rows], attention_mask=mask[rows], decoder_input_ids=start[rows], cache=cache).logits
    torch.testing.assert_close(found, expected[rows], rtol=0, atol=1e-12)


@pytest.mark.parametrize("attention, initial_state", KINDS)
def test_rows_do_not_depend_on_padding(attention, initial_state):
    model = tiny_lstm(attention, initial_state, dtype=torch.float32)
    source, mask, labels = tiny_batch()
    decoder_ids = model.prepare_decoder_input_ids_from_labels(labels)
    wide = torch.nn.functional.pad(source, (0, 5), value=7), torch.nn.functional.pad(mask, (0, 5))
    padded = model(input_ids=wide[0], attention_mask=wide[1], decoder_input_ids=decoder_ids)
    for row, length in enumerate(LENGTHS):
        ids = decoder_ids[row : row + 1, :length]
        alone = model(input_ids=source[row : row + 1, :length], decoder_input_ids=ids)
        torch.testing.assert_close(padded.logits[row : row + 1, :length], alone.logits, rtol=0, atol=1e-6)
        states = padded.encoder_last_hidden_state[row]
        torch.testing.assert_close(states[:length], alone.encoder_last_hidden_state[0], rtol=0, atol=1e-6)
        assert not states[length:].any()


def test_inputs_may_be_embeddings_encoder_outputs_or_labels():
    model = tiny_lstm()
    source, mask, labels = tiny_batch()
    decoder_ids = model.prepare_decoder_input_ids_from_labels(labels)
    assert decoder_ids[0].tolist() == [1, *labels[0, :-1].tolist()] and decoder_ids[2].tolist() == [1, 2, 0, 0, 0, 0]
    expected = model(input_ids=source, attention_mask=mask, decoder_input_ids=decoder_ids, output_attentions=True)
    states = expected.encoder_last_hidden_state
    soft = torch.nn.functional.one_hot(decoder_ids, 7).double() @ model.get_decoder().get_input_embeddings().weight
    for inputs in (
        dict(inputs_embeds=model.get_input_embeddings()(source), decoder_input_ids=decoder_ids),
        dict(encoder_outputs=(states,), decoder_inputs_embeds=soft),
        dict(encoder_outputs=model.get_encoder()(source, attention_mask=mask, return_dict=True), labels=labels),
    ):
        found = model(attention_mask=mask, **inputs)
        torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-12)
    as_tuple = model(input_ids=source, attention_mask=mask, labels=labels, return_dict=False, use_cache=False)
    assert len(as_tuple) == 3 and torch.equal(as_tuple[1], expected.logits)

    (weights,) = expected.cross_attentions
    assert weights.shape == (4, 1, 6, 6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(4, 1, 6, dtype=torch.float64))
    assert not (weights * (mask == 0)[:, None, None]).any()


def test_loss_over_the_number_of_targets_of_several_batches():
    model = tiny_lstm()
    source, mask, labels = tiny_batch()
    inputs = dict(input_ids=source, attention_mask=mask, labels=labels)
    count = int((labels != -100).sum())
    out = model(**inputs)
    picked = torch.log_softmax(out.logits, -1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    torch.testing.assert_close(out.loss, -(picked * (labels != -100)).sum() / count)

    def gradient(*calls):
        model.zero_grad()
        for rows, options in calls:
            model(**{name: value[rows] for name, value in inputs.items()}, **options).loss.backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    whole, total = gradient((slice(None), {})), dict(num_items_in_batch=torch.tensor(count))
    parts = gradient((slice(0, 1), total), (slice(1, 4), total))
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)
    kinds = [parameter.kind for parameter in inspect.signature(model.forward).parameters.values()]
    assert inspect.Parameter.VAR_KEYWORD in kinds  # how Trainer finds out that the model takes num_items_in_batch


@pytest.mark.half_precision
@pytest.mark.parametrize("attention", ["additive", "fixed"])
def test_bfloat16_is_close_and_trains(attention):
    model = tiny_lstm(attention, dtype=torch.float32, initializer_range=0.3)
    source, mask, labels = tiny_batch()
    expected = model(input_ids=source, attention_mask=mask, labels=labels)
    out = model.bfloat16()(input_ids=source, attention_mask=mask, labels=labels)
    assert out.logits.dtype == torch.bfloat16 and out.loss.dtype == torch.float32
    torch.testing.assert_close(out.logits.float(), expected.logits, rtol=0, atol=0.05)
    out.loss.backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


def test_dropout_acts_in_training_only():
    model = tiny_lstm(dropout=0.5, encoder_layers=2, decoder_layers=2)
    source, mask, labels = tiny_batch()
    inputs = dict(input_ids=source, attention_mask=mask, labels=labels)
    assert torch.equal(model(**inputs).logits, model(**inputs).logits)
    model.train()
    assert not torch.allclose(model(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("attention, initial_state", KINDS)
def test_round_trip(attention, initial_state, tmp_path):
    model = tiny_lstm(attention, initial_state, dtype=torch.float32, encoder_layers=2)
    source, mask, labels = tiny_batch()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert type(loaded) is LSTMSeq2SeqForConditionalGeneration
    for field in LSTMSeq2SeqConfig.__annotations__:
        assert getattr(loaded.config, field) == getattr(model.config, field), field
    assert isinstance(AutoConfig.from_pretrained(tmp_path), LSTMSeq2SeqConfig)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    inputs = dict(input_ids=source, attention_mask=mask, labels=labels)
    assert torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    assert loaded.generation_config.eos_token_id == 2 and loaded.generation_config.decoder_start_token_id == 1


def test_fresh_parameters_are_uniform_and_padding_is_zero():
    model = tiny_lstm(initializer_range=0.2)
    for embedding in (model.get_input_embeddings(), model.get_decoder().embed_tokens):
        assert not embedding.weight[0].any()
    values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert 0.19 < values.abs().max() <= 0.2
    assert abs(float(values[values != 0].std()) - 0.2 / 3**0.5) < 0.01
    assert model.get_output_embeddings() is model.lm_head


def _call(**overrides):
    source, mask, labels = tiny_batch()
    attention = overrides.pop("attention", "additive")
    inputs = dict(input_ids=source, attention_mask=mask, labels=labels) | overrides
    return tiny_lstm(attention)(**{name: value for name, value in inputs.items() if value is not None})


def _changed(tensor, row, position, value):
    changed = tensor.clone()
    changed[row, position] = value
    return changed


SOURCE, MASK, LABELS = tiny_batch()
STATE = torch.zeros(1, 4, 8, dtype=torch.float64)
REFUSALS = {
    "left padding": (dict(attention_mask=_changed(MASK, 3, 0, 0)), "attention_mask: row 3"),
    "hole": (dict(attention_mask=_changed(MASK, 1, 2, 0)), "attention_mask: row 1"),
    "empty row": (dict(attention_mask=_changed(MASK, 2, 0, 0)), "attention_mask: row 2"),
    "mask shape": (dict(attention_mask=MASK[:, :5]), r"attention_mask must .* \(4, 6\), got \(4, 5\)"),
    "source id": (dict(input_ids=_changed(SOURCE, 1, 3, 12)), "input_ids: row 1 has id 12"),
    "label": (dict(labels=_changed(LABELS, 3, 1, 7)), "labels: row 3 has 7"),
    "negative label": (dict(labels=_changed(LABELS, 0, 1, -1)), "labels: row 0 has -1"),
    "no source": (dict(input_ids=None), "input_ids, inputs_embeds"),
    "no target": (dict(labels=None), "decoder_input_ids, decoder_inputs_embeds"),
    "label shape": (dict(decoder_input_ids=SOURCE[:, :3] * 0), "labels must have"),
    "rows": (dict(labels=LABELS[:3]), "for each of the 4 sources, got 3"),
    "left target": (dict(decoder_attention_mask=_changed(MASK, 0, 0, 0)), "decoder_attention_mask: row 0"),
    "cache type": (dict(cache=(STATE, STATE)), "cache must be an LSTMCache, got tuple"),
    "cache shape": (dict(cache=LSTMCache(STATE[:, :3], STATE[:, :3], 1)), r"cache: .*\(1, 4, 8\)"),
    "keys shape": (dict(cache=LSTMCache(STATE, STATE, 1, torch.zeros(4, 5, 8))), r"keys .*\(4, 6\), got \(4, 5\)"),
    "argument": (dict(past_key_values=1), "no argument past_key_values"),
    "longer target": (
        dict(attention="fixed", labels=_changed(LABELS, 1, 4, 3)),
        "row 1 has 5 targets and its source 4",
    ),
    "longer target by its mask": (
        dict(
            attention="fixed", labels=None, decoder_input_ids=SOURCE * 0,
            decoder_attention_mask=_changed(MASK, 3, 5, 1),
        ),
        "row 3 has 6 targets and its source 5",
    ),
    "longer decoder input": (
        dict(attention="fixed", labels=None, decoder_input_ids=torch.ones(4, 7, dtype=torch.long)),
        "row 0 has 7 targets and its source 6",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    overrides, message = REFUSALS[name]
    with pytest.raises(ValueError, match=message):
        _call(**overrides)


def test_fixed_attention_allows_labels_padded_further_than_the_source():
    padded = torch.nn.functional.pad(LABELS, (0, 2), value=-100)
    torch.testing.assert_close(_call(attention="fixed", labels=padded).loss, _call(attention="fixed").loss)


@pytest.mark.parametrize(
    "field, value",
    [
        ("vocab_size", 0), ("hidden_size", 7), ("attention", "dot"), ("initial_state", "mean"), ("dropout", 1.0),
        ("eos_token_id", 7), ("pad_token_id", 2), ("initializer_range", 0.0), ("tie_word_embeddings", True),
    ],
)  # fmt: skip
def test_configurations_that_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}|eos_token_id"):
        LSTMSeq2SeqConfig(**{"vocab_size": 12, "decoder_vocab_size": 7, field: value})
    assert LSTMSeq2SeqConfig(hidden_size=7, bidirectional=False).decoder_vocab_size == 8000


def test_resizing_and_checkpointing_are_refused():
    model = tiny_lstm()
    with pytest.raises(ValueError, match="source and a target vocabulary"):
        model.resize_token_embeddings(20)
    with pytest.raises(ValueError, match="does not support activation checkpointing"):
        model.activation_checkpointing_enable()
