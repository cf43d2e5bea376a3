"""Shared by the tests of the `evaluate` modules: caches of their own, no network, and small inputs for each module."""

import functools
import socket
import sys
from pathlib import Path

import evaluate
import pytest

from hf_ebm.evaluate_modules import module_path
from tests.models.tokenizers_for_tests import small_model, small_tokenizer


@pytest.fixture(autouse=True, scope="package")
def own_caches(tmp_path_factory):
    """`evaluate` copies modules to one folder, rows to another, and imports the copies as a package `evaluate_modules`.

    Other tests, or the user, may have it from another folder.
    """
    folder = tmp_path_factory.mktemp("evaluate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate.config, "HF_MODULES_CACHE", folder / "modules")
        patch.setattr(evaluate.config, "HF_METRICS_CACHE", folder / "metrics")
        patch.setattr(evaluate.config, "HF_EVALUATE_OFFLINE", True)
        patch.setattr(sys, "path", [folder for folder in sys.path if not Path(folder, "evaluate_modules").is_dir()])
        for name in _copies():
            patch.delitem(sys.modules, name)
        yield folder
        for name in _copies():
            del sys.modules[name]


def _copies() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == "evaluate_modules"]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*arguments):
        raise AssertionError(f"a connection was tried: {arguments[1:]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def load(name: str, **options) -> evaluate.Metric:
    return evaluate.load(module_path(name), **options)


@functools.cache
def scorer(energy: str = "local") -> dict:
    """A tiny model and its tokenizer, which reads no capitals, as arguments of `compute`."""
    tokenizer = small_tokenizer("wordpiece")
    return {"model": small_model(tokenizer, energy=energy, positions=40), "tokenizer": tokenizer}


# For each module, three rows and what else `compute` needs.
INPUTS = {
    "edit_distance": (dict(predictions=["a b", "", "c"], references=["a", ["b", "b c"], "c"]), dict),
    "energy_gap": (dict(predictions=["the cat", "", "dog"], references=["the dog", "mat", "Dog"]), scorer),
    "minimal_pairs": (dict(predictions=["the cat", "", "dog"], references=["the dog", "mat", "Dog"]), scorer),
    "non_termination": (dict(predictions=[[4, 2], [], [4, 4, 4]]), lambda: {"end_id": 2}),
    "novel_rate": (dict(predictions=[["a", "b"], ["a", "a", "b"], ["", ""]]), dict),
    "phoneme_error_rate": (dict(predictions=["a b", "", "c"], references=["a", ["b", "b c"], "c"]), dict),
    "pseudo_perplexity": (dict(predictions=["the cat", "on the mat", "dog"]), scorer),
    "repetition": (dict(predictions=[[4, 4, 4, 4, 4], [], [5, 6, 7, 8]]), dict),
}
