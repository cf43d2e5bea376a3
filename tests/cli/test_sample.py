"""`hf-ebm sample`: nothing lost or doubled by a kill, and the same set of records from any number of processes."""

import json
import math
import os
import re

import pandas as pd
import pytest
from transformers.utils import logging

from hf_ebm import ChainGenerationConfig, EnergyModel
from hf_ebm.cli.run_records import ChainRecords, RunRecords
from hf_ebm.cli.tables import Output, to_json
from hf_ebm.models.energy import generation_energy, saved_runs
from hf_ebm.sampling import kernels
from hf_ebm.sampling.kernels import KERNELS
from tests.cli.conftest import killed, read, run
from tests.models.tokenizers_for_tests import small_tokenizer
from tests.processes import fresh

pytestmark = pytest.mark.slow

CHAINS = ["--num_chains", "6", "--num_epochs", "5", "--burn_in", "1", "--thinning", "2", "--seed", "3"]


def keys(records: list[dict]) -> list[tuple]:
    return [(record["prompt"], record["chain"], record["epoch"]) for record in records]


def same_records(found: list[dict], expected: list[dict]) -> bool:
    """The same set of records, each once; energies up to rounding (packing differs)."""
    found, expected = sorted(found, key=lambda r: keys([r])), sorted(expected, key=lambda r: keys([r]))
    same = [(*key, record["text"]) for key, record in zip(keys(found), found, strict=True)]
    wanted = [(*key, record["text"]) for key, record in zip(keys(expected), expected, strict=True)]
    energies = pytest.approx([record["energy"] for record in expected], abs=1e-3)
    return same == wanted and [record["energy"] for record in found] == energies


