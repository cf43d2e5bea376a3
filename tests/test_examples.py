"""Each script of `examples/` runs, at small sizes, and does what it says."""

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hf_ebm import EnergyModel
from hf_ebm.assets import load_embedded_causal
from tests.real_models import reaction_wheel

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[1] / "examples"


def prints_energies_of_its_samples(found: dict, printed: str) -> None:
    energies = found["model"](found["out"].sequences).energy.tolist()
    assert [float(line.split()[0]) for line in printed.splitlines()[:3]] == pytest.approx(sorted(energies), abs=0.01)
    assert str(found["out"].summary()) in printed


def keeps_to_its_constraint(found: dict, printed: str) -> None:
    texts = [line.split(maxsplit=1)[1] for line in printed.splitlines()[1:5]]
    assert all(text.startswith("and the ") and text.endswith("of israel.") for text in texts)
    assert all("king" in text.split() and "lord" not in text.split() for text in texts)


def finds_the_sentences(found: dict, printed: str) -> None:
    assert printed.splitlines()[-1].startswith("3 of 3 sentences")
    shuffled = found["model"].score([candidates[1] for candidates in found["lists"]], found["tokenizer"]).energy
    assert (found["scores"].energy < shuffled).all()


def fills_the_same_atom_twice(found: dict, printed: str) -> None:
    joint, independent = printed.split("independent")
    fills = re.findall(r"^ +(\S+)  CC\(=O\)Cl\.(\w+)Cc1ccccc1>>CC\(=O\)(\w+)Cc1ccccc1$", joint, re.M)
    assert {one for _, one, other in fills if one == other} >= {"N", "O", "S"}
    assert sum(float(share) for share, one, other in fills if one == other) > 0.98
    assert "NCc1ccccc1>>CC(=O)OCc1ccccc1" in independent.splitlines()[1]  # the masks know nothing of each other


def pronounces(found: dict, printed: str) -> None:
    assert found["best"] == {"cat": "K AE T", "strength": "S T R EH NG TH"}
    assert printed.count(" nats a phoneme") == 2


def loads_without_the_library(found: dict, printed: str) -> None:
    here, there = map(float, re.findall(r"energy (\S+) here, (\S+) in a process .* False$", printed.strip())[0])
    assert here == pytest.approx(there, abs=1e-4) and here > 0
    assert "model.safetensors" in printed and (found["args"].folder / "README.md").exists()


def corrects_its_language_model(found: dict, printed: str) -> None:
    lm = load_embedded_causal()[0]
    losses, tokens = 0.0, 0
    for row in found["test"]:
        ids = torch.tensor([row["prefix_ids"] + row["continuation_ids"]])
        labels = ids.clone()
        labels[:, : len(row["prefix_ids"])] = -100
        count = len(row["continuation_ids"])
        losses, tokens = losses + lm(ids, labels=labels).loss.item() * count, tokens + count
    own = float(re.findall(r"language model (\S+),", printed)[0])
    assert own == pytest.approx(torch.tensor(losses / tokens).exp().item(), rel=1e-3)
    assert 0.5 * own < found["lower"] <= found["upper"] * 1.01 < 2 * own
    assert found["trainer"].state.global_step == 2


def learns_stress(found: dict, printed: str) -> None:
    assert found["error_before"] < 0.45 and found["error_after"] < 0.55  # two of three are wrong by chance
    assert found["trainer"].state.global_step == 4


def measures_its_cost(found: dict, printed: str) -> None:
    found["trainer"].args.predict_with_generate = True
    written = found["trainer"].predict(found["test"]).predictions
    texts = found["tokenizer"].batch_decode(written, skip_special_tokens=True)
    costs = [1 - len(set(text.split())) / len(text.split()) for text in texts]
    assert found["after"]["eval_cost"] == pytest.approx(sum(costs) / len(costs), abs=1e-6)
    assert f"cost {found['after']['eval_cost']:.3f}" in printed and found["trainer"].state.global_step == 2
    assert found["after"]["eval_loss"] != found["before"]["eval_loss"]


SMALL: dict[str, tuple[str, Callable[[dict, str], None]]] = {
    "sample": ("--length 5 --num_chains 3 --num_epochs 8", prints_energies_of_its_samples),
    "infill": ("--num_chains 4 --num_epochs 12", keeps_to_its_constraint),
    "reactions": ("WHEEL --atoms N O S C", fills_the_same_atom_twice),
    "score_and_rerank": ("--num_texts 3 --num_candidates 3", finds_the_sentences),
    "conditional_generation": ("--words cat strength --num_chains 3 --num_epochs 6", pronounces),
    "publish": ("--folder published --num_epochs 6", loads_without_the_library),
    "residual_model": (
        "--num_train 16 --num_test 3 --max_steps 2 --max_new_tokens 8 --num_samples 8",
        corrects_its_language_model,
    ),
    "fine_tune_for_search": (
        "--num_train 400 --num_test 50 --pretraining_steps 120 --max_steps 4 --hidden_size 32",
        learns_stress,
    ),
    "risk_training": (
        "--num_train 8 --num_test 3 --longest 16 --batch_size 4 --max_steps 2 --num_candidates 2",
        measures_its_cost,
    ),
}


def test_every_script_is_run_and_listed():
    scripts = {path.stem for path in FOLDER.glob("*.py")}
    assert scripts == set(SMALL)
    assert all(f"[{name}.py]({name}.py)" in (FOLDER / "README.md").read_text("utf-8") for name in scripts)


def run(name: str, arguments: str, monkeypatch) -> dict:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments.split()])
    return runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")


@pytest.mark.parametrize("name", SMALL)
def test_script_does_what_it_says(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments, check = SMALL[name]
    if "WHEEL" in arguments:
        arguments = arguments.replace("WHEEL", str(reaction_wheel()))
    check(run(name, arguments, monkeypatch), capsys.readouterr().out)


def test_few_samples_are_shown_without_diagnostics(monkeypatch, capsys):
    run("sample", "--length 3 --num_chains 2 --num_epochs 4", monkeypatch)
    printed = capsys.readouterr().out.splitlines()
    assert printed[2].startswith("prompt 0: 2 chains of 3 samples") and "raise num_epochs" in printed[-1]


@pytest.mark.parametrize("option", ["--must_say", "--avoid"])
@pytest.mark.parametrize("word", ["helicopter", "[MASK]", "[UNK]"])
def test_infill_refuses_words_without_a_token(option, word, monkeypatch, capsys):
    monkeypatch.setattr(EnergyModel, "generate", None)  # before any work
    with pytest.raises(SystemExit):
        run("infill", f"{option} {word}", monkeypatch)
    assert f"{option} must be" in (told := capsys.readouterr().err) and repr(word) in told


def test_infill_reads_a_word_as_the_text_is_read(monkeypatch, capsys):
    run("infill", "--must_say King --num_chains 2 --num_epochs 8", monkeypatch)
    assert all("king" in line.split() for line in capsys.readouterr().out.splitlines()[1:3])
