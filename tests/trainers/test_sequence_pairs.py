"""Pairs of prompts and targets: log probabilities and decoding, for encoder-decoders and causal models."""

import pytest
import torch
import transformers as tf
from transformers import GenerationConfig

from hf_ebm.trainers import MinimumRiskConfig, MinimumRiskTrainer
from hf_ebm.trainers.sequence_pairs import SequencePairs
from tests.causal_families import CAUSAL, END, PAD, collate_left, collate_right, completion_rows, tiny_causal
from tests.seq2seq_families import FAMILIES, seq2seq_batch, tiny_seq2seq

GREEDY = GenerationConfig(max_new_tokens=6, eos_token_id=END, pad_token_id=PAD, do_sample=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probabilities_are_the_models_own(family):
    model, batch = tiny_seq2seq(family), seq2seq_batch(family)
    pairs = SequencePairs.of(model, batch, model.config.pad_token_id or 0, [2])
    found = pairs.log_probs(model, range(3), pairs.targets)
    logs = torch.log_softmax(model(**batch).logits, -1)
    labels = batch["labels"]
    each = logs.gather(2, labels.clamp_min(0)[..., None])[..., 0]
    kept = torch.arange(labels.shape[1]) < torch.tensor([len(target) for target in pairs.targets])[:, None]
    expected = each.masked_fill(~kept, 0).sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    moved = family in ("mbart", "plbart")  # whose last label is the language, from which decoding starts
    assert [len(target) for target in pairs.targets] == [n - moved for n in (8, 5, 7)]


@pytest.mark.parametrize("collate", [collate_left, collate_right])
@pytest.mark.parametrize("family", CAUSAL)
def test_causal_log_probabilities_are_those_of_single_rows(family, collate):
    model, rows = tiny_causal(family), completion_rows()
    pairs = SequencePairs.of(model, collate(rows), PAD, [END])
    found = pairs.log_probs(model, range(len(rows)), pairs.targets)
    for row, value in zip(rows, found, strict=True):
        logs = torch.log_softmax(model(row["input_ids"][None]).logits[0, :-1], -1)
        labels = row["labels"][1:]
        expected = logs[labels != -100].gather(1, labels[labels != -100][:, None]).sum()
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
    # Other sequences, several of one row.
    others = [torch.tensor([5, 6, END]), torch.tensor([7]), torch.tensor([5, 5, 5, 5, 5, 5, 5, 5])]
    found = pairs.log_probs(model, [4, 0, 4], others)
    for index, ids, value in zip([4, 0, 4], others, found, strict=True):
        prompt = pairs.prompts[index]
        logs = torch.log_softmax(model(torch.cat([prompt, ids])[None]).logits[0], -1)
        expected = sum(logs[len(prompt) - 1 + t, token] for t, token in enumerate(ids))
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)


def greedy_by_hand(model, prompt):
    ids = prompt.clone()
    for _ in range(6):
        ids = torch.cat([ids, model(ids[None]).logits[0, -1].argmax()[None]])
        if int(ids[-1]) == END:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("collate", [collate_left, collate_right])
@pytest.mark.parametrize("family", CAUSAL)
def test_decoding_is_that_of_single_rows_whatever_the_padding(family, collate):
    model, rows = tiny_causal(family), completion_rows()
    pairs = SequencePairs.of(model, collate(rows), PAD, [END])
    model.train()
    decoded = pairs.decode(model, GREEDY)
    assert model.training
    for prompt, found in zip(pairs.prompts, decoded, strict=True):
        assert found[0].tolist() == greedy_by_hand(model, prompt).tolist()


