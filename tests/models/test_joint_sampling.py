"""Samples of residual models against enumeration; a deliberately wrong sampler must fail the same test."""

import logging as python_logging

import pytest
import torch
import transformers as tf

from hf_ebm.models.residual import JointGenerationConfig, ResidualEnergyModel
from hf_ebm.models.residual import candidates as candidates_module
from hf_ebm.models.residual.candidates import SamplingParameters, sample_continuations
from tests.causal_families import tiny_causal
from tests.models.residual_models import (
    END,
    LENGTH,
    PAD,
    PREFIX,
    VOCAB,
    all_continuations,
    exact_energies,
    exact_log_probs,
    frequencies,
    toy_encoder,
    toy_lm,
    toy_residual,
)
from tests.sampling.oracle import total_variation_limit

pytestmark = pytest.mark.slow

SAMPLING = SamplingParameters(LENGTH, (END,))


def distance(drawn, log_probs: torch.Tensor) -> float:
    return float((frequencies(drawn) - log_probs.softmax(0)).abs().sum() / 2)


def continuations_of(output, prompt: int = 0) -> list[tuple[int, ...]]:
    rows = output.sequences[output.prompt_indices == prompt], output.attention_mask[output.prompt_indices == prompt]
    starts = output.prompt_lengths[output.prompt_indices == prompt]
    return [tuple(ids[mask.bool()][start:].tolist()) for ids, mask, start in zip(*rows, starts, strict=True)]


@pytest.mark.parametrize("prefix", [[0], [0, 3, 4]])
def test_candidates_are_draws_from_the_language_model(prefix):
    lm, prefix = toy_lm(), torch.tensor(prefix)
    drawn = sample_continuations(lm, [prefix], 6000, SAMPLING, seed=1, batch_size=500)[0]
    log_probs = exact_log_probs(lm, prefix)
    assert float(log_probs.exp().sum()) == pytest.approx(1)
    limit = total_variation_limit(log_probs.exp(), 6000)
    assert distance(drawn, log_probs) < limit
    # Those of a language model at another temperature are not.
    warm = sample_continuations(lm, [prefix], 6000, SAMPLING._replace(temperature=1.5), 1, 500)[0]
    assert distance(warm, log_probs) > limit


@pytest.mark.parametrize("warp", [{"temperature": 0.7}, {"top_k": 2}, {"top_p": 0.6}])
def test_warps_are_those_that_are_asked_for(warp):
    lm = toy_lm()
    drawn = sample_continuations(lm, [PREFIX], 4000, SAMPLING._replace(**warp), seed=1, batch_size=500)[0]
    first = torch.tensor([int(ids[0]) for ids in drawn])
    logits = lm(input_ids=PREFIX[None]).logits[0, -1].detach()
    if "temperature" in warp:
        expected = (logits / 0.7).softmax(-1)
    else:
        order = logits.argsort(descending=True)
        kept = 2 if "top_k" in warp else int((logits.softmax(-1)[order].cumsum(0) < 0.6).sum()) + 1
        expected = torch.zeros_like(logits)
        expected[order[:kept]] = logits[order[:kept]].softmax(-1)
    shares = torch.bincount(first, minlength=VOCAB) / len(first)
    assert float((shares - expected).abs().sum() / 2) < 0.03


def test_generation_settings_of_the_language_model_do_not_leak_in():
    lm = toy_lm()
    lm.generation_config.update(repetition_penalty=20.0, num_return_sequences=2, num_beams=2, no_repeat_ngram_size=1)
    kept = lm.generation_config
    drawn = sample_continuations(lm, [PREFIX], 6000, SAMPLING, seed=1, batch_size=500)[0]
    assert len(drawn) == 6000 and lm.generation_config is kept and kept.repetition_penalty == 20.0
    log_probs = exact_log_probs(lm, PREFIX)
    assert distance(drawn, log_probs) < total_variation_limit(log_probs.exp(), 6000)


