"""Adapters of PEFT: energies are a plain loop's over the stock model with the adapter, on, off, saved and merged."""

import json
import re

import pytest
import torch
from peft import (
    IA3Config,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    get_peft_model,
)
from transformers import AutoModel, AutoModelForMaskedLM, BertConfig, BertForMaskedLM

from hf_ebm import EnergyModel
from hf_ebm.models import adapters
from hf_ebm.models.adapters import check_in_layers, has_adapters, own_tokenizer
from hf_ebm.models.energy.configuration_energy import token_roles
from tests.models.families import tiny_family_model
from tests.models.tokenizers_for_tests import small_tokenizer

IDS = torch.tensor([[2, 10, 11, 12, 3]])
LORA = dict(r=4, target_modules=["query", "value", "dense"])
KINDS = {
    "lora": lambda: LoraConfig(**LORA),
    "ia3": lambda: IA3Config(target_modules=["key", "value", "output.dense"], feedforward_modules=["output.dense"]),
    "whole head": lambda: LoraConfig(r=2, target_modules=["query"], modules_to_save=["transform"]),
}


def small_mlm(intermediate: int = 32) -> BertForMaskedLM:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(small_tokenizer("wordpiece")), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=intermediate, max_position_embeddings=32,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.35)
    return model.eval()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A masked-LM checkpoint with its tokenizer."""
    folder = tmp_path_factory.mktemp("base")
    small_mlm().save_pretrained(folder)
    small_tokenizer("wordpiece").save_pretrained(folder)
    return folder


def with_adapter(mlm, kind: str) -> PeftModel:
    """The adapter is far from doing nothing."""
    model = get_peft_model(mlm, KINDS[kind]())
    for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        torch.manual_seed(number)
        parameter.data.uniform_(0.2, 2.0) if kind == "ia3" else parameter.data.normal_(0, 0.5)
    return model.eval()


@torch.no_grad()
def plain_energy(mlm) -> float:
    """A plain loop over a model's own forward."""
    total = 0.0
    for position in (1, 2, 3):
        masked = IDS.clone()
        masked[0, position] = 4
        total -= float(mlm(input_ids=masked).logits[0, position].log_softmax(-1)[IDS[0, position]])
    return total


@torch.no_grad()
def energy(model: EnergyModel) -> float:
    return float(model(IDS).energy)


