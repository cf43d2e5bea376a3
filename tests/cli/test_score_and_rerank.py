"""`hf-ebm score` and `hf-ebm rerank`: formats, streams, and refusals in one line."""

import datetime
import io
import json
import shutil

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from hf_ebm import EnergyModel
from tests.cli.conftest import read, run

RECORDS = [{"id": 3, "text": "the cat sat"}, {"id": 4, "text": ""}, {"id": 5, "text": "天地 😀"}]


@pytest.fixture
def expected(model_folder):
    model, tokenizer = EnergyModel.from_pretrained(model_folder).eval(), AutoTokenizer.from_pretrained(model_folder)
    return model.score([record["text"] for record in RECORDS], tokenizer)


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "txt"])
def test_score_reads_and_writes_every_format(ending, model_folder, tmp_path, expected):
    source, target = tmp_path / f"in.{ending}", tmp_path / "out.jsonl"
    if ending == "jsonl":
        source.write_text("".join(json.dumps(record) + "\n" for record in RECORDS), encoding="utf-8")
    elif ending == "parquet":
        pd.DataFrame(RECORDS).to_parquet(source)
        target = tmp_path / "out.parquet"
    else:
        source.write_text("\n".join(record["text"] for record in RECORDS) + "\n", encoding="utf-8")
    run("score", "--model", model_folder, "--input", source, "--output", target, "--details")
    found = pd.read_parquet(target).to_dict("records") if ending == "parquet" else read(target)
    assert [record["text"] for record in found] == [record["text"] for record in RECORDS]
    assert [record["energy"] for record in found] == pytest.approx(expected.energy.tolist(), abs=1e-5)
    assert list(found[0]["words"]) == ["the", "cat", "sat"]
    if ending != "txt":
        assert [record["id"] for record in found] == [3, 4, 5]


def test_score_in_a_pipe(model_folder, monkeypatch, capsys, expected):
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(json.dumps(record) + "\n" for record in RECORDS)))
    run("score", "--model", model_folder, "--masking", "exact")
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["energy"] for record in found] == pytest.approx(expected.energy.tolist(), abs=1e-5)
    assert found[1]["pseudo_perplexity"] is None


def test_rerank(model_folder, tmp_path):
    lists = [{"candidates": ["the cat", "cat the"], "s": [0.0, -1.0]}, {"candidates": ["dog"], "s": [2.0]}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lists))
    run(
        "rerank", "--model", model_folder, "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl",
        "--scores_column", "s", "--weight", "0.5", "--length_normalization", "1",
    )  # fmt: skip
    model, tokenizer = EnergyModel.from_pretrained(model_folder).eval(), AutoTokenizer.from_pretrained(model_folder)
    expected = model.rerank(
        [record["candidates"] for record in lists], tokenizer, base_scores=[record["s"] for record in lists],
        weight=0.5, length_normalization=1.0,
    )  # fmt: skip
    for record, order, scores in zip(read(tmp_path / "out.jsonl"), expected.order, expected.scores, strict=True):
        assert record["order"] == order and record["best"] == record["candidates"][order[0]]
        assert record["rerank_scores"] == pytest.approx(scores)


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["score", "--input", "missing.jsonl"], "missing.jsonl"),
        (["score", "--input", "IN", "--text_column", "body"], "record 0 has no 'body'"),
        (["score", "--input", "BROKEN"], "line 2 is not JSON"),
        (["score", "--input", "IN", "--output", "nowhere/out.jsonl"], "cannot be written"),
        (["score", "--input", "IN", "--dtype", "int8"], "dtype must be one of"),
        (["score", "--input", "IN", "--device", "quantum"], "device 'quantum' cannot be used"),
        (["score", "--input", "IN", "--masking", "fast"], "masking must be one of"),
        (["score", "--input", "IN", "--model", "no/such-model"], "no/such-model"),
        (["rerank", "--input", "IN"], "record 0 has no 'candidates'"),
        (["sample", "--lengths", "0"], "lengths must be"),
        (["sample"], "give prompts, as --input or --text, or --lengths"),
        (["dance"], "there is no command 'dance'"),
        (["score", "--input", "in.csv"], "must end in .jsonl"),
        (["score", "--input", "IN", "--output", "out.csv"], "output: out.csv must end in .jsonl"),
        (["score", "--input", "IN", "--output", "."], "is a folder"),
        (["score", "--input", "IN", "--device", "meta"], "device 'meta' cannot be used"),
        (["score", "--input", "IN", "--energy", "free"], "energy must be one of"),
        (["rerank", "--input", "LETTERS"], "of record 0 must be a list that isn't empty, got 'abc'"),
        (["sample", "--text", "the [MASK]", "--lengths", "3"], "lengths was given together with prompts"),
        (["sample", "--input", "EMPTY"], "there are no prompts"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_two(arguments, message, model_folder, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"text": "the cat"}\n')
    (tmp_path / "broken.jsonl").write_text('{"text": "the cat"}\n{"text": \n')
    (tmp_path / "letters.jsonl").write_text('{"candidates": "abc"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    names = ("IN", "BROKEN", "LETTERS", "EMPTY")
    places = {name: tmp_path / f"{name.lower()}.jsonl" for name in names}
    arguments = [places.get(argument, argument) for argument in arguments]
    if arguments[0] != "dance" and "--model" not in arguments:
        arguments += ["--model", model_folder]
    with pytest.raises(SystemExit) as stop:
        run(*arguments)
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 2 and message in error and error.startswith("hf-ebm: ")


def test_what_records_hold_survives(model_folder, tmp_path):
    """Whole numbers above 2**53 beside nulls, dates, a byte-order mark, an ending in capitals, a link as output."""
    table = pa.table({"text": ["the cat", "dog"], "id": [2**60 + 1, None], "on": [datetime.date(2026, 1, 2), None]})
    pq.write_table(table, tmp_path / "in.parquet")
    (tmp_path / "real.jsonl").write_text("old")
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "real.jsonl")
    run("score", "--model", model_folder, "--input", tmp_path / "in.parquet", "--output", tmp_path / "link.jsonl")
    found = read(tmp_path / "real.jsonl")
    assert [record["id"] for record in found] == [2**60 + 1, None] and found[0]["on"] == "2026-01-02"
    assert (tmp_path / "link.jsonl").is_symlink()
    (tmp_path / "B.JSONL").write_text('{"text": "the cat"}\n', encoding="utf-8-sig")
    run("score", "--model", model_folder, "--input", tmp_path / "B.JSONL", "--output", tmp_path / "out.parquet")
    assert pq.read_table(tmp_path / "out.parquet").to_pylist()[0]["energy"] == pytest.approx(found[0]["energy"])
    assert not list(tmp_path.glob("*.tmp")) and not list(tmp_path.glob(".*.tmp"))


def test_models_that_cannot_be_loaded_are_one_line(model_folder, tmp_path, capsys):
    shutil.copytree(model_folder, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    (tmp_path / "in.jsonl").write_text('{"text": "the cat"}\n')
    with pytest.raises(SystemExit):
        run("score", "--model", tmp_path / "model", "--input", tmp_path / "in.jsonl")
    assert "cannot be loaded" in capsys.readouterr().err
    shutil.copy(f"{model_folder}/model.safetensors", weights)
    for file in (tmp_path / "model").glob("token*"):
        file.unlink()
    with pytest.raises(SystemExit):
        run("score", "--model", tmp_path / "model", "--input", tmp_path / "in.jsonl")
    assert "has no tokenizer beside its weights" in capsys.readouterr().err
