"""Masked language models with code of their own: the right class or an error, never another class without a word."""

import importlib
import json

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    BertForMaskedLM,
    PreTrainedModel,
)
from transformers.modeling_outputs import MaskedLMOutput

from hf_ebm import EnergyConfig, EnergyModel, ProductLM, ResidualEnergyModel
from tests.conftest import tiny_mlm
from tests.models.own_code_checkpoints import checkpoint_with_code, write_code
from tests.models.residual_models import toy_lm
from tests.models.test_adapters import energy, plain_energy

CODE = {
    "tower": {"AutoConfig": "configuration_tower.TowerConfig", "AutoModelForMaskedLM": "modeling_tower.Tower"},
    "scaled": {"AutoModelForMaskedLM": "modeling_scaled.ScaledBert"},
}


@pytest.fixture(scope="module", params=CODE)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def checkpoint(kind, tmp_path_factory):
    return checkpoint_with_code(tmp_path_factory.mktemp("own") / kind, kind)


def stock(checkpoint) -> PreTrainedModel:
    return AutoModelForMaskedLM.from_pretrained(checkpoint, trust_remote_code=True)


def test_load_wrap_save_and_load_again(checkpoint, kind, tmp_path):
    mlm = stock(checkpoint)
    expected = plain_energy(mlm)
    loaded = EnergyModel.from_pretrained(checkpoint, trust_remote_code=True)
    again = EnergyModel(mlm, mask_token_id=4, special_token_ids=[0, 2, 3])
    for number, model in enumerate((loaded, again)):
        assert energy(model) == pytest.approx(expected, rel=1e-5)
        for turn in range(2):  # also one that was loaded from what was saved
            folder = tmp_path / f"{number}{turn}"
            model.save_pretrained(folder)
            assert json.loads((folder / "config.json").read_text())["text_config"]["auto_map"] == CODE[kind]
            assert all((folder / f"{place.split('.')[0]}.py").is_file() for place in CODE[kind].values())
            model = EnergyModel.from_pretrained(folder, trust_remote_code=True)
            assert energy(model) == pytest.approx(expected, rel=1e-5)
            assert type(model.mlm).__name__ == type(mlm).__name__
        auto = AutoModel.from_pretrained(folder, trust_remote_code=True)
        assert isinstance(auto, EnergyModel) and energy(auto) == pytest.approx(expected, rel=1e-5)
    (tmp_path / "below").mkdir()
    loaded.save_pretrained(tmp_path / "below" / "model")
    deep = EnergyModel.from_pretrained(tmp_path / "below", subfolder="model", trust_remote_code=True)
    assert energy(deep) == pytest.approx(expected, rel=1e-5)


def test_without_trust_there_is_an_error_and_not_another_class(checkpoint, kind, tmp_path):
    message = r"has code of its own \(.*modeling_.*\).*trust_remote_code=True"
    with pytest.raises(ValueError, match=message):
        EnergyModel.from_pretrained(checkpoint)
    EnergyModel.from_pretrained(checkpoint, trust_remote_code=True).save_pretrained(tmp_path)
    for load in (EnergyModel.from_pretrained, AutoModel.from_pretrained):
        for arguments in ({}, {"trust_remote_code": False}):
            with pytest.raises(ValueError, match=message):
                load(tmp_path, **arguments)
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, EnergyConfig)
    with pytest.raises(ValueError, match="has code of its own"):
        EnergyModel(config)
    config.save_pretrained(tmp_path / "config")
    for name in ("config", "."):
        texts = (tmp_path / name / "config.json").read_text()
        assert json.loads(texts)["text_config"]["auto_map"] == CODE[kind]


def test_the_class_of_transformers_is_taken_on_request(checkpoint, kind, tmp_path):
    if kind == "tower":
        with pytest.raises(ValueError, match="has code of its own"):
            EnergyModel.from_pretrained(checkpoint, trust_remote_code=False)
        return
    model = EnergyModel.from_pretrained(checkpoint, trust_remote_code=False)
    assert type(model.mlm) is BertForMaskedLM
    model.save_pretrained(tmp_path)  # which no longer names the code that was not run
    again = EnergyModel.from_pretrained(tmp_path)
    assert energy(again) == pytest.approx(energy(model)) and not (tmp_path / "modeling_scaled.py").exists()


class TripledBert(BertForMaskedLM):
    """A user's own, in a script."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 3
        return output


class Bag(PreTrainedModel):
    """Another, of a name that says nothing."""

    config_class, _supports_sdpa = BertForMaskedLM.config_class, True

    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(config.vocab_size, 8)
        self.head = torch.nn.Linear(8, config.vocab_size)
        self.causal = False
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids, return_dict=True):
        hidden = self.embed(input_ids)
        hidden = hidden.cumsum(1) if self.causal else hidden + hidden.mean(1, keepdim=True)
        return MaskedLMOutput(logits=self.head(hidden))


def test_classes_of_a_script_can_be_used_but_not_saved(tmp_path):
    config = tiny_mlm(vocab_size=20).config
    for mlm in (TripledBert(config), Bag(config)):
        model = EnergyModel(mlm.eval(), mask_token_id=4, special_token_ids=[0, 2, 3])
        assert energy(model) == pytest.approx(plain_energy(mlm), rel=1e-5)
        assert model.generate(lengths=2, num_epochs=1, seed=0).energies.isfinite().all()
        with pytest.raises(ValueError, match=rf"{type(mlm).__name__}\.register_for_auto_class\('AutoModelForMaskedLM'"):
            model.save_pretrained(tmp_path / "saved")
        assert not (tmp_path / "saved").exists()
    mlm.causal = True
    with pytest.raises(ValueError, match="Bag is causal"):
        EnergyModel(mlm)
    mlm.head = torch.nn.Linear(8, 3)
    with pytest.raises(ValueError, match="Bag has no masked-language-model head"):
        EnergyModel(mlm)


def test_a_module_that_is_registered_is_saved_with_its_code(tmp_path, monkeypatch):
    write_code(tmp_path, "scaled")
    monkeypatch.syspath_prepend(tmp_path)
    scaled = importlib.import_module("modeling_scaled").ScaledBert
    mlm = scaled(tiny_mlm(vocab_size=20).config).eval()
    model = EnergyModel(mlm, mask_token_id=4, special_token_ids=[0, 2, 3])
    with pytest.raises(ValueError, match=r"ScaledBert\.register_for_auto_class"):
        model.save_pretrained(tmp_path / "saved")
    scaled.register_for_auto_class("AutoModelForMaskedLM")
    model.save_pretrained(tmp_path / "saved")
    again = EnergyModel.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    assert energy(again) == pytest.approx(energy(model), rel=1e-5)


def test_models_of_two_parts_do_not_save_code(checkpoint, kind, tmp_path):
    class Quick(type(toy_lm())):
        pass

    lm = Quick(toy_lm().config).double()
    product = ProductLM(lm, toy_lm(seed=1))
    with pytest.raises(ValueError, match="lm: Quick has code of its own"):
        product.save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match="encoder must be what AutoModel makes"):
        ResidualEnergyModel(toy_lm(), stock(checkpoint))
    assert not (tmp_path / "saved").exists()
