"""The best model by reward, and early stopping, of all trainers for what is decoded; metrics of predictions."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback

from hf_ebm.trainers import GRPOConfig
from tests.trainers import test_reward_funcs
from tests.trainers.test_prompts import TEXTS, model_of, trainer_of

pytestmark = pytest.mark.slow

EVALUATED = [{**row, "topic": "evaluated"} for row in TEXTS[:3]]
STEPWISE = {
    "max_steps": 9, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
    "per_device_train_batch_size": 2,
}  # fmt: skip


def judge_of(evaluated):
    """A reward with given values in evaluations, one after the other."""

    def judge(completions, topic):
        if topic[0] == "evaluated":
            return [next(evaluated)] * len(completions)
        return [float(len(text)) for text in completions]

    return judge


@pytest.mark.parametrize(
    "kind, metric",
    [
        ("mgs", "eval_rewards/judge/mean"),
        ("minimum risk", "reward"),
        ("leave one out", "eval_reward"),
        ("ranking", "rewards/judge/mean"),
        ("grpo, iterated, mixed", "eval_reward"),
    ],
)
def test_the_best_model_by_reward_is_loaded_and_stopping_is_early(kind, metric, tmp_path):
    """The rewards of evaluations are given: the second is the best, and the two after it are worse."""
    judge, seen = judge_of(iter([1.0, 3.0, 2.0, 2.5])), []

    def metrics(prediction):
        seen.append(prediction.predictions)
        return {"rows": len(prediction.label_ids)}

    trainer = trainer_of(
        kind, "gpt2", tmp_path, reward_funcs=judge, eval_dataset=EVALUATED, load_best_model_at_end=True,
        metric_for_best_model=metric, predict_with_generate=True, **STEPWISE,
    )  # fmt: skip
    trainer.compute_metrics = metrics
    trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=2))
    trainer.train()
    logs = [log for log in trainer.state.log_history if "eval_reward" in log]
    for name in ("eval_reward", "eval_rewards/judge/mean"):
        assert [log[name] for log in logs] == [1.0, 3.0, 2.0, 2.5]
    assert all(log["eval_rows"] == 3 for log in logs) and all(len(ids) == 3 for ids in seen)
    assert trainer.state.global_step == 4 and trainer.state.best_metric == 3.0
    assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-2"
    best, last = (load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors") for step in (2, 4))
    loaded = trainer.model.state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in best.items())
    assert not all(torch.equal(last[name], value) for name, value in best.items())


@pytest.mark.parametrize("kind", ["ranking", "grpo, iterated, mixed"])
def test_adapters_of_the_best_model_are_loaded_and_runs_of_adapters_resumed(kind, tmp_path):
    """Bit for bit, within the iterations of a batch."""
    trainers = []
    for name, rewards in (("a", [1.0, 3.0, 2.0, 2.5]), ("b", [2.5])):
        torch.manual_seed(0)
        lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        trainers.append(
            trainer_of(
                kind, "bart", tmp_path / name, model=get_peft_model(model_of("bart"), lora), eval_dataset=EVALUATED,
                reward_funcs=judge_of(iter(rewards)), load_best_model_at_end=True, metric_for_best_model="reward",
                **{**STEPWISE, "max_steps": 4},
            )
        )  # fmt: skip
    whole, again = trainers
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    saved = {
        (name, step): load_file(tmp_path / name / f"checkpoint-{step}" / "adapter_model.safetensors")
        for name, step in (("a", 2), ("a", 4), ("b", 4))
    }
    for name, value in saved["a", 4].items():
        assert torch.equal(saved["b", 4][name], value)
    assert not all(torch.equal(saved["a", 2][name], value) for name, value in saved["a", 4].items())
    for trainer in trainers:
        loaded = get_peft_model_state_dict(trainer.model)
        assert all(torch.equal(loaded[name], value) for name, value in saved["a", 2].items())


def test_of_a_cost_less_is_better(tmp_path):
    for metric, more in (("cost", False), ("eval_cost", False), ("eval_loss", False), ("reward", True)):
        assert GRPOConfig(str(tmp_path), use_cpu=True, metric_for_best_model=metric).greater_is_better == more
    said = GRPOConfig(str(tmp_path), use_cpu=True, metric_for_best_model="cost", greater_is_better=True)
    assert said.greater_is_better


@pytest.mark.parametrize(
    "rewards, metric", [(None, "eval_reward"), ("neg_edit_distance", "rewards/edit_distance/mean")]
)
def test_a_reward_that_is_not_logged_is_refused(rewards, metric, tmp_path):
    with pytest.raises(ValueError, match=r"metric_for_best_model must be one of loss, cost.*got 'rewards?"):
        test_reward_funcs.trainer_of("mgs", tmp_path, rewards, metric_for_best_model=metric)
