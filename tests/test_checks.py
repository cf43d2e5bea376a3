"""Numbers and paths as the ecosystem gives them: one rule, and its users one by one."""

import json
import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import torch
from transformers import pipeline

import hf_ebm.pipelines  # noqa: F401  # registers the tasks
from hf_ebm import (
    ChainGenerationConfig,
    EnergyConfig,
    JointGenerationConfig,
    LSTMSeq2SeqConfig,
    enumerate_distribution,
)
from hf_ebm.checks import as_number, as_path, as_whole, listed, number, whole, wholes
from hf_ebm.models.residual.scoring_residual import residual_perplexity
from hf_ebm.texts import as_texts
from hf_ebm.trainers.mgs import MGSConfig
from hf_ebm.trainers.stepwise import SoftBeamConfig
from tests.pipelines.models_for_pipelines import energy_model, residual_model, tokenizer

WHOLE = [85, np.int64(85), np.uint8(85), torch.tensor(85), torch.tensor(85, dtype=torch.int32), np.array(85),
         Fraction(85), Fraction(170, 2)]  # fmt: skip
NUMBERS = [0.75, np.float64(0.75), np.float16(0.75), torch.tensor(0.75), np.array(0.75), Fraction(3, 4),
           Decimal("0.75"), torch.tensor(0.75, requires_grad=True, dtype=torch.bfloat16)]  # fmt: skip
NO_NUMBERS = [True, np.True_, torch.tensor(True), "1", b"1", None, [1], np.array([1]), torch.tensor([1]), 1j,
              torch.tensor(1, device="meta"), math.nan, np.float32("nan"), Decimal("nan"), {}]  # fmt: skip


@pytest.mark.parametrize("value", WHOLE, ids=repr)
def test_whole_numbers(value):
    for found in (whole(value), as_whole("n", value, 85, 85)):
        assert type(found) is int
        assert found == 85
    assert type(number(value)) is float
    assert number(value) == 85.0


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_numbers(value):
    assert type(number(value)) is float
    assert number(value) == as_number("x", value, above=0, below=1) == 0.75
    assert whole(value) is None


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_no_numbers(value):
    assert whole(value) is None
    assert number(value) is None


def test_bounds_are_told():
    told = {
        "a number from 0.000001 up": dict(least=1e-6),
        "a number above 0": dict(above=0),
        "a number above 0 and up to 1": dict(above=0, most=1),
        "a number from 0 up and below 1": dict(least=0, below=1),
        "a number from 0 to 1": dict(least=0, most=1),
        "a finite number": {},
    }
    for text, bounds in told.items():
        for value in (math.inf, -1.0 if bounds else -math.inf):
            with pytest.raises(ValueError, match=f"^x must be {text}, got {value}"):
                as_number("x", value, **bounds)
    with pytest.raises(ValueError, match=r"^n must be a whole number from 1 to 3, got 4"):
        as_whole("n", 4, 1, 3)
    with pytest.raises(ValueError, match=r"^n must be a whole number from 1 up, got 10000.0"):
        as_whole("n", 1e4, 1)
    with pytest.raises(ValueError, match=r"^x must be a finite number"):
        as_number("x", 10**400)


def test_lists():
    for value in ([1, 2], (1, 2), range(1, 3), np.array([1, 2]), torch.tensor([1, 2]), [np.int8(1), torch.tensor(2)]):
        found = wholes(value, 1)
        assert found == [1, 2]
        assert {type(member) for member in found} == {int}
    sparse, meta = torch.tensor([1, 2]).to_sparse(), torch.tensor([1, 2], device="meta")
    arrays = (np.array(12), sparse, meta, torch.tensor([1.0]))
    for value in ("12", b"12", {1: 2}, {1, 2}, 12, *arrays, [1, "2"], [1, True], [[1, 2]]):
        assert wholes(value) is None
    assert wholes([]) == []
    assert wholes([0], 1) is None
    assert listed(iter("ab")) == ["a", "b"]


class Wrapped:
    """A path that is neither a text nor a `Path`."""

    def __init__(self, path):
        self.path = path

    def __fspath__(self):
        return self.path


def test_paths(tmp_path):
    for value in ("a/b", Path("a/b"), PurePosixPath("a/b"), Wrapped("a/b")):
        assert as_path("folder", value) == Path("a/b")
    for value in (b"a/b", Wrapped(b"a/b"), 3, None):
        with pytest.raises(ValueError, match=r"^folder must be a name or a path, as text or a Path, got"):
            as_path("folder", value)
    (tmp_path / "texts.txt").write_text("a b\nc\n")
    assert as_texts("texts", Wrapped(str(tmp_path / "texts.txt"))) == ["a b", "c"]
    with pytest.raises(ValueError, match=r"texts must be strings .* got b'a b'"):
        as_texts("texts", b"a b")