@pytest.fixture(scope="module")
def whole(model_folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "out.jsonl"
    run("sample", "--model", model_folder, "--lengths", "4", "6", *CHAINS, "--output", output)
    return read(output)


def test_records_are_complete_and_the_summary_reports(model_folder, tmp_path, whole, capsys):
    output = tmp_path / "out.jsonl"
    run("sample", "--model", model_folder, "--lengths", "4", "6", *CHAINS, "--output", output, "--chains_at_once", "2")
    assert same_records(read(output), whole)
    assert sorted(keys(whole)) == [(p, c, e) for p in (0, 1) for c in range(6) for e in (1, 3)]
    summary = capsys.readouterr().out
    assert "acceptance rate" in summary and "novel rate" in summary and "R-hat" in summary
    assert not (tmp_path / "out.jsonl.state").exists()
    run("sample", "--model", model_folder, "--lengths", "4", "6", *CHAINS, "--output", output, "--chains_at_once", "5")
    assert len(read(output)) == len(whole)


def test_replicas_are_given_as_temperatures_or_their_number(model_folder, tmp_path, capsys):
    settings = dict(lengths=3, num_chains=2, num_epochs=32, burn_in=30, seed=0)
    options = [str(part) for name, value in settings.items() for part in (f"--{name}", value)]
    for given, ladder in ((["1", "1.5"], [1.0, 1.5]), (["2"], 2)):
        output = tmp_path / f"{len(given)}.jsonl"
        run("sample", "--model", model_folder, *options, "--replica_temperatures", *given, "--output", output)
        out = EnergyModel.from_pretrained(model_folder).generate(**settings, replica_temperatures=ladder)
        found = sorted(read(output), key=lambda record: keys([record]))
        assert [record["energy"] for record in found] == pytest.approx(out.energies.flatten().tolist(), abs=1e-3)
    with pytest.raises(SystemExit):
        run("sample", "--model", model_folder, *options, "--replica_temperatures", "1.5", "--output", "-")
    assert "replica_temperatures must be temperatures that rise from 1" in capsys.readouterr().err


def test_a_half_written_output_is_completed(model_folder, tmp_path, whole):
    output = tmp_path / "out.jsonl"
    arguments = ["sample", "--model", model_folder, "--lengths", "4", "6", *CHAINS, "--output", output]
    run(*arguments)
    content = output.read_bytes()
    for cut in (0, 1, len(content) // 3, len(content) // 2 + 7, len(content) - 1):
        output.write_bytes(content[:cut])
        run(*arguments, "--chains_at_once", "4")
        assert same_records(read(output), whole)
        assert len(read(output)) == len(whole)


@pytest.mark.parametrize(
    "owner,name,at,half,chains_left",
    [
        (RunRecords, "append", 1, False, 0),
        (RunRecords, "append", 4, True, 6),
        (generation_energy, "run_epoch", 13, False, 4),
    ],
)
def test_killed_runs_go_on(owner, name, at, half, chains_left, model_folder, tmp_path, whole, monkeypatch):
    """kill -9 before anything is written, in the middle of a record, and in the middle of a batch's epochs."""
    output = tmp_path / "out.jsonl"
    arguments = ["sample", "--model", model_folder, "--lengths", "4", "6", *CHAINS, "--output", output]
    arguments = list(map(str, [*arguments, "--chains_at_once", "2", "--device", "cpu"]))

    def half_a_line(*given):
        if half:
            records, rows = given
            with open(records.lines, "a") as file:
                file.write(to_json(rows[0])[:25])

    monkeypatch.setattr(saved_runs, "SECONDS_BETWEEN_SAVES", -1.0)  # a state after every epoch
    killed(owner, name, at, half_a_line, *arguments)
    left = [json.loads(line) for line in output.read_bytes().split(b"\n")[:-1]]
    assert len(set(keys(left))) == len(left) == 2 * chains_left
    resumed = []
    plain = EnergyModel.generate

    def generate(self, *given, **options):
        resumed.append(options.get("resume_from"))
        return plain(self, *given, **options)

    monkeypatch.setattr(EnergyModel, "generate", generate)
    run(*arguments)
    assert same_records(read(output), whole)
    assert sum(folder is not None for folder in resumed) == 1  # the batch that was killed, from its state


def test_a_run_that_is_killed_at_every_second_step_ends(model_folder, tmp_path, monkeypatch):
    """kill -9 long before an epoch of five steps ends, again and again: each life saves one, and the last is short."""
    arguments = ["sample", "--model", model_folder, "--lengths", "5", "--num_chains", "4", "--num_epochs", "1"]
    run(*arguments, "--output", tmp_path / "whole.jsonl")
    monkeypatch.setattr(saved_runs, "SECONDS_BETWEEN_SAVES", 0.0)
    monkeypatch.setattr(saved_runs, "MOST_TIME_SAVING", math.inf)
    output = tmp_path / "out.jsonl"
    step = lambda *given, delayed_acceptance: kernels.metropolis_hastings(*given, delayed_acceptance)  # noqa: E731
    monkeypatch.setitem(KERNELS, "metropolis_hastings", KERNELS["metropolis_hastings"]._replace(step=step))
    for _ in range(4):
        killed(kernels, "metropolis_hastings", 2, lambda *given: None, *arguments, "--output", output)
        assert read(output) == []
    steps, plain = [], kernels.metropolis_hastings
    monkeypatch.setattr(kernels, "metropolis_hastings", lambda *given: steps.append(given) or plain(*given))
    run(*arguments, "--output", output)
    assert same_records(read(output), read(tmp_path / "whole.jsonl")) and len(steps) == 1


def counted(folder, *commands: list[str]) -> None:
    """Runs commands one after the other; a file of its own tells of each process that made records."""
    plain = RunRecords.append

    def append(self, records):
        (folder / f"{os.getpid()}.process").touch()
        plain(self, records)

    RunRecords.append = append
    for arguments in commands:
        run(*arguments)


def test_two_processes_make_the_same_set_and_one_summary(model_folder, tmp_path, whole, capfd):
    output = tmp_path / "out.jsonl"
    common = ["sample", "--model", model_folder, "--device", "cpu"]
    to_file = [*common, "--lengths", "4", "6", *CHAINS, "--output", str(output), "--chains_at_once", "2"]
    printed = [*common, "--lengths", "4", "--num_chains", "5", "--num_epochs", "6"]
    both = fresh(tmp_path, counted, tmp_path, to_file, printed, count=2)
    stdout, stderr = ("".join(getattr(one, name) for one in both) for name in ("stdout", "stderr"))
    assert len(list(tmp_path.glob("*.process"))) == 2
    assert same_records(read(output), whole)
    assert stdout.count("6 chains of 2 samples") == 2  # of two prompts, told by one process
    run(*printed)
    alone = capfd.readouterr()
    lines = [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]
    assert same_records(lines, [json.loads(line) for line in alone.out.splitlines()])
    summary = r"5 chains of 6 samples;.* mean energy ([\d.]+)\n.*\n +energy +([\d.]+)"
    both, own = ([float(number) for number in re.search(summary, err).groups()] for err in (stderr, alone.err))
    assert both == pytest.approx(own, abs=0.02)


def test_prompts_from_a_file_and_parquet_output(model_folder, tmp_path):
    (tmp_path / "in.txt").write_text("the [MASK] sat\nthe cat [MASK] on [MASK]\n")
    output = tmp_path / "out.parquet"
    arguments = ["sample", "--model", model_folder, "--input", tmp_path / "in.txt", "--output", output, *CHAINS]
    run(*arguments)
    frame = pd.read_parquet(output)
    assert len(frame) == 24 and frame.text[frame.prompt == 0].str.startswith("the").all()
    assert not frame.text.str.contains("MASK").any()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.parquet", "out.parquet.run.json"]
    run(*arguments)  # complete: nothing to do
    assert pd.read_parquet(output).equals(frame)


def test_prompts_without_the_models_mask_are_told(model_folder, tmp_path, caplog):
    source = tmp_path / "prompts.txt"
    source.write_text("the [MASK] sat\nthe <mask> sat\nthe cat sat\n[MASK] cat ___\n")
    arguments = (
        "sample",
        "--model",
        model_folder,
        "--input",
        source,
        "--num_epochs",
        "1",
        "--unknown_tokens",
        "ignore",
    )
    logging.enable_propagation()
    run(*arguments, "--output", tmp_path / "told.jsonl")
    told = list(caplog.messages)
    run(*arguments, "--output", tmp_path / "meant.jsonl", "--rewrite", "true")
    logging.disable_propagation()
    assert told == caplog.messages  # the second command says nothing
    assert told[0].startswith("prompts: 2 of 4 rows hold no [MASK], this model's mask, and are rewritten as wholes: ")
    assert told[0].endswith("row 1 (with '<mask>'), row 2. --rewrite says that this is meant.") and len(told) == 2
    assert told[1].startswith("prompts: 1 of 4 rows hold another mask than [MASK]") and "row 3 (with '___')" in told[1]
    assert read(tmp_path / "told.jsonl") == read(tmp_path / "meant.jsonl")


def test_a_blank_line_among_prompts_is_refused_and_not_said_to_be_rewritten(model_folder, tmp_path, caplog, capsys):
    source = tmp_path / "prompts.txt"
    source.write_text("the [MASK]\n\nthe cat\n")
    logging.enable_propagation()
    with pytest.raises(SystemExit):
        run("sample", "--model", model_folder, "--input", source, "--output", tmp_path / "out.jsonl")
    logging.disable_propagation()
    assert "prompt 1 has no free position" in capsys.readouterr().err
    (told,) = [message for message in caplog.messages if "rewritten as wholes" in message]
    assert told.endswith("rewritten as wholes: row 2. --rewrite says that this is meant.")


def test_an_output_of_something_else_is_not_touched(model_folder, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    output.write_text("precious\n")
    arguments = ["sample", "--model", model_folder, "--lengths", "3", "--output", output]
    with pytest.raises(SystemExit):
        run(*arguments)
    assert output.read_text() == "precious\n" and "nothing is overwritten" in capsys.readouterr().err
    output.unlink()
    run(*arguments, "--seed", "1")
    before = output.read_text()
    with pytest.raises(SystemExit):
        run(*arguments, "--seed", "2")
    assert output.read_text() == before and "holds a run with other seed (1 there, 2 here)" in capsys.readouterr().err


def test_standard_output_is_json_lines(model_folder, capfd):
    run("sample", "--model", model_folder, "--text", "the [MASK] sat", "--num_chains", "2", "--num_epochs", "2")
    found = capfd.readouterr()
    records = [json.loads(line) for line in found.out.splitlines()]
    assert sorted(keys(records)) == [(0, chain, epoch) for chain in (0, 1) for epoch in (0, 1)]
    assert "acceptance rate" in found.err


def test_round_trips_of_replicas_are_in_the_records(model_folder, tmp_path, capsys):
    given = ["--lengths", "2", "--num_chains", "2", "--num_epochs", "9", "--replica_temperatures", "1", "1.1"]
    run("sample", "--model", model_folder, *given, "--device", "cpu", "--output", tmp_path / "out.jsonl")
    by_chain = {record["chain"]: record["round_trips"] for record in read(tmp_path / "out.jsonl")}
    out = EnergyModel.from_pretrained(model_folder).generate(
        lengths=2, num_chains=2, num_epochs=9, replica_temperatures=[1.0, 1.1], seed=0
    )
    assert list(by_chain.values()) == out.replicas.round_trips.tolist() and sum(by_chain.values()) > 0
    assert f"round trips of replicas: {sum(by_chain.values())}" in capsys.readouterr().out


def parts_of_words(tokenizer) -> list[int]:
    """Tokens that a text they are in may not be read as."""
    vocabulary = tokenizer.get_vocab().items()
    return [number for token, number in vocabulary if tokenizer.tokenize(f"the {token} sat")[1:-1] != [token]]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_the_summary_is_that_of_what_generate_returns(model_folder, tmp_path, capsys, ending):
    """Whatever tokens texts would be read as; of a file without tokens these are what there is to go by."""
    model, tokenizer = EnergyModel.from_pretrained(model_folder), small_tokenizer("wordpiece")
    prompts, output = ["the [MASK] [MASK] sat", "[MASK] cat [MASK] on [MASK] [MASK]"], tmp_path / f"out.{ending}"
    (tmp_path / "in.txt").write_text("\n".join(prompts))
    chains = ["--num_chains", "4", "--num_epochs", "12", "--burn_in", "2", "--seed", "5", "--chains_at_once", "3"]
    given = ["sample", "--model", model_folder, "--input", tmp_path / "in.txt", "--output", output, *chains]
    run(*given, "--device", "cpu")
    printed = capsys.readouterr().out
    settings = dict(num_chains=4, num_epochs=12, burn_in=2, seed=5)
    out = model.generate(**tokenizer(prompts, return_tensors="pt", padding=True), **settings)
    told = ["\n".join([f"  {report.counts}", *report.lines()]) for report in out.summary().prompts]
    assert all(own in printed for own in told)
    if ending == "parquet":
        frame = pd.read_parquet(output)
        frame.drop(columns="token_ids").to_parquet(output)
        tokens = list(frame.sort_values(["prompt", "chain", "epoch"])["token_ids"].map(list))
    else:
        records = read(output)
        tokens = [record.pop("token_ids") for record in sorted(records, key=lambda r: keys([r]))]
        output.write_text("".join(to_json(record) + "\n" for record in records[:-1]))
    ids = [
        ids[:length].tolist() for row, length in zip(out.samples, out.attention_mask.sum(1), strict=True) for ids in row
    ]
    assert tokens == ids
    run(*given, "--device", "cpu")
    again = capsys.readouterr().out
    assert ("already complete" in again) == (ending == "parquet")
    assert all(report.counts in again for report in out.summary().prompts) and not all(own in again for own in told)


def test_chains_that_cannot_be_judged_are_refused_before_any_file(model_folder, tmp_path, capsys):
    """In words of the command, which has no argument `chain_keys`."""
    output = tmp_path / "out.jsonl"
    for given in (["--max_rows", "9"], ["--num_chains", "2"]):
        arguments = ["--lengths", "2", "--output", output, "--target_rhat", "1.1", *given]
        with pytest.raises(SystemExit):
            run("sample", "--model", model_folder, *arguments)
        told = capsys.readouterr().err
        assert ("num_chains" in told or "max_rows" in told) and "chain_keys" not in told
        assert not list(tmp_path.glob("out*"))


JUDGED = ["--lengths", "2", "3", "--num_chains", "4", "--num_epochs", "8", "--burn_in", "2", "--seed", "4"]
JUDGED += ["--target_rhat", "1.1", "--max_rows", "4000"]


def test_each_prompt_goes_on_until_its_own_r_hat_is_met(model_folder, tmp_path, capsys, monkeypatch):
    """However long that is, a run that is cut or killed ends with the same records."""
    parts = parts_of_words(small_tokenizer("wordpiece"))
    common = ["sample", "--model", model_folder, "--device", "cpu", *JUDGED, "--suppress_tokens", *parts]
    run(*common, "--output", tmp_path / "whole.jsonl")
    whole, model, told = read(tmp_path / "whole.jsonl"), EnergyModel.from_pretrained(model_folder), set()
    for prompt in (0, 1):
        settings = dict(
            lengths=[2, 3],
            num_chains=4,
            num_epochs=8,
            burn_in=2,
            seed=4,
            target_rhat=1.1,
            max_rows=4000,
            suppress_tokens=parts,
        )
        out = model.generate(**settings, chain_keys=[(prompt, chain) for chain in range(4)])
        assert {record["epoch"] for record in whole if record["prompt"] == prompt} == set(out.kept_epochs)
        told.add(out.run.epoch)
    assert len(told) == 2 and "target_rhat was met" in capsys.readouterr().out
    output = tmp_path / "out.jsonl"
    arguments = [*common, "--output", output]
    killed(ChainRecords, "append", 2, lambda *given: None, *map(str, arguments))
    run(*arguments)
    assert same_records(read(output), whole)
    output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:60]))  # within the second prompt
    run(*arguments)
    assert same_records(read(output), whole)
    # Killed when a prompt's records are there and its state still is: it isn't run again.
    again, asked, plain = tmp_path / "again.jsonl", [], EnergyModel.generate
    killed(ChainRecords, "state_folder", 4, lambda *given: None, *map(str, common), "--output", str(again))
    monkeypatch.setattr(EnergyModel, "generate", lambda *own, **how: asked.append(how) or plain(*own, **how))
    run(*common, "--output", again)
    assert same_records(read(again), whole) and ["resume_from" in how for how in asked] == [True, False]
    with pytest.raises(SystemExit):
        run(*common, "--output", tmp_path / "refused.jsonl", "--chains_at_once", "3")
    assert "chains_at_once must be at least" in capsys.readouterr().err


