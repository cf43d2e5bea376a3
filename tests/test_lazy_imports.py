"""`import hf_ebm` imports nothing else, and Transformers' auto classes know its models all the same."""

import subprocess
import sys
from importlib import import_module

import pytest

import hf_ebm
from hf_ebm import registration

AUTO = "transformers.models.auto.configuration_auto"
TOY = f"""
import sys
from transformers import PreTrainedConfig
class ToyConfig(PreTrainedConfig):
    model_type = "toy"
sys.modules["{AUTO}"].AutoConfig.register("toy", ToyConfig)
"""


def test_the_package_imports_nothing_before_it_is_used():
    seen = "import sys, hf_ebm; print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", seen], text=True).strip() == "[]"


@pytest.mark.parametrize("imported", [True, False], ids=["after", "before"])
def test_auto_classes_import_a_model_when_they_are_asked_for_it(imported, tmp_path, monkeypatch):
    """Whether the package is imported after the auto classes or before them."""
    (tmp_path / "toy_model.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registration, "MODEL_TYPES", {"toy": "toy_model"})
    auto = import_module(AUTO)
    monkeypatch.setattr(import_module("transformers.models.auto"), "configuration_auto", auto)
    monkeypatch.setattr(auto.CONFIG_MAPPING, "_extra_content", {})
    if not imported:
        monkeypatch.delitem(sys.modules, AUTO)
    registration.announce()
    auto = import_module(AUTO)
    assert "toy" in auto.CONFIG_MAPPING and "toy_model" not in sys.modules
    config = auto.AutoConfig.for_model("toy")
    assert type(config).__name__ == "ToyConfig" and config.model_type == "toy"
    assert type(config) in auto.CONFIG_MAPPING.values() and ("toy", type(config)) in auto.CONFIG_MAPPING.items()
    del sys.modules["toy_model"]


def test_every_model_type_is_registered_where_it_is_said_to_be():
    """In a process of its own: a published copy that other tests load registers itself in place of the package's."""
    program = f"""
import hf_ebm, {AUTO} as auto
for name in {list(registration.MODEL_TYPES)!r}:
    print(name, auto.CONFIG_MAPPING[name].model_type, auto.CONFIG_MAPPING[name].__module__)
"""
    lines = subprocess.check_output([sys.executable, "-c", program], text=True).splitlines()
    assert len(lines) == len(registration.MODEL_TYPES)
    for line, (model_type, module) in zip(lines, registration.MODEL_TYPES.items(), strict=True):
        name, own, place = line.split()
        assert (name, own) == (model_type, model_type) and place.startswith(module)


def test_public_names_and_modules_are_there_and_no_others():
    assert set(hf_ebm.__all__) <= set(dir(hf_ebm))
    assert all(getattr(hf_ebm, name).__module__.startswith("hf_ebm.") for name in hf_ebm.__all__)
    given: dict = {}
    exec("from hf_ebm import *", given)
    assert set(hf_ebm.__all__) == set(given) - {"__builtins__"}
    assert hf_ebm.trainers.__name__ == "hf_ebm.trainers"
    with pytest.raises(AttributeError, match="nothing"):
        _ = hf_ebm.nothing
