"""`"energy-sampling"` against `EnergyModel.generate`."""

import pytest
import torch
from datasets import Dataset
from transformers import GenerationConfig, pipeline
from transformers.pipelines.pt_utils import KeyDataset

from hf_ebm import ChainGenerationConfig
from hf_ebm.assets import load_embedded
from hf_ebm.pipelines import EnergySamplingPipeline
from tests.pipelines.models_for_pipelines import PROMPTS, assert_like, calls_of, energy_model, tokenizer

SETTINGS = dict(num_chains=2, num_epochs=3, burn_in=1, seed=3)
MIXED = [PROMPTS[0], 5, {"length": 2}, *PROMPTS[1:]]


@pytest.fixture
def sampling():
    return EnergySamplingPipeline(model=energy_model(), tokenizer=tokenizer())


def from_generate(model, prompts, **settings) -> list[list[dict]]:
    """What `generate` gives for all prompts together."""
    batch = tokenizer()(prompts, padding=True, return_tensors="pt")
    out = model.generate(batch["input_ids"], batch["attention_mask"], **settings)
    found = [[] for _ in prompts]
    for row in range(len(out.samples)):
        for number, epoch in enumerate(out.kept_epochs):
            found[int(out.prompt_indices[row])].append(
                {
                    "text": tokenizer().decode(out.samples[row, number], skip_special_tokens=True),
                    "energy": float(out.energies[row, number]),
                    "chain": int(out.chain_indices[row]),
                    "epoch": epoch,
                    "acceptance_rate": float(out.trace.acceptance_rate[row, epoch]),
                    "novel_rate": float(out.trace.novel_rate[row, epoch]),
                }
            )
    return found


@pytest.mark.parametrize("batch_size", [1, 2, 4, 20])
def test_samples_are_those_of_generate_whatever_the_batch_size(sampling, batch_size):
    found = sampling(PROMPTS, batch_size=batch_size, **SETTINGS)
    assert_like(found, from_generate(sampling.model, PROMPTS, **SETTINGS))
    assert all(len(own) == 2 * 2 for own in found)
    assert [(one["chain"], one["epoch"]) for one in found[0]] == [(0, 1), (0, 2), (1, 1), (1, 2)]


def test_equal_inputs_and_chains_get_samples_of_their_own(sampling):
    assert PROMPTS[1] == PROMPTS[3]
    found = sampling(PROMPTS, batch_size=4, **SETTINGS | {"num_epochs": 8})
    runs = [[one["text"] for one in own if one["chain"] == c] for own in (found[1], found[3]) for c in (0, 1)]
    assert len({tuple(run) for run in runs}) == 4


def test_lengths_are_those_of_generate_and_may_stand_beside_prompts(sampling):
    expected = sampling.model.generate(lengths=[7, 5, 2], **SETTINGS)
    found = sampling([7, 5, {"length": 2}], batch_size=3, **SETTINGS)
    texts = tokenizer().batch_decode(expected.samples.flatten(0, 1), skip_special_tokens=True)
    assert [one["text"] for own in found for one in own] == texts
    one_by_one = sampling(MIXED, **SETTINGS)
    assert_like(sampling(MIXED, batch_size=4, **SETTINGS), one_by_one)
    assert_like(one_by_one[1], found[1])


def test_columns_and_generators(sampling):
    expected = sampling(PROMPTS, **SETTINGS)
    column = KeyDataset(Dataset.from_dict({"prompt": PROMPTS}), "prompt")
    for inputs in (column, iter(PROMPTS), Dataset.from_dict({"prompt": PROMPTS})["prompt"]):
        assert_like(list(sampling(inputs, batch_size=2, **SETTINGS)), expected)
    numbers = KeyDataset(Dataset.from_dict({"n": [3, 4]}), "n")
    assert_like(list(sampling(numbers, batch_size=2, **SETTINGS)), sampling([3, 4], **SETTINGS))


def test_one_input_is_the_first_of_a_list(sampling):
    assert_like(sampling(PROMPTS[0], **SETTINGS), sampling(PROMPTS, **SETTINGS)[0])
    assert_like(sampling(4, **SETTINGS), sampling([{"length": 4}], token_budget=10, **SETTINGS)[0])


def test_a_batch_is_one_call_of_the_model(sampling, monkeypatch):
    sizes = calls_of(monkeypatch, sampling.model, "generate", lambda ids, *args, **kwargs: len(ids))
    sampling(MIXED, batch_size=4, **SETTINGS)
    assert sizes == [4, 3]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_without_a_seed_a_call_draws_one(sampling, batch_size):
    """So the samples depend on torch's generator, but not on the batches, and two calls differ."""
    settings = {name: value for name, value in SETTINGS.items() if name != "seed"} | {"num_epochs": 6}
    torch.manual_seed(5)
    seed = int(torch.randint(0, 2**31, ()))
    torch.manual_seed(5)
    first, second = (sampling(PROMPTS, batch_size=batch_size, **settings) for _ in range(2))
    assert_like(first, sampling(PROMPTS, seed=seed, **settings))
    assert [one["text"] for own in first for one in own] != [one["text"] for own in second for one in own]