def wrapped(mlm) -> EnergyModel:
    tokenizer = small_tokenizer("wordpiece")
    return EnergyModel(mlm, **token_roles(tokenizer, len(tokenizer)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_with_only_an_adapter_loads(kind, base, tmp_path):
    peft = with_adapter(AutoModelForMaskedLM.from_pretrained(base), kind)
    peft.save_pretrained(tmp_path)
    stock = plain_energy(AutoModelForMaskedLM.from_pretrained(tmp_path))
    assert abs(stock - plain_energy(small_mlm())) > 0.2
    model = EnergyModel.from_pretrained(tmp_path)
    assert energy(model) == pytest.approx(stock, rel=1e-5)
    assert model.config.mask_token_id == 4  # of the base model's tokenizer
    assert len(own_tokenizer(str(tmp_path))) == model.vocab_size


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_wrapped_switched_saved_and_loaded(kind, base, tmp_path):
    peft = with_adapter(AutoModelForMaskedLM.from_pretrained(base), kind)
    on, off = plain_energy(peft), plain_energy(small_mlm())
    model = wrapped(peft)
    assert model.mlm is peft.get_base_model() and energy(model) == pytest.approx(on, rel=1e-5)
    with peft.disable_adapter():
        assert energy(model) == pytest.approx(off, rel=1e-5)
    model.disable_adapters()
    assert energy(model) == pytest.approx(off, rel=1e-5)
    model.enable_adapters()
    assert energy(model) == pytest.approx(on, rel=1e-5)
    model.config.energy = "raw"
    model.save_pretrained(tmp_path)
    files = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "config.json"} <= set(files)
    assert "model.safetensors" not in files
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    for again in (EnergyModel.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert isinstance(again, EnergyModel) and has_adapters(again) and again.config.energy == "raw"
        again.config.energy = "local"
        assert energy(again) == pytest.approx(on, rel=1e-5)
    read = PeftModel.from_pretrained(AutoModelForMaskedLM.from_pretrained(base), tmp_path)
    assert plain_energy(read) == pytest.approx(on, rel=1e-5)
    assert EnergyModel.from_pretrained(tmp_path, energy="local", dtype=torch.float64).mlm.dtype == torch.float64


@pytest.mark.parametrize("kind", KINDS)
def test_merged_models_are_plain_ones(kind, base, tmp_path):
    peft = with_adapter(AutoModelForMaskedLM.from_pretrained(base), kind)
    model, on = wrapped(peft), plain_energy(peft)
    merged = peft.merge_and_unload()
    assert not has_adapters(merged)
    for one in (model, wrapped(merged)):
        assert energy(one) == pytest.approx(on, rel=1e-4)
        one.save_pretrained(tmp_path)
        assert not (tmp_path / "adapter_config.json").exists()
        assert energy(EnergyModel.from_pretrained(tmp_path)) == pytest.approx(on, rel=1e-4)


@pytest.mark.parametrize("first", [True, False])
def test_what_was_verified_with_adapters_off_is_verified_again_with_them_on(first):
    """Without a feed-forward network that widens, the last layers that do are the adapter's, and attention follows."""
    peft = get_peft_model(
        small_mlm(intermediate=16), LoraConfig(r=2, target_modules=["value"], init_lora_weights=False)
    )
    model = wrapped(peft.eval())
    for on in (first, not first):
        (model.enable_adapters if on else model.disable_adapters)()
        assert energy(model) == pytest.approx(plain_energy(model.mlm), rel=1e-5)


def test_adapters_of_an_energy_model_are_its_masked_language_models(base, tmp_path):
    """Also of a saved one, whose folder is then the base."""
    EnergyModel.from_pretrained(base, energy="raw").save_pretrained(tmp_path / "saved")
    for number, place in enumerate((base, tmp_path / "saved")):
        model = EnergyModel.from_pretrained(place)
        before = energy(model)
        model.add_adapter(LoraConfig(r=2, target_modules=["query"], init_lora_weights=False))
        assert abs(energy(model) - before) > 1e-3
        model.save_pretrained(tmp_path / str(number))
        again = EnergyModel.from_pretrained(tmp_path / str(number))
        assert energy(again) == pytest.approx(energy(model), rel=1e-5)
        assert again.config.energy == model.config.energy == ("local", "raw")[number]


@pytest.mark.parametrize(
    "settings",
    [
        PromptTuningConfig(num_virtual_tokens=3, task_type="TOKEN_CLS"),
        PrefixTuningConfig(num_virtual_tokens=3, task_type="FEATURE_EXTRACTION"),
        LoraConfig(r=2, target_modules=["query"], alora_invocation_tokens=[7, 8]),
    ],
)
def test_adapters_around_the_model_are_refused_by_name(settings):
    kind = settings.peft_type.value
    with pytest.raises(ValueError, match=f"an adapter of the type {kind} .* LoRA or IA3"):
        EnergyModel(get_peft_model(small_mlm(), settings))


def test_what_would_not_be_loaded_again_is_refused_before_anything_is_written(base, tmp_path):
    target = tmp_path / "target"
    nameless = wrapped(with_adapter(small_mlm(), "lora"))
    with pytest.raises(ValueError, match=r"has no name; merge_and_unload.*or save the base model first"):
        nameless.save_pretrained(target)
    lost = wrapped(with_adapter(AutoModelForMaskedLM.from_pretrained(base), "lora"))
    lost.mlm.peft_config["default"].base_model_name_or_path = str(tmp_path / "gone")
    with pytest.raises(ValueError, match="is not found at"):
        lost.save_pretrained(target)
    grown = AutoModelForMaskedLM.from_pretrained(base)
    grown.resize_token_embeddings(grown.config.vocab_size + 8)
    with pytest.raises(ValueError, match="has 150 ids, not 158"):
        wrapped(with_adapter(grown, "lora")).save_pretrained(target)
    around = get_peft_model(EnergyModel.from_pretrained(base), LoraConfig(**LORA))
    with pytest.raises(ValueError, match="put there by EnergyModel"):
        around.get_base_model().save_pretrained(target)
    two = with_adapter(AutoModelForMaskedLM.from_pretrained(base), "lora")
    two.add_adapter("other", LoraConfig(**LORA))
    two.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match=r"must have one active adapter to be saved.*default, other"):
        wrapped(two).save_pretrained(target)
    assert not target.exists()
    with pytest.raises(ValueError, match="resize the base model, and save it, before"):
        wrapped(two).resize_token_embeddings(200)
    around.save_pretrained(target)
    with pytest.raises(ValueError, match="the adapter is of another model"):
        EnergyModel.from_pretrained(target)
    with pytest.raises(ValueError, match=r"holds an adapter .*which would be loaded with the model"):
        wrapped(small_mlm()).save_pretrained(target)


def test_an_encoder_decoder_with_an_adapter():
    peft = get_peft_model(
        tiny_family_model("bart"), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    assert has_adapters(EnergyModel(peft.eval(), mask_token_id=4, special_token_ids=[0, 1, 2]).mlm)


def test_an_old_peft_is_refused_by_name_whatever_way_an_adapter_comes(base, tmp_path, monkeypatch):
    peft = with_adapter(AutoModelForMaskedLM.from_pretrained(base), "lora")
    peft.save_pretrained(tmp_path)
    monkeypatch.setattr(adapters, "LOWEST_PEFT", "99.1")
    for argument, use in {
        "mlm": lambda: wrapped(peft),
        str(tmp_path): lambda: EnergyModel.from_pretrained(tmp_path),
        "adapter_config": lambda: wrapped(small_mlm()).add_adapter(LoraConfig(target_modules=["query"])),
        "model": lambda: check_in_layers("model", peft),
    }.items():
        with pytest.raises(ValueError, match=rf"^{re.escape(argument)}: adapters need peft 99.1 or later, got 0\."):
            use()
    assert wrapped(small_mlm()) is not None
