"""`hf-ebm train`: what it saves and reports, resuming bit for bit, several processes, sources of data, refusals."""

import json
import os
import random
from pathlib import Path

import datasets
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
)

from hf_ebm.cli.train import OBJECTIVES
from hf_ebm.cli.training.data import DataArguments, first_rows, load_pairs
from hf_ebm.cli.training.models import TAGGING, TRANSCRIPTION
from hf_ebm.data.cmudict_tasks import load_g2p, load_stress
from hf_ebm.data.metrics import tagging_scores, transcription_scores
from hf_ebm.data.symbols import symbol_tokenizer
from tests.cli.conftest import read, run
from tests.processes import fresh

pytestmark = pytest.mark.slow

LSTM = ["--model_name_or_path", "lstm", "--hidden_size", "8", "--embedding_dim", "6"]
QUICK = ["--use_cpu", "--learning_rate", "0.01", "--num_train_epochs", "2", "--logging_steps", "1"]
EVALUATE = ["--eval_strategy", "epoch", "--predict_with_generate"]


def reversals(count: int, seed: int) -> list[dict]:
    generator = random.Random(seed)
    sources = [[generator.choice("abcde") for _ in range(generator.randint(2, 6))] for _ in range(count)]
    return [{"source": " ".join(row), "target": " ".join(reversed(row)).upper()} for row in sources]


def write(path, records: list[dict]) -> str:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("data")
    write(folder / "train.jsonl", reversals(18, 0))
    write(folder / "validation.jsonl", reversals(7, 1))
    return str(folder)


def result(capsys) -> dict:
    """The one line on standard output."""
    return json.loads(capsys.readouterr().out)


def outputs(folder, sources: list[str], **options) -> list[str]:
    """What a saved model generates, one source at a time."""
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = [model.generate(**tokenizer(source, return_tensors="pt"), **options)[0] for source in sources]
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


def test_pronunciation_is_scored_against_all_references_in_any_order(tmp_path, capsys):
    run(
        "train", "cross-entropy", "--task", "cmudict-g2p", *LSTM, *QUICK, "--do_eval", "--predict_with_generate",
        "--output_dir", tmp_path, "--max_train_samples", "60", "--max_eval_samples", "30", "--num_train_epochs", "12",
        "--learning_rate", "0.05", "--train_sampling_strategy", "group_by_length",
    )  # fmt: skip
    found = result(capsys)
    rows = load_g2p()["validation"].select(range(30))
    assert any(len(references) > 1 for references in rows["references"])
    longest = max(len(target.split()) for target in rows["target"])
    config = AutoModelForSeq2SeqLM.from_pretrained(tmp_path).generation_config
    assert config.max_length >= longest + 2
    predictions = outputs(tmp_path, rows["source"])
    assert len(set(predictions)) > 5
    expected = transcription_scores(predictions, list(rows["references"]))
    assert {name: found[f"eval_{name}"] for name in TRANSCRIPTION} == pytest.approx(expected)
    assert set(expected) == set(TRANSCRIPTION)
    assert json.loads((tmp_path / "all_results.json").read_text()) == pytest.approx(found)


def test_stress_gets_a_tagger_that_is_scored_at_vowels(tmp_path, capsys):
    run(
        "train", "self-normalized", "--task", "cmudict-stress", *LSTM, *QUICK, *EVALUATE, "--output_dir", tmp_path,
        "--max_train_samples", "60", "--max_eval_samples", "20", "--eval_split", "test",
    )  # fmt: skip
    found = result(capsys)
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert (model.config.attention, model.config.initial_state) == ("fixed", "zero")
    rows = load_stress()["test"].select(range(20))
    pairs = []
    for prediction, reference in zip(outputs(tmp_path, rows["source"]), rows["target"], strict=True):
        labels = zip(prediction.split(), reference.split(), strict=True)
        pairs.append(tuple(map(" ".join, zip(*[pair for pair in labels if pair[1] != "-"], strict=True))))
    expected = tagging_scores(*zip(*pairs, strict=True), default_label="0")
    assert {name: found[f"eval_{name}"] for name in TAGGING} == pytest.approx(expected)
    assert set(expected) == set(TAGGING)
    assert found["eval_loss"] > found["eval_cross_entropy"] > 0
    history = json.loads((tmp_path / "trainer_state.json").read_text())["log_history"]
    assert [log["epoch"] for log in history if "eval_accuracy" in log] == [1.0, 2.0, 2.0]
    assert len(outputs(tmp_path, [" ".join(["AH"] * 30)])[0].split()) == 30  # not cut after 20 tokens


