"""Long runs go on with what they were started with alone; an error says what differs, and a finished run that it is."""

import json
import runpy
import shutil
import sys
import threading

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file

from hf_ebm.cli import run_records
from hf_ebm.cli.continuations import NEGATIVES_FIELDS
from hf_ebm.cli.run_records import ChainRecords, RunRecords
from hf_ebm.cli.tables import Output
from hf_ebm.models.energy import generation_energy, saved_runs
from tests.cli.conftest import killed, read, run
from tests.cli.test_negatives_and_perplexity import language_model as small_lm
from tests.models.residual_models import toy_encoder
from tests.models.tokenizers_for_tests import small_tokenizer


@pytest.fixture
def model(model_folder, tmp_path):
    return shutil.copytree(model_folder, tmp_path / "model")


@pytest.fixture
def language_model(tmp_path):
    tokenizer = small_tokenizer("wordpiece")
    small_lm(tokenizer).save_pretrained(tmp_path / "lm")
    tokenizer.save_pretrained(tmp_path / "lm")
    return tmp_path / "lm"


def other_weights(folder) -> None:
    """One weight is another, by little."""
    weights = load_file(folder / "model.safetensors")
    name = min(name for name in weights if weights[name].dim() == 2)
    weights[name][3, 3] += 1e-5
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def other_tokenizer(folder) -> None:
    values = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    values["normalizer"]["lowercase"] = False
    (folder / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")


def other_configuration(folder) -> None:
    values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(values | {"layer_norm_eps": 0.5, "layer_norm_epsilon": 0.5}))


def refused(capsys, *arguments) -> str:
    with pytest.raises(SystemExit):
        run(*arguments)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def commands(folder, language_model, model) -> dict[str, list]:
    source = folder / "in.jsonl"
    source.write_text('{"text": "the cat [MASK] sat on", "id": 1}\n{"text": "the dog [MASK] on the"}\n')
    return {
        "sample": ["sample", "--model", model, "--input", source, "--num_chains", "2", "--num_epochs", "2"],
        "negatives": ["negatives", "--model", language_model, "--prefix_tokens", "2", "--max_new_tokens", "3",
                      "--input", source],
    }  # fmt: skip


@pytest.mark.parametrize("command", ["sample", "negatives"])
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_what_differs_is_named(command, ending, tmp_path, model, language_model, capsys):
    output, folder = tmp_path / f"out.{ending}", {"sample": model, "negatives": language_model}[command]
    arguments = [*commands(tmp_path, language_model, model)[command], "--output", output]
    run(*arguments)
    before, _ = output.read_bytes(), capsys.readouterr()
    run(*arguments)
    assert "already complete" in capsys.readouterr().out and output.read_bytes() == before
    kept = shutil.copytree(folder, tmp_path / "kept")
    arguments[2] = kept
    run(*arguments)  # the same model in another place
    assert "already complete" in capsys.readouterr().out
    for name, change in (
        ("weights", other_weights), ("tokenizer", other_tokenizer), ("configuration", other_configuration),
    ):  # fmt: skip
        arguments[2] = shutil.copytree(folder, tmp_path / name)
        change(tmp_path / name)
        assert f"out.{ending} holds a run with other {name}; choose another" in refused(capsys, *arguments)
    arguments[2] = kept
    assert "other seed (0 there, 5 here);" in refused(capsys, *arguments, "--seed", "5")
    assert "other dtype ('float32' there, 'float64' here), weights;" in refused(
        capsys, *arguments, "--dtype", "float64"
    )
    (tmp_path / "in.jsonl").write_text((tmp_path / "in.jsonl").read_text().replace('"id": 1', '"id": 2'))
    assert "other inputs;" in refused(capsys, *arguments)
    assert output.read_bytes() == before


def test_records_of_earlier_versions_are_refused_with_what_to_do(tmp_path, model, language_model, capsys):
    output = tmp_path / "out.jsonl"
    arguments = [*commands(tmp_path, language_model, model)["sample"], "--output", output]
    run(*arguments)
    noted, before = json.loads((tmp_path / "out.jsonl.run.json").read_text()), output.read_bytes()
    del noted["checksums"]
    for content in (json.dumps(noted), "[]", "{"):
        (tmp_path / "out.jsonl.run.json").write_text(content)
        capsys.readouterr()
        error = refused(capsys, *arguments)
        assert "no checksums (earlier versions wrote none)" in error and f"remove {output}, {output}.run.json" in error
    assert output.read_bytes() == before


def test_mask_predict_goes_on_from_where_it_was_a_kernel(tmp_path, model, language_model, capsys):
    output, arguments = tmp_path / "out.jsonl", commands(tmp_path, language_model, model)["sample"]
    arguments += ["--decoder", "mask_predict", "--chains_at_once", "1", "--output", output]
    run(*arguments)
    noted, whole = json.loads((tmp_path / "out.jsonl.run.json").read_text()), output.read_text().splitlines(True)
    assert noted["settings"].pop("decoder") == "mask_predict" and len(whole) == 4
    noted["settings"]["kernel"] = "mask_predict"  # as earlier versions wrote it
    (tmp_path / "out.jsonl.run.json").write_text(json.dumps(noted))
    output.write_text("".join(whole[:3]))
    assert "other seed (0 there, 5 here);" in refused(capsys, *arguments, "--seed", "5")
    run(*arguments)
    assert output.read_text() == "".join(whole)


