"""Fewer processes than were asked for are told of, and several for a command that runs in one are refused."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from hf_ebm import processes
from hf_ebm.trainers import EnergyTrainer, EnergyTrainingConfig
from tests.cli.conftest import run

MESSAGE = "asked for several processes and started one"


def test_accelerate_starts_one_process_and_is_warned_of(model_folder, tmp_path, monkeypatch, caplog):
    sample = ["sample", "--model", model_folder, "--lengths", "3", "--num_epochs", "1", "--output", "out.jsonl"]
    monkeypatch.chdir(tmp_path)
    run(*sample)
    assert MESSAGE not in caplog.text
    (tmp_path / "script.py").write_text(
        "import json, os\nwith open(f'{os.getpid()}.json', 'w') as file: json.dump({**os.environ}, file)"
    )
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "script.py"]
    subprocess.run(launcher, check=True, capture_output=True, timeout=300)
    (started,) = tmp_path.glob("[0-9]*.json")
    for name, value in json.loads(started.read_text()).items():
        monkeypatch.setenv(name, value)
    run(*sample)
    assert caplog.text.count(MESSAGE) == 1


@pytest.mark.parametrize("name", ["score", "rerank", "perplexity", "demo"])
def test_several_processes_of_what_runs_in_one_are_refused(name, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        run(name)
    assert f"{name} runs in one process, and 2 were started" in capsys.readouterr().err


def test_processes_that_do_not_know_of_each_other_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")  # as MPI says it; on GPUs accelerate doesn't join its processes
    monkeypatch.setattr(processes, "PartialState", lambda **_: SimpleNamespace(num_processes=1))
    with pytest.raises(ValueError, match="2 processes were started and do not know of each other"):
        processes.joined("cuda")
    with pytest.raises(ValueError, match="on CPUs train with use_cpu=True"):
        EnergyTrainer(args=EnergyTrainingConfig(str(tmp_path)))
    assert not list(tmp_path.iterdir())
