"""Adapters, and code of a checkpoint's own, where models are loaded or wrapped: commands, pipelines, trainers, …"""

import json

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForMaskedLM, pipeline

import hf_ebm.pipelines  # noqa: F401  # registers the tasks
from hf_ebm import EnergyModel, ProductLM, ResidualEnergyModel, soft_beam_search
from hf_ebm.cli.main import main
from hf_ebm.evaluate_modules import energy_model
from hf_ebm.trainers import EnergyTrainer, EnergyTrainingConfig, ResidualNCEConfig, ResidualNCETrainer
from hf_ebm.trainers.costs import ScorerCost
from tests.causal_families import tiny_causal
from tests.models.residual_models import toy_encoder, toy_lm
from tests.models.test_adapters import base, small_mlm, with_adapter, wrapped  # noqa: F401  # `base` is a fixture
from tests.models.test_checkpoints import TripledBert, checkpoint, kind  # noqa: F401  # fixtures
from tests.models.tokenizers_for_tests import small_tokenizer
from tests.seq2seq_families import tiny_seq2seq

TEXT = "the cat sat"
LORA = dict(r=2, init_lora_weights=False)


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):  # noqa: F811
    """A folder with an adapter alone, and the energy of `TEXT` with it."""
    folder = tmp_path_factory.mktemp("adapter")
    peft = with_adapter(AutoModelForMaskedLM.from_pretrained(base), "lora")
    peft.save_pretrained(folder)
    return folder, peft, float(wrapped(peft).score([TEXT], small_tokenizer("wordpiece")).energy)


def scored(capsys, tmp_path, *arguments) -> float:
    (tmp_path / "in.txt").write_text(TEXT + "\n")
    main(["score", "--input", str(tmp_path / "in.txt"), "--output", "-", *arguments])
    return json.loads(capsys.readouterr().out)["energy"]


def test_commands_evaluate_modules_and_pipelines_load_an_adapter(adapter, capsys, tmp_path):
    folder, peft, expected = adapter
    assert scored(capsys, tmp_path, "--model", str(folder)) == pytest.approx(expected, rel=1e-5)
    model, tokenizer = energy_model(folder, None, None)
    assert float(model.score([TEXT], tokenizer).energy) == pytest.approx(expected, rel=1e-5)
    for given in ({"model": str(folder)}, {"model": peft, "tokenizer": tokenizer}):
        scores = pipeline("energy-scoring", device="cpu", dtype=torch.float32, **given)
        assert scores(TEXT)["energy"] == pytest.approx(expected, rel=1e-5)
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    for command in ("negatives", "perplexity"):
        arguments = [
            "--model",
            str(folder),
            "--input",
            str(tmp_path / "in.jsonl"),
            "--output",
            str(tmp_path / "out.jsonl"),
        ]
        with pytest.raises(SystemExit):
            main([command, *arguments])
        assert "holds an adapter; merge_and_unload() it" in capsys.readouterr().err


def test_commands_and_pipelines_run_code_on_request(checkpoint, capsys, tmp_path):  # noqa: F811
    tokenizer = small_tokenizer("wordpiece")
    loaded = EnergyModel.from_pretrained(checkpoint, trust_remote_code=True)
    expected = float(loaded.score([TEXT], tokenizer).energy)
    assert scored(capsys, tmp_path, "--model", str(checkpoint), "--trust_remote_code") == pytest.approx(expected)
    with pytest.raises(SystemExit):
        scored(capsys, tmp_path, "--model", str(checkpoint))
    assert "has code of its own" in capsys.readouterr().err
    scores = pipeline("energy-scoring", model=str(checkpoint), trust_remote_code=True, device="cpu")
    assert scores(TEXT)["energy"] == pytest.approx(expected)
    loaded.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match="has code of its own"):
        pipeline("energy-scoring", model=str(tmp_path / "saved"))