def test_settings_are_saved_as_plain_numbers(tmp_path):
    chain = ChainGenerationConfig(
        seed=np.int64(85), num_chains=torch.tensor(3), burn_in=Fraction(0), block_size=np.array([1, 2]),
        energy_temperature=np.float32(0.5), proposal_top_p=torch.tensor(0.5), min_energy_temperature=Fraction(1, 4),
        lengths={np.int32(3): np.float64(0.5), 4: torch.tensor(1)}, suppress_tokens=torch.tensor([5, 6]),
        exclude_current=np.True_,
    )  # fmt: skip
    chain.save_pretrained(tmp_path)
    found = ChainGenerationConfig.from_pretrained(tmp_path).settings()
    assert found == {
        "seed": 85, "num_chains": 3, "burn_in": 0, "block_size": [1, 2], "energy_temperature": 0.5,
        "proposal_top_p": 0.5, "min_energy_temperature": 0.25, "lengths": {3: 0.5, 4: 1.0}, "suppress_tokens": [5, 6],
        "exclude_current": True,
    }  # fmt: skip
    joint = JointGenerationConfig(seed=np.int64(1), temperature=Fraction(3, 2), top_k=torch.tensor(4)).settings()
    assert json.loads(json.dumps(joint)) == {"seed": 1, "temperature": 1.5, "top_k": 4}
    for wrong in ({"seed": True}, {"num_chains": 2.0}, {"energy_temperature": np.float64("nan")},
                  {"lengths": {3: True}}, {"block_size": [np.float64(1)]}, {"suppress_tokens": "12"}):  # fmt: skip
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}.* must be"):
            ChainGenerationConfig(**wrong)


def test_configurations_are_saved_as_plain_numbers():
    energy = EnergyConfig(
        mask_token_id=np.int64(4), special_token_ids=np.array([0, 1]), prefix_token_ids=(torch.tensor(2),)
    )
    assert json.loads(energy.to_json_string())["special_token_ids"] == [0, 1]
    assert (energy.mask_token_id, energy.prefix_token_ids) == (4, [2])
    with pytest.raises(ValueError, match="mask_token_id must be a whole number from 0 up, got '4'"):
        EnergyConfig(mask_token_id="4")
    with pytest.raises(ValueError, match="special_token_ids must be a list of token ids, got 4"):
        EnergyConfig(special_token_ids=4)
    recurrent = LSTMSeq2SeqConfig(vocab_size=np.int64(40), dropout=Fraction(1, 4), eos_token_id=torch.tensor(2))
    assert json.loads(recurrent.to_json_string())["vocab_size"] == 40


def test_arguments_of_trainers(tmp_path):
    args = MGSConfig(
        output_dir=tmp_path, num_candidates=np.int64(2), alpha=Fraction(1, 2), mixture=torch.tensor(0.5),
        max_length_ratio=np.float32(1.5),
    )  # fmt: skip
    assert (args.num_candidates, args.alpha, args.mixture, args.max_length_ratio) == (2, 0.5, 0.5, 1.5)
    assert json.loads(args.to_json_string())["alpha"] == 0.5
    args = SoftBeamConfig(output_dir=tmp_path, beam_size=torch.tensor(2), alpha_growth=np.float64(2))
    assert json.loads(args.to_json_string())["beam_size"] == 2
    with pytest.raises(ValueError, match="num_candidates must be a whole number from 1 up, got True"):
        MGSConfig(output_dir=tmp_path, num_candidates=True)


