"""Launchers start two processes; fewer than were asked for are told of, several of what runs in one are refused."""

import atexit
import json
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.commands.launch import launch_command, launch_command_parser

import hf_ebm
from hf_ebm import runtime
from hf_ebm.cli import commands
from hf_ebm.trainers import EnergyTrainer, EnergyTrainingConfig
from tests.cli import test_negatives_and_perplexity
from tests.cli.conftest import read, run
from tests.conftest import tiny_energy_model
from tests.pipelines.models_for_pipelines import assert_like
from tests.processes import fresh

pytestmark = pytest.mark.slow

_FEW = ["--num_particles", "2", "--num_runs", "2", "--num_chains", "2", "--num_epochs", "2"]
SIZES, folders = test_negatives_and_perplexity.SIZES, test_negatives_and_perplexity.folders
MESSAGE = "asked for several processes and started one"


# Says what Open MPI says, and starts as many processes as it is told to, with its variables.
MPIRUN = f"""#!{sys.executable}
import os, subprocess, sys
if "--version" in sys.argv:
    sys.exit(print("mpirun (Open MPI) 5.0.11"))
count, command = int(sys.argv[sys.argv.index("-n") + 1]), sys.argv[sys.argv.index({sys.executable!r}):]
names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
sizes = dict.fromkeys(("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"), str(count))
ranks = [{{**os.environ, **sizes, **dict.fromkeys(names, str(rank))}} for rank in range(count)]
sys.exit(max(process.wait() for process in [subprocess.Popen(command, env=rank) for rank in ranks]))
"""

# What every process writes: its variables, how many it knows of, which of them it is, and what all sum up to.
COUNTED = """
import json, os, torch
from accelerate import PartialState
variables, state, total = {**os.environ}, PartialState(cpu=True), torch.ones(1)
torch.distributed.all_reduce(total)
with open(f"{os.getpid()}.json", "w") as file:
    json.dump([variables, state.num_processes, state.process_index, int(total)], file)
state.destroy_process_group()  # whose threads would end a process that ends before them
"""


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """What each process wrote that `accelerate launch` started, which is run within the tests' process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(hf_ebm.__file__).parents[1]))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def run_script(script, *options):
        Path("script.py").write_text(script)
        launch_command(launch_command_parser().parse_args(["--num_processes", "2", *options, "script.py"]))
        return [json.loads(path.read_text()) for path in Path().glob("[0-9]*.json")]

    return run_script


@pytest.mark.parametrize("options", [["--multi_gpu"], ["--cpu", "--mpirun_hostfile", "hosts"]], ids=" ".join)
def test_accelerate_starts_two_processes_that_know_of_each_other(options, launched, monkeypatch):
    """With Open MPI 5.0.11 in place of the file here it does, too; of torchrun's two `test_distributed` tells."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    Path("hosts").write_text("localhost slots=2")
    Path("mpirun").write_text(MPIRUN)
    Path("mpirun").chmod(0o755)
    found = launched(COUNTED, "--num_machines", "1", "--main_process_port", port, *options)
    assert sorted(numbers for _, *numbers in found) == [[2, 0, 2], [2, 1, 2]]
    for variables, *_ in found:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert runtime.num_started() == 2


def test_a_command_leaves_the_group_at_its_end(tmp_path, monkeypatch):
    at_the_end = []
    monkeypatch.setattr(atexit, "register", at_the_end.append)
    with pytest.raises(SystemExit):
        run("score", "--input", tmp_path / "none.txt")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    for function in [*at_the_end, *at_the_end]:
        function()
    assert not torch.distributed.is_initialized()


def run_all(commands):
    for arguments in commands:
        run(*arguments)


