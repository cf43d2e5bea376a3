"""The policy gradient of what generation forces or forbids: exact expectations over all sequences of a tiny vocabulary.

The estimator's expectation is its sum over every sequence, each weighted by the probability with which it is drawn.
"""

import copy

import pytest
import torch
import transformers as tf

from hf_ebm import LSTMSeq2SeqConfig, LSTMSeq2SeqForConditionalGeneration
from hf_ebm.objectives.sequence_costs import normalized_edit_distance
from hf_ebm.trainers import MinimumRiskConfig, MinimumRiskTrainer, PolicyGradientConfig, PolicyGradientTrainer
from tests.trainers.test_trainers import ONE_STEP

V, PAD, END = 7, 1, 2
BART = dict(
    vocab_size=V, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=16, pad_token_id=PAD, bos_token_id=0,
    eos_token_id=END, decoder_start_token_id=END, dropout=0.0,
)  # fmt: skip
LSTM = dict(
    vocab_size=V, decoder_vocab_size=V, embedding_dim=6, decoder_embedding_dim=6, hidden_size=8, pad_token_id=PAD,
    bos_token_id=0, eos_token_id=END, decoder_start_token_id=0, attention="fixed", initial_state="zero",
)  # fmt: skip
SOURCE, TARGET = [4, 6, 5], [5, 3, END]


