"""Tables of completions: what was drawn, read by hand, for every trainer; what is printed, and what trackers get."""

import sys
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from hf_ebm.objectives.sequence_costs import normalized_edit_distance
from hf_ebm.trainers.completion_log import print_table
from tests.causal_families import completion_rows
from tests.trainers import test_sampled_risk
from tests.trainers.test_prompts import END, TEXTS, tokenizer_of, trainer_of

pytestmark = pytest.mark.slow

SETTINGS = {
    "max_steps": 2, "logging_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
    "reward_weights": [1.0, 0.5],
}  # fmt: skip
COLUMNS = ["step", "prompt", "completion", "reference", "rewards/closeness", "rewards/of_topic", "reward"]


def closeness(completions, references):
    return [-abs(len(text) - len(truth)) for text, truth in zip(completions, references, strict=True)]


def of_topic(completions, topic):
    return [None if name == "y" else len(text) for text, name in zip(completions, topic, strict=True)]


def decodings(trainer):
    """What is decoded from now on: prompts, and candidates of each."""
    found, decode = [], trainer.candidates.decode

    def noted(pairs, *given, **options):
        found.append((pairs.columns["prompt"], decode(pairs, *given, **options)))
        return found[-1][1]

    trainer.candidates.decode = noted
    return found


def by_hand(decoded):
    """The rows of a table."""
    tokenizer, texts, rows = tokenizer_of(), {row["prompt"]: row for row in TEXTS}, []
    for prompts, found in decoded:
        for prompt, candidates in zip(prompts, found, strict=True):
            for ids in candidates:
                text, row = tokenizer.decode(ids, skip_special_tokens=True), texts[prompt]
                near, long = -abs(len(text) - len(row["reference"])), None if row["topic"] == "y" else len(text)
                rows.append((prompt, text, row["reference"], near, long, near + (long or 0) / 2))
    return rows


def rows_of(path):
    frame = pd.read_parquet(path)
    frame = frame.astype(object).where(frame.notna(), None)
    return list(frame.drop(columns="step").itertuples(index=False, name=None))


@pytest.mark.parametrize(
    "kind, which",
    [
        ("mgs", "gpt2"),
        ("minimum risk", "bart"),
        ("leave one out", "gpt2"),
        ("ranking, beams", "bart"),
        ("grpo", "gpt2"),
    ],
)
def test_a_table_is_of_the_last_update_and_changes_nothing(kind, which, tmp_path):
    plain, watched = (
        trainer_of(kind, which, tmp_path, log_completions=on, reward_funcs=[closeness, of_topic], **SETTINGS)
        for on in (False, True)
    )
    plain.train()
    folder = tmp_path / "completions"
    assert not folder.exists()
    decoded = decodings(watched)
    watched.train()
    assert all(map(torch.equal, plain.model.parameters(), watched.model.parameters()))
    logs = [
        [{name: value for name, value in log.items() if "second" not in name and "runtime" not in name}
         for log in one.state.log_history] for one in (plain, watched)
    ]  # fmt: skip
    assert logs[0] == logs[1]
    (file,) = folder.iterdir()
    frame, rows = pd.read_parquet(file), rows_of(file)
    assert file.name == "train-00002.parquet" and list(frame.columns) == COLUMNS and set(frame["step"]) == {2}
    # Of MGS what is decoded before the weights are perturbed: five decodings a batch.
    expected = by_hand(decoded[-10::5] if kind == "mgs" else decoded[-2:])
    if kind in ("minimum risk", "ranking, beams"):  # candidates that are equal count once, and the target is one
        targets = [tokenizer_of()(row["reference"], add_special_tokens=False)["input_ids"] + [END] for row in TEXTS]
        expected += by_hand([([row["prompt"] for row in TEXTS], [[ids] for ids in targets])])
        assert set(rows) == set(expected)
    else:
        assert rows == expected


def test_an_evaluation_has_a_table_of_its_name(tmp_path, capsys):
    data = {"one": TEXTS[:3], "two": TEXTS[3:]}
    settings = {**SETTINGS, "eval_strategy": "steps", "eval_steps": 2, "log_completions": True}
    trainer = trainer_of(
        "self-critical", "bart", tmp_path, eval_dataset=data, reward_funcs=[closeness, of_topic],
        num_completions_to_print=2, predict_with_generate=True, **settings,
    )  # fmt: skip
    trainer.predict(TEXTS)  # which nothing is logged of
    decoded = decodings(trainer)
    trainer.train()
    folder = tmp_path / "completions"
    assert sorted(path.stem for path in folder.iterdir()) == ["eval_one-00002", "eval_two-00002", "train-00002"]
    assert rows_of(folder / "eval_one-00002.parquet") == by_hand(decoded[-2:-1])
    assert rows_of(folder / "eval_two-00002.parquet") == by_hand(decoded[-1:])
    printed = capsys.readouterr().out
    assert [printed.count(title) for title in ("eval_one, step 2", "eval_two, step 2", "train, step 2")] == [1, 1, 1]
    first = printed.partition("eval_one, step 2")[2].partition("eval_two")[0]
    assert [prompt in first for prompt in ("a b c", "d", "i j k")] == [True, True, False]  # two of three rows


