"""Checksums of models: of every part that decides a value, and of nothing else."""

import hashlib
from dataclasses import replace

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from hf_ebm import EnergyModel
from hf_ebm.models.energy.saved_runs import SavedRun
from hf_ebm.models.fingerprints import fingerprint, model_fingerprints
from tests.conftest import tiny_energy_model
from tests.models.own_code_checkpoints import checkpoint_with_code
from tests.models.tokenizers_for_tests import small_tokenizer
from tests.sampling.chains import BASE, equal


def changed(model: EnergyModel, reference: dict[str, str], tokenizer=None) -> list[str]:
    return [name for name, found in model_fingerprints(model, tokenizer).items() if found != reference[name]]


def test_of_weights_it_is_of_all_bytes_names_and_types():
    model = tiny_energy_model()
    digest = hashlib.sha256()
    for name in sorted(model.state_dict()):
        tensor = model.state_dict()[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    assert fingerprint(model) == digest.hexdigest()
    moved = tiny_energy_model()
    cpu_offload(moved, execution_device="cpu", offload_buffers=True)
    assert any(tensor.is_meta for tensor in moved.state_dict().values()) and fingerprint(moved) == digest.hexdigest()
    assert fingerprint(model.to(torch.bfloat16)) != digest.hexdigest()


def test_each_part_is_told_from_the_others(tmp_path):
    model, tokenizer = tiny_energy_model(), small_tokenizer("wordpiece")
    model.save_pretrained(tmp_path / "saved")
    known = model_fingerprints(model, tokenizer)
    again = EnergyModel.from_pretrained(tmp_path / "saved", masking="unmasked", max_sequence_length=20)
    assert changed(again, known) == []  # another folder and scoring variant, a limit that is lifted
    assert changed(EnergyModel.from_pretrained(tmp_path / "saved", excluded_token_ids=[5]), known) == ["configuration"]
    again.mlm.config.layer_norm_eps = 1e-3
    assert changed(again, known) == ["configuration"]
    again.mlm.config.layer_norm_eps = model.mlm.config.layer_norm_eps
    again.mlm.bert.embeddings.word_embeddings.weight.data[5, 3] += 1e-6
    assert changed(again, known) == ["weights"]
    tokenizer("the cat", padding="max_length", max_length=20, truncation=True)
    assert changed(model, known, tokenizer) == []  # how the last text was padded
    tokenizer.backend_tokenizer.normalizer = None
    assert changed(model, known, tokenizer) == ["tokenizer"]


def test_of_tokenizers_without_a_backend_it_is_of_their_files(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat"]
    found = []
    for name, own in (("a", words), ("b", words), ("c", [*words[:5], "cat", "the"])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vocab.txt").write_text("\n".join(own))
        tokenizer = BertTokenizerLegacy(str(tmp_path / name / "vocab.txt"))
        assert not hasattr(tokenizer, "backend_tokenizer")
        found.append(model_fingerprints(tiny_energy_model(), tokenizer)["tokenizer"])
    assert found[0] == found[1] != found[2]


def test_adapters_are_part_of_a_model_as_they_are_used():
    model = tiny_energy_model()
    model.add_adapter(LoraConfig(r=2, target_modules=["query"]))
    known = model_fingerprints(model)
    model.disable_adapters()
    assert changed(model, known) == ["adapters"]
    model.enable_adapters()
    assert changed(model, known) == []
    layer = next(one for one in model.modules() if isinstance(one, BaseTunerLayer))
    layer.set_scale("default", 3.0)
    assert changed(model, known) == ["adapters"]
    layer.set_scale("default", 1.0)
    for name, parameter in model.named_parameters():
        parameter.data += "lora_B" in name
    weights = model_fingerprints(model)
    assert changed(model, known) == ["weights"]
    layer.merge()
    assert changed(model, weights) == ["weights", "adapters"]


def test_code_of_a_checkpoint_is_part_of_it(tmp_path):
    folder = checkpoint_with_code(tmp_path / "scaled", "scaled")
    known = model_fingerprints(EnergyModel.from_pretrained(folder, trust_remote_code=True))
    assert changed(EnergyModel.from_pretrained(folder, trust_remote_code=True), known) == []
    assert changed(EnergyModel.from_pretrained(folder, trust_remote_code=False), known) == ["code"]
    code = folder / "modeling_scaled.py"
    code.write_text(code.read_text().replace("* 3", "* 4"))
    assert changed(EnergyModel.from_pretrained(folder, trust_remote_code=True), known) == ["code"]


def test_a_saved_run_goes_on_with_its_model_alone(tmp_path):
    model = tiny_energy_model()
    model.generate(**BASE, save_state_to=tmp_path / "own")
    nearly = tiny_energy_model()
    nearly.mlm.bert.embeddings.word_embeddings.weight.data[5, 3] += 1e-5  # energies are the same up to rounding
    with pytest.raises(ValueError, match="of a model with other weights"):
        nearly.generate(resume_from=tmp_path / "own", num_epochs=9)
    whole = model.generate(**BASE | {"num_epochs": 9})
    assert equal(whole, model.generate(resume_from=tmp_path / "own", num_epochs=9))


def test_a_run_that_save_wrote_has_every_chains_energy_compared(tmp_path):
    """`SavedRun.save` knows no model."""
    model = tiny_energy_model()
    run = model.generate(**BASE).run
    run.save(tmp_path / "run")
    whole = model.generate(**BASE | {"num_epochs": 9})
    assert equal(whole, model.generate(resume_from=tmp_path / "run", num_epochs=9, save_state_to=tmp_path / "more"))
    assert SavedRun.load(tmp_path / "more").run_config["model"] == model_fingerprints(model)
    terms = run.state.token_energies.clone()
    terms[2, 1] += 0.5
    replace(run, state=run.state._replace(token_energies=terms)).save(tmp_path / "run")
    with pytest.raises(ValueError, match="it is not the run's model"):
        model.generate(resume_from=tmp_path / "run", num_epochs=9)