def test_two_processes_write_and_print_what_one_does(model_folder, folders, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    candidates = [["the cat sat", "cat the", ""], ["the dog"], ["on the mat", "the log"]]
    Path("lists.jsonl").write_text("".join(f"{json.dumps({'candidates': own})}\n" for own in candidates))
    texts, chains = ["--input", folders / "texts.txt"], ["--lengths", "3", "--num_chains", "3", "--num_epochs", "2"]
    few = [*SIZES, "--num_samples", "5", "20", "--max_rows", "5"]
    given = {
        "sample": ["sample", "--model", model_folder, *chains, "--chains_at_once", "1", "--seed", "2"],
        "score": ["score", "--model", model_folder, *texts, "--details", "true"],
        "rerank": ["rerank", "--model", model_folder, "--input", tmp_path / "lists.jsonl"],
        "negatives": ["negatives", "--model", folders / "lm", *texts, *SIZES, "--texts_at_once", "8"],
        "causal": ["perplexity", "--model", folders / "lm", *texts, *SIZES],
        "residual": ["perplexity", "--model", folders / "residual", *texts, *few],
        "masked": ["perplexity", "--model", folders / "masked", *texts, "--max_rows", "5", *_FEW],
    }

    def commands(count: int) -> list[list]:
        """Outputs are called by the number of processes."""
        where = ("--device", "cpu", "--output")
        return [[*own, *where, tmp_path / f"{name}-{count}.jsonl"] for name, own in given.items()]

    run_all(commands(1))
    alone = capsys.readouterr().out
    first, second = (process.stdout for process in fresh(tmp_path, run_all, commands(2), count=2))
    for name in given:
        found, expected = read(f"{name}-2.jsonl"), read(f"{name}-1.jsonl")
        if name in ("sample", "negatives"):  # which are appended as they come
            found, expected = (sorted(own, key=lambda record: list(record.values())) for own in (found, expected))
        assert len(found) > 1
        assert_like(found, expected)
    assert second == ""
    assert_like(*([json.loads(line) for line in own.splitlines() if line[:1] == "{"] for own in (first, alone)))


def test_a_share_without_rows_is_not_run_and_errors_say_where_a_share_begins(monkeypatch):
    def run_share(share):
        raise ValueError(f"row 0 of {share}")

    monkeypatch.setattr(commands, "gather_object", lambda found: [["a"], ["b"], *found])
    assert commands.divided(SimpleNamespace(process_index=0, num_processes=3), 2, run_share) == ["a", "b"]
    with pytest.raises(ValueError, match=r"row 0 of slice\(1, 2, None\) \(counted from row 1\)"):
        commands.divided(SimpleNamespace(process_index=2, num_processes=3), 2, run_share)


def test_accelerate_starts_one_process_and_is_warned_of(model_folder, launched, tmp_path, monkeypatch, caplog):
    sample = ["sample", "--model", model_folder, "--lengths", "3", "--num_epochs", "1", "--output", "out.jsonl"]
    run(*sample)
    args = EnergyTrainingConfig(str(tmp_path / "out"), use_cpu=True, report_to=[])
    EnergyTrainer(tiny_energy_model(), args)
    assert MESSAGE not in caplog.text
    script = "import json, os\nwith open(f'{os.getpid()}.json', 'w') as file: json.dump({**os.environ}, file)"
    (started,) = launched(script, "--cpu")
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    run(*sample)
    assert caplog.text.count(MESSAGE) == 1
    EnergyTrainer(tiny_energy_model(), args)  # whose command leaves it to the trainer
    runtime.check_launch("train", ("train",))
    runtime.check_launch("score", ("train",))  # which several processes don't divide
    assert caplog.text.count(MESSAGE) == 2


def test_several_processes_of_what_runs_in_one_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        run("demo")
    assert "demo runs in one process, and 2 were started" in capsys.readouterr().err


def test_processes_that_do_not_know_of_each_other_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")  # as MPI says it; on GPUs accelerate doesn't join its processes
    monkeypatch.setattr(runtime, "PartialState", lambda **_: SimpleNamespace(num_processes=1))
    with pytest.raises(ValueError, match="2 processes were started and do not know of each other"):
        runtime.joined("cuda")
    with pytest.raises(ValueError, match="on CPUs train with use_cpu=True"):
        EnergyTrainer(args=EnergyTrainingConfig(str(tmp_path)))
    assert not list(tmp_path.iterdir())