def test_models_with_states_that_cannot_be_repeated_run_without_sharing():
    torch.manual_seed(0)
    config = tf.Mamba2Config(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_heads=4, head_dim=8, n_groups=1, state_size=4,
        expand=2, chunk_size=4, bos_token_id=0, eos_token_id=END, pad_token_id=PAD,
    )  # fmt: skip
    model = ResidualEnergyModel(tf.Mamba2ForCausalLM(config).eval(), toy_encoder(dtype=torch.float32)).eval()
    assert not candidates_module.can_share_prefix(model.lm)
    assert len(continuations_of(model.generate([[3, 4, 0]], num_candidates=4, max_new_tokens=3, seed=0))) == 1


@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "gpt_neox"])
def test_a_shared_prefix_changes_no_sample(family, monkeypatch):
    lm = tiny_causal(family)
    prefixes = [torch.tensor([0, 3, 4, 5]), torch.tensor([0, 7]), torch.tensor([0, 9, 9, 2])]
    sampling = SamplingParameters(5, (1,))
    assert candidates_module.can_share_prefix(lm)
    shared = sample_continuations(lm, prefixes, 6, sampling, seed=3, batch_size=12)
    monkeypatch.setattr(candidates_module, "can_share_prefix", lambda model: False)
    alone = sample_continuations(lm, prefixes, 6, sampling, seed=3, batch_size=12)
    for own, theirs in zip(shared, alone, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(own, theirs, strict=True))


