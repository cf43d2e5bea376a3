"""Trained models that aren't ours, from packages that `make real` downloads into the environment's `real`."""

import sys
from pathlib import Path

import pytest


def reaction_wheel() -> Path:
    """The wheel of rxnmapper 0.4.3; a test is skipped where there is none."""
    path = Path(sys.prefix, "real", "rxnmapper-0.4.3-py3-none-any.whl")
    if not path.exists():
        pytest.skip(f"{path.name} isn't there: make real")
    return path
