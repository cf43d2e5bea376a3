"""Every code block of the README, the guides and the other pages runs; those of Hub models in `test_hub`."""

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import torch
import torch.distributed.run

from hf_ebm.cli.main import main
from tests.docs.hub_models import HUB_MODELS

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "docs/index.md", "docs/methods.md")]
PAGES += sorted((ROOT / "docs/guides").glob("*.md"))
BLOCKS = [
    (f"{page.name}-{number}", language, code)
    for page in PAGES
    for number, (language, code) in enumerate(re.findall(r"^```(\w+)\n(.*?)^```", page.read_text("utf-8"), re.S | re.M))
]
PYTHON = {name: code for name, language, code in BLOCKS if language == "python"}
HUB = {
    name: code
    for name, code in PYTHON.items()
    if "push_to_hub(" in code or any(f'"{model}"' in code.split("# or")[0] for model in HUB_MODELS)
}
SMALL_SPACE = "small_spaces.md-0"
OFFLINE = [name for name in PYTHON if name not in HUB and name != SMALL_SPACE]
LINES = [line for _, language, code in BLOCKS if language == "bash" for line in code.splitlines()]
COMMANDS = list(dict.fromkeys(line for line in LINES if line.startswith("hf-ebm ")))
LAUNCHED = [line for line in LINES if line.startswith("torchrun ")]


def test_every_block_is_of_a_kind_that_is_run():
    assert {language for _, language, _ in BLOCKS} == {"python", "bash", "mermaid", "diff"}
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    for line in LINES:  # make's targets are run by CI itself
        words = shlex.split(line, comments=True)
        assert not words or line in COMMANDS + LAUNCHED or (words[0] == "make" and set(words[1:]) <= set(targets)), line


@pytest.mark.parametrize("name", OFFLINE)
def test_python_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(PYTHON[name], name, "exec"), {})


def test_samples_of_a_small_space_are_as_near_as_independent_draws(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(PYTHON[SMALL_SPACE], SMALL_SPACE, "exec"), names)
    exact, samples = names["exact"], names["samples"]
    floor = float((exact.log_probabilities.exp() / (2 * torch.pi * len(samples))).sqrt().sum())
    found = [exact.total_variation(own) for own in (samples, names["independent"])]
    assert len(samples) == 2500 and found == pytest.approx([floor, floor], rel=0.4) and floor < 0.06, (found, floor)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_run(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text("And God said, Let there be light\nand he went the house\n")
    Path("prompts.txt").write_text("and the [MASK] said unto [MASK]\n")
    Path("nbest.jsonl").write_text('{"candidates": ["he went up", "up he go"]}\n')
    pair = {"sentence_good": "let there be light", "sentence_bad": "let light there be", "linguistics_term": "order"}
    Path("pairs.jsonl").write_text(json.dumps(pair) + "\n")
    Path("word.fasta").write_text(">a word\nlight\n")
    Path("scan.csv").write_text("mutant,effect\nl1n,0.3\nl1s:t5s,-0.2\n")
    row = {"prefix_ids": [2, 70], "continuation_ids": [3], "negatives": [[70, 3]]}
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    main(shlex.split(line, comments=True)[1:])
    assert capsys.readouterr().out


@pytest.mark.parametrize("line", LAUNCHED)
def test_launchers_run(line, tmp_path, monkeypatch, capfd):
    """The launcher in this process, which has imported it; what it starts are processes of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    torch.distributed.run.main(shlex.split(line, comments=True)[1:])
    assert "4 chains of 4 samples" in capfd.readouterr().out


def test_the_readme_shows_the_main_job_in_few_words():
    readme = (ROOT / "README.md").read_text("utf-8")
    assert all(name in readme for name in ("bert-base-uncased", "roberta-base", "esm2", "make sample", "make test"))
    assert len(readme.split()) < 900


def test_the_diagram_shows_the_layers_that_are_checked():
    diagram = next(code for _, language, code in BLOCKS if language == "mermaid")
    place = {
        name: row for row, line in enumerate(re.findall(r'\["([^"]+)"\]', diagram)) for name in re.findall(r"\w+", line)
    }
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    names = [[name.strip().removeprefix("hf_ebm.") for name in layer.split("|")] for layer in layers]
    missing = {name for layer in names for name in layer} - place.keys()
    assert not any((ROOT / "hf_ebm" / name).is_dir() for name in missing)
    rows = [[place[name] for name in layer] for layer in names if not missing & {*layer}]
    assert rows == sorted(rows) and all(len(set(row)) == 1 for row in rows)


def test_links_between_files_lead_somewhere():
    for page in [*PAGES, *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
