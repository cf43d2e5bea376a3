"""`"joint-sampling"` against `ResidualEnergyModel.generate`."""

import pytest
import torch
from datasets import Dataset
from transformers import pipeline
from transformers.pipelines.pt_utils import KeyDataset

from hf_ebm import ChainGenerationConfig, JointGenerationConfig, ResidualEnergyModel
from hf_ebm.assets import KJV_CAUSAL_LM, KJV_MASKED_LM
from hf_ebm.pipelines import JointSamplingPipeline
from hf_ebm.random_state import stream_seed
from tests.pipelines.models_for_pipelines import assert_like, residual_model, tokenizer

PROMPTS = ["the cat", "", "in the beginning god", "the cat"]
SETTINGS = dict(num_candidates=6, num_samples=3, max_new_tokens=4, seed=2)


@pytest.fixture
def sampling():
    return JointSamplingPipeline(model=residual_model(), tokenizer=tokenizer())


def generated(model, prompt: str, number: int, **settings):
    """What `generate` gives for one prompt, tokenized by hand: the start token, and no end."""
    ids = [tokenizer().cls_token_id, *tokenizer()(prompt, add_special_tokens=False)["input_ids"]]
    out = model.generate([ids], **settings | {"seed": stream_seed(settings["seed"], number)})
    return out, [ids[len(ids) :] + own[len(ids) :].tolist() for own in out.sequences]


@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_samples_are_those_of_generate_whatever_the_batch_size(sampling, batch_size):
    found = sampling(PROMPTS, batch_size=batch_size, **SETTINGS)
    for number, (prompt, own) in enumerate(zip(PROMPTS, found, strict=True)):
        out, continuations = generated(sampling.model, prompt, number, **SETTINGS)
        texts = tokenizer().batch_decode(continuations, skip_special_tokens=True)
        assert [one["text"] for one in own["samples"]] == texts
        assert_like([one["energy"] for one in own["samples"]], out.energies.tolist())
        assert own["effective_sample_size"] == pytest.approx(float(out.effective_sample_size[0]))
        assert set(own) == {"samples", "effective_sample_size"}
    assert found[0] != found[3]  # equal prompts get samples of their own


def test_padding_is_no_part_of_a_text(sampling):
    """A model without a pad token pads with id 0, which may be a word."""
    settings = SETTINGS | {"num_candidates": 40, "num_samples": 20, "max_new_tokens": 30}
    expected = sampling(PROMPTS[0], **settings)
    word = sampling.model.config.lm_pad_token_id = tokenizer().convert_tokens_to_ids("the")
    out, _ = generated(sampling.model, PROMPTS[0], 0, **settings)
    assert len(out.attention_mask.sum(1).unique()) > 1 and bool((out.sequences[:, -1] == word).any())
    assert_like(sampling(PROMPTS[0], **settings), expected)


def test_candidates_and_weights_where_asked_for(sampling):
    found = sampling(PROMPTS, batch_size=2, return_candidates=True, **SETTINGS)
    out, _ = generated(sampling.model, PROMPTS[2], 2, return_candidates=True, **SETTINGS)
    own = found[2]["candidates"]
    assert [one["text"] for one in own] == tokenizer().batch_decode(out.candidates[0], skip_special_tokens=True)
    assert_like([one["energy"] for one in own], out.candidate_energies[0].tolist())
    assert_like([one["log_weight"] for one in own], out.candidate_log_weights[0].tolist())
    assert sum(torch.tensor([one["log_weight"] for one in own]).exp()) == pytest.approx(1, rel=1e-5)


def test_columns_single_inputs_and_calls_without_a_seed(sampling):
    expected = sampling(PROMPTS, **SETTINGS)
    for inputs in (KeyDataset(Dataset.from_dict({"prompt": PROMPTS}), "prompt"), iter(PROMPTS)):
        assert_like(list(sampling(inputs, batch_size=2, **SETTINGS)), expected)
    assert_like(sampling(PROMPTS[0], **SETTINGS), expected[0])
    settings = {name: value for name, value in SETTINGS.items() if name != "seed"}
    found = []
    for batch_size in (1, 4):
        torch.manual_seed(5)
        found.append(sampling(PROMPTS, batch_size=batch_size, **settings))
    assert_like(found[0], found[1])
    assert found[0] != sampling(PROMPTS, **settings)


def test_settings_and_the_stepwise_method(sampling):
    sampling.model.generation_config = JointGenerationConfig(num_candidates=5, max_new_tokens=2)
    config = JointGenerationConfig(method="stepwise", num_rollouts=2, stepwise_top_k=3, seed=1)
    found = sampling(PROMPTS[:2], generation_config=config, num_samples=2)
    assert all(own["effective_sample_size"] is None and len(own["samples"]) == 2 for own in found)
    with pytest.raises(ValueError, match="num_candidates has no effect with method 'stepwise'"):
        sampling(PROMPTS, generation_config=config, num_candidates=3)
    found = sampling(PROMPTS[0], return_candidates=True)
    assert len(found["candidates"]) == 5


@pytest.mark.parametrize(
    "inputs,settings,message",
    [
        (["the", 3], {}, r"inputs must be texts, got int \(input 1\)"),
        (["the", {"text": "cat"}], {}, r"inputs must be texts, got dict \(input 1\)"),
        (["the", "the cat " * 30], {}, r"positions for 40 .* \(inputs 0 to 1\)"),
        (["the"], {"num_chains": 3}, "no argument num_chains; it takes generation_config, return_candidates, method"),
        (["the"], {"num_samples": 0}, "num_samples must be a whole number from 1 up, got 0"),
        (["the"], {"generation_config": ChainGenerationConfig()}, "must be a JointGenerationConfig, got Chain"),
    ],
)
def test_what_is_wrong_is_refused(sampling, inputs, settings, message):
    with pytest.raises(ValueError, match=message):
        sampling(inputs, batch_size=2, **SETTINGS | settings)


def test_the_embedded_models():
    model = ResidualEnergyModel.from_lm_and_encoder(KJV_CAUSAL_LM, KJV_MASKED_LM, dtype=torch.float32)
    made = pipeline("joint-sampling", model=model, num_candidates=8, max_new_tokens=8, seed=0)
    prompts = ["and god said, let there", "the lord is"]
    found = made(prompts, batch_size=2)
    assert_like(found, made(prompts))
    assert all(0 < own["effective_sample_size"] <= 8 and own["samples"][0]["text"] for own in found)
    # A text that isn't ended costs what `score` says.
    text = found[0]["samples"][0]["text"]
    scored = model.score([text], model.lm_tokenizer, prefixes=prompts[:1], ended=False)
    assert float(scored.residual_energy[0]) == pytest.approx(found[0]["samples"][0]["energy"], abs=1e-4)
