"""`hf-ebm score --pairs`: accuracies against counts, intervals against resampling, tokens where two differ."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from hf_ebm import EnergyModel
from hf_ebm.data.metrics import accuracy_of, compared_pairs
from hf_ebm.models.energy.scoring_energy import ScoreOutput
from tests.cli.conftest import read, run
from tests.conftest import plain_token_energies

PAIRS = [
    {"sentence_good": "the cat sat on the mat", "sentence_bad": "the cat on sat the mat", "term": "order"},
    {"sentence_good": "the dog sat", "sentence_bad": "the dogs sat", "term": "agreement"},
    {"sentence_good": "the Dog", "sentence_bad": "the dog", "term": "order"},
    {"sentence_good": "on the log", "sentence_bad": "the the log", "term": "order"},
]


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in PAIRS))
    return path


@pytest.fixture(scope="module")
def energies(model_folder):
    """Of both sentences of each pair, by one masked row at a time."""
    model, tokenizer = EnergyModel.from_pretrained(model_folder).eval(), AutoTokenizer.from_pretrained(model_folder)

    def terms(text: str) -> list[float]:
        ids = torch.tensor(tokenizer(text).input_ids)
        return plain_token_energies(model, ids, list(range(1, len(ids) - 1)))

    return [[terms(record[name]) for name in ("sentence_good", "sentence_bad")] for record in PAIRS]


def test_pairs(pairs, energies, model_folder, tmp_path, capsys):
    target = tmp_path / "out.jsonl"
    arguments = ["score", "--model", model_folder, "--pairs", pairs, "--output", target, "--group_column", "term"]
    run(*arguments)
    told, found = [json.loads(line) for line in capsys.readouterr().out.splitlines()], read(target)
    assert [{name: record[name] for name in PAIRS[0]} for record in found] == PAIRS
    wins = [float(sum(good) < sum(bad)) for good, bad in energies]
    wins[2] = 0.5  # the same tokens
    assert [record["win"] for record in found] == wins
    for record, (good, bad) in zip(found, energies, strict=True):
        assert [record["energy_good"], record["energy_bad"]] == pytest.approx([sum(good), sum(bad)], abs=1e-4)
    assert found[2]["tokens_good"] == found[2]["token_energies_bad"] == []
    (extra,) = found[1]["tokens_bad"]
    assert extra.endswith("s") and found[1]["tokens_good"] == []
    assert found[1]["token_energies_bad"] == pytest.approx([energies[1][1][2]], abs=1e-4)
    order = [wins[0], wins[2], wins[3]]
    assert [one.get("group") for one in told] == [None, "order", "agreement"]
    assert [one["accuracy"] for one in told] == pytest.approx([np.mean(wins), np.mean(order), wins[1]])
    assert [one["pairs"] for one in told] == [4, 3, 1]
    assert told[2]["low"] == told[2]["high"] == wins[1]
    run(*arguments)
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == told


def test_energies_of_the_tokens_that_differ(pairs, energies, model_folder, capsys):
    run("score", "--model", model_folder, "--pairs", pairs)
    printed = capsys.readouterr()
    record = json.loads(printed.out.splitlines()[3])
    good, bad = energies[3]
    assert record["tokens_good"] == ["on"] and record["tokens_bad"] == ["the"]
    assert record["token_energies_good"] == pytest.approx(good[:1], abs=1e-4)
    assert record["token_energies_bad"] == pytest.approx(bad[:1], abs=1e-4)
    assert json.loads(printed.err.splitlines()[-1])["pairs"] == 4


def test_the_same_tokens_tie_whatever_the_rounding():
    good, bad = (
        ScoreOutput(energy=torch.tensor([energy, energy]), tokens=[["a"], [word]], token_energies=[[energy], [energy]])
        for energy, word in ((1.0, "a"), (1.000001, "b"))
    )
    assert [record["win"] for record in compared_pairs(good, bad)] == [0.5, 1.0]


def test_intervals_are_those_of_resampled_pairs():
    wins = [1.0] * 30 + [0.5] * 4 + [0.0] * 6
    resampled = np.random.default_rng(1).choice(wins, (4000, 40)).mean(1)
    found = accuracy_of(wins, num_resamples=4000)
    assert [found.low, found.high] == pytest.approx(np.quantile(resampled, [0.025, 0.975]).tolist(), abs=0.02)
    assert found != accuracy_of(wins, num_resamples=50, seed=1) == accuracy_of(wins, num_resamples=50, seed=1)
    narrow = accuracy_of(wins, num_resamples=4000, level=0.5)
    assert [narrow.low, narrow.high] == pytest.approx(np.quantile(resampled, [0.25, 0.75]).tolist(), abs=0.02)


@pytest.mark.parametrize(
    "given,told",
    [
        (["--bad_column", "worse"], "pairs.jsonl: record 0 has no 'worse'"),
        (["--group_column", "field"], "pairs.jsonl: record 0 has no 'field'"),
        (["--num_resamples", "0"], "num_resamples must be"),
        (["--details"], "details can't be given"),
        (["--input", "texts.txt"], "input can't be given"),
    ],
)
def test_refusals(given, told, pairs, capsys):
    with pytest.raises(SystemExit) as stop:
        run("score", "--model", "no/such-model", "--pairs", pairs, *given)
    assert stop.value.code == 2 and told in capsys.readouterr().err
