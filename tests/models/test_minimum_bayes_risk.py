"""Minimum Bayes risk decoding: what it chooses of what `generate` makes with the same seed, and refusals."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from hf_ebm import mbr, mbr_decode
from hf_ebm.assets import load_embedded_causal
from hf_ebm.objectives.sequence_costs import COSTS
from tests.causal_families import END, PAD, tiny_causal
from tests.seq2seq_families import seq2seq_batch, tiny_seq2seq
from tests.trainers.test_trainers import rows, trainer_of

WAYS = {"sampling": {"do_sample": True, "top_k": 0}, "beams": {"num_beams": 6}}


def ids_of(row, ends):
    ids = row.tolist()
    found = [at for at, id in enumerate(ids) if id in ends]
    return ids[: found[0] + 1] if found else ids


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["lstm additive", "bart", "t5", "marian", "causal"])
def test_one_of_the_candidates_comes_back_the_one_of_least_cost(family, way):
    if family == "causal":
        model = tiny_causal().eval()
        inputs = {"input_ids": torch.tensor([[5, 6, 7], [8, 9, 10]]), "attention_mask": torch.ones(2, 3).long()}
        model.generation_config = GenerationConfig(eos_token_id=END, pad_token_id=PAD)
    else:
        model = tiny_seq2seq(family).eval()
        inputs = {
            name: value for name, value in seq2seq_batch(family).items() if name in ("input_ids", "attention_mask")
        }
    settings = {**WAYS[way], "num_return_sequences": 6, "max_new_tokens": 5}
    torch.manual_seed(0)
    whole = model.generate(**inputs, **settings)
    torch.manual_seed(0)
    out = model.generate(**inputs, **settings, custom_generate=mbr, num_references=4, return_dict_in_generate=True)
    rows = len(inputs["input_ids"])
    assert torch.equal(out.candidates.flatten(0, 1), whole) and out.sequences.shape[0] == rows
    start = inputs["input_ids"].shape[1] if family == "causal" else 1
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    for row in range(rows):
        found = [ids_of(ids[start:], ends) for ids in out.candidates[row]]
        means = [
            float(COSTS["edit_distance"]([one] * (4 - (k < 4)), [o for n, o in enumerate(found[:4]) if n != k]).mean())
            for k, one in enumerate(found)
        ]
        assert out.expected_costs[row].tolist() == pytest.approx(means)
        assert ids_of(out.sequences[row, start:], ends) == found[means.index(min(means))]


def test_texts_are_those_of_the_metric_and_the_seed():
    model, tokenizer = load_embedded_causal()
    longest = lambda predictions, references: [-float(len(text)) for text in predictions]  # noqa: E731
    settings = {"num_candidates": 4, "max_new_tokens": 4}
    sources = ["and god said", "the lord", "and"]
    found = mbr_decode(model, tokenizer, sources, cost=longest, batch_size=2, **settings)
    assert found == mbr_decode(model, tokenizer, sources, cost=longest, batch_size=2, **settings)
    shortest = mbr_decode(model, tokenizer, sources, cost=lambda p, r: [float(len(text)) for text in p], **settings)
    assert len(found) == 3 and all(len(one) >= len(other) for one, other in zip(found[:2], shortest[:2], strict=True))
    assert found != mbr_decode(model, tokenizer, sources, cost=longest, seed=1, **settings)
    assert len(mbr_decode(model, tokenizer, sources, cost="sentence_bleu", candidates="beams", **settings)) == 3


def test_predictions_of_a_trainer_and_adapters(tmp_path):
    """Stock generation settings reach it; the model is called inside an adapter as by itself."""
    settings = {"custom_generate": mbr, "do_sample": True, "num_return_sequences": 4, "max_new_tokens": 5}
    trainer = trainer_of("cross-entropy", tmp_path, tiny_seq2seq("bart"), predict_with_generate=True)
    assert trainer.predict(rows(4, 9), **settings).predictions.shape[0] == 4
    model, adapted = (tiny_seq2seq("bart").eval() for _ in range(2))
    adapted = get_peft_model(adapted, LoraConfig(r=2, target_modules=["q_proj"])).eval()
    found = []
    for one in (model, adapted):
        torch.manual_seed(0)
        found.append(one.generate(input_ids=torch.tensor([[4, 5], [6, 7]]), **settings))
    assert torch.equal(*found)


def test_refusals():
    model, inputs = tiny_seq2seq("bart"), torch.tensor([[4, 5]])
    with pytest.raises(ValueError, match="num_return_sequences must be 2 or more"):
        model.generate(inputs, custom_generate=mbr, do_sample=True)
    some = {"custom_generate": mbr, "do_sample": True, "num_return_sequences": 4}
    with pytest.raises(ValueError, match="num_references must be a whole number from 2 to 4"):
        model.generate(inputs, num_references=5, **some)
    with pytest.raises(ValueError, match="processing_class must be a tokenizer"):
        model.generate(inputs, cost="sentence_bleu", **some)
    with pytest.raises(ValueError, match="cost must be a callable or one of"):
        model.generate(inputs, cost="none", **some)
    causal, tokenizer = load_embedded_causal()
    for changes, message in (
        ({"sources": [3]}, "sources"), ({"candidates": "greedy"}, "candidates must be one of"),
        ({"num_candidates": 1}, "num_candidates must be a whole number from 2"),
        ({"sources": ["and god said " * 100]}, "sources must leave room for a token"),
        ({"num_return_sequences": 4}, "settings must not have num_return_sequences, which is num_candidates here"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            mbr_decode(causal, tokenizer, **{"sources": ["and"], **changes})
