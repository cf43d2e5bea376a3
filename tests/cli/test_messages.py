"""What the commands say of themselves: help, version, mistakes in options, interruptions."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter

import pytest

import hf_ebm
from hf_ebm.cli.help import COMMANDS, STORED, help_of_command, stored_help
from hf_ebm.cli.run_records import RunRecords
from hf_ebm.models.energy import generation_energy
from hf_ebm.trainers import EnergyTrainer
from tests.cli.conftest import read, run

TRAINED = ["cross-entropy", "soft-beam", "mgs", "policy-gradient", "residual-nce", "energy"]


def refused(capsys, *arguments) -> str:
    """The line that refuses a command."""
    with pytest.raises(SystemExit) as stopped:
        run(*arguments)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(
    "command", [[name] for name in COMMANDS if name != "train"] + [["train", name] for name in TRAINED]
)
def test_help_tells_each_thing_once(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(*command, "--help")
    assert stopped.value.code == 0
    options = re.split(r"\n  (?=--)", capsys.readouterr().out)[1:]
    texts = [" ".join(re.split(r"\n {10,}|  +", option, maxsplit=1)[1].split()) for option in options]
    assert len(texts) > 5 and all(texts)
    assert [text for text in texts if "default: None" in text] == []
    assert [text for text in texts if re.search(r"\bdefault.*\(default:", text, re.IGNORECASE)] == []
    assert [text for text, times in Counter(texts).items() if times > 1] == []


def test_help_says_what_happens_without_a_setting(capsys):
    with pytest.raises(SystemExit):
        run("sample", "--help")
    told = " ".join(capsys.readouterr().out.split())
    assert "Seed of the chains' own random streams: the same command gives the same chains. (default: 0)" in told
    assert "Epochs; one epoch visits every free position once. Default: the model's own, or 10. --burn_in" in told


def test_the_seed_is_0_by_default(model_folder, tmp_path):
    arguments = ["sample", "--model", model_folder, "--lengths", "3", "--num_epochs", "3", "--output"]
    run(*arguments, tmp_path / "none.jsonl")
    run(*arguments, tmp_path / "zero.jsonl", "--seed", "0")
    run(*arguments, tmp_path / "one.jsonl", "--seed", "1")
    none, zero, one = (read(tmp_path / f"{name}.jsonl") for name in ("none", "zero", "one"))
    assert none == zero != one


def test_the_version_is_told(capsys):
    run("--version")
    assert capsys.readouterr().out == f"hf-ebm {hf_ebm.__version__}\n"


def test_mistakes_in_options_are_told_in_a_line(capsys):
    told = refused(capsys, "sample", "--lenghts", "3")
    assert told.startswith("hf-ebm: hf-ebm sample has no option --lenghts, did you mean --lengths?")
    told = refused(capsys, "train", "energy", "--nothing_like_it=3", "--output_dir", "x", "--train_file", "x")
    assert told.startswith("hf-ebm: hf-ebm train energy has no option --nothing_like_it; ")
    assert "'the [MASK]' stands where an option was expected" in refused(capsys, "sample", "the [MASK]")
    assert "--num_chains" in refused(capsys, "sample", "--num_chains", "many")
    assert "--input" in refused(capsys, "negatives")


def test_options_come_from_the_command_line_alone(model_folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "program.args").write_text("--num_epochs 7")
    monkeypatch.setattr("sys.argv", [str(tmp_path / "program")])
    run("sample", "--model", model_folder, "--lengths", "2", "--num_epochs", "1")
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_nothing_to_sample_names_the_options(model_folder, capsys):
    told = refused(capsys, "sample", "--model", model_folder)
    assert all(option in told for option in ("--input", "--text", "--lengths"))


def test_inputs_that_nest_too_deeply_are_refused(model_folder, capsys):
    told = refused(capsys, "score", "--model", model_folder, "--further_inputs", "[" * 3000 + "]" * 3000)
    assert "further_inputs" in told and len(told) < 250


@pytest.mark.parametrize("option", [["--num_chains", "99999999999999999999"], ["--num_epochs", "100000000000"]])
@pytest.mark.parametrize("given", [["--lengths", "3"], ["--text", "the [MASK]"]])
def test_what_cannot_be_kept_is_refused(model_folder, tmp_path, capsys, option, given):
    told = refused(capsys, "sample", "--model", model_folder, *given, *option, "--output", tmp_path / "out.jsonl")
    assert option[0].removeprefix("--") in told and "GiB or more, which is more than this machine's" in told
    assert not list(tmp_path.iterdir())


def test_a_port_in_use_suggests_another(model_folder, capsys, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = refused(capsys, "demo", "--model", model_folder, "--port", port)
        assert told == f"hf-ebm: port {port} is in use; choose another with --port"
        assert "--host" in refused(capsys, "demo", "--model", model_folder, "--host", "192.0.2.1")


def interrupted(monkeypatch, capsys, owner, name: str, at: int, *arguments) -> str:
    """The last line that is told when Ctrl-C comes at the n-th call of a function."""
    plain, calls = getattr(owner, name), []

    def pressing(*given, **options):
        calls.append(given)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(*given, **options)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, pressing)
            with pytest.raises(SystemExit) as stopped:
                run(*arguments)
    finally:
        signal.signal(signal.SIGINT, before)
    assert stopped.value.code == 130
    return capsys.readouterr().err.splitlines()[-1]


def test_an_interruption_says_how_to_go_on(model_folder, tmp_path, monkeypatch, capsys):
    arguments = ["sample", "--model", model_folder, "--lengths", "3", "--num_chains", "2", "--num_epochs", "4"]
    run(*arguments, "--output", tmp_path / "whole.jsonl")
    for owner, name, at in ((RunRecords, "append", 1), (generation_energy, "run_epoch", 3)):
        output = tmp_path / f"{name}.jsonl"
        told = interrupted(monkeypatch, capsys, owner, name, at, *arguments, "--output", output)
        assert told == "hf-ebm: interrupted; repeat the command to continue"
        run(*arguments, "--output", output)
        assert read(output) == read(tmp_path / "whole.jsonl")
    told = interrupted(monkeypatch, capsys, generation_energy, "run_epoch", 3, *arguments)
    assert told == "hf-ebm: interrupted; with a file as --output it could go on"


def test_an_interrupted_training_names_its_checkpoint(model_folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "texts.txt").write_text("the cat\nthe dog\n")
    common = ["train", "energy", "--model_name_or_path", model_folder, "--train_file", tmp_path / "texts.txt",
              "--objective", "mlm", "--report_to", "none", "--use_cpu", "--max_steps", "3", "--save_steps", "1",
              "--per_device_train_batch_size", "2", "--output_dir"]  # fmt: skip
    told = interrupted(monkeypatch, capsys, EnergyTrainer, "loss_terms", 1, *common, tmp_path / "one")
    assert (
        told == f"hf-ebm: interrupted; no checkpoint had been saved to {tmp_path / 'one'}, so the command starts anew"
    )
    told = interrupted(monkeypatch, capsys, EnergyTrainer, "loss_terms", 2, *common, tmp_path / "two")
    assert told == "hf-ebm: interrupted; to continue, repeat the command with --resume_from_checkpoint last"
    run(*common, tmp_path / "two", "--resume_from_checkpoint", "last")


def test_an_interruption_while_the_command_starts_is_told_in_a_line(tmp_path):
    """Before any command has begun; what it imports takes seconds."""
    (tmp_path / "torch.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise AssertionError\n")
    start = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); sys.argv[0] = 'hf-ebm'; "
    start += "from hf_ebm.cli.main import main; main()"
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    found = subprocess.run(
        [sys.executable, "-c", start, "score"], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert (found.returncode, found.stderr, found.stdout) == (130, "hf-ebm: interrupted\n", "")


def test_help_and_version_import_neither_torch_nor_transformers(tmp_path):
    for heavy in ("torch", "transformers"):
        (tmp_path / f"{heavy}.py").write_text("raise AssertionError\n")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    for words in (["--help"], ["--version"], ["nothing"], ["train"], *([name, "--help"] for name in COMMANDS)):
        found = subprocess.run(
            [sys.executable, "-m", "hf_ebm", *words], capture_output=True, text=True,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        assert "AssertionError" not in found.stderr and found.returncode == (2 if words == ["nothing"] else 0), words
        assert found.stdout.startswith("usage: hf-ebm") or words != ["--help"]


def test_the_help_that_is_stored_is_that_of_the_commands(capsys):
    """`make help` writes it anew."""
    assert json.loads(STORED.read_text(encoding="utf-8")) == json.loads(json.dumps(stored_help()))
    for name in COMMANDS:
        with pytest.raises(SystemExit) if name != "train" else contextlib.nullcontext():
            run(name, "--help")  # which is that of the parser, as torch is imported here
        assert capsys.readouterr().out == help_of_command(name)


def test_numbers_with_exponents_are_values(capsys):
    told = refused(capsys, "rerank", "--weight", "-1e-3", "--length_normalization", "-.5E+2", "--input", "none.jsonl")
    assert "none.jsonl" in told  # and nothing of the numbers, which are looked at later
