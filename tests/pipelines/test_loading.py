"""`pipeline(task, model=…)`: by name, by object, what is refused and why."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertModel, pipeline

import hf_ebm.pipelines
from hf_ebm import EnergyModel, ResidualEnergyModel
from hf_ebm.pipelines import EnergyScoringPipeline
from tests.models.tokenizers_for_tests import small_tokenizer
from tests.pipelines.models_for_pipelines import (
    TEXTS,
    bert,
    causal_lm,
    energy_model,
    residual_model,
    saved,
    tokenizer,
)

MASKED_TASKS = ("energy-scoring", "energy-reranking", "energy-sampling", "joint-fill-mask")


@pytest.mark.parametrize("task", MASKED_TASKS)
def test_a_plain_checkpoint_is_wrapped_as_from_pretrained_does(task, tmp_path):
    folder = saved(tmp_path, bert(), tokenizer())
    made, model = pipeline(task, model=folder), EnergyModel.from_pretrained(folder)
    assert type(made) is hf_ebm.pipelines.TASKS[task] and isinstance(made.model, EnergyModel)
    assert made.model.config.to_diff_dict() == model.config.to_diff_dict()
    assert all(torch.equal(a, b) for a, b in zip(made.model.parameters(), model.parameters(), strict=True))
    assert made.tokenizer.get_vocab() == tokenizer().get_vocab()


def test_arguments_of_from_pretrained_reach_it(tmp_path):
    folder = saved(tmp_path, bert(), tokenizer())
    made = pipeline("energy-scoring", model=folder, dtype="bfloat16", model_kwargs={"energy": "raw"})
    assert made.model.config.energy == "raw" and made.model.mlm.dtype == torch.bfloat16
    assert (
        pipeline("energy-scoring", model=folder, local_files_only=True, device_map="cpu").model.config.energy == "local"
    )


def test_a_saved_energy_model_keeps_what_it_was(tmp_path):
    model = energy_model("raw", masking="unmasked")
    made = pipeline("energy-scoring", model=saved(tmp_path, model, tokenizer()))
    assert made.model.config.energy == "raw" and made.model.config.masking == "unmasked"
    assert made("the cat sat")["energy"] == pytest.approx(float(model.score(["the cat sat"], tokenizer()).energy[0]))


def test_a_saved_pipeline_loads_by_name_without_remote_code(tmp_path):
    made = pipeline("energy-scoring", model=bert(), tokenizer=tokenizer())
    made.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.py"))
    again = pipeline("energy-scoring", model=str(tmp_path))
    assert again(TEXTS[0]) == made(TEXTS[0]) and isinstance(EnergyModel.from_pretrained(tmp_path), EnergyModel)


@pytest.mark.parametrize("task", ["energy-reranking", "joint-sampling"])
def test_a_residual_model_loads_with_the_tokenizer_it_was_saved_with(task, tmp_path):
    made = pipeline(task, model=saved(tmp_path, residual_model()))
    assert isinstance(made.model, ResidualEnergyModel)
    assert made.tokenizer.get_vocab() == tokenizer().get_vocab()
    model = residual_model()
    assert pipeline(task, model=model).tokenizer is model.lm_tokenizer


def test_a_masked_language_model_object_is_wrapped_and_a_model_without_roles_gets_them():
    mlm = bert()
    made = pipeline("energy-scoring", model=mlm, tokenizer=tokenizer())
    assert made.model.mlm is mlm
    bare = EnergyModel(mlm)
    assert pipeline("energy-scoring", model=bare, tokenizer=tokenizer()).model is bare
    expected = energy_model().config
    for model in (made.model, bare):
        for name in ("mask_token_id", "special_token_ids", "excluded_token_ids", "prefix_token_ids"):
            assert getattr(model.config, name) == getattr(expected, name) and getattr(expected, name) is not None


def test_the_device_is_where_the_model_goes(monkeypatch):
    moved, to = [], EnergyModel.to
    monkeypatch.setattr(EnergyModel, "to", lambda self, device: moved.append(device) or to(self, device))
    for device in ("cpu", -1, torch.device("cpu")):
        made = pipeline("energy-scoring", model=energy_model(), tokenizer=tokenizer(), device=device)
        assert made.device == made.model.device == torch.device("cpu") and not moved
    made = pipeline("energy-scoring", model=energy_model(), tokenizer=tokenizer(), device="meta")
    assert moved == [torch.device("meta")] and made.model.device.type == "meta" and "device=meta" in repr(made)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_it_runs_on_a_gpu():
    made = pipeline("energy-scoring", model=energy_model(), tokenizer=tokenizer(), device="cuda")
    assert made.model.device.type == "cuda"
    assert made(TEXTS[0])["energy"] == pytest.approx(
        float(energy_model().score(TEXTS[:1], tokenizer()).energy), rel=1e-3
    )


# Without a tokenizer.


@pytest.mark.parametrize("explicit", [False, True])
def test_a_plain_checkpoint_without_a_tokenizer_needs_one(explicit, tmp_path):
    """Transformers makes one up from the configuration, with which every energy would be wrong."""
    folder = saved(tmp_path, bert())
    if explicit:
        made = pipeline("energy-scoring", model=folder, tokenizer=tokenizer())
        assert made.model.config.mask_token_id == tokenizer().mask_token_id
        assert made("the cat")["tokens"] == ["the", "cat"]
    else:
        with pytest.raises(ValueError, match="tokenizer: none lies beside the weights"):
            pipeline("energy-scoring", model=folder)


def test_saved_models_and_objects_without_a_tokenizer_need_one(tmp_path):
    residual = residual_model()
    residual.lm_tokenizer = None
    for task, model in (
        ("energy-scoring", saved(tmp_path / "a", energy_model())),
        ("energy-scoring", energy_model()),
        ("joint-sampling", saved(tmp_path / "b", residual)),
        ("joint-sampling", residual),
    ):
        with pytest.raises(ValueError, match="tokenizer must be the model's tokenizer, got NoneType"):
            pipeline(task, model=model)
    with pytest.raises(ValueError, match="got list"):
        pipeline("energy-scoring", model=energy_model(), tokenizer=["the"])


def test_another_models_tokenizer_is_refused(tmp_path):
    other = small_tokenizer("wordpiece")
    other.mask_token = "the"
    with pytest.raises(ValueError, match=f"mask token has id {other.mask_token_id}, the model's is 4"):
        pipeline("energy-sampling", model=energy_model(), tokenizer=other)
    other.mask_token = None
    for model in (bert(), saved(tmp_path, bert(), other)):
        with pytest.raises(ValueError, match="has no mask token"):
            pipeline("energy-scoring", model=model, tokenizer=other)


# Other models.


@pytest.mark.parametrize("task", MASKED_TASKS)
def test_other_models_are_refused_with_the_reason(task, tmp_path):
    for number, (model, reason) in enumerate(
        [(causal_lm(), "masked-LM head|masked-language-model head"), (bert(BertModel), "weights|masked-language-model")]
    ):
        for given in (saved(tmp_path / str(number), model, tokenizer()), model):
            with pytest.raises(ValueError, match=f"model (cannot be loaded|must be of the class).*({reason})"):
                pipeline(task, model=given, tokenizer=tokenizer())
    for given in (3, energy_model().config):
        with pytest.raises(ValueError, match="model must be a name or folder, or of the class"):
            pipeline(task, model=given, tokenizer=tokenizer())


def test_a_residual_model_only_where_it_works_and_nothing_else_for_joint_sampling(tmp_path):
    for given in (residual_model(), saved(tmp_path / "residual", residual_model())):
        for task in ("energy-scoring", "energy-sampling"):
            with pytest.raises(ValueError, match=r"masked-LM head|masked-language-model head"):
                pipeline(task, model=given, tokenizer=tokenizer())
    for given in (energy_model(), bert(), causal_lm()):
        with pytest.raises(ValueError, match="of the class ResidualEnergyModel, got"):
            pipeline("joint-sampling", model=given, tokenizer=tokenizer())
    with pytest.raises(ValueError, match="no saved ResidualEnergyModel but of the type 'gpt2'"):
        pipeline("joint-sampling", model=saved(tmp_path / "causal", causal_lm(), tokenizer()))


def test_missing_weights_are_not_made_up(tmp_path):
    """The class that the checkpoint names would do so."""
    folder = saved(tmp_path, bert(), tokenizer())
    weights = load_file(tmp_path / "model.safetensors")
    del weights["cls.predictions.transform.dense.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model cannot be loaded: .*has no weights for .*transform\.dense\.weight"):
        pipeline("energy-scoring", model=folder, device_map="cpu")


def test_unknown_arguments_are_refused_when_it_is_made_and_when_it_is_called():
    with pytest.raises(ValueError, match="no argument masknig; it takes masking, stride"):
        pipeline("energy-scoring", model=energy_model(), tokenizer=tokenizer(), masknig="exact")
    made = EnergyScoringPipeline(model=energy_model(), tokenizer=tokenizer())
    for inputs in ("the", ["the"], []):
        with pytest.raises(ValueError, match="no argument top_k, verbose; it takes"):
            made(inputs, verbose=True, top_k=3)
