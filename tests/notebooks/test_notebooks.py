"""Every notebook runs from a clean start, with smaller sizes; what is stored in it came from one run."""

from pathlib import Path

import nbformat
import papermill
import pytest

from tests.notebooks import cells

pytestmark = pytest.mark.notebooks

FOLDER = Path(__file__).parents[2] / "notebooks"
# What each notebook's cell of parameters is replaced by: enough to run every line, too little to conclude anything.
REDUCED = {
    "sampling_and_diagnostics": {
        "length": 6, "num_chains": 2, "num_epochs": 8, "burn_in": 2, "schedule_epochs": 3, "raw_epochs": 4,
        "infill_chains": 2, "infill_epochs": 6, "toy_steps": 3, "toy_chains": 4, "toy_epochs": 10,
    },
    "controlled_generation": {
        "length": 6, "num_chains": 2, "num_epochs": 6, "burn_in": 2, "weights": [2.0], "classifier_iterations": 3,
        "infill_chains": 2, "infill_epochs": 4, "check_chains": 2, "check_epochs": 6,
    },
    "joint_fills": {"words": ["present"], "row_limits": [20, 40], "num_blanks": 2, "top_k": 3},
    "publishing": {"length": 6, "num_chains": 2, "num_epochs": 7, "burn_in": 2, "train_steps": 3, "train_rows": 50},
    "search_aware_finetuning": {
        "max_train": 64, "held_out": 8, "batch_size": 32, "hidden_size": 16, "pretrain_epochs": 2, "search_epochs": 2,
        "line_points": 7,
    },
    "risk_training": {
        "num_train": 4, "num_test": 3, "shortest": 18, "longest": 20, "max_new_tokens": 12, "batch_size": 2,
        "num_candidates": 2, "max_steps": 2,
    },
    "residual_models": {
        "num_train": 8, "num_test": 8, "batch_size": 4, "num_epochs": 1, "num_candidates": 8, "bound_sizes": [2, 4],
        "stepwise_tokens": 2, "product_steps": 2,
    },
    "variants": {"train_steps": 3, "batch_size": 8, "num_others": 4},
    "chapter_6_study": {
        "sizes": [20], "teacher_size": 50, "max_steps": 2, "eval_steps": 2, "num_words": 3, "num_chains": 1,
        "num_epochs": 2, "burn_in": 1,
    },
}  # fmt: skip
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def code_cells(name):
    return [cell for cell in nbformat.read(FOLDER / f"{name}.ipynb", 4).cells if cell.cell_type == "code"]


def test_every_notebook_has_reduced_sizes():
    assert sorted(REDUCED) == NAMES and len(NAMES) == 9


@pytest.mark.parametrize("name", NAMES)
def test_runs_from_a_clean_start(name, tmp_path):
    path = FOLDER / f"{name}.ipynb"
    known = papermill.inspect_notebook(path)
    assert set(REDUCED[name]) <= set(known), "a size that the notebook hasn't"
    assert not cells.run(path, REDUCED[name], tmp_path)


def test_a_cell_that_fails_is_told(tmp_path):
    path = tmp_path / "broken.ipynb"
    parameters = nbformat.v4.new_code_cell("size = 1", metadata={"tags": ["parameters"]})
    nbformat.write(nbformat.v4.new_notebook(cells=[parameters, nbformat.v4.new_code_cell("assert size == 1")]), path)
    assert not cells.run(path, {"size": 1}, tmp_path) and "AssertionError" in cells.run(path, {"size": 2}, tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_stored_outputs_are_of_one_run(name):
    own = code_cells(name)
    assert [cell.execution_count for cell in own] == list(range(1, len(own) + 1))
    outputs = [output for cell in own for output in cell.outputs]
    assert not any(output.output_type == "error" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs), "no plot"
    text = "".join(
        str(output.get("text", "")) + str(output.get("data", {}).get("text/plain", "")) for output in outputs
    )
    assert "/tmp" not in text and "/work" not in text and "Traceback" not in text
