"""What all modules have in common: loading, documentation, cards, adding rows, refusals."""

import doctest
import re
import shutil
from pathlib import Path

import evaluate
import numpy as np
import pytest
import torch
from datasets import Dataset
from huggingface_hub import SpaceCard

from hf_ebm import evaluate_modules
from hf_ebm.evaluate_modules import MODULES, module_path
from tests.evaluate_modules.conftest import INPUTS, load

SECTIONS = (
    "## Metric Description", "## How to Use", "### Inputs", "### Output Values", "### Examples",
    "## Limitations and Bias", "## Citation",
)  # fmt: skip

each = pytest.mark.parametrize("name", MODULES)


def run_examples(text: str, name: str, variables: dict) -> int:
    """Runs the examples of a text and returns how many there are."""
    test = doctest.DocTestParser().get_doctest(text, variables, name, None, 0)
    report = []
    failed = doctest.DocTestRunner(verbose=False).run(test, out=report.append, clear_globs=False).failed
    variables.update(test.globs)
    assert not failed, "".join(report)
    return len(test.examples)


def test_all_folders_are_modules():
    folder = Path(evaluate_modules.__file__).parent
    assert sorted(path.name for path in folder.iterdir() if (path / "README.md").exists()) == list(MODULES)
    assert set(INPUTS) == set(MODULES)


@pytest.mark.parametrize("name", ["bleu", "", "Repetition", None])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match=rf"name must be one of 'edit_distance', .*, 'repetition', got {name!r}"):
        module_path(name)


@each
def test_loads_from_its_folder_alone(name, tmp_path, own_caches):
    folder = Path(shutil.copytree(module_path(name), tmp_path / name))
    module = evaluate.load(str(folder), module_type="metric")
    assert module.name == name
    assert own_caches / "modules" in Path(module._compute.__func__.__code__.co_filename).parents
    info = module.info
    assert info.description.endswith(".\n")
    assert info.citation == "" or re.match(r"@\w+\{\w[\w-]+,\n", info.citation)
    assert list(info.features) == list(INPUTS[name][0])
    assert all(f"\n{part}:\n" in info.inputs_description for part in ("Args", "Returns", "Raises", "Examples"))
    assert info.description in type(module).__doc__ and info.inputs_description in module.compute.__doc__


@each
def test_documented_examples_run(name):
    assert run_examples(load(name).inputs_description, name, {}) >= 4


@each
def test_card(name):
    card = SpaceCard.load(Path(module_path(name)) / "README.md")
    assert card.data.title and card.data.sdk == "gradio" and card.data.tags == ["evaluate", "metric"]
    assert card.data.to_dict()["description"].endswith(".")
    assert f"# Metric Card for {card.data.title}\n" in card.text
    assert tuple(re.findall(r"^##+ .*$", card.text, re.M)) == SECTIONS
    citation = load(name).citation
    assert f"```bibtex\n{citation}```" in card.text if citation else "no paper" in card.text.split(SECTIONS[-1])[1]


