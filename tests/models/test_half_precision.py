"""Recurrent models in half precision, under autocast and with weights of it, on any processor.

`make test-processors` runs what is marked `half_precision` as on processors without kernels for it.
"""

import pytest
import torch

from hf_ebm.models.lstm.modeling_bilstm import factored_log_partition
from tests.models.lstm_models import KINDS, LENGTHS, tiny_batch, tiny_lstm
from tests.models.test_bilstm import tiny_bilstm

pytestmark = pytest.mark.half_precision
# Of values below 1, in units of their type's eps: eight roundings of a half each.
ROUNDINGS = 4
HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
IDS = torch.tensor([[1, 5, 6, 7, 2], [1, 4, 2, 0, 0]])


def linear_bound(layer, inputs, dtype, roundings=3):
    """The most by which a linear layer's outputs can be off when inputs, weights and outputs are rounded to `dtype`.

    Each rounding is by a factor of at most 1 + eps / 2; a tenth is left for their products and for sums in float32.
    """
    sums = inputs.abs() @ layer.weight.abs().T + layer.bias.abs()
    return (1.1 * roundings * torch.finfo(dtype).eps / 2 * sums).detach()


def assert_within(found, expected, bound):
    assert bool(((found.float() - expected).abs() <= bound).all())


@HALF
@pytest.mark.parametrize("equal_lengths", [True, False])
@pytest.mark.parametrize("attention, initial_state", KINDS)
def test_encoder_decoder_under_autocast(attention, initial_state, equal_lengths, dtype):
    """The encoder's states are those without autocast; logits in half precision are off by what rounding can do."""
    model = tiny_lstm(attention, initial_state, dtype=torch.float32, initializer_range=0.3)
    source, mask, labels = tiny_batch()
    if equal_lengths:  # torch has other code for it
        source, mask, labels = source[:1].repeat(4, 1), mask[:1].repeat(4, 1), labels[:1].repeat(4, 1)
    inputs = dict(input_ids=source, attention_mask=mask, labels=labels, return_dict=True)
    expected = model(**inputs)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype):
            out = model(**inputs)
        assert out.logits.dtype == dtype and out.loss.dtype == torch.float32
        torch.testing.assert_close(out.encoder_last_hidden_state, expected.encoder_last_hidden_state)
        if attention == "fixed" and initial_state == "zero":  # all but the output layer is the LSTM
            features, _, _ = model.decoder(
                model.decoder.embed_tokens(model.prepare_decoder_input_ids_from_labels(labels)),
                expected.encoder_last_hidden_state, mask, None,
            )  # fmt: skip
            assert_within(out.logits, expected.logits, linear_bound(model.lm_head, features, dtype))
        torch.testing.assert_close(out.logits.float(), expected.logits, rtol=0, atol=ROUNDINGS * torch.finfo(dtype).eps)
        if grad:
            out.loss.backward()
            assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@HALF
@pytest.mark.parametrize("how", ["autocast", "weights"])
@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("attention, initial_state", KINDS)
def test_encoder_decoder_generates(attention, initial_state, num_beams, how, dtype):
    """Every greedy token has the highest logit of one pass in float32, up to rounding; beams have their lengths."""
    model = tiny_lstm(attention, initial_state, dtype=torch.float32, initializer_range=0.3)
    source, mask, _ = tiny_batch()
    with torch.autocast("cpu", dtype, enabled=how == "autocast"):
        half = model if how == "autocast" else tiny_lstm(attention, initial_state, dtype, initializer_range=0.3)
        written = half.generate(source, attention_mask=mask, num_beams=num_beams, max_new_tokens=6, do_sample=False)
    assert written.shape[1] <= 7
    if attention == "fixed":
        assert (written[:, 1:] != 0).sum(1).tolist() == list(LENGTHS)
    if num_beams == 1 and attention == "additive":
        logits = model(input_ids=source, attention_mask=mask, decoder_input_ids=written[:, :-1]).logits.detach()
        chosen = logits.gather(2, written[:, 1:, None])[..., 0]
        lost = (logits.amax(2) - chosen).masked_fill(written[:, 1:] == 0, 0)
        assert float(lost.max()) <= ROUNDINGS * torch.finfo(dtype).eps


@HALF
def test_masked_model_under_autocast(dtype):
    """Hidden states are those without autocast, so logits and scores of contexts are off by one layer's rounding."""
    model, tokens = tiny_bilstm(dtype=torch.float32), torch.tensor([4, 6, 8])
    mask = (IDS != 0).long()
    labels = IDS.masked_fill(mask == 0, -100)
    frame = [1], [2], tokens, 3
    hidden = model.bilstm(IDS, mask)[0]
    expected, tables, log_z = model.lm_head(hidden), model.context_logits(*frame), factored_log_partition(model, *frame)
    # States are below 1. Rounded are states, weights, the product, that plus the bias, and the sum of both sides.
    largest = float(linear_bound(model.lm_head, torch.ones(model.config.hidden_size), dtype, roundings=5).max())
    for grad in (True, False):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype):
            out, found, states = model(IDS, mask, labels), model.context_logits(*frame), model.bilstm(IDS, mask)[0]
            assert abs(factored_log_partition(model, *frame) - log_z) < 3 * largest
        assert out.logits.dtype == dtype
        torch.testing.assert_close(states, hidden)
        assert_within(out.logits, expected, linear_bound(model.lm_head, hidden, dtype))
        for table, exact in zip(found, tables, strict=True):
            assert_within(table, exact, largest)
        if grad:
            (out.loss + sum(table.float().mean() for table in found)).backward()
            assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@HALF
def test_masked_model_with_weights_of_half_precision(dtype):
    model, half = tiny_bilstm(dtype=torch.float32), tiny_bilstm(dtype=torch.float32).to(dtype)
    mask, tokens = (IDS != 0).long(), torch.tensor([4, 6, 8])
    expected = model(IDS, mask).logits
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            out, found = half(IDS, mask, IDS.masked_fill(mask == 0, -100)), half.context_logits([1], [2], tokens, 3)
        assert out.logits.dtype == found[0].dtype == dtype
        torch.testing.assert_close(out.logits.float(), expected, rtol=0, atol=ROUNDINGS * torch.finfo(dtype).eps)
    assert torch.isfinite(torch.tensor(factored_log_partition(half, [1], [2], tokens, 3)))