def tiny(kind):
    """Nearly uniform, so that a few thousand draws hold every sequence."""
    torch.manual_seed(0)
    if kind == "lstm":
        model = LSTMSeq2SeqForConditionalGeneration(LSTMSeq2SeqConfig(**LSTM))
    elif kind == "bart":
        model = tf.BartForConditionalGeneration(tf.BartConfig(**BART))
        model.generation_config.update(forced_eos_token_id=None)
    else:
        sizes = dict(n_positions=16, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        ids = dict(vocab_size=V, bos_token_id=0, eos_token_id=END, pad_token_id=PAD)
        model = tf.GPT2LMHeadModel(tf.GPT2Config(**sizes, **ids))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
    return model.double().eval()


def batch_of(kind, length, prompt):
    target = torch.tensor([TARGET[-length:]])
    ids = torch.tensor([SOURCE[:prompt] if kind == "gpt2" else SOURCE[: length if kind == "lstm" else 3]])
    if kind == "gpt2":
        labels = torch.cat([torch.full_like(ids, -100), target], 1)
        ids = torch.cat([ids, target], 1)
    else:
        labels = target
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def only(*ids):
    return set(range(V)) - set(ids)


# The settings, the most tokens, and by hand which tokens may not follow (tokens so far, most tokens).
NOTHING = lambda seen, most: set()  # noqa: E731
PADDING = lambda seen, most: {PAD}  # noqa: E731  # is never sampled, unless it is forced
KEPT = {
    "forced first": ({"forced_bos_token_id": 5}, 3, lambda seen, most: {PAD} if seen else only(5)),
    "padding forced first": ({"forced_bos_token_id": PAD}, 2, lambda seen, most: {PAD} if seen else only(PAD)),
    "forced last": (
        {"forced_eos_token_id": END}, 3, lambda seen, most: only(END) if len(seen) == most - 1 else {PAD},
    ),
    "suppressed": ({"suppress_tokens": [3, PAD]}, 2, lambda seen, most: {3, PAD}),
    "suppressed first": (
        {"begin_suppress_tokens": [END, 4]}, 2, lambda seen, most: {PAD} if seen else {END, 4, PAD},
    ),
    "suppressed behind a forced first": (
        {"begin_suppress_tokens": [END, 4], "forced_bos_token_id": 5}, 3,
        lambda seen, most: [only(5), {END, 4, PAD}, {PAD}][len(seen)],
    ),
    "bad words": (
        {"bad_words_ids": [[6], [3, 5], [4, END]]}, 2,
        lambda seen, most: {6, PAD} | ({5} if seen[-1:] == [3] else {END} if seen[-1:] == [4] else set()),
    ),
}  # fmt: skip
LEFT_OUT = {
    "min_length": 3, "min_new_tokens": 2, "repetition_penalty": 3.0, "encoder_repetition_penalty": 3.0,
    "no_repeat_ngram_size": 1, "encoder_no_repeat_ngram_size": 1, "sequence_bias": [[[5], -9.0]],
    "exponential_decay_length_penalty": (1, 9.0), "temperature": 0.2, "top_k": 2, "top_p": 0.3, "min_p": 0.5,
    "typical_p": 0.2, "epsilon_cutoff": 0.2, "eta_cutoff": 0.3, "num_beams": 3, "length_penalty": 3.0,
    "do_sample": False, "top_h": 0.3, "guidance_scale": 3.0, "stop_strings": ["a"],
}  # fmt: skip
CASES = {
    **{name: ("bart", settings, most, rule, 0) for name, (settings, most, rule) in KEPT.items()},
    "what is left out, all at once": ("bart", LEFT_OUT, 2, PADDING, 0),
    "fixed length": ("lstm", {}, 3, lambda seen, most: {0, PAD, END} if len(seen) < 2 else only(END), 0),
    "causal, forced first": ("gpt2", *KEPT["forced first"], 1),
    "causal, not forced behind a longer prompt": ("gpt2", {"forced_bos_token_id": 5}, 2, PADDING, 2),
    "causal, forced last": ("gpt2", *KEPT["forced last"], 2),
    "causal, bad words": ("gpt2", *KEPT["bad words"], 2),
}


def every_sequence(most, rule, seen=()):
    """All that can be drawn: up to the end token, or as many tokens as are decoded."""
    if len(seen) == most or END in seen:
        yield list(seen)
        return
    for token in sorted(set(range(V)) - rule(list(seen), most)):
        yield from every_sequence(most, rule, (*seen, token))


def log_prob_by_hand(kind, model, batch, ids, most, rule):
    """Token by token, from the model's forward, among the tokens that the rule leaves."""
    total = torch.zeros((), dtype=torch.float64)
    for at, token in enumerate(ids):
        if kind == "gpt2":
            prompt = batch["input_ids"][:, : -int((batch["labels"] != -100).sum())]
            logits = model(torch.cat([prompt, torch.tensor([ids[:at]], dtype=torch.long)], 1)).logits[0, -1]
        else:
            start = torch.tensor([[model.config.decoder_start_token_id, *ids[:at]]])
            inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
            logits = model(**inputs, decoder_input_ids=start).logits[0, -1]
        left = sorted(set(range(V)) - rule(ids[:at], most))
        total = total + torch.log_softmax(logits[left], -1)[left.index(token)]
    return total


def trainer_of(tmp_path, model, settings, classes=(PolicyGradientTrainer, PolicyGradientConfig), **further):
    model.generation_config.update(**settings)
    args = classes[1](str(tmp_path), **{**ONE_STEP, "max_length_ratio": 1.0, **further})
    return classes[0](model, args)


def each_once(samples, ruled_out):
    """Different samples of the one row, with what was ruled out at each."""
    lengths = [len(ids) for ids in samples]
    parts = [None] * len(samples) if ruled_out is None else ruled_out.split(lengths)
    found = {tuple(ids.tolist()): (ids, part) for ids, part in zip(samples, parts, strict=True)}
    ids, parts = zip(*found.values(), strict=True)
    return list(ids), None if ruled_out is None else torch.cat(parts)


def gradient(parameters):
    return torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters])


@pytest.mark.parametrize("case", CASES)
def test_the_policy_gradient_is_of_what_is_drawn(case, tmp_path):
    kind, settings, most, rule, prompt = CASES[case]
    model, batch = tiny(kind), batch_of(kind, most, prompt)
    before = copy.deepcopy(model)
    trainer = trainer_of(tmp_path, model, settings, baseline="running_mean")
    model.train()
    pairs = trainer.candidates.pairs(batch)
    (samples,), ruled_out = trainer.candidates.sample(pairs, 2000)
    drawn, ruled_out = each_once(samples, ruled_out)
    sequences = list(every_sequence(most, rule))
    assert sorted(ids.tolist() for ids in drawn) == sorted(sequences)  # those that can be drawn, all of them
    logs = torch.stack([log_prob_by_hand(kind, before, batch, ids.tolist(), most, rule) for ids in drawn])
    assert float(logs.exp().sum().detach()) == pytest.approx(1, abs=1e-9)
    costs = normalized_edit_distance(drawn, pairs.targets * len(drawn)).double()
    (logs.exp() * costs).sum().backward()

    weighted = len(drawn) * logs.detach().exp() * costs
    trainer.candidates.sample = lambda pairs, count: ([drawn], ruled_out)
    trainer.candidates.candidate_costs = lambda pairs, candidates: weighted[None]
    log_probs, _ = trainer.candidates.score(model, pairs, [drawn], ruled_out)
    torch.testing.assert_close(log_probs[0], logs, atol=1e-9, rtol=1e-9)
    trainer.training_terms(model, pairs).loss.backward()
    expected = gradient(before.parameters())
    assert float(expected.norm()) > 1e-3
    torch.testing.assert_close(gradient(model.parameters()), expected, atol=1e-9, rtol=1e-6)
    logs = logs.detach()
    shares = torch.tensor([sum(ids.equal(other) for other in samples) / len(samples) for ids in drawn])
    distance = float((shares - logs.exp()).abs().sum() / 2)  # a total variation: what is drawn follows the rule
    assert distance < 1.5 * float((logs.exp() * (1 - logs.exp()) / len(samples)).sqrt().sum() / 2)


