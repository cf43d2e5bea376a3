"""`hf-ebm variants`: the input's columns and the scores, and refusals that name the record."""

import csv

import pandas as pd
import pytest
from transformers import AutoTokenizer

from hf_ebm import EnergyModel
from tests.cli.conftest import read, run
from tests.models.families import tiny_family_model
from tests.models.test_mutations import letter_tokenizer

TABLE = 'mutant,DMS_score,note\nK2R,0.50,\nK2E:A7G,NA,"a, b"\n'


@pytest.fixture(scope="module")
def proteins(tmp_path_factory) -> str:
    folder, tokenizer = tmp_path_factory.mktemp("proteins"), letter_tokenizer()
    tiny_family_model("bert", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def inputs(tmp_path) -> list:
    (tmp_path / "wild.fasta").write_text(">wild type\nMKTA\nYIAK*\n")
    (tmp_path / "scan.csv").write_text(TABLE)
    return ["--reference", tmp_path / "wild.fasta", "--mutations", tmp_path / "scan.csv"]


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_columns_of_the_input_and_scores(ending, proteins, inputs, tmp_path):
    schemes, target = ["joint", "mutant_marginals", "sampled_joint_log_prob"], tmp_path / f"out.{ending}"
    run("variants", "--model", proteins, *inputs, "--output", target, "--schemes", *schemes,
        "--num_draws", "9", "--seed", "2")  # fmt: skip
    if ending == "csv":
        with open(target, newline="") as file:
            found = list(csv.DictReader(file))
    else:
        found = read(target) if ending == "jsonl" else pd.read_parquet(target).to_dict("records")
    assert [{name: row[name] for name in ("mutant", "DMS_score", "note")} for row in found] == [
        {"mutant": "K2R", "DMS_score": "0.50", "note": ""}, {"mutant": "K2E:A7G", "DMS_score": "NA", "note": "a, b"},
    ]  # fmt: skip
    model, tokenizer = EnergyModel.from_pretrained(proteins).eval(), AutoTokenizer.from_pretrained(proteins)
    for scheme in schemes:
        expected = model.score_variants("MKTAYIAK", ["K2R", "K2E:A7G"], tokenizer, scheme=scheme, num_draws=9, seed=2)
        assert [float(row[scheme]) for row in found] == pytest.approx(expected.scores.tolist(), abs=1e-5)
    assert [float(row["sampled_joint_log_prob_error"]) for row in found] == pytest.approx(expected.errors.tolist())


@pytest.mark.parametrize(
    "given,told",
    [
        (["--offset", "5"], "scan.csv: record 0: 'K2R': position 2"),
        (["--mutation_column", "variant"], "scan.csv: record 0 has no 'variant'"),
        (["--schemes", "marginals"], "schemes must be one of"),
        (["--output", "out.tsv"], "out.tsv must end in"),
        (["--reference", "two.fasta"], "two.fasta must hold one sequence, got 2"),
        (["--reference", "none.fasta"], "none.fasta holds no sequence"),
        (["--reference", "other.fasta"], "other.fasta: the tokenizer has no token for the letter 'J' (letter 2)"),
        (["--mutations", "indels.csv"], "indels.csv: record 1: 'T3del': scheme 'masked_marginals'"),
    ],
)
def test_refusals_name_the_record(given, told, proteins, inputs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = {"two": ">a\nMK\n>b\nMK\n", "none": ">a\n", "other": "MJ\n"}
    for name, text in files.items():
        (tmp_path / f"{name}.fasta").write_text(text)
    (tmp_path / "indels.csv").write_text("mutant\nK2R\nT3del\n")
    with pytest.raises(SystemExit) as stop:
        run("variants", "--model", proteins, *inputs, *given)
    assert stop.value.code == 2 and told in capsys.readouterr().err
