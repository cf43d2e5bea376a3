"""Tables of the commands: all fields of all records come out as they went in, or are refused by name before work."""

import datetime
import decimal
import io
import json
import os
import sys

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hf_ebm.cli import sample, scoring
from tests.cli.conftest import read, run
from tests.cli.test_negatives_and_perplexity import SIZES, TEXTS, folders  # noqa: F401

TEXT, MASKED = ["the cat", "dog sat", "mat"], ["the cat [MASK]", "dog [MASK] sat", "a [MASK]"]
# Lists in each other that are read but not written: what recurses in C is counted apart from 3.12 on.
READ_NOT_WRITTEN = 900 if sys.version_info < (3, 12) else 1400
LATE = ("view", "pair")  # columns that pyarrow before 25 can't write
FEW = ["--num_chains", "1", "--num_epochs", "1"]


def brackets(depth: int) -> str:
    return "[" * depth + "]" * depth


def nested(depth: int) -> list:
    """A list in a list in a list …"""
    return [nested(depth - 1)] if depth else []


def every_type() -> pa.Table:
    """A column of every type that Parquet can hold, with a null in each."""
    day, money, inner = datetime.date, decimal.Decimal, pa.struct([("a", pa.uint64()), ("b", pa.list_(pa.string()))])
    whole = {str(kind): pa.array([1, None, 2], kind) for kind in (pa.int8(), pa.int32(), pa.uint8(), pa.uint32())}
    units = (("ms", 10**6, None), ("us", 10**3, "UTC"), ("ns", 1, "Europe/Berlin"))
    moments = {
        f"moment_{unit}": pa.array([1_700_000_000_123_456_789 // scale, None, 1], pa.timestamp(unit, zone))
        for unit, scale, zone in units
    }
    spans = {f"span_{unit}": pa.array([1001, None, 2], pa.duration(unit)) for unit in ("s", "ms", "us", "ns")}
    columns = {
        "null": pa.nulls(3), "truth": pa.array([True, None, False]), **whole, **moments, **spans,
        "large": pa.array([2**63 + 1, None, 2**64 - 1], pa.uint64()),
        "half": pa.array([np.float16(1.5), None, np.float16(2.5)], pa.float16()),
        "float": pa.array([1.5, None, float("inf")], pa.float32()),
        "money": pa.array([money("1.23"), None, money("4.56")], pa.decimal128(38, 2)),
        "much": pa.array([money("1.23"), None, money("4.56")], pa.decimal256(60, 2)),
        "day": pa.array([day(2020, 1, 2), None, day(1, 1, 1)], pa.date32()),
        "clock": pa.array([1001, None, 2], pa.time64("ns")), "clock_ms": pa.array([1001, None, 2], pa.time32("ms")),
        "large_text": pa.array(["a", None, "ü"], pa.large_string()),
        "view": pa.array(["a", None, "longer than twelve letters"], pa.string_view()),
        "bytes": pa.array([b"\x00", None, b"\xff"]), "two_bytes": pa.array([b"ab", None, b"cd"], pa.binary(2)),
        "list": pa.array([[1, 2], None, []], pa.list_(pa.int8())),
        "pair": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int8(), 2)),
        "nested": pa.array([{"a": 2**63, "b": ["x"]}, None, {"a": None, "b": []}], inner),
        "map": pa.array([[("k", 1), ("l", 2)], None, []], pa.map_(pa.string(), pa.int64())),
        "kinds": pa.array(["a", None, "b"]).dictionary_encode(),
    }  # fmt: skip
    return pa.table({name: column for name, column in columns.items() if name not in LATE or can_be_written(column)})


def can_be_written(column: pa.Array) -> bool:
    try:
        pq.write_table(pa.table({"column": column}), io.BytesIO())
    except pa.ArrowNotImplementedError:
        return False
    return True


@pytest.fixture
def typed(tmp_path) -> pa.Table:
    """What `typed.parquet` holds, as it is read: the texts and columns of all types, with a schema of its own."""
    table = every_type().append_column(pa.field("text", pa.string(), nullable=False), pa.array(TEXT))
    table = table.append_column("candidates", pa.array([[text, "the cat"] for text in TEXT]))
    pq.write_table(table.replace_schema_metadata({"made by": "hand"}), tmp_path / "typed.parquet")
    return pq.read_table(tmp_path / "typed.parquet")