@pytest.mark.parametrize(
    "objective",
    [
        ["scheduled-sampling", "--inputs", "soft_sample", "--teacher_forcing_schedule", "constant"],
        ["soft-beam", "--beam_size", "2"],
    ],
    ids=lambda objective: objective[0],
)
def test_a_run_resumed_in_a_fresh_process_is_the_same_run(objective, folder, tmp_path):
    common = ["--task", folder, *LSTM, *QUICK, "--save_strategy", "epoch", "--per_device_train_batch_size", "4"]
    common += ["--dropout", "0.2"]
    run("train", *objective, *common, "--output_dir", tmp_path / "whole")
    (tmp_path / "cut").mkdir()
    (tmp_path / "whole" / "checkpoint-5").rename(tmp_path / "cut" / "checkpoint-5")
    cut = ["train", *objective, *common, "--output_dir", tmp_path / "cut", "--resume_from_checkpoint", "last"]
    fresh(tmp_path, run, *cut)
    logs = [
        json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"] for name in ("whole", "cut")
    ]
    whole, cut = [[(log["step"], log["loss"]) for log in history if "loss" in log] for history in logs]
    assert len(whole) == 10 and whole == cut
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def keeping(folder, *arguments) -> None:
    """Runs the command and keeps every process's weights."""
    plain = Trainer.save_state

    def save_state(self):
        torch.save(dict(self.model.state_dict()), folder / f"{os.environ['RANK']}.pt")
        plain(self)

    Trainer.save_state = save_state
    run(*arguments)


def test_two_processes_train_one_model(folder, tmp_path, capsys):
    arguments = ["train", "cross-entropy", "--task", folder, *LSTM, *QUICK, *EVALUATE]
    arguments += ["--per_device_eval_batch_size", "2"]  # 7 rows: one process gets a row again
    own = [*arguments, "--output_dir", tmp_path / "two", "--per_device_train_batch_size", "3"]
    own.remove("--use_cpu")  # which the command gives itself
    two = json.loads("".join(one.stdout for one in fresh(tmp_path, keeping, tmp_path, *own, count=2)))  # one printed
    weights = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    run(*arguments, "--output_dir", tmp_path / "one", "--per_device_train_batch_size", "6")
    one = result(capsys)
    saved = [load_file(tmp_path / name / "model.safetensors") for name in ("two", "one")]
    for name, value in saved[0].items():
        assert torch.equal(value, weights[0][name])
        torch.testing.assert_close(value, saved[1][name], atol=2e-3, rtol=0)  # Adam enlarges rounding
    assert {name: two[f"eval_{name}"] for name in TRANSCRIPTION} == pytest.approx(
        {name: one[f"eval_{name}"] for name in TRANSCRIPTION}
    )


def pairs_of(**arguments) -> dict[str, list[dict]]:
    data = DataArguments(**arguments)
    return {split: list(rows) for split, rows in first_rows(load_pairs(data, evaluate=True), data).items()}


def test_data_come_from_files_and_folders(folder, tmp_path):
    train, held_out = reversals(18, 0), reversals(7, 1)
    expected = {"train": train, "evaluation": held_out}
    assert pairs_of(task=folder) == expected
    files = {}
    for name, rows in (("train", train), ("dev", held_out)):
        frame = pd.DataFrame([{"id": 0, "x": row["source"], "target": row["target"]} for row in rows])
        frame.to_parquet(tmp_path / f"{name}.parquet")
        frame.to_csv(tmp_path / f"{name}.csv", index=False)
        files[name] = tmp_path / name
    for ending in (".parquet", ".csv"):
        task, eval_file = (f"{files[name]}{ending}" for name in ("train", "dev"))
        assert pairs_of(task=task, eval_file=eval_file, source_column="x") == expected
    splits = datasets.DatasetDict(a=datasets.Dataset.from_list(train), b=datasets.Dataset.from_list(held_out))
    splits.save_to_disk(tmp_path / "disk")
    assert pairs_of(task=str(tmp_path / "disk"), train_split="a", eval_split="b") == expected
    swapped = pairs_of(task=folder, source_column="target", target_column="source", max_train_samples=5)
    assert swapped["train"] == [{"source": row["target"], "target": row["source"]} for row in train[:5]]
    cells = tmp_path / "cells.csv"
    cells.write_text("source,target\nnull,1\n007,NA\n")  # texts, not numbers or missing values
    assert pairs_of(task=str(cells), eval_file=str(cells))["train"] == [
        {"source": "null", "target": "1"}, {"source": "007", "target": "NA"},
    ]  # fmt: skip