def test_models_of_two_parts_use_adapters_and_are_saved_merged(adapter, tmp_path):
    ids = torch.tensor([[3, 4, 5]])
    lm = get_peft_model(toy_lm(), LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, **LORA))
    encoder = get_peft_model(toy_encoder(), LoraConfig(target_modules=["query"], **LORA))
    torch.manual_seed(0)
    plain = ResidualEnergyModel(toy_lm(), toy_encoder())
    model = ResidualEnergyModel(lm, encoder)
    model.head.load_state_dict(plain.head.state_dict())
    with torch.no_grad():
        assert float((model(ids).energy - plain(ids).energy).abs()) > 1e-5
        with encoder.disable_adapter():
            torch.testing.assert_close(model(ids).energy, plain(ids).energy)
    with pytest.raises(ValueError, match="encoder has layers of an adapter"):
        ResidualNCETrainer(model, ResidualNCEConfig(output_dir=str(tmp_path / "run"), use_cpu=True), train_dataset=[])
    for part in (encoder, lm):
        name = "encoder" if part is encoder else "lm"
        with pytest.raises(ValueError, match=rf"{name} has layers of an adapter.*merge_and_unload\(\)"):
            model.save_pretrained(tmp_path / "saved")
        assert not (tmp_path / "saved").exists()
        part.merge_and_unload()
    model.save_pretrained(tmp_path / "saved")
    torch.testing.assert_close(ResidualEnergyModel.from_pretrained(tmp_path / "saved")(ids).energy, model(ids).energy)
    again = get_peft_model(toy_lm(), LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, **LORA))
    with pytest.raises(ValueError, match="lm has layers of an adapter"):
        ProductLM(again, toy_lm(seed=3)).save_pretrained(tmp_path / "product")
    toy_lm().save_pretrained(tmp_path / "lm")
    with pytest.raises(ValueError, match=r"encoder: .* holds an adapter"):
        ResidualEnergyModel.from_lm_and_encoder(tmp_path / "lm", adapter[0])


def energy_trainer(base, folder, steps: int) -> EnergyTrainer:  # noqa: F811
    model = EnergyModel.from_pretrained(base)
    torch.manual_seed(3)
    model.add_adapter(LoraConfig(r=2, target_modules=["query", "value"]))
    args = EnergyTrainingConfig(
        output_dir=str(folder), objective="mlm", max_steps=steps, save_steps=2, per_device_train_batch_size=2,
        learning_rate=0.1, report_to=[], use_cpu=True, load_best_model_at_end=True, eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    rows = [{"input_ids": [2, 10 + number, 11, 12, 3]} for number in range(8)]
    return EnergyTrainer(model, args, train_dataset=rows, eval_dataset=rows[:2])


def test_training_an_adapter_leaves_the_base_and_is_resumed(base, tmp_path):  # noqa: F811
    whole = energy_trainer(base, tmp_path, 4)
    before = {name: value.clone() for name, value in whole.model.state_dict().items()}
    whole.train()
    changed = {name for name, value in whole.model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all("lora_" in name for name in changed)
    assert (tmp_path / "checkpoint-2" / "adapter_model.safetensors").is_file()
    resumed = energy_trainer(base, tmp_path, 4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ValueError, match=r"TripledBert\.register_for_auto_class"):
        EnergyTrainer(wrapped(TripledBert(small_mlm().config)), whole.args, eval_dataset=[])
    with pytest.raises(ValueError, match="has no name"):
        EnergyTrainer(wrapped(with_adapter(small_mlm(), "lora")), whole.args, eval_dataset=[])


def test_an_adapter_of_a_folder_is_not_uploaded(adapter):
    model = EnergyModel.from_pretrained(adapter[0])
    with pytest.raises(ValueError, match="is a folder of this machine"):
        model.push_to_hub("you/adapter")


@pytest.mark.parametrize("settings", [PromptTuningConfig, PrefixTuningConfig])
def test_prompts_are_refused_where_a_model_scores_or_beams_are_relaxed(settings):
    for task, model in (("SEQ_2_SEQ_LM", tiny_seq2seq("bart")), ("CAUSAL_LM", tiny_causal())):
        prompted = get_peft_model(model, settings(task_type=task, num_virtual_tokens=2))
        with pytest.raises(ValueError, match=r"model: an adapter of the type .* puts prompts in front"):
            ScorerCost(prompted, 0)
        if task == "SEQ_2_SEQ_LM":
            with pytest.raises(ValueError, match="PeftModelForSeq2SeqLM makes for its prompts"):
                prompted.generate(input_ids=torch.tensor([[5, 6]]), custom_generate=soft_beam_search, max_new_tokens=3)


def test_adapters_in_layers_are_scored_and_their_beams_relaxed():
    torch.manual_seed(0)
    adapted = get_peft_model(tiny_seq2seq("bart"), LoraConfig(target_modules=["q_proj", "fc1"], **LORA)).eval()
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "max_new_tokens": 6, "num_beams": 2}
    beams = adapted.generate(**inputs)
    relaxed = adapted.generate(**inputs, custom_generate=soft_beam_search, alpha=float("inf"))
    cost = ScorerCost(adapted, 1)([[5, 6, 2]], None, [[4, 5]])
    merged = adapted.merge_and_unload()
    assert relaxed.tolist() == beams.tolist() == merged.generate(**inputs).tolist()
    torch.testing.assert_close(cost, ScorerCost(merged, 1)([[5, 6, 2]], None, [[4, 5]]))
