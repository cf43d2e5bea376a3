"""The recipes of CONTRIBUTING.md apply to the package, and what they add works where it is looked for."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
RECIPES = re.findall(r"^### (.*?)\n.*?^```diff\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.S | re.M)
CHECKS = {
    "A kernel": "tests/sampling/test_tables.py::test_every_entry_keeps_its_word[kernel-barker]",
    "An energy": "tests/docs/recipes_in_use.py::test_energy",
    "An objective": "tests/docs/recipes_in_use.py::test_objective",
    "A cost": "tests/docs/recipes_in_use.py::test_cost",
    "A model family": "tests/docs/recipes_in_use.py::test_model_family",
}


@pytest.fixture(scope="module")
def checked(tmp_path_factory) -> str:
    """What pytest says of all checks, run in a copy to which all recipes are applied."""
    copy = tmp_path_factory.mktemp("recipes")
    unread = shutil.ignore_patterns("__pycache__", "*.safetensors")
    for name in ("hf_ebm", "trainers", "hub_cards", "tests"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=unread)
    for title, diff in RECIPES:
        done = subprocess.run(["git", "apply", "--recount"], input=diff, text=True, cwd=copy, capture_output=True)
        assert not done.returncode, f"{title}: {done.stderr}"
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(copy)]
    environment = {**os.environ, "PYTHONPATH": str(copy), "GIT_DIR": os.devnull}
    return subprocess.run(
        [*command, *CHECKS.values()], cwd=copy, env=environment, text=True, stdout=subprocess.PIPE
    ).stdout


def test_every_recipe_is_checked():
    assert [title for title, _ in RECIPES] == list(CHECKS)
    assert all(len(diff.splitlines()) < 60 for _, diff in RECIPES)


@pytest.mark.parametrize("title", CHECKS)
def test_what_a_recipe_adds_works(title, checked):
    assert f"{CHECKS[title]} PASSED" in checked, checked[-4000:]
