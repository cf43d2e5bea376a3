"""`hf-ebm fill` against `EnergyModel.fill`."""

import json

import pandas as pd
import pytest
from transformers import AutoTokenizer

from hf_ebm import EnergyModel
from tests.cli.conftest import read, run

TEXTS = ["the [MASK] sat on the [MASK].", "[MASK] dog"]
WORDS = ["cat", "dog", "unbelievable"]


@pytest.fixture
def model(model_folder):
    return EnergyModel.from_pretrained(model_folder).eval(), AutoTokenizer.from_pretrained(model_folder)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_texts_come_back_with_their_fills(ending, model, model_folder, tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"id": n, "text": t}) + "\n" for n, t in enumerate(TEXTS)))
    (tmp_path / "words.txt").write_text("\n".join(WORDS))
    run(
        "fill", "--model", model_folder, "--input", tmp_path / "in.jsonl", "--output", tmp_path / f"out.{ending}",
        "--words_file", tmp_path / "words.txt", "--top_k", "4", "--temperature", "0.8",
    )  # fmt: skip
    out = tmp_path / f"out.{ending}"
    found = pd.read_parquet(out).to_dict("records") if ending == "parquet" else read(out)
    expected = model[0].fill(TEXTS, model[1], 4, words=WORDS, temperature=0.8)
    for row, record in enumerate(found):
        assert (record["id"], record["text"], record["method"]) == (row, TEXTS[row], "exact")
        assert record["log_partition"] == pytest.approx(float(expected.log_partition[row]), abs=1e-5)
        for one, other in zip(record["fills"], expected.fills[row], strict=True):
            assert one["score"] == pytest.approx(other.probability, abs=1e-6) and one["sequence"] == other.sequence
            assert list(one["token_str"]) == other.token_strs
            assert [list(own) for own in one["token"]] == other.tokens
        best = [words[0] for words in record["marginals"]]
        assert [list(word["token"]) for word in best] == [words[0].tokens for words in expected.marginals[row]]


def test_rules_and_readings(model, model_folder, capsys):
    run(
        "fill", "--model", model_folder, "--text", TEXTS[0], "--words", *WORDS, "--different", "0,1", "--reading",
        "sequential", "--pieces", "1", "--pattern", "dog",
    )  # fmt: skip
    (record,) = map(json.loads, capsys.readouterr().out.splitlines())
    expected = model[0].fill(
        TEXTS[0], model[1], words=WORDS, different=[0, 1], reading="sequential", pieces=1, pattern="dog"
    )
    assert [one["token_str"] for one in record["fills"]] == [one.token_strs for one in expected.fills[0]]
    assert {tuple(one["token_str"]) for one in record["fills"]} == {("cat", "dog"), ("dog", "cat")}
    assert record["r_hat"] is record["fills"][0]["error"] is None


@pytest.mark.parametrize(
    "given,pieces", [(["2"], 2), (["1", "2"], (1, 2)), (["1-2", "1"], [(1, 2), 1]), (["any", "2"], [None, 2])]
)
def test_numbers_of_pieces(given, pieces, model, model_folder, capsys):
    arguments = ["--row_limit", 9, "--top_k", 2, "--method", "candidates"]
    run("fill", "--model", model_folder, "--text", TEXTS[0], "--pieces", *given, *arguments)
    (record,) = map(json.loads, capsys.readouterr().out.splitlines())
    expected = model[0].fill(TEXTS[0], model[1], 2, pieces=pieces, row_limit=9, method="candidates")
    assert [one["token"] for one in record["fills"]] == [one.tokens for one in expected.fills[0]]
    assert record["log_partition"] == pytest.approx(float(expected.log_partition[0]), abs=1e-4)


@pytest.mark.parametrize(
    "arguments,message",
    [
        ([], "give texts, as --input or --text"),
        (["--text", "the cat"], "row 0 holds no mask token"),
        (["--text", "[MASK]", "--words", "cat", "[SEP]"], "'[SEP]' of row 0, blank 0"),
        (["--text", "[MASK]", "--equal", "a,b"], "equal must be numbers of blanks"),
        (["--text", "[MASK]", "--pieces", "1", "2", "3"], "pieces has entries for 3 blanks, row 0 has 1"),
        (["--text", "[MASK]", "--pieces", "3", "2"], "pieces must be a number, a pair"),
        (["--text", "[MASK]", "--pieces", "2-"], "pieces must be like 2, 1-3 or any"),
        (["--text", "[MASK]", "--words_file", "EMPTY"], "holds no word"),
        (["--input", "IN"], "record 0 has no 'text'"),
    ],
)
def test_what_cannot_be_filled_is_told_in_one_line(arguments, message, model_folder, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"body": "[MASK]"}\n')
    (tmp_path / "empty.txt").write_text("\n")
    files = {"IN": tmp_path / "in.jsonl", "EMPTY": tmp_path / "empty.txt"}
    with pytest.raises(SystemExit):
        run("fill", "--model", model_folder, *(files.get(one, one) for one in arguments))
    (told,) = capsys.readouterr().err.splitlines()
    assert message in told
