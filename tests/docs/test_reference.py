"""The API reference holds every exported name, and the index every page."""

from pathlib import Path

import pytest

import hf_ebm
import hf_ebm.pipelines
import hf_ebm.trainers
from hf_ebm.evaluate_modules import MODULES

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = "\n".join(path.read_text("utf-8") for path in (DOCS / "reference").glob("*.rst"))
DIRECTIVES = [line.split("::")[1].strip() for line in REFERENCE.splitlines() if line.startswith(".. auto")]


@pytest.mark.parametrize("package", [hf_ebm, hf_ebm.trainers, hf_ebm.pipelines], ids=lambda package: package.__name__)
def test_public_names_are_in_the_reference(package):
    missing = [name for name in package.__all__ if name != "TASKS" and f"{package.__name__}.{name}" not in DIRECTIVES]
    # What a module page documents needs no entry of its own.
    missing = [name for name in missing if getattr(package, name).__module__ not in DIRECTIVES]
    assert not missing, f"docs/reference/ needs entries of {missing}"


def test_nothing_is_described_twice():
    assert len(set(DIRECTIVES)) == len(DIRECTIVES)


def test_metrics_and_pages_are_listed():
    guide = (DOCS / "guides/pipelines_and_metrics.md").read_text("utf-8")
    assert all(f"`{name}`" in guide for name in MODULES)
    index = (DOCS / "index.md").read_text("utf-8")
    pages = [
        path.relative_to(DOCS).with_suffix("")
        for folder in ("guides", "reference")
        for path in (DOCS / folder).iterdir()
    ]
    assert all(f"\n{page.as_posix()}\n" in index for page in pages)