def test_every_row_of_a_batch_has_its_own_rule(tmp_path):
    """Fixed lengths differ, and the cross entropy that is mixed in is the model's own."""
    model = tiny("lstm")
    before = copy.deepcopy(model)
    batch = {
        "input_ids": torch.tensor([[4, 6, 5], [5, 3, PAD], [6, PAD, PAD]]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]]),
        "labels": torch.tensor([[5, 3, END], [4, END, -100], [END, -100, -100]]),
    }
    trainer = trainer_of(tmp_path, model, {}, cross_entropy_weight=0.5)
    pairs = trainer.candidates.pairs(batch)
    samples, ruled_out = trainer.candidates.sample(pairs, 4)
    found, cross_entropy = trainer.candidates.score(model, pairs, samples, ruled_out, with_targets=True)
    for row, most in enumerate((3, 2, 1)):
        one = {name: batch[name][row : row + 1, :most] for name in batch}

        def rule(seen, most):
            return {0, PAD, END} if len(seen) < most - 1 else only(END)

        for ids, value in zip(samples[row], found[row], strict=True):
            expected = log_prob_by_hand("lstm", before, one, ids.tolist(), most, rule)
            torch.testing.assert_close(value, expected, atol=1e-9, rtol=1e-9)
        plain = -log_prob_by_hand("lstm", before, one, one["labels"][0].tolist(), most, NOTHING) / most
        torch.testing.assert_close(cross_entropy[row], plain, atol=1e-9, rtol=1e-9)


def test_a_forced_first_token_cancels_in_minimum_risk(tmp_path):
    """q is the same, with the same gradient, whether or not the forced token's log probability is in it."""
    model, batch = tiny("bart"), batch_of("bart", 3, 0)
    before = copy.deepcopy(model)
    classes = (MinimumRiskTrainer, MinimumRiskConfig)
    trainer = trainer_of(tmp_path, model, {"forced_bos_token_id": 5}, classes, num_candidates=6, sharpness=0.7)
    sample, drawn = trainer.candidates.sample, []
    trainer.candidates.sample = lambda *given: drawn.append(sample(*given)) or drawn[0]
    model.train()
    pairs = trainer.candidates.pairs(batch)
    risk = trainer.training_terms(model, pairs).loss
    risk.backward()
    candidates = {tuple(ids.tolist()): ids for ids in [pairs.targets[0], *drawn[0][0][0]]}.values()
    assert len(candidates) > 3 and all(int(ids[0]) == 5 for ids in candidates)

    def rule(seen, most):
        return set() if seen else only(5)

    logs = torch.stack([log_prob_by_hand("bart", before, batch, ids.tolist(), 3, rule) for ids in candidates])
    costs = normalized_edit_distance(list(candidates), pairs.targets * len(candidates)).double()
    expected = (torch.softmax(0.7 * logs, 0) * costs).sum()
    expected.backward()
    torch.testing.assert_close(risk, expected, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(gradient(model.parameters()), gradient(before.parameters()), atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize("name", ["forced_bos_token_id", "forced_eos_token_id"])
def test_several_forced_tokens_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match=rf"{name} must be one token for a model to be sampled from, got \[2, 3\]"):
        trainer_of(tmp_path, tiny("bart"), {name: [2, 3]})