def test_settings_by_name_go_before_a_generation_config_and_it_before_the_models(sampling):
    config = ChainGenerationConfig(num_epochs=4, num_chains=3, seed=1)
    found = sampling(PROMPTS[:1], generation_config=config, num_chains=1, block_size=2)
    expected = from_generate(sampling.model, PROMPTS[:1], generation_config=config, num_chains=1, block_size=2)
    assert_like(found, expected)
    made = EnergySamplingPipeline(model=energy_model(), tokenizer=tokenizer(), generation_config=config, burn_in=3)
    assert len(made(PROMPTS[0])) == 3 and len(made(PROMPTS[0], burn_in=2)) == 6
    made.model.generation_config = ChainGenerationConfig(num_epochs=9, lengths=4, thinning=2, seed=8)
    assert len(made(PROMPTS[0], burn_in=0)) == 6  # of epochs 0 and 2 of four; the lengths are for no input
    assert made(PROMPTS[0])[0]["text"] == made(PROMPTS[0], seed=1)[0]["text"]


def test_a_models_own_settings_are_those_of_a_call(sampling):
    sampling.model.generation_config = ChainGenerationConfig(
        num_epochs=2, num_chains=3, seed=8, replica_temperatures=[1, 2]
    )
    found = sampling(PROMPTS[:2], batch_size=2)
    assert_like(found, from_generate(sampling.model, PROMPTS[:2]))
    assert [len(own) for own in found] == [6, 6]


def test_other_kernels(sampling):
    found = sampling(PROMPTS, decoder="mask_predict", num_epochs=2, batch_size=2)
    assert all(len(own) == 1 and own[0]["acceptance_rate"] is own[0]["novel_rate"] is None for own in found)
    assert "[MASK]" not in str(found)


@pytest.mark.parametrize(
    "wrong,message",
    [
        ("the cat sat", r"must hold the mask token '\[MASK\]' where something is to be sampled, got 'the cat sat'"),
        ("", "must hold the mask token"),
        (0, "lengths from 1 up as n or .*, got 0"),
        (True, "lengths from 1 up as n or .*, got True"),
        (2.5, "lengths from 1 up as n or .*, got 2.5"),
        ({"length": -1}, "lengths from 1 up as n or .*, got .*-1"),
        ({"length": 3, "text": "the"}, "lengths from 1 up as n or .*, got .*'text'"),
        ({"text": "the [MASK]"}, "lengths from 1 up as n or"),
        ("[MASK] the" * 100, "inputs: row 0 has 202 tokens, the model has positions for 129"),
        (128, "row 1 has 130 tokens, the model has positions for 129"),
    ],
)
def test_wrong_inputs_are_refused(sampling, wrong, message):
    with pytest.raises(ValueError, match=f"{message}.*\\(inputs? (0 to )?1\\)"):
        sampling([PROMPTS[0], wrong], batch_size=2, **SETTINGS)


@pytest.mark.parametrize(
    "settings,message",
    [
        (
            {"num_chain": 3},
            "EnergySamplingPipeline has no argument num_chain; it takes generation_config, token_budget",
        ),
        ({"max_new_tokens": 3}, "no argument max_new_tokens"),
        ({"generation_config": GenerationConfig()}, "must be a ChainGenerationConfig, got GenerationConfig"),
        ({"burn_in": 5, "num_epochs": 3}, r"burn_in \(5\) must be below num_epochs \(3\)"),
        ({"kernel": "magic"}, "kernel must be one of"),
        ({"lengths": 4}, "lengths: a length is an input here, n or .*; got lengths=4"),
        ({"generation_config": ChainGenerationConfig(lengths=[3])}, r"a length is an input here.* got lengths=\[3\]"),
    ],
)
def test_wrong_settings_are_refused(sampling, settings, message):
    for inputs in (PROMPTS, iter(PROMPTS)):
        with pytest.raises(ValueError, match=message):
            list(sampling(inputs, **settings))


def test_the_embedded_model():
    model, own = load_embedded()
    made = pipeline("energy-sampling", model=model, tokenizer=own, num_epochs=4, seed=0)
    prompts = ["and the [MASK] [MASK] unto the [MASK] of israel.", "[MASK] said", 6]
    found = made(prompts, batch_size=3)
    assert_like(found, made(prompts))
    assert all(one["text"].startswith("and the ") and one["text"].endswith("of israel.") for one in found[0])
    # The energy of free tokens given the rest, which are terms of the whole text's energy.
    last = found[1][-1]
    terms = model.score([last["text"]], own).token_energies[0]
    assert last["energy"] == pytest.approx(terms[0], rel=1e-4)