@pytest.mark.parametrize("family", ["lstm additive", "bart", "t5", "marian"])
def test_decoded_sequences_have_no_start_token_and_keep_their_end(family):
    model, batch = tiny_seq2seq(family), seq2seq_batch(family)
    ends = [model.config.eos_token_id]
    pairs = SequencePairs.of(model, batch, model.config.pad_token_id, ends)
    config = GenerationConfig(
        max_new_tokens=5, eos_token_id=ends, pad_token_id=model.config.pad_token_id, do_sample=True, top_k=0,
        decoder_start_token_id=model.config.decoder_start_token_id,
        bos_token_id=getattr(model.config, "bos_token_id", None),
    )  # fmt: skip
    torch.manual_seed(0)
    samples = pairs.decode(model, config, num_samples=4)
    assert [len(found) for found in samples] == [4, 4, 4]
    rows = [row for row, found in enumerate(samples) for _ in found]
    flat = [ids for found in samples for ids in found]
    assert all(ends[0] not in ids[:-1].tolist() and 1 <= len(ids) <= 5 for ids in flat)
    torch.manual_seed(0)
    config.update(num_return_sequences=4, output_logits=True, return_dict_in_generate=True)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    model.generation_config = config  # which `generate` would fill up from the model's own
    whole = model.generate(**inputs, generation_config=config)
    logs = torch.log_softmax(torch.stack(whole.logits, 1).double(), -1)  # of the model, before anything is forced
    scores = logs.gather(2, whole.sequences[:, 1:, None])[..., 0]
    for row, (ids, value) in enumerate(zip(flat, pairs.log_probs(model, rows, flat), strict=True)):
        torch.testing.assert_close(value.double(), scores[row, : len(ids)].sum(), rtol=1e-5, atol=1e-5)


def test_decoding_starts_from_each_rows_own_language():
    """mBART's labels end with it; the configuration's start token would be put in front of it."""
    model, batch = tiny_seq2seq("mbart"), seq2seq_batch("mbart")
    pairs = SequencePairs.of(model, batch, model.config.pad_token_id, [2])
    languages = [int(row[row != -100][-1]) for row in batch["labels"]]
    assert model.config.decoder_start_token_id not in languages
    config = GenerationConfig(max_new_tokens=6, eos_token_id=2, pad_token_id=1, decoder_start_token_id=2)
    found = pairs.decode(model, config)
    for row, language in enumerate(languages):
        ids = torch.tensor([[language]])
        inputs = {name: batch[name][row : row + 1] for name in ("input_ids", "attention_mask")}
        while ids.shape[1] < 7 and int(ids[0, -1]) != 2:
            chosen = model(**inputs, decoder_input_ids=ids).logits[0, -1].argmax()
            ids = torch.cat([ids, chosen.view(1, 1)], 1)
        assert found[row][0].tolist() == ids[0, 1:].tolist()


def test_further_inputs_of_causal_models_are_refused():
    model, batch = tiny_causal(), collate_right(completion_rows())
    zeros, ones = torch.zeros_like(batch["input_ids"]), torch.ones_like(batch["input_ids"])
    SequencePairs.of(model, {**batch, "token_type_ids": zeros, "note": ones}, PAD, [END])
    for name in ("token_type_ids", "position_ids"):
        with pytest.raises(ValueError, match=f"inputs: {name} must be left out"):
            SequencePairs.of(model, {**batch, name: ones}, PAD, [END])


def test_causal_models_that_need_more_or_are_not_causal_are_refused(tmp_path):
    sizes = dict(vocab_size=23, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    sparse = tf.BigBirdForCausalLM(tf.BigBirdConfig(**sizes, is_decoder=True, block_size=4))
    xlm = tf.XLMWithLMHeadModel(tf.XLMConfig(vocab_size=23, emb_dim=16, n_layers=1, n_heads=2, n_langs=2, causal=True))
    for model, message in (
        (sparse, "model: the block-sparse attention"),
        (xlm, "model: XLMWithLMHeadModel needs langs"),
    ):
        with pytest.raises(ValueError, match=message):
            MinimumRiskTrainer(model, MinimumRiskConfig(str(tmp_path), report_to=[], use_cpu=True))