def test_sampling_leaves_the_global_generator_and_modes_alone():
    model = toy_residual().train()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    model.generate([[0, 3]], num_candidates=8, max_new_tokens=3, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.encoder.training and not model.lm.training


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_resampling_gives_the_joint_distribution(family):
    model = toy_residual(family)
    target = exact_log_probs(model.lm, PREFIX) - exact_energies(model, PREFIX)
    prompts, common = [PREFIX.tolist()] * 4, dict(max_new_tokens=LENGTH, seed=1, candidates_at_once=2500)
    # Candidates enough for the bias of order 1/n not to count.
    output = model.generate(prompts, num_candidates=2500, num_samples=500, return_candidates=True, **common)
    drawn = [ids for prompt in range(len(prompts)) for ids in continuations_of(output, prompt)]
    limit = total_variation_limit(target.softmax(0), len(drawn))
    assert distance(drawn, target) < limit
    energies = dict(zip(all_continuations(), exact_energies(model, PREFIX).tolist(), strict=True))
    for ids, energy in zip(drawn[:50], output.energies[:50].tolist(), strict=True):
        assert energy == pytest.approx(energies[ids], abs=1e-5)
    # The sign of the energy matters, and so do the weights.
    model.head.weight.data.neg_()
    wrong = model.generate(prompts[:1], num_candidates=2500, num_samples=500, **common)
    assert distance(continuations_of(wrong), target) > 0.2
    candidates = [ids for own in output.candidates for ids in own]
    for log_probs, same in ((target, False), (exact_log_probs(model.lm, PREFIX), True)):
        assert (distance(candidates, log_probs) < total_variation_limit(log_probs.softmax(0), 10_000)) == same


def test_stepwise_sampling_gives_the_joint_distribution():
    model = toy_residual("gpt2")
    target = exact_log_probs(model.lm, PREFIX) - exact_energies(model, PREFIX)
    settings = dict(method="stepwise", stepwise_top_k=VOCAB, num_rollouts=20, max_new_tokens=LENGTH, seed=1)
    output = model.generate([PREFIX.tolist()], num_samples=100, candidates_at_once=512, **settings)
    drawn = continuations_of(output)
    limit = total_variation_limit(target.softmax(0), len(drawn))
    assert distance(drawn, target) < limit
    assert output.effective_sample_size is None
    model.head.weight.data.neg_()
    wrong = model.generate([PREFIX.tolist()], num_samples=30, **settings)
    assert distance(continuations_of(wrong), target) > limit


def test_a_stepwise_choice_among_one_token_is_greedy():
    model = toy_residual()
    output = model.generate([[0, 3]], method="stepwise", stepwise_top_k=1, num_rollouts=1, max_new_tokens=4, seed=0)
    row = torch.tensor([[0, 3]])
    for _ in range(4):
        if int(row[0, -1]) != END:
            row = torch.cat([row, model.lm(input_ids=row).logits[:, -1].argmax(-1)[:, None]], 1)
    assert output.sequences[0].tolist() == row[0].tolist()


def test_prompts_do_not_depend_on_each_other_or_on_padding():
    model = toy_residual()
    settings = dict(num_candidates=16, max_new_tokens=4, seed=5, num_samples=3)
    together = model.generate([[0, 3, 4], [0]], **settings)
    alone = model.generate([[0, 3, 4]], **settings)
    assert continuations_of(together) == continuations_of(alone)
    padded = model.generate(torch.tensor([[0, 3, 4], [PAD, PAD, 0]]), torch.tensor([[1, 1, 1], [0, 0, 1]]), **settings)
    assert continuations_of(padded, 1) == continuations_of(together, 1)
    assert continuations_of(model.generate(**settings)) == continuations_of(model.generate([[0]], **settings))


def test_memory_grows_with_the_candidates_at_once_alone(monkeypatch):
    model, largest = toy_residual(dtype=torch.float32), []
    for part in (model.lm, model.encoder):

        def measured(*args, _forward=part.forward, **kwargs):
            largest.append(len(kwargs["input_ids"]))
            return _forward(*args, **kwargs)

        monkeypatch.setattr(part, "forward", measured)
    output = model.generate(
        [[0, 3]], num_candidates=10_000, candidates_at_once=1000, max_new_tokens=3, seed=0, return_candidates=True
    )
    assert max(largest) == 1000
    assert len(output.candidates[0]) == 10_000 and output.candidate_energies.shape == (1, 10_000)
    weights = output.candidate_log_weights[0].exp()
    assert float(weights.sum()) == pytest.approx(1)
    assert float(output.effective_sample_size) == pytest.approx(float(1 / weights.square().sum()))


def test_a_small_effective_sample_size_is_reported(caplog):
    model = toy_residual(spread_of_energies=60.0)
    python_logger = python_logging.getLogger("hf_ebm.models.residual.generation_residual")
    python_logger.addHandler(caplog.handler)
    output = model.generate([PREFIX.tolist()], num_candidates=200, max_new_tokens=LENGTH, seed=0)
    assert float(output.effective_sample_size) < 30
    if float(output.effective_sample_size) < 5:
        assert "equal ones" in caplog.text
    caplog.clear()
    toy_residual(spread_of_energies=0.01).generate([PREFIX.tolist()], num_candidates=50, max_new_tokens=3, seed=0)
    assert caplog.text == ""


def test_settings_are_saved_and_checked(tmp_path):
    config = JointGenerationConfig(num_candidates=8, top_k=3)
    config.save_pretrained(tmp_path)
    assert JointGenerationConfig.from_pretrained(tmp_path).settings() == {"num_candidates": 8, "top_k": 3}
    for settings, message in (
        ({"num_candidates": 0}, "num_candidates must be a whole number from 1 up, got 0"),
        ({"top_p": 1.5}, "top_p must be a number above 0 and up to 1, got 1.5"),
        ({"temperature": 0}, "temperature must be a number from 0.000001 up, got 0"),
        ({"method": "best"}, "method must be one of 'resampling', 'stepwise', got 'best'"),
        ({"num_beams": 4}, "unknown generation settings: num_beams"),
    ):
        with pytest.raises(ValueError, match=message):
            JointGenerationConfig(**settings)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            dict(input_ids=[[3] * 30], max_new_tokens=5),
            "has 30 tokens, with max_new_tokens 35; the language model",
        ),
        (dict(input_ids=[[3], [99]]), "input_ids: row 1 holds the id 99; the language model has ids 0 to 5"),
        (dict(input_ids=[]), "input_ids must be one or more"),
        (dict(input_ids=torch.zeros(3, dtype=torch.long)), "input_ids must be a tensor of ids"),
        (dict(input_ids=[[3]], attention_mask=torch.ones(1, 1)), "attention_mask is for a tensor"),
        (dict(input_ids=[[3]], colour="red"), "unknown generation settings: colour"),
        (dict(input_ids=[[3]], method="stepwise", return_candidates=True), "return_candidates has no meaning"),
        (dict(input_ids=[[3]], method="stepwise", top_k=3), "top_k has no effect with method 'stepwise'"),
        (dict(input_ids=[[3.5]]), r"input_ids: row 0 must be a list of ids, got \[3.5\]"),
        (dict(input_ids="text"), "input_ids must be a tensor of ids .* got 'text'; .* return_tensors=\"pt\""),
        (dict(input_ids=[1, 3], attention_mask=[1, 1]), 'lists of ids don\'t need; .* return_tensors="pt"'),
        (dict(input_ids=tf.BatchEncoding({"input_ids": [[3]]})), r"return_tensors=\"pt\", and .* names: \*\*batch"),
        (dict(input_ids=["text"]), "input_ids: row 0 must be a list of ids, got 'text'"),
    ],
)
def test_what_cannot_be_done_is_refused_before_any_work(arguments, message, monkeypatch):
    model = toy_residual()
    monkeypatch.setattr(model.lm, "forward", lambda *a, **k: pytest.fail("work was done"))
    with pytest.raises(ValueError, match=message):
        model.generate(**arguments)