def test_names_of_evaluation_sets_may_have_slashes(tmp_path):
    settings = {**SETTINGS, "eval_strategy": "steps", "eval_steps": 2, "log_completions": True}
    trainer = trainer_of(
        "self-critical",
        "bart",
        tmp_path,
        eval_dataset={"wmt/de": TEXTS[:1]},
        reward_funcs=[closeness, of_topic],
        **settings,
    )
    trainer.train()
    assert len(rows_of(tmp_path / "completions" / "eval_wmt" / "de-00002.parquet")) == 1


def test_ids_and_costs_without_a_tokenizer(tmp_path):
    """And samples of several updates, which are told of once."""
    settings = {"num_iterations": 2, "max_steps": 3, "log_completions": True, "num_completions_to_print": 0}
    trainer = test_sampled_risk.trainer_of("grpo", tmp_path, **settings)
    trainer.train()
    assert "log_completions" not in trainer.training_facts().hyperparameters  # which what is learned doesn't depend on
    files = sorted((tmp_path / "completions").iterdir())
    assert [path.name for path in files] == ["train-00001.parquet", "train-00003.parquet"]
    for path, drawn in zip(files, trainer.drawn, strict=True):
        frame = pd.read_parquet(path)
        assert list(frame.columns) == ["step", "prompt", "completion", "reference", "cost"]
        expected = []
        for row, found in zip(completion_rows(), drawn, strict=True):
            target, prompt = row["labels"][row["labels"] != -100], row["input_ids"][row["labels"] == -100]
            for ids, cost in zip(found, normalized_edit_distance(found, [target] * 3).tolist(), strict=True):
                expected.append((*(" ".join(map(str, one.tolist())) for one in (prompt, ids, target)), cost))
        assert list(frame.drop(columns="step").itertuples(index=False, name=None)) == expected


def test_rewards_that_a_function_could_not_say_are_missing(tmp_path):
    def failing(completions):
        return [float("nan"), *[1.0] * (len(completions) - 1)]

    trainer = trainer_of(
        "leave one out", "gpt2", tmp_path, log_completions=True, reward_funcs=failing, reward_errors="skip"
    )
    trainer.train()
    frame = pd.read_parquet(tmp_path / "completions" / "train-00001.parquet")
    assert frame["rewards/failing"].isna().tolist() == [True, *[False] * 11] and set(frame["reward"]) == {1.0}


@pytest.mark.parametrize("with_rich", [True, False])
def test_tables_are_printed_as_they_are(with_rich, monkeypatch, capsys):
    if not with_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    print_table({"prompt": ["[bold]a[/bold] b", None], "rewards/near": [1 / 3, None]}, "train, step 1")
    printed = capsys.readouterr().out
    assert "[bold]a[/bold] b" in printed and "0.3333" in printed and "near" in printed and "rewards/" not in printed


def test_trackers_get_their_tables(tmp_path, monkeypatch):
    """Of modules that stand in for theirs, with what is called of these."""
    sent = {}
    table = SimpleNamespace(Table=lambda dataframe: dataframe)
    for name in ("wandb", "trackio"):
        module = SimpleNamespace(
            run=1, log=lambda found, name=name: sent.setdefault(name, []).append(found), **vars(table)
        )
        monkeypatch.setitem(sys.modules, name, module)
    mlflow = SimpleNamespace(log_table=lambda frame, file: sent.setdefault("mlflow", []).append((file, frame)))
    experiment = SimpleNamespace(log_table=lambda file, frame: sent.setdefault("comet_ml", []).append((file, frame)))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "comet_ml", SimpleNamespace(get_running_experiment=lambda: experiment))
    trainer = trainer_of("leave one out", "gpt2", tmp_path, log_completions=True)
    trainer.args.report_to = ["wandb", "tensorboard", "trackio", "mlflow", "comet_ml"]
    trainer.train()
    expected = pd.read_parquet(tmp_path / "completions" / "train-00001.parquet")
    for name in ("wandb", "trackio"):
        (found,) = sent[name]
        assert found["train/completions"].equals(expected) and found["train/global_step"] == 1
    for name, ending in (("mlflow", "json"), ("comet_ml", "csv")):
        ((file, frame),) = sent[name]
        assert file == f"train/completions-00001.{ending}" and frame.equals(expected)
    sys.modules["wandb"].run, sys.modules["comet_ml"].get_running_experiment = None, lambda: None  # nothing runs
    trainer.train()
    assert [len(sent[name]) for name in sent] == [1, 2, 2, 1]


@pytest.mark.parametrize(
    "settings, message",
    [({"log_completions": 1}, "log_completions must be True or False, got 1"),
     ({"num_completions_to_print": -1}, "num_completions_to_print must be a whole number from 0 up, got -1")],
)  # fmt: skip
def test_refusals(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trainer_of("grpo", "bart", tmp_path, **settings)