def test_a_killed_run_does_not_go_on_with_another_model(tmp_path, model, language_model, capsys, monkeypatch):
    """Nor does a batch whose state was saved, when the record of the run was removed and the state was not."""
    output = tmp_path / "out.jsonl"
    arguments = [*commands(tmp_path, language_model, model)["sample"], "--output", output, "--device", "cpu"]
    monkeypatch.setattr(saved_runs, "SECONDS_BETWEEN_SAVES", -1.0)
    killed(generation_energy, "run_epoch", 2, lambda *_: None, *map(str, arguments))
    assert list((tmp_path / "out.jsonl.state").iterdir())
    other_weights(model)
    error = refused(capsys, *arguments)
    assert "holds a run with other weights" in error and f"remove {output}, {output}.run.json, {output}.state" in error
    output.unlink()
    (tmp_path / "out.jsonl.run.json").unlink()
    assert "resume_from: the saved run is of a model with other weights" in refused(capsys, *arguments)


def test_nothing_is_left_beside_a_finished_run(tmp_path, model, language_model, monkeypatch):
    """States go with their batch; what a kill at the end left goes when the command is repeated."""
    output, given = tmp_path / "out.parquet", commands(tmp_path, language_model, model)
    left, plain = [], ChainRecords.append_batch

    def append_batch(self, batch, records):
        plain(self, batch, records)
        left.append(list(self.states.iterdir()))

    monkeypatch.setattr(ChainRecords, "append_batch", append_batch)
    run(*given["sample"], "--output", output, "--chains_at_once", "1")
    assert left == [[]] * 4
    (tmp_path / "out.parquet.partial.jsonl").write_text("")
    (tmp_path / "out.parquet.state").mkdir()
    run(*given["sample"], "--output", output)
    run(*given["negatives"], "--output", tmp_path / "noise.parquet")
    (tmp_path / "noise.parquet.partial.jsonl").write_text("")
    run(*given["negatives"], "--output", tmp_path / "noise.parquet")
    assert sorted(path.name for path in tmp_path.glob("*.parquet*")) == [
        "noise.parquet", "noise.parquet.run.json", "out.parquet", "out.parquet.run.json",
    ]  # fmt: skip


def test_negatives_of_another_language_model_are_told_from_those_of_lm(tmp_path, model, language_model, caplog):
    run(*commands(tmp_path, language_model, model)["negatives"], "--output", tmp_path / "rows.jsonl")
    toy_encoder("bert", len(small_tokenizer("wordpiece")), torch.float32).save_pretrained(tmp_path / "encoder")
    small_tokenizer("wordpiece").save_pretrained(tmp_path / "encoder")
    arguments = ["--encoder", tmp_path / "encoder", "--train_file", tmp_path / "rows.jsonl", "--max_new_tokens", "3",
                 "--max_steps", "1", "--report_to", "none", "--use_cpu"]  # fmt: skip
    warning = "rows.jsonl was sampled from"
    run("train", "residual-nce", *arguments, "--lm", language_model, "--output_dir", tmp_path / "a")
    assert warning not in caplog.text
    other_weights(language_model)
    run("train", "residual-nce", *arguments, "--lm", language_model, "--output_dir", tmp_path / "b")
    assert warning in caplog.text


def test_a_run_that_kept_nothing_does_not_stand_in_the_way(tmp_path, model, language_model, capsys):
    """What was refused after the output was begun; a run that goes on is another thing."""
    output = tmp_path / "out.jsonl"
    arguments = ["sample", "--model", model, "--num_chains", "2", "--num_epochs", "2", "--output", output]
    assert "positions" in refused(capsys, *arguments, "--lengths", "1000")
    with FileLock(tmp_path / "out.jsonl.run.lock"):
        assert "other lengths" in refused(capsys, *arguments, "--lengths", "3")
    run(*arguments, "--lengths", "3")
    assert len(read(output)) == 4 and not list(tmp_path.glob("*.lock"))
    assert "other lengths (3 there, 4 here)" in refused(capsys, *arguments, "--lengths", "4")


def test_locks_need_nothing_that_windows_lacks(monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    runpy.run_path(run_records.__file__)


def test_processes_take_turns_to_append(tmp_path):
    """One that holds the turn, as while it appends, keeps another from it until it is done."""
    rows = [{"row": number, "prefix_ids": [number]} for number in range(2)]
    one, other = (RunRecords(Output(str(tmp_path / "out.jsonl"), None, NEGATIVES_FIELDS), ("row",)) for _ in range(2))
    one.open({"command": "negatives", "checksums": {}})
    one.append(rows[:1])
    with FileLock(tmp_path / "out.jsonl.lock"):
        late = threading.Thread(target=other.append, args=(rows,))
        late.start()
        late.join(0.2)
        assert late.is_alive() and one.read() == rows[:1]
    late.join()
    assert one.read() == rows
    one.finish()
    assert {path.name for path in tmp_path.iterdir()} == {"out.jsonl", "out.jsonl.run.json", "out.jsonl.run.lock"}


@pytest.mark.parametrize("command", ["score", "rerank", "sample", "negatives", "perplexity"])
def test_the_input_is_not_written_over(command, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "the cat", "candidates": ["a"]}\n')
    (tmp_path / "link.jsonl").symlink_to(source)
    for output in (source, tmp_path / "link.jsonl"):
        error = refused(capsys, command, "--model", "no/such-model", "--input", source, "--output", output)
        assert f"output: {output} is the input itself" in error
    assert source.read_text() == '{"text": "the cat", "candidates": ["a"]}\n'