@each
def test_examples_of_the_card_run(name):
    text = (Path(module_path(name)) / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    shown = [block for block in blocks if block.startswith(">>>")]
    plain = [block for block in blocks if block not in shown]
    assert len(plain) == 1 and shown
    variables: dict = {}
    assert all(run_examples(block, name, variables) for block in shown)
    variables = {}
    exec(compile(plain[0], f"card of {name}", "exec"), variables)
    assert isinstance(variables["results"], dict)


@each
def test_results_are_the_documented_ones(name):
    columns, options = INPUTS[name]
    module = load(name)
    found = module.compute(**columns, **options())
    card = (Path(module_path(name)) / "README.md").read_text(encoding="utf-8")
    outputs = card.split("### Output Values")[1].split("### Examples")[0]
    assert set(re.findall(r"^- \*\*(\w+)\*\*", outputs, re.M)) == set(found)
    returns = module.inputs_description.split("Returns:\n")[1].split("Raises:\n")[0]
    assert set(re.findall(r"^ {4}(\w+) \(", returns, re.M)) == set(found)
    for key, value in found.items():
        rows = value if isinstance(value, list) else [value]
        assert len(rows) == (3 if isinstance(value, list) else 1), key
        assert all(type(number) in (int, float) for number in rows), key


@each
@pytest.mark.parametrize("options", [{}, {"keep_in_memory": True}])
def test_rows_may_come_in_pieces(name, options):
    columns, settings = INPUTS[name]
    whole = load(name, **options).compute(**columns, **settings())
    module = load(name, **options)
    module.add_batch(**{column: rows[:2] for column, rows in columns.items()})
    module.add_batch(**{column: rows[2:] for column, rows in columns.items()})
    assert module.compute(**settings()) == whole
    for row in range(3):
        module.add(**{column.removesuffix("s"): rows[row] for column, rows in columns.items()})
    assert module.compute(**settings()) == whole


def test_modules_combine():
    names = ["edit_distance", "phoneme_error_rate"]
    columns = INPUTS["edit_distance"][0]
    combined = evaluate.combine([module_path(name) for name in names])
    whole = combined.compute(**columns)
    assert whole == load(names[0]).compute(**columns) | load(names[1]).compute(**columns)
    for prediction, reference in zip(columns["predictions"], columns["references"], strict=True):
        combined.add(prediction, reference)
    assert {key: value for module in combined.evaluation_modules for key, value in module.compute().items()} == whole


@pytest.mark.parametrize("form", [np.array, torch.tensor, tuple, lambda rows: map(np.array, rows)])
def test_ids_may_be_arrays_and_tensors(form):
    rows = [[4, 5, 4, 2], [4, 4, 4, 4]]
    for name, options in [("repetition", {}), ("non_termination", {"end_id": 2})]:
        expected = load(name).compute(predictions=rows, **options)
        assert load(name).compute(predictions=form(rows), **options) == expected


@pytest.mark.parametrize("form", [tuple, np.array, lambda rows: Dataset.from_dict({"rows": rows})["rows"]])
def test_texts_may_be_columns_of_a_data_set(form):
    predictions, references = ["a b", "", "c"], ["a", "b b", "c"]
    for given in (references, [[text, "b"] for text in references]):
        expected = load("edit_distance").compute(predictions=predictions, references=given)
        assert load("edit_distance").compute(predictions=form(predictions), references=form(given)) == expected


TEXTS = ["edit_distance", "phoneme_error_rate", "energy_gap", "pseudo_perplexity"]
IDS = ["repetition", "non_termination"]
PAIRS = ["edit_distance", "phoneme_error_rate", "energy_gap"]
SEVERAL = ["edit_distance", "phoneme_error_rate"]
REFUSED = [
    (list(MODULES), dict(predictions=[]), r"predictions must be a list of one or more .*, got \[\]"),
    (PAIRS, dict(predictions=None), "predictions must be a list of one or more .*, got None"),
    (list(MODULES), dict(predictions=3), "predictions must be a list of one or more .*, got 3"),
    (list(MODULES), dict(predictions={"a": 1}), "predictions must be a list of one or more .*, got {'a': 1}"),
    (list(MODULES), dict(predictions={"a"}), "predictions must be a list of one or more .*, got {'a'}"),
    (list(MODULES), dict(predictions=torch.tensor(3)), r"predictions must be a list .*, got tensor\(3\)"),
    (list(MODULES), dict(predictions="a b"), "predictions must be a list of one or more .*, got 'a b'"),
    (TEXTS, dict(predictions=["a", 3]), "predictions must be texts, got 3 in row 1"),
    (TEXTS, dict(predictions=["a", None]), "predictions must be texts, got None in row 1"),
    (TEXTS, dict(predictions=[["a"]]), r"predictions must be texts, got \['a'\] in row 0"),
    (IDS, dict(predictions=[[4], [1.5]]), r"predictions must .*lists of token ids, got \[1.5\] in row 1"),
    (IDS, dict(predictions=[[4], [4, None]]), r"predictions must .*lists of token ids, got \[4, None\] in row 1"),
    (IDS, dict(predictions=[[4], ["5"]]), r"predictions must .*lists of token ids, got \['5'\] in row 1"),
    (IDS, dict(predictions=[[4], "5"]), "predictions must be lists of token ids, got the text '5' in row 1"),
    (IDS, dict(predictions=[4, 5]), "predictions must .*lists of token ids, got 4 in row 0"),
    (IDS, dict(predictions=np.array([[1.0]])), "predictions must .*lists of token ids, got .*1.* in row 0"),
    (["novel_rate"], dict(predictions=["ab"]), "predictions in row 0 must be a list of one or more texts, got 'ab'"),
    (["novel_rate"], dict(predictions=[["a", "b"], ["a"]]), r"in row 1 must hold two or more samples, got \['a'\]"),
    (["novel_rate"], dict(predictions=[["a", 2]]), r"predictions in row 0 must be a list of texts, got \['a', 2\]"),
    (PAIRS, dict(references=None), "references must be a list of one or more .*, got None"),
    (PAIRS, dict(references="abc"), "references must be a list of one or more .*, got 'abc'"),
    (PAIRS, dict(references=["a", "b"]), "predictions and references must be equally many, got 3 and 2"),
    (["energy_gap"], dict(references=["a", ["b"], "c"]), r"references must be texts, got \['b'\] in row 1"),
    (SEVERAL, dict(references=["a", 5, "c"]), "references in row 1 must be a list of one or more texts, got 5"),
    (SEVERAL, dict(references=["a", [], "c"]), r"references in row 1 must be a list of one or more texts, got \[\]"),
    (SEVERAL, dict(references=["a", ["b", 5], "c"]), r"references in row 1 must be a list of texts, got \['b', 5\]"),
    (SEVERAL, dict(references=["a", " ", "c"]), "references in row 1 must hold a symbol each, got ' '"),
    (SEVERAL, dict(references=["a", ["b", ""], "c"]), r"references in row 1 must hold a symbol each, got \['b', ''\]"),
]


@pytest.mark.parametrize(
    ("name", "given", "message"), [(name, given, message) for names, given, message in REFUSED for name in names]
)
def test_refusals_name_the_argument_and_add_nothing(name, given, message):
    columns, options = INPUTS[name]
    module = load(name)
    with pytest.raises(ValueError, match=message):
        module.compute(**{**columns, **given}, **options())
    assert len(module) == 0
    assert module.compute(**columns, **options()) == load(name).compute(**columns, **options())


@each
def test_unknown_inputs_are_refused(name):
    with pytest.raises(ValueError, match="Bad inputs for evaluation module: \\['weights'\\]"):
        load(name).add_batch(**INPUTS[name][0], weights=[1, 1, 1])


def test_after_an_error_of_the_model_rows_are_gone():
    columns, options = INPUTS["pseudo_perplexity"]
    module = load("pseudo_perplexity")
    with pytest.raises(ValueError, match="predictions: row 1 has"):
        module.compute(predictions=["the", "the " * 50], **options())
    assert module.compute(**columns, **options()) == load("pseudo_perplexity").compute(**columns, **options())
