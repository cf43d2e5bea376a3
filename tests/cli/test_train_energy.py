"""`hf-ebm train energy`."""

import json

import pytest

from hf_ebm import EnergyModel
from tests.cli.conftest import run

TEXTS = ["the cat", "a mat", "the dog sat", "in the"]


def test_a_model_is_trained_and_read_again(model_folder, tmp_path, capsys):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    common = ["--model_name_or_path", model_folder, "--train_file", tmp_path / "texts.txt", "--max_steps", "2",
              "--report_to", "none", "--use_cpu", "--energy", "raw"]  # fmt: skip
    for objective, more in (("mlm", []), ("kl", ["--teacher", model_folder]), ("pll", ["--do_eval"])):
        more += ["--eval_file", tmp_path / "texts.txt"] if "--do_eval" in more else []
        if objective != "mlm":
            more += ["--per_device_train_batch_size", "1", "--max_steps", "1", "--per_device_eval_batch_size", "1"]
        run("train", "energy", "--objective", objective, *common, *more, "--output_dir", tmp_path / objective)
        metrics = json.loads(capsys.readouterr().out)
        assert metrics["train_loss"] > 0 and ("eval_loss" in metrics) == (objective == "pll")
        model = EnergyModel.from_pretrained(tmp_path / objective)
        assert model.config.energy == "raw" and model.config.mask_token_id is not None


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--objective", "mle"], "sequences, above enumeration_limit"),
        (["--objective", "kl"], "teacher must be given"),
        (["--objective", "best"], "objective must be one of 'mle', 'pll', 'mlm', 'kl', 'kl+pll', got 'best'"),
        (["--do_eval"], "eval_file and --do_eval"),
    ],
)
def test_mistakes_are_reported_in_a_line(model_folder, tmp_path, capsys, arguments, message):
    (tmp_path / "texts.txt").write_text("the cat sat on the mat\n")
    with pytest.raises(SystemExit):
        run(
            "train", "energy", "--model_name_or_path", model_folder, "--train_file", tmp_path / "texts.txt",
            "--output_dir", tmp_path / "out", "--use_cpu", "--report_to", "none", "--max_steps", "1", *arguments,
        )  # fmt: skip
    error = capsys.readouterr().err
    assert message in error.splitlines()[-1]


def test_rows_without_a_value_are_named_or_skipped(model_folder, tmp_path, capsys, caplog):
    (tmp_path / "texts.txt").write_text("the cat\nthe \u2603\na mat\n")
    common = ["train", "energy", "--model_name_or_path", model_folder, "--train_file", tmp_path / "texts.txt",
              "--use_cpu", "--report_to", "none", "--max_steps", "1", "--per_device_train_batch_size", "1",
              "--objective", "pll", "--output_dir"]  # fmt: skip
    with pytest.raises(SystemExit):
        run(*common, tmp_path / "refused")
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("hf-ebm: train_file: row 1 ('the \u2603') holds [UNK] (token ")
    assert "skip_unusable_rows" in error and not any((tmp_path / "refused").iterdir())
    with pytest.raises(SystemExit):
        run(*common, tmp_path / "refused", "--unknown_tokens", "error")
    assert "row 1 has 1 unknown of 2 tokens" in capsys.readouterr().err
    run(*common, tmp_path / "skipped", "--skip_unusable_rows")
    assert "1 of 3 rows are left out" in caplog.text
