"""Examples in docstrings give what they say, and public functions of the pure modules have one."""

import doctest
import importlib
import pkgutil

import pytest

import hf_ebm

PURE = ("exact", "scoring", "sampling", "relaxations", "objectives")
MODULES = [
    module.name
    for module in pkgutil.walk_packages(hf_ebm.__path__, "hf_ebm.")
    if module.name.split(".")[1] in PURE and not module.ispkg
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_say(name):
    module = importlib.import_module(name)
    found = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert not found.failed
