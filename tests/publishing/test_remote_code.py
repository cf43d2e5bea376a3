"""The code beside a model holds what the model needs of the package, and nothing else."""

import ast
import builtins
import dis
import sys
from types import CodeType

import pytest
import torch

from hf_ebm import ProductLM, ResidualEnergyModel, mbr
from hf_ebm.publishing.remote_code import write_custom_generate, write_remote_code
from tests.conftest import tiny_energy_model
from tests.models.residual_models import toy_encoder, toy_lm
from tests.models.test_bilstm import tiny_bilstm
from tests.seq2seq_families import tiny_seq2seq

MODELS = {
    "energy": tiny_energy_model,
    "residual": lambda: ResidualEnergyModel(toy_lm(dtype=torch.float32), toy_encoder(dtype=torch.float32)),
    "product": lambda: ProductLM(toy_lm(dtype=torch.float32), toy_lm(seed=3, dtype=torch.float32)),
    "lstm": lambda: tiny_seq2seq("lstm additive"),
    "bilstm": tiny_bilstm,
    "custom generate": None,
    "custom generate, mbr": None,
}
GENERATE = {"custom generate": "sampler", "custom generate, mbr": "mbr"}
# Of modules that are published in part: a name that models need not.
UNNEEDED = {"hf_ebm_runtime": "check_launch", "hf_ebm_texts": "TextEnergy", "hf_ebm_model_facts": "target_length"}


def stored(code: CodeType) -> set[str]:
    return {one.argval for one in dis.get_instructions(code) if one.opname in ("STORE_NAME", "STORE_GLOBAL")}


def unknown(code: CodeType, known: set[str]) -> set[str]:
    """Names that a module's code, functions and classes in it look up, and that nothing gives a meaning to."""
    own = known | stored(code)
    found = {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")} - own
    return found.union(*(unknown(inner, known) for inner in code.co_consts if isinstance(inner, CodeType)))


@pytest.mark.parametrize("kind", MODELS)
def test_published_code_is_whole_and_no_more_than_that(kind, tmp_path):
    if kind in GENERATE:
        files = [name for name in write_custom_generate(tmp_path, GENERATE[kind]) if name.endswith(".py")]
    else:
        model = MODELS[kind]()
        model.config.save_pretrained(tmp_path)
        files = write_remote_code(tmp_path, model)
    sources = {(tmp_path / name).stem: (tmp_path / name).read_text() for name in files}
    codes = {name: compile(text, name, "exec") for name, text in sources.items()}
    own = {name: stored(code) for name, code in codes.items()}
    always = {*dir(builtins), "__annotations__", "__file__", "__module__", "__qualname__"}
    for name, code in codes.items():
        assert not unknown(code, own[name] | always), name
    for name, text in sources.items():
        assert "hf_ebm.assets" not in text  # which examples import
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert {alias.name for alias in node.names} <= own[node.module], (name, node.module)
    assert not any(unneeded in own.get(name, ()) for name, unneeded in UNNEEDED.items())


@pytest.mark.parametrize("kind", ["energy", "custom generate"])
def test_methods_that_are_left_out_take_their_modules_along(kind, tmp_path):
    if kind == "energy":
        model = tiny_energy_model()
        model.config.save_pretrained(tmp_path)
        files, own = write_remote_code(tmp_path, model), ("generate", "score", "rerank", "fill")
    else:
        files, own = write_custom_generate(tmp_path), ("generate",)
    file = next(name for name in files if name.endswith("hf_ebm_models_energy_modeling_energy.py"))
    (methods,) = (
        node for node in ast.parse((tmp_path / file).read_text()).body if getattr(node, "name", "") == "EnergyModel"
    )
    assigned = {
        node.value.id for node in methods.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)
    }
    assert assigned & {"generate", "score", "rerank", "fill", "score_variants", "generate_from_sources"} == set(own)
    assert not any("mutations" in name or "conditional_energy" in name for name in files)
    assert any("joint_fills" in name for name in files) == (kind == "energy")


@pytest.fixture
def modules_apart(tmp_path, monkeypatch):
    """Published code is imported from a folder of its own, and nothing of it stays for the tests that come after."""

    def taken() -> dict:
        return {name: sys.modules.pop(name) for name in [*sys.modules] if name.startswith("transformers_modules")}

    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    others = taken()
    yield
    taken()
    sys.modules.update(others)


@pytest.mark.usefixtures("modules_apart")
def test_published_minimum_bayes_risk_decoding_is_that_of_the_package(tmp_path):
    write_custom_generate(tmp_path / "mbr", "mbr")
    model, found = tiny_seq2seq("bart").eval(), []
    settings = {"do_sample": True, "num_return_sequences": 5, "max_new_tokens": 4, "num_references": 3}
    for way in ({"custom_generate": str(tmp_path / "mbr"), "trust_remote_code": True}, {"custom_generate": mbr}):
        torch.manual_seed(0)
        found.append(model.generate(torch.tensor([[4, 5], [6, 7]]), **way, **settings))
    assert torch.equal(*found) and len(found[0]) == 2
    assert "minimum-bayes-risk" in (tmp_path / "mbr" / "README.md").read_text()
    with pytest.raises(ValueError, match="method must be one of 'sampler', 'mbr'"):
        write_custom_generate(tmp_path, "beams")