def test_an_encoder_too_short_for_prefix_and_continuation_is_refused():
    model = toy_residual("gpt2")
    model.encoder.config.n_positions = 8
    with pytest.raises(ValueError, match="with max_new_tokens 9; the encoder has positions for 8"):
        model.generate([[0, 3, 4]], max_new_tokens=6)


def test_an_empty_prompt_needs_a_start_token():
    model = toy_residual()
    assert continuations_of(model.generate([[]], seed=1, max_new_tokens=3)) == continuations_of(
        model.generate([[0]], seed=1, max_new_tokens=3)
    )
    model.config.start_token_id = None
    with pytest.raises(ValueError, match="row 0 is empty, and the language model has no bos_token_id"):
        model.generate([[]])
    with pytest.raises(ValueError, match="row 0 is empty"):
        model.generate()


def test_nan_energies_name_the_candidate():
    model = toy_residual()
    model.encoder.embeddings.word_embeddings.weight.data[5] = torch.nan
    with pytest.raises(ValueError, match=r"prompt 0, candidate: energies: row [0-9]+ has the energy nan"):
        model.generate([[0, 3]], num_candidates=64, max_new_tokens=3, seed=0)


def test_infinite_energies_everywhere_name_the_prompt():
    model = toy_residual()
    model.head.bias.data.fill_(torch.inf)
    for settings in (dict(), dict(method="stepwise", num_rollouts=2)):
        with pytest.raises(ValueError, match=r"prompt 0, .*infinite energy"):
            model.generate([[0, 3]], num_samples=1, max_new_tokens=3, seed=0, **settings)


def test_saved_settings_of_resampling_do_not_hinder_stepwise_sampling():
    model = toy_residual()
    model.generation_config.top_k = 3
    output = model.generate([[0, 3]], method="stepwise", stepwise_top_k=2, num_rollouts=2, max_new_tokens=2, seed=0)
    assert output.sequences.shape[0] == 1


def test_parts_on_different_devices_are_refused():
    model = toy_residual()
    model.encoder.to("meta")
    with pytest.raises(ValueError, match="lm and encoder must be on one device, got cpu, meta"):
        model.generate([[0]])
