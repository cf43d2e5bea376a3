"""`generate` of the recurrent encoder-decoder: what is written, its scores, lengths with fixed attention."""

import itertools

import pytest
import torch

from .lstm_models import KINDS, LENGTHS, tiny_batch, tiny_lstm

MODES = {
    "greedy": {},
    "sample": dict(do_sample=True),
    "beam": dict(num_beams=4),
    "return several": dict(num_beams=4, num_return_sequences=3),
    "sample several": dict(do_sample=True, num_return_sequences=3),
    "sample beams": dict(num_beams=3, do_sample=True),
}


def _limit(attention):
    return {} if attention == "fixed" else dict(max_new_tokens=8)


def _log_probability(model, source, mask, sequences) -> torch.Tensor:
    """(N,) of each written sequence, its end token included and nothing after it."""
    labels = sequences[:, 1:].masked_fill(sequences[:, 1:] == 0, -100)
    logits = model(input_ids=source, attention_mask=mask, labels=labels).logits
    picked = torch.log_softmax(logits, -1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    return (picked * (labels != -100)).sum(1)


@pytest.mark.parametrize("attention, initial_state", KINDS)
@pytest.mark.parametrize("mode", MODES)
def test_cache_changes_nothing(attention, initial_state, mode):
    model = tiny_lstm(attention, initial_state, dtype=torch.float32, decoder_layers=2)
    source, mask, _ = tiny_batch()
    written = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        inputs = dict(input_ids=source, attention_mask=mask, use_cache=use_cache, **_limit(attention), **MODES[mode])
        written.append(model.generate(**inputs))
    assert torch.equal(*written)


@pytest.mark.parametrize("initial_state", ["encoder", "zero"])
def test_greedy_is_the_argmax_loop(initial_state):
    model = tiny_lstm("additive", initial_state)
    source, mask, _ = tiny_batch()
    ids = torch.ones(len(source), 1, dtype=torch.long)
    for _ in range(8):
        ended = (ids == 2).any(1)
        best = model(input_ids=source, attention_mask=mask, decoder_input_ids=ids).logits[:, -1].argmax(-1)
        ids = torch.cat([ids, best.masked_fill(ended, 0)[:, None]], 1)
    written = model.generate(input_ids=source, attention_mask=mask, max_new_tokens=8)
    assert torch.equal(written, ids[:, : written.shape[1]])


@pytest.mark.parametrize("attention", ["additive", "fixed"])
def test_beam_scores_are_log_probabilities_of_what_is_returned(attention):
    model = tiny_lstm(attention)
    source, mask, _ = tiny_batch()
    source, mask = source[[0, 1, 3]], mask[[0, 1, 3]]  # a source of one position has one target, so no three
    out = model.generate(
        input_ids=source, attention_mask=mask, num_beams=4, num_return_sequences=3, length_penalty=0.0,
        output_scores=True, return_dict_in_generate=True, **_limit(attention),
    )  # fmt: skip
    sources, masks = source.repeat_interleave(3, 0), mask.repeat_interleave(3, 0)
    expected = _log_probability(model, sources, masks, out.sequences)
    torch.testing.assert_close(out.sequences_scores.double(), expected, rtol=0, atol=1e-4)
    for ids in out.sequences[:, 1:].tolist():
        assert 2 not in ids or not any(ids[ids.index(2) + 1 :]), "after the end there is padding"


@pytest.mark.parametrize("mode", [*MODES, "too long"])
def test_fixed_attention_writes_as_much_as_it_reads(mode):
    options = MODES.get(mode, dict(max_new_tokens=15, num_beams=4))
    model = tiny_lstm("fixed", dtype=torch.float32)
    source, mask, _ = tiny_batch()
    torch.manual_seed(0)
    written = model.generate(input_ids=source, attention_mask=mask, **options)
    per_row = options.get("num_return_sequences", 1)
    assert written.shape == (4 * per_row, 7)
    for row, ids in enumerate(written[:, 1:].tolist()):
        length = LENGTHS[row // per_row]
        if mode == "return several" and length == 1 and row % per_row:
            continue  # there is only one target of length 1
        assert all(token >= 3 for token in ids[: length - 1]), ids
        assert ids[length - 1 :] == [2] + [0] * (6 - length), ids


@pytest.mark.parametrize("attention, initial_state", KINDS)
@pytest.mark.parametrize("num_beams", [1, 4])
def test_rows_are_decoded_as_if_alone(attention, initial_state, num_beams):
    model = tiny_lstm(attention, initial_state, dtype=torch.float32)
    source, mask, _ = tiny_batch()
    together = model.generate(input_ids=source, attention_mask=mask, num_beams=num_beams, **_limit(attention))
    for row, length in enumerate(LENGTHS):
        alone = model.generate(input_ids=source[row : row + 1, :length], num_beams=num_beams, **_limit(attention))
        width = alone.shape[1]
        assert torch.equal(together[row, :width], alone[0]) and not together[row, width:].any()


def test_a_beam_as_wide_as_the_space_finds_the_best_target_of_its_length():
    model = tiny_lstm("fixed")
    source = tiny_batch()[0][:1, :3]
    targets = torch.tensor([[1, *symbols, 2] for symbols in itertools.product(range(3, 7), repeat=2)])
    scores = _log_probability(model, source.expand(16, -1), None, targets)
    written = model.generate(input_ids=source, num_beams=16, num_return_sequences=16)
    assert torch.equal(written, targets[scores.argsort(descending=True)])


def test_sampling_follows_the_model():
    model = tiny_lstm("additive", dtype=torch.float32)
    source = tiny_batch()[0][:1]
    torch.manual_seed(0)
    start = torch.ones(1, 1, dtype=torch.long)
    expected = torch.softmax(model(input_ids=source, decoder_input_ids=start).logits[0, 0], -1)
    options = dict(do_sample=True, top_k=0, num_return_sequences=20000, max_new_tokens=1)
    written = model.generate(input_ids=source, **options)[:, 1]
    found = torch.bincount(written, minlength=7) / len(written)
    assert (found - expected).abs().max() < 0.015  # four standard errors


@pytest.mark.parametrize("attention", ["additive", "fixed"])
def test_generation_starts_from_encoder_outputs_or_a_prefix(attention):
    model = tiny_lstm(attention, dtype=torch.float32)
    source, mask, _ = tiny_batch()
    source, mask = source[[0, 1, 3]], mask[[0, 1, 3]]
    common = dict(attention_mask=mask, num_beams=2, **_limit(attention))
    expected = model.generate(input_ids=source, **common)
    encoder_outputs = model.get_encoder()(source, attention_mask=mask)
    assert torch.equal(model.generate(encoder_outputs=encoder_outputs, **common), expected)
    embeds = model.get_input_embeddings()(source)
    assert torch.equal(model.generate(inputs_embeds=embeds, **common), expected)

    prefix = torch.tensor([[1, 5, 3]]).expand(3, -1)
    written = model.generate(input_ids=source, decoder_input_ids=prefix, **common)
    assert torch.equal(written[:, :3], prefix)
    if attention == "fixed":
        assert written.shape[1] == 7 and [int((row == 2).nonzero()) for row in written] == [6, 4, 5]


def test_a_limit_below_the_source_length_is_kept():
    source, mask, _ = tiny_batch()
    model = tiny_lstm("fixed", dtype=torch.float32)
    assert model.generate(input_ids=source, attention_mask=mask, max_new_tokens=3).shape == (4, 4)
    assert model.generate(input_ids=source, attention_mask=mask, max_length=3).shape == (4, 3)


def test_attention_weights_of_generation():
    source, mask, _ = tiny_batch()
    out = tiny_lstm(dtype=torch.float32).generate(
        input_ids=source, attention_mask=mask, max_new_tokens=3, output_attentions=True, return_dict_in_generate=True
    )
    assert [weights.shape for (weights,) in out.cross_attentions] == [(4, 1, 1, 6)] * 3
    assert out.cache.get_seq_length() == 3
