"""`hf-ebm train` on sources without targets."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig

from tests.cli.conftest import run
from tests.cli.test_train import result, reversals, save_bart, write
from tests.cli.test_train_task_loss import QUICK, save_gpt2

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ending", [".jsonl", ".csv"])
@pytest.mark.parametrize(("objective", "kind"), [("policy-gradient", "gpt2"), ("grpo", "bart"), ("ranking", "bart")])
def test_prompts_need_no_targets(objective, kind, ending, tmp_path, capsys):
    """They are trained on like the same sources with targets that the reward doesn't read."""
    start = {"gpt2": save_gpt2, "bart": save_bart}[kind](tmp_path / "start")
    rows, found, weights = reversals(8, 0), [], []
    write_rows = write if ending == ".jsonl" else write_csv
    for name, columns in (("pairs", ["source", "target"]), ("prompts", ["source"])):
        data, output = tmp_path / f"{name}{ending}", tmp_path / name
        write_rows(data, [{"other": "x", **{column: row[column] for column in columns}} for row in rows])
        run(
            "train", objective, "--task", data, "--model_name_or_path", start, *QUICK, "--do_eval", "--eval_file", data,
            "--reward_funcs", "neg_repetition", "--output_dir", output, "--max_source_length", "20",
            "--generation_config", generation_config(tmp_path),
            *(["--cross_entropy_weight", "0"] if objective == "ranking" else []),
        )  # fmt: skip
        found.append(result(capsys))
        weights.append(load_file(output / "model.safetensors"))
    names = [name for name in found[1] if "reward" in name or "cost" in name]
    assert len(names) > 2 and {name: found[0][name] for name in names} == pytest.approx({n: found[1][n] for n in names})
    assert all(torch.allclose(weights[0][name], value, atol=1e-6) for name, value in weights[1].items())


def generation_config(folder) -> str:
    """Decodes fewer tokens than any length of targets would allow."""
    GenerationConfig(max_new_tokens=5).save_pretrained(folder / "decoding")
    return str(folder / "decoding")


def write_csv(path, rows: list[dict]) -> None:
    lines = [",".join(rows[0]), *(",".join(row.values()) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