def save_bart(path, dtype=torch.float32) -> str:
    rows = reversals(18, 0)
    tokenizer = symbol_tokenizer([row["target"] for row in rows], [row["source"] for row in rows])
    config = BartConfig(
        vocab_size=len(tokenizer), d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, max_position_embeddings=32, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    BartForConditionalGeneration(config).to(dtype).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def test_saved_models_are_trained_on(folder, tmp_path, capsys):
    """A model of another family, saved in half precision; the recurrent model of a run of this command."""
    bart = save_bart(tmp_path / "bart", torch.bfloat16)
    run("train", "cross-entropy", "--task", folder, *LSTM, *QUICK, "--output_dir", tmp_path / "lstm")
    for name, start in (("a", bart), ("b", tmp_path / "lstm")):
        capsys.readouterr()
        run(
            "train", "soft-beam", "--task", folder, "--model_name_or_path", start, *QUICK, *EVALUATE, "--output_dir",
            tmp_path / name, "--beam_size", "2",
        )  # fmt: skip
        assert 0 <= result(capsys)["eval_loss"] <= 1.5  # a rate of wrong tokens
        before, after = (load_file(f"{path}/model.safetensors") for path in (start, tmp_path / name))
        assert any(not torch.equal(before[key].float(), after[key]) for key in after)
        assert all(value.dtype == torch.float32 for value in after.values())


def test_the_best_model_has_the_lowest_error_rate(folder, tmp_path):
    run(
        "train", "cross-entropy", "--task", folder, *LSTM, *QUICK, *EVALUATE, "--output_dir", tmp_path,
        "--num_train_epochs", "6", "--learning_rate", "0.1", "--save_strategy", "epoch", "--load_best_model_at_end",
        "--metric_for_best_model", "phoneme_error_rate",
    )  # fmt: skip
    state = json.loads((tmp_path / "trainer_state.json").read_text())
    rates = [log["eval_phoneme_error_rate"] for log in state["log_history"] if "eval_bleu" in log]
    assert len(set(rates)) > 1 and state["best_metric"] == min(rates) == rates[-1]


def test_help(capsys):
    run("train", "--help")
    shown = capsys.readouterr().out
    assert all(name in shown for name in OBJECTIVES)
    with pytest.raises(SystemExit):
        run("train", "soft-beam", "--help")
    shown = capsys.readouterr().out
    assert all(option in shown for option in ("--beam_size", "--alpha", "--task", "--learning_rate", "--hidden_size"))


REFUSED = {
    "--source_column src": "has no 'src'; it has source, target",
    "--target_column source": "source_column and target_column must differ",
    "--eval_file {d}/unknown.jsonl --do_eval": "target of row 0 of split 'evaluation' holds 'Z'",
    "--eval_file {d}/blank.jsonl --do_eval --predict_with_generate": "with a symbol each, got [''] in row 0",
    "--eval_file {d}/dev.jsonl": "eval_file was given without an evaluation",
    "--do_eval": "eval_file must be given for an evaluation",
    "--predict_with_generate": "predict_with_generate was given without an evaluation",
    "--eval_split dev --do_eval": "is a file, which has no splits",
    "--task {d}/empty.jsonl": "empty.jsonl: there are no rows",
    "--task {d}/null.jsonl": "null.jsonl: 'target' of row 0 must be a string, got None",
    "--task {d}/ragged.csv": "ragged.csv: line 3 has 1 cells, the header 2",
    "--task {d}/none.jsonl": "No such file",
    "--task {d}/notes.txt": "must end in .jsonl",
    "--task {d}": "must hold one file 'train'",
    "--task cmudict-stres": "is neither built in (cmudict-stress, cmudict-g2p) nor a file",
    "--task cmudict-stress --train_split dev": "has no split 'dev'; it has train, validation, test",
    "--task cmudict-stress --eval_file {d}/dev.jsonl --do_eval": "eval_file goes with a file as task",
    "--dataset_config x": "dataset_config goes with a data set of the Hub",
    "--task {d}/uneven.jsonl --attention fixed": "row 1 of split 'train' has 2 source and 1 target symbols",
    "--max_source_length 4": "source of row",
    "--max_train_samples 0": "max_train_samples must be at least 1, got 0",
    "--output_dir {d}": "is not empty; choose another folder",
    "--output_dir {d}/dev.jsonl/x": "cannot be written",
    "--resume_from_checkpoint last": "there is no checkpoint in",
    "--resume_from_checkpoint {d}": "must be 'last' or the folder of a checkpoint",
    "--beam_size 1000": "beam_size must be at most the vocabulary of",
    "--alpha 0": "alpha must be a number above 0, got 0.0",
    "--hidden_size 7": "hidden_size must be even",
    "--layers 0": "encoder_layers must be a whole number from 1 up, got 0",
    "--eval_file {d}/dev.jsonl --do_eval --metric_for_best_model bleu": "add --predict_with_generate",
    "--metric_for_best_model accuracy": "must be one of loss, phoneme_error_rate, word_accuracy, bleu, got 'accuracy'",
    "--do_predict": "do_predict is no option here",
    "--model_name_or_path {d}/bart": "hidden_size, embedding_dim: only for --model_name_or_path lstm",
    "--nonsense 1": "--nonsense",
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("broken")
    good = reversals(6, 2)
    write(folder / "good.jsonl", good)
    write(folder / "dev.jsonl", good[:2])
    write(folder / "unknown.jsonl", [{"source": "a b", "target": "A Z"}])
    write(folder / "blank.jsonl", [{"source": "a b", "target": ""}])
    write(folder / "null.jsonl", [{"source": "a b", "target": None}])
    write(folder / "uneven.jsonl", [{"source": "a b", "target": "A B"}, {"source": "a b", "target": "A"}])
    write(folder / "empty.jsonl", [])
    (folder / "ragged.csv").write_text("source,target\na,A\nb\n")
    (folder / "notes.txt").write_text("a\n")
    return folder


@pytest.mark.parametrize("options", REFUSED)
def test_refusals_are_one_line(options, broken, tmp_path, capsys):
    given = options.format(d=broken).split()
    with pytest.raises(SystemExit) as exit_code:
        run(
            "train", "soft-beam", "--task", broken / "good.jsonl", *LSTM, "--use_cpu", "--output_dir",
            tmp_path / "out", *given,
        )  # fmt: skip
    captured = capsys.readouterr()
    assert exit_code.value.code == 2 and REFUSED[options] in captured.err and not captured.out
    assert captured.err.startswith("hf-ebm: ") and captured.err.count("\n") == 1
    assert not any((tmp_path / "out").glob("*"))


def test_models_that_cannot_be_trained_are_refused(folder, tmp_path, capsys):
    GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1)).save_pretrained(tmp_path / "gpt2")
    save_bart(tmp_path / "bart")
    for file in (tmp_path / "bart").glob("tokenizer*"):
        file.unlink()
    weights = Path(save_bart(tmp_path / "torn"), "model.safetensors")
    kept = {name: value for name, value in load_file(weights).items() if "fc1.weight" not in name}
    save_file(kept, weights, {"format": "pt"})
    messages = {
        "gpt2": "must be a sequence-to-sequence model", "bart": "has no tokenizer", "none": "cannot be loaded",
        "torn": "has no weights for model.decoder.layers.0.fc1.weight, model.encoder.layers.0.fc1.weight, which would",
    }  # fmt: skip
    for name, message in messages.items():
        with pytest.raises(SystemExit):
            run(
                "train", "cross-entropy", "--task", folder, "--model_name_or_path", tmp_path / name, "--output_dir",
                tmp_path / "out",
            )  # fmt: skip
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("train", "beam-search")
    assert "objective must be one of cross-entropy, scheduled-sampling" in capsys.readouterr().err


def test_another_model_or_other_data_are_not_resumed(folder, tmp_path, capsys):
    start = ["train", "cross-entropy", *QUICK, "--output_dir", tmp_path / "out", "--save_strategy", "epoch"]
    run(*start, "--task", folder, *LSTM)
    other = [{**row, "target": row["target"].replace("E", "Z")} for row in read(f"{folder}/train.jsonl")]
    changes = {
        "differing: hidden_size": ["--task", folder, *LSTM, "--hidden_size", "10"],
        "differing: the symbols": ["--task", write(tmp_path / "other.jsonl", other), *LSTM],
    }
    for message, options in changes.items():
        with pytest.raises(SystemExit):
            run(*start, *options, "--resume_from_checkpoint", "true")
        assert message in capsys.readouterr().err
