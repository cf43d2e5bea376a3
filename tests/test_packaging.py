"""What a wheel would hold, from the packaging settings: everything the package needs, and nothing else."""

import fnmatch
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from setuptools import Distribution

from hf_ebm.models.adapters import LOWEST_PEFT

tomllib = pytest.importorskip("tomllib")
ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
PLACES = {"hf_ebm.trainers": "trainers", "hf_ebm.hub_cards": "hub_cards"}


def folder_of(package: str) -> Path:
    return ROOT / SETTINGS["package-dir"].get(package, package.replace(".", "/"))


def tracked() -> list[Path]:
    """Files of the package under version control, less the links that editable installs need."""
    if not (ROOT / ".git").exists():
        pytest.skip("an unpacked archive has no list of its files")
    command = ["git", "ls-files", "-s", "hf_ebm", "trainers", "hub_cards"]
    lines = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(lines) > 100
    return [ROOT / line.partition("\t")[2] for line in lines if not line.startswith("120000")]


def test_every_package_is_named_and_exists():
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "hf_ebm").rglob("__init__.py")}
    assert set(SETTINGS["packages"]) == found | set(PLACES)
    assert SETTINGS["package-dir"] == PLACES
    assert all((folder_of(package) / "__init__.py").is_file() for package in SETTINGS["packages"])


def test_every_file_is_in_the_wheel_once():
    folders = {folder_of(package): package for package in SETTINGS["packages"]}
    for path in tracked():
        package = folders.get(path.parent)
        if package is not None and path.suffix == ".py":
            continue
        homes = [
            (folder, pattern)
            for folder, name in folders.items()
            for pattern in SETTINGS["package-data"].get(name, [])
            if folder in path.parents and fnmatch.fnmatch(str(path.relative_to(folder)), pattern)
        ]
        assert homes, f"{path.relative_to(ROOT)} is in no package and no package data"


def test_patterns_of_package_data_match_something():
    for package, patterns in SETTINGS["package-data"].items():
        for pattern in patterns:
            assert list(folder_of(package).glob(pattern)), f"{package}: {pattern}"


def test_installing_warns_of_nothing(tmp_path, monkeypatch, recwarn):
    """Looking for data by itself setuptools takes their folders for forgotten packages, and warns of each at length."""
    monkeypatch.chdir(ROOT)
    distribution = Distribution({"script_name": "setup.py"})
    distribution.parse_config_files()
    distribution.get_command_obj("egg_info").egg_base = str(tmp_path)  # which it may write
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    data = {Path(folder, name) for _, folder, _, names in build.data_files for name in names}
    assert len(data) > 50 and not [str(warning.message) for warning in recwarn]


def test_weights_are_safetensors_alone():
    assert not [path for path in tracked() if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".h5", ".ckpt")]


def test_hooks_before_a_commit_are_the_checks_of_make_lint():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    recipe = re.search(r"^lint: setup\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    checks = set(re.findall(r"\$\(BIN\)/(\S+)", recipe[1]))
    assert {hook["entry"].split()[0].removeprefix(".venv/bin/") for hook in hooks} == checks
    for form in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        found = yaml.safe_load(form.read_text())
        assert found["name"] and found["description"] and all(part["attributes"]["label"] for part in found["body"])


def test_the_lowest_peft_is_one_everywhere():
    """The one that adapters are refused below is the one that tests take."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"peft>={LOWEST_PEFT}" in project["optional-dependencies"]["dev"]
    assert f"`peft` ≥ {LOWEST_PEFT}" in (ROOT / "README.md").read_text(encoding="utf-8")
