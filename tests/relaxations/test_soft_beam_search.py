"""Soft beam decoding behind `generate`, against Transformers' own beam search."""

import math

import pytest
import torch
from transformers import StoppingCriteria

from hf_ebm.relaxations.soft_beam import soft_beam_search
from tests.seq2seq_families import FAMILIES, seq2seq_batch, tiny_seq2seq


def generate(model, batch, **settings):
    defaults = dict(max_new_tokens=7, do_sample=False, return_dict_in_generate=True)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return model.generate(**inputs, **{**defaults, **settings})


def without_padding(model, sequences):
    """Up to the first end token; Transformers pads with the end token where pad is 0."""
    end = model.generation_config.eos_token_id
    return [row[: row.index(end, 1) + 1] if end in row[1:] else row for row in sequences.tolist()]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("alpha", [1e13, math.inf])
def test_tends_to_the_stock_beam_search(family, alpha):
    model, batch = tiny_seq2seq(family), seq2seq_batch(family)
    beams = dict(num_beams=3, num_return_sequences=3, length_penalty=0.0)
    stock = generate(model, batch, output_scores=True, **beams)
    ours = generate(model, batch, custom_generate=soft_beam_search, alpha=alpha, **beams)
    assert without_padding(model, ours.sequences) == without_padding(model, stock.sequences)
    torch.testing.assert_close(ours.sequences_scores.float(), stock.sequences_scores.float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("penalty", [-1.0, 0.5, 2.0])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("family", ["lstm additive", "bart", "t5"])
def test_ends_and_length_penalties_as_in_the_stock_beam_search(family, penalty, early_stopping):
    """With an end token that is likely: hypotheses end at every step."""
    model, batch = tiny_seq2seq(family), seq2seq_batch(family)
    with torch.no_grad():
        logits = model(**batch).logits[batch["labels"] != -100]
    model.generation_config.eos_token_id = int(logits.softmax(-1).mean(0)[3:].argmax()) + 3
    settings = dict(num_beams=4, num_return_sequences=2, length_penalty=penalty, early_stopping=early_stopping)
    stock = generate(model, batch, output_scores=True, **settings)
    ours = generate(model, batch, custom_generate=soft_beam_search, alpha=math.inf, **settings)
    assert without_padding(model, ours.sequences) == without_padding(model, stock.sequences)
    torch.testing.assert_close(ours.sequences_scores.float(), stock.sequences_scores.float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["lstm fixed", "bart"])
def test_one_hard_beam_is_greedy_search(family):
    model, batch = tiny_seq2seq(family), seq2seq_batch(family)
    stock = generate(model, batch, num_beams=1).sequences
    ours = generate(model, batch, num_beams=1, custom_generate=soft_beam_search, alpha=math.inf).sequences
    assert without_padding(model, ours) == without_padding(model, stock)


def test_processors_and_given_prefixes_are_heeded():
    model, batch = tiny_seq2seq("bart"), seq2seq_batch("bart")
    prefix = torch.tensor([[2, 7, 9]] * 3)
    settings = dict(num_beams=3, length_penalty=0.0, decoder_input_ids=prefix, bad_words_ids=[[5], [6]])
    stock = generate(model, batch, **settings).sequences
    ours = generate(model, batch, custom_generate=soft_beam_search, alpha=math.inf, **settings).sequences
    assert torch.equal(ours[:, :3], prefix)
    assert without_padding(model, ours) == without_padding(model, stock)


def test_global_scores_are_sums_of_logits():
    model, batch = tiny_seq2seq("lstm fixed"), seq2seq_batch("lstm fixed")
    out = generate(
        model, batch, num_beams=3, length_penalty=0.0, custom_generate=soft_beam_search, alpha=math.inf,
        normalization="global", max_new_tokens=8,
    )  # fmt: skip
    for row, sequence in enumerate(out.sequences):
        length = int(batch["attention_mask"][row].sum())
        ids = sequence[None, : length + 1]
        source = batch["input_ids"][row : row + 1, :length]
        logits = model(input_ids=source, decoder_input_ids=ids[:, :-1]).logits[0]
        score = logits.gather(1, ids[0, 1:, None]).sum()
        assert int(ids[0, -1]) == model.config.eos_token_id
        assert float(out.sequences_scores[row]) == pytest.approx(float(score), abs=1e-4)


class _At(StoppingCriteria):
    """Stops a hypothesis that has reached a length, or one that ends in a token."""

    def __init__(self, length=None, token=None):
        self.length, self.token = length, token

    def __call__(self, input_ids, scores, **kwargs):
        if self.length is not None:
            return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)
        return input_ids[:, -1] == self.token


@pytest.mark.parametrize("criterion", [_At(length=4), _At(token=9), _At(token=20)])
def test_stopping_criteria_as_in_the_stock_beam_search(criterion):
    model, batch = tiny_seq2seq("bart"), seq2seq_batch("bart")
    settings = dict(num_beams=3, length_penalty=0.0, stopping_criteria=[criterion])
    stock = generate(model, batch, output_scores=True, **settings)
    ours = generate(model, batch, custom_generate=soft_beam_search, alpha=math.inf, **settings)
    width = max(stock.sequences.shape[1], ours.sequences.shape[1])
    padded = [torch.nn.functional.pad(s, (0, width - s.shape[1]), value=1) for s in (stock.sequences, ours.sequences)]
    assert torch.equal(*padded)
    torch.testing.assert_close(ours.sequences_scores.float(), stock.sequences_scores.float(), atol=1e-4, rtol=1e-4)


def test_half_precision_weights():
    model, batch = tiny_seq2seq("bart").half(), seq2seq_batch("bart")
    out = generate(model, batch, num_beams=3, custom_generate=soft_beam_search)
    assert bool(out.sequences_scores.isfinite().all())


def test_a_small_alpha_decodes_differently():
    model, batch = tiny_seq2seq("bart"), seq2seq_batch("bart")
    hard = generate(model, batch, num_beams=3, custom_generate=soft_beam_search, alpha=math.inf)
    soft = generate(model, batch, num_beams=3, custom_generate=soft_beam_search, alpha=0.01)
    assert not torch.equal(hard.sequences_scores, soft.sequences_scores)


def test_refusals():
    model, batch = tiny_seq2seq("bart"), seq2seq_batch("bart")
    with pytest.raises(ValueError, match="do_sample must be False"):
        generate(model, batch, custom_generate=soft_beam_search, do_sample=True)
    with pytest.raises(ValueError, match="alpha must be above 0, got 0"):
        generate(model, batch, custom_generate=soft_beam_search, alpha=0.0)
    with pytest.raises(ValueError, match="normalization must be one of 'local', 'global', got 'both'"):
        generate(model, batch, custom_generate=soft_beam_search, normalization="both")
    with pytest.raises(ValueError, match=r"num_beams must be at most .*41 tokens, got 42"):
        generate(model, batch, custom_generate=soft_beam_search, num_beams=42)
