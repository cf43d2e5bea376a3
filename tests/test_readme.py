"""The README's examples run, and its commands are the ones that exist."""

import json
import re
import shlex
from pathlib import Path

import pytest

from hf_ebm.cli.main import main

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.S)
OFFLINE = [
    block
    for block in PYTHON
    if any(
        name in block
        for name in (
            "load_embedded",
            "load_stress",
            "hf_ebm.data.synthetic",
            "hf_ebm.data.conditional",
            "hf_ebm.evaluate_modules",
        )
    )
]
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", README, re.S) for line in block.splitlines()]


def test_there_are_examples():
    assert len(OFFLINE) >= 3 and len(PYTHON) > len(OFFLINE)


@pytest.mark.parametrize("block", range(len(OFFLINE)))
def test_examples_with_the_embedded_model_run(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(OFFLINE[block], f"README block {block}", "exec"), {})


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("hf-ebm ")])
def test_commands_run(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text("And God said, Let there be light\nand he went the house\n")
    Path("prompts.txt").write_text("and the [MASK] said unto [MASK]\n")
    Path("nbest.jsonl").write_text('{"candidates": ["he went up", "up he go"]}\n')
    row = {"prefix_ids": [2, 70], "continuation_ids": [3], "negatives": [[70, 3]]}
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    main(shlex.split(line.split("#")[0])[1:])
    assert capsys.readouterr().out


def test_models_on_the_hub_are_shown():
    hub = "\n".join(block for block in PYTHON if block not in OFFLINE)
    assert all(name in hub for name in ("bert-base-uncased", "roberta-base", "esm2"))
    assert "make sample" in README and "make test" in README