def lines(path, records) -> str:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("command", ["score", "rerank"])
def test_columns_of_parquet_keep_their_types(command, typed, model_folder, tmp_path):
    run(command, "--model", model_folder, "--input", tmp_path / "typed.parquet", "--output", tmp_path / "out.parquet",
        "--unknown_tokens", "ignore")  # fmt: skip
    found = pq.read_table(tmp_path / "out.parquet")
    assert found.select(typed.column_names).equals(typed, check_metadata=True)
    added = {"score": {"energy": pa.float64(), "num_tokens": pa.int64(), "num_unknown": pa.int64(),
                       "pseudo_perplexity": pa.float64()},
             "rerank": {"best": pa.string(), "order": pa.list_(pa.int64()), "rerank_scores": pa.list_(pa.float64()),
                        "energies": pa.list_(pa.float64())}}[command]  # fmt: skip
    assert {name: found.schema.field(name).type for name in found.column_names[typed.num_columns :]} == added


def test_samples_and_negatives_carry_every_column(typed, folders, tmp_path):  # noqa: F811
    place = typed.column_names.index("text")
    pq.write_table(typed.set_column(place, "text", pa.array(MASKED)), tmp_path / "typed.parquet")
    arguments = ["--input", tmp_path / "typed.parquet", "--unknown_tokens", "ignore"]
    run("sample", "--model", folders / "mlm", *arguments, "--output", tmp_path / "out.parquet", "--num_chains", "2",
        "--num_epochs", "2", "--chains_at_once", "5")  # fmt: skip
    found = pq.read_table(tmp_path / "out.parquet")
    expected = typed.drop_columns(["text"])
    assert found.column("prompt").to_pylist() == [0] * 4 + [1] * 4 + [2] * 4
    for number in range(12):
        assert found.select(expected.column_names).slice(number, 1).equals(expected.slice(number // 4, 1))
    assert found.select(expected.column_names).schema.equals(expected.schema)
    assert not any("MASK" in text for text in found.column("text").to_pylist())
    typed = typed.set_column(place, "text", pa.array(["the", "the cat sat", "on the mat"]))
    pq.write_table(typed, tmp_path / "typed.parquet")
    sizes = ["--prefix_tokens", "2", "--max_new_tokens", "2"]  # [CLS] the; the first has nothing to continue
    for command, more in (("negatives", []), ("perplexity", ["--candidates_at_once", "9"])):
        run(command, "--model", folders / "lm", *arguments, *sizes, "--output", tmp_path / f"{command}.parquet", *more)
        found = pq.read_table(tmp_path / f"{command}.parquet")
        assert found.column("text").to_pylist() == ["the cat sat", "on the mat"]
        assert found.select(expected.column_names).equals(expected.slice(1, 2))


def test_columns_of_parquet_as_json(typed, model_folder, tmp_path):
    run("score", "--model", model_folder, "--input", tmp_path / "typed.parquet", "--output", tmp_path / "out.jsonl",
        "--unknown_tokens", "ignore")  # fmt: skip
    found = read(tmp_path / "out.jsonl")
    assert set(typed.column_names) <= set(found[0]) and all(
        found[1][name] is None for name in every_type().column_names
    )
    first = {name: found[0][name] for name in ("moment_ns", "clock", "large", "money", "bytes", "map", "nested", "day")}
    assert first == {
        "moment_ns": "2023-11-14 23:13:20.123456789+01:00", "clock": "00:00:00.000001001", "large": 2**63 + 1,
        "money": "1.23", "bytes": "AA==", "map": [["k", 1], ["l", 2]], "nested": {"a": 2**63, "b": ["x"]},
        "day": "2020-01-02",
    }  # fmt: skip
    assert found[2]["float"] is None  # infinity


CHANGING = [
    {"text": "the cat", "id": 1},
    {"text": "dog", "note": "half of a pair: \ud83d", "more": {"a": [1, None]}},
    {"more": {"b": 2.5}, "text": "sat on", "id": 2**60 + 1, "late": [[], ["x"]]},
]


@pytest.mark.parametrize("command", ["score", "rerank", "sample"])
def test_fields_that_come_and_go_all_stay(command, model_folder, tmp_path):
    records = [record | {"candidates": [record["text"], "mat"]} for record in CHANGING]
    lines(tmp_path / "in.jsonl", records)
    arguments = [
        command,
        "--model",
        model_folder,
        "--input",
        tmp_path / "in.jsonl",
        *(FEW if command == "sample" else []),
    ]
    run(*arguments, "--output", tmp_path / "out.jsonl")
    found = sorted(read(tmp_path / "out.jsonl"), key=lambda record: record.get("prompt", 0))
    kept = [
        name for name in ("id", "note", "more", "late", "candidates", "text") if (command, name) != ("sample", "text")
    ]
    for record, given in zip(found, records, strict=True):
        assert {name: record[name] for name in kept if name in record} == {
            name: given[name] for name in kept if name in given
        }
    del records[1]["note"]  # not a text that Parquet can hold
    lines(tmp_path / "in.jsonl", records)
    run(*arguments, "--output", tmp_path / "out.parquet")
    found = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [record["id"] for record in found] == [1, None, 2**60 + 1]
    assert [record["late"] for record in found] == [None, None, [[], ["x"]]]
    assert [record["more"] for record in found] == [None, {"a": [1, None], "b": None}, {"a": None, "b": 2.5}]


@pytest.mark.parametrize(
    "name,values",
    [
        ("id", [2**63, 1]),
        ("mixed", [1, "a"]),
        ("mixed", [True, 1.5]),
        ("mixed", [{"a": 1}, 3]),
        ("deeper", [[1], ["a"]]),
        ("empty", [{}, {}]),
        ("half", ["\ud83d", ""]),
        ("exact", [2**53 + 1, 0.5]),
        ("deep", [nested(400), None]),
    ],
)
def test_what_no_column_can_hold_is_refused_by_name_before_the_model_is_loaded(
    name, values, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for module in (scoring, sample):
        monkeypatch.setattr(module, "load_model", lambda *_, **__: pytest.fail("the model was loaded"))
    lines(tmp_path / "in.jsonl", [{"text": "the", "candidates": ["a"], name: value} for value in values])
    for command in ("score", "rerank", "sample", "negatives", "perplexity"):
        with pytest.raises(SystemExit):
            run(command, "--input", "in.jsonl", "--output", "out.parquet")
        error = capsys.readouterr().err
        assert f"in.jsonl: the field {name!r} cannot be a column of Parquet" in error and error.count("\n") == 1
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_fields_of_the_input_keep_names_that_ours_have_too(model_folder, tmp_path, capsys):
    own = [{"text": "the cat", "energy": "mine", "tokens": [1]}, {"text": "dog", "num_tokens": None}]
    lines(tmp_path / "in.jsonl", own)
    arguments = ["score", "--model", model_folder, "--details"]
    run(*arguments, "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl")
    lines(tmp_path / "bare.jsonl", [{"text": record["text"]} for record in own])
    run(*arguments, "--input", tmp_path / "bare.jsonl", "--output", tmp_path / "plain.jsonl")
    shared = ("energy", "tokens", "num_tokens")
    for found, given, plain in zip(read(tmp_path / "out.jsonl"), own, read(tmp_path / "plain.jsonl"), strict=True):
        ours = {f"hf_ebm_{name}" if name in shared else name: value for name, value in plain.items()}
        assert found == {**given, **ours}
    # Once more, by another model, say: both stay apart. A third time there is no name left.
    run(*arguments, "--input", tmp_path / "plain.jsonl", "--output", tmp_path / "twice.parquet")
    found = pq.read_table(tmp_path / "twice.parquet")
    assert found.column("energy").equals(found.column("hf_ebm_energy"))
    with pytest.raises(SystemExit):
        run(*arguments, "--input", tmp_path / "twice.parquet", "--output", tmp_path / "thrice.jsonl")
    assert "there are fields 'energy' and 'hf_ebm_energy' already; rename one" in capsys.readouterr().err


def test_prompts_of_other_columns_and_a_run_that_goes_on(model_folder, tmp_path, capsys):
    own = [{"prompt": "the [MASK]", "chain": "c", "energy": 1, "text": "t"}, {"prompt": "[MASK] cat", "chain": None}]
    lines(tmp_path / "in.jsonl", own)
    output = tmp_path / "out.jsonl"
    arguments = ["sample", "--model", model_folder, "--input", tmp_path / "in.jsonl", "--text_column", "prompt",
                 "--output", output, *FEW]  # fmt: skip
    run(*arguments)
    content, summary = output.read_bytes(), capsys.readouterr().out
    for record in read(output):
        given = own[record["hf_ebm_prompt"]]
        assert {name: record[name] for name in given} == given and record["hf_ebm_chain"] == 0
        assert set(record) - {"text", "energy"} == {
            "prompt", "chain", "hf_ebm_prompt", "hf_ebm_chain", "epoch", "hf_ebm_text", "hf_ebm_energy",
            "acceptance_rate", "novel_rate", "token_ids",
        }  # fmt: skip
    output.write_bytes(content[: len(content) // 2])
    run(*arguments)
    assert output.read_bytes() == content and capsys.readouterr().out == summary


def test_negatives_refuse_fields_that_trainers_would_read(folders, tmp_path, capsys):  # noqa: F811
    lines(tmp_path / "in.jsonl", [{"text": text, "negatives": "none", "row": 5} for text in TEXTS])
    with pytest.raises(SystemExit):
        run(
            "negatives",
            "--model",
            folders / "lm",
            "--input",
            tmp_path / "in.jsonl",
            "--output",
            tmp_path / "o.jsonl",
            *SIZES,
        )
    assert "row, negatives: trainers read fields of these names" in capsys.readouterr().err


ENDINGS = [
    ("fill", "input"), ("fill", "output"), ("score", "input"), ("rerank", "input"), ("sample", "input"),
    ("negatives", "input"), ("perplexity", "input"),
    ("score", "output"), ("rerank", "output"), ("sample", "output"), ("negatives", "output"), ("perplexity", "output"),
    ("train energy", "train_file"), ("train residual-nce", "train_file"),
]  # fmt: skip


@pytest.mark.parametrize("command,option", ENDINGS)
@pytest.mark.parametrize("name", ["file.csv", "file"])
def test_an_ending_that_is_not_known_is_refused_before_any_work(command, option, name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text("text\nthe cat\n")
    lines(tmp_path / "in.jsonl", [{"text": "the cat", "candidates": ["the"]}])
    options = {"input": "in.jsonl", "output": "out.jsonl"} if "train" not in command else {"output_dir": "out"}
    given = [part for key, value in {**options, option: name}.items() for part in (f"--{key}", value)]
    model = {"train energy": "--model_name_or_path", "train residual-nce": "--lm"}.get(command, "--model")
    with pytest.raises(SystemExit):
        run(*command.split(), model, "no/such-model", *given)
    assert f"{name} must end in .jsonl, .ndjson, .json" in capsys.readouterr().err.strip().splitlines()[-1]
    assert sorted(os.listdir(tmp_path)) == sorted([name, "in.jsonl"])


@pytest.mark.parametrize(
    "name,content",
    [
        ("in.jsonl", b'\xef\xbb\xbf{"text": "the cat", "id": 1}\r\n\r\n{"text": "dog", "id": 2}\r\n'),
        ("in.ndjson", b'{"text": "the cat", "id": 1}\n{"text": "dog", "id": 2}'),
        ("-", b'\xef\xbb\xbf{"text": "the cat", "id": 1}\r\n{"text": "dog", "id": 2}\r\n'),
        ("in.txt", b"\xef\xbb\xbfthe cat\r\ndog"),
    ],
)
def test_line_ends_and_marks_of_windows(name, content, model_folder, tmp_path, monkeypatch):
    (tmp_path / "in").write_bytes(content)
    (tmp_path / "in").rename(tmp_path / name)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
    source = name if name == "-" else tmp_path / name
    run("score", "--model", model_folder, "--input", source, "--output", tmp_path / "out.parquet")
    found = pd.read_parquet(tmp_path / "out.parquet")
    assert found["text"].tolist() == ["the cat", "dog"] and ("id" in found) == (name != "in.txt")


@pytest.mark.parametrize("command", ["score", "rerank"])
def test_no_records_are_no_records(command, model_folder, tmp_path):
    (tmp_path / "in.jsonl").write_text("")
    run(command, "--model", model_folder, "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == ""
    schema = pa.schema({"text": pa.string(), "candidates": pa.list_(pa.string()), "id": pa.uint8()})
    empty = schema.empty_table()
    pq.write_table(empty, tmp_path / "in.parquet")
    run(command, "--model", model_folder, "--input", tmp_path / "in.parquet", "--output", tmp_path / "out.parquet")
    found = pq.read_table(tmp_path / "out.parquet")
    assert found.select(empty.column_names).equals(empty) and found.num_columns > empty.num_columns


@pytest.mark.parametrize(
    "name,content,message",
    [
        (
            "in.jsonl",
            '{"text": "a"}\n' + '{"text": ' + brackets(100_000) + "}\n",
            "line 2 is nested too deeply",
        ),
        (
            "in.jsonl",
            '{"text": "a", "m": ' + brackets(READ_NOT_WRITTEN) + "}\n",
            "nested too deeply to be written as JSON",
        ),
        ("in.jsonl", '{"text": "a", "id": ' + "9" * 5000 + "}\n", "line 1 is not JSON"),
        (
            "in.jsonl",
            '[{"text": "a"}]\n',
            "line 1 must be a JSON object, got list; a record stands on a line of its own",
        ),
        ("in.json", '[\n{"text": "a"}\n]\n', "a record stands on a line of its own"),
        (
            "in.jsonl",
            '{"text": "a"}\n{"text": "b", "m": {"a": 1, "b": 2, "a": 3}}\n',
            "line 2 is not JSON: the name 'a'",
        ),
        ("in.jsonl", '{"text": "a"}\n{"text": null}\n', "'text' of record 1 must be a string, got None"),
        (
            "in.jsonl",
            '{"text": "half: \\ud83d"}\n',
            "'text' of record 0 holds half of a surrogate pair, U+D83D, at character 6",
        ),
        ("in.jsonl", '{"text": "a"}\n"\udcff"\n', "line 2 is not UTF-8"),
        ("in.txt", "a\n\udcff\n", "line 2 is not UTF-8"),
        ("in.parquet", "text\n", "in.parquet: not Parquet"),
    ],
)
def test_files_that_are_not_what_they_say(name, content, message, tmp_path, capsys):
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(SystemExit):
        run("score", "--model", "no/such-model", "--input", tmp_path / name)
    assert message in capsys.readouterr().err


def test_very_long_lines_and_devices(model_folder, tmp_path):
    record = {"text": "the cat", "note": "x" * 3_000_000}
    lines(tmp_path / "in.jsonl", [record, record])
    run("score", "--model", model_folder, "--input", tmp_path / "in.jsonl", "--output", tmp_path / "out.jsonl")
    assert [found["note"] for found in read(tmp_path / "out.jsonl")] == [record["note"]] * 2
    run("score", "--model", model_folder, "--input", tmp_path / "in.jsonl", "--output", "/dev/null")
    with pytest.raises(SystemExit):
        run("sample", "--model", model_folder, "--lengths", "3", "--output", "/dev/null")


def test_columns_of_one_name_are_refused_by_it(tmp_path, capsys):
    pq.write_table(pa.table([["the"], [1], [2]], names=["text", "a", "a"]), tmp_path / "in.parquet")
    with pytest.raises(SystemExit):
        run("score", "--model", "no/such-model", "--input", tmp_path / "in.parquet")
    assert "in.parquet: it has several columns 'a'; rename them" in capsys.readouterr().err


def test_a_folder_of_parquet_is_a_table(model_folder, tmp_path):
    (tmp_path / "kind=1.parquet").mkdir()
    for number, text in enumerate(["the cat", "dog"]):
        pq.write_table(pa.table({"text": [text]}), tmp_path / "kind=1.parquet" / f"part{number}.parquet")
    run("score", "--model", model_folder, "--input", tmp_path / "kind=1.parquet", "--output", tmp_path / "out.jsonl")
    assert [(record["text"], "kind" in record) for record in read(tmp_path / "out.jsonl")] == [
        ("the cat", False), ("dog", False),
    ]  # fmt: skip


TEXT_READERS = {
    "fill": ("text", []), "score": ("text", []), "score ": ("before", ["--prefix_column", "before"]),
    "sample": ("text", []), "rerank": ("candidates", []),
    "negatives": ("text", ["--output", "out.jsonl"]), "perplexity": ("text", []),
    "train energy": ("text", ["--output_dir", "out"]),
    "train mgs": ("source", ["--output_dir", "out", "--model_name_or_path", "lstm"]),
}  # fmt: skip


@pytest.mark.parametrize("command", TEXT_READERS)
@pytest.mark.parametrize(
    "text,message", [("a \ud83d", "holds half of a surrogate pair"), (7, "must be a string, got 7")]
)
def test_what_is_no_text_is_told_by_file_field_and_record(command, text, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name, options = TEXT_READERS[command]
    record = {"text": "the", "before": "a", "candidates": ["a"], "source": "a", "target": "b"}
    wrong = record | {name: ["a", text] if name == "candidates" else text}
    lines(tmp_path / "in.jsonl", [record, wrong])
    option = {"train energy": "--train_file", "train mgs": "--task"}.get(command, "--input")
    with pytest.raises(SystemExit):
        run(*command.split(), option, "in.jsonl", *options)
    (told,) = capsys.readouterr().err.splitlines()
    place = "of row 1" if command == "train mgs" else "of record 1"
    assert "in.jsonl: " in told and repr(name) in told and place in told and message in told
    assert os.listdir(tmp_path) == ["in.jsonl"]