def test_chains_are_the_same(tmp_path):
    model = energy_model()
    plain = dict(lengths=3, num_chains=2, num_epochs=2, seed=85, token_budget=64, proposal_temperature=0.5)
    found = dict(
        lengths=torch.tensor(3), num_chains=np.int8(2), num_epochs=Fraction(2), seed=np.int64(85),
        token_budget=np.int64(64), proposal_temperature=Fraction(1, 2), chain_keys=np.array([[0, 0], [0, 1]]),
    )  # fmt: skip

    def extra(ids):
        return ids.sum(1).double() / 100

    expected = model.generate(**plain, extra_energies=[(0.5, extra)])
    out = model.generate(**found, extra_energies=[(torch.tensor(0.5), extra)], save_state_to=Wrapped(str(tmp_path)))
    assert torch.equal(out.samples, expected.samples)
    assert torch.equal(out.energies, expected.energies)
    again = model.generate(resume_from=tmp_path, seed=torch.tensor(85), extra_energies=[(Fraction(1, 2), extra)])
    assert torch.equal(again.samples, expected.samples)
    ids = torch.tensor([[6, 7, 8], [7, 8, 9]])
    rows = dict(chain_keys=[(0, 0), (1, 0)], num_epochs=1, seed=1)
    assert torch.equal(
        model.generate(ids, chain_rows=np.array([1, 0]), **rows).samples,
        model.generate(ids, chain_rows=[1, 0], **rows).samples,
    )
    with pytest.raises(ValueError, match="token_budget must be a whole number from 1 up, got True"):
        model.generate(**plain | {"token_budget": True})
    with pytest.raises(ValueError, match="resume_from must be a name or a path"):
        model.generate(resume_from=bytes(tmp_path))


def test_scores_and_lists_are_the_same():
    model, texts = energy_model(), ["the cat sat", "the dog sat"]
    scored = model.score(texts, tokenizer(), masking="stride", stride=2)
    found = model.score(texts, tokenizer(), masking="stride", stride=np.int64(2), token_budget=torch.tensor(9))
    assert torch.allclose(found.energy, scored.energy)
    expected = model.rerank([texts], tokenizer(), base_scores=[[0.5, 0.25]], weight=0.5, length_normalization=1.0)
    for scores in ([Decimal("0.5"), Fraction(1, 4)], np.array([0.5, 0.25]), torch.tensor([0.5, 0.25])):
        out = model.rerank(
            [texts], tokenizer(), base_scores=[scores], weight=np.float32(0.5), length_normalization=Fraction(1)
        )
        assert out.scores == expected.scores
    for given, message in {
        "base_scores must be a list": 5, "list 0 must hold": [["a", "b"]], "one score per candidate": [[1.0]],
        "base_scores: list 0": [None],
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=given):
            model.rerank([texts], tokenizer(), base_scores=message)
    with pytest.raises(ValueError, match="length_normalization must leave 3"):
        model.rerank([texts], tokenizer(), length_normalization=1e4)
    pipe = pipeline("energy-reranking", model=model, tokenizer=tokenizer())
    row = {"candidates": texts, "scores": np.array([0.5, 0.25])}
    assert [one["score"] for one in pipe(row, weight=torch.tensor(0.5))] == pytest.approx(
        sorted(model.rerank([texts], tokenizer(), base_scores=[[0.5, 0.25]], weight=0.5).scores[0], reverse=True)
    )
    sampler = pipeline("energy-sampling", model=model, tokenizer=tokenizer())
    expected = sampler({"length": torch.tensor(2)}, seed=3)
    assert sampler(np.int64(2), seed=np.int64(3), batch_size=np.int64(1)) == expected


def test_residual_numbers_are_the_same():
    model = residual_model()
    plain = dict(seed=5, num_candidates=8, max_new_tokens=3, num_samples=2)
    given = dict(seed=np.int64(5), num_candidates=torch.tensor(8), max_new_tokens=Fraction(3), num_samples=np.uint8(2))
    assert torch.equal(model.generate([[6, 7]], **given).sequences, model.generate([[6, 7]], **plain).sequences)
    rows = ([[6, 7]], [[8, 9, 10]])
    found = residual_perplexity(
        model, *rows, max_new_tokens=np.int64(3), num_samples=np.array([2, 4]), seed=np.int64(1)
    )
    assert found.num_samples.tolist() == [2, 4]
    expected = residual_perplexity(model, *rows, max_new_tokens=3, num_samples=[2, 4], seed=1)
    assert torch.equal(found.log_partition_lower, expected.log_partition_lower)


def test_enumeration():
    found = enumerate_distribution(
        lambda ids: ids.sum(1), np.array([1, 2]), np.int64(2), temperature=Fraction(1, 2), chunk_size=torch.tensor(3)
    )
    energies = torch.tensor([2.0, 3.0, 3.0, 4.0], dtype=torch.float64)
    assert torch.allclose(found.log_probabilities, (-2 * energies).log_softmax(0))
    for wrong in ({"length": 2.0}, {"temperature": 0}, {"tokens": []}, {"limit": True}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            enumerate_distribution(lambda ids: ids.sum(1), **{"tokens": [1], "length": 1, **wrong})