def test_a_foreign_line_in_the_output_is_an_error(model_folder, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    arguments = ["sample", "--model", model_folder, "--lengths", "3", "--output", output]
    run(*arguments)
    output.write_text(output.read_text() + '{"a": 1}\n')
    with pytest.raises(SystemExit):
        run(*arguments)
    assert "holds a line that is no record of this command" in capsys.readouterr().err


def test_missing_chains_are_not_passed_over(tmp_path):
    config = ChainGenerationConfig().resolved(ChainGenerationConfig(), {"num_epochs": 1})
    records = ChainRecords(
        Output(str(tmp_path / "out.jsonl"), None, dict.fromkeys(("prompt", "chain", "epoch"))), config
    )
    records.open({"checksums": {}})
    records.append([{"prompt": 0, "chain": 0, "epoch": 0}])
    with pytest.raises(RuntimeError, match="have not been sampled"):
        records.close([(0, 0), (0, 1)])


def test_constraints_are_given_as_tokens_and_texts(model_folder, tmp_path, capsys, monkeypatch):
    start, avoid = "the king said", tmp_path / "avoid.txt"
    tokenizer = small_tokenizer("wordpiece")
    first, second = tokenizer.tokenize(start)[:2]
    command = ["sample", "--model", model_folder, "--text", start, "--rewrite", *CHAINS, "--max_changes", "1"]
    asked, generate = [], EnergyModel.generate
    monkeypatch.setattr(EnergyModel, "generate", lambda *own, **how: asked.append(how) or generate(*own, **how))
    avoid.write_text("king\nthe king saw\n", encoding="utf-8")
    run(*command, "--allowed_tokens", json.dumps({"1": [first, second]}), "--avoid", avoid)
    config, ids = asked[0]["generation_config"], tokenizer(start).input_ids
    assert (config.max_changes, config.allowed_tokens) == (1, {1: ids[1:3]})
    assert config.avoid == tokenizer(["king", "the king saw"]).input_ids
    avoid.write_text(f"{start}\n", encoding="utf-8")
    capsys.readouterr()
    for option, value, message in (
        ("--avoid", avoid, "avoid: prompt 0 starts at"),
        ("--allowed_tokens", '{"1": ["no such token"]}', "allowed_tokens: position 1: 'no such token' is no token"),
        ("--allowed_tokens", "[1", "allowed_tokens must be lists of tokens"),
        ("--protected_positions", "99", "protected_positions: position 99"),
    ):
        with pytest.raises(SystemExit):
            run(*command, option, value)
        assert message in capsys.readouterr().err
