"""GRPO: several updates with the samples of a batch, the reference, lengths, what a resumed run goes on with."""

import copy

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

from hf_ebm.objectives.sequence_costs import normalized_edit_distance
from hf_ebm.trainers import GRPOConfig, GRPOTrainer
from hf_ebm.trainers.rollouts import Rollout
from tests.causal_families import PAD, collate_right, completion_rows, tiny_causal
from tests.seq2seq_families import tiny_seq2seq
from tests.trainers.test_sampled_risk import trainer_of
from tests.trainers.test_trainers import ONE_STEP, collate, rows

pytestmark = pytest.mark.slow

ITERATED = {"num_iterations": 3, "kl_weight": 0.5, "clip_range": 0.05, "learning_rate": 0.05}


def of(tmp_path, *arguments, **settings):
    return trainer_of("grpo", tmp_path, *arguments, **settings)


def token_logs(model, row, ids):
    prompt = row["input_ids"][row["labels"] == -100]
    logits = model(torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1]
    logits[:, PAD] = -torch.inf
    return logits.log_softmax(-1)[range(len(ids)), ids]


@pytest.mark.parametrize("lengths", ["sequence", "tokens", "constant"])
def test_iterations_equal_hand_written_ones(lengths, tmp_path):
    """Three updates of one batch, accumulated in parts of 3, 3 and 2 rows, one sequence and token at a time."""
    model, data = tiny_causal(), completion_rows()
    by_hand, reference = copy.deepcopy(model), copy.deepcopy(model)
    settings = {**ITERATED, "max_steps": 3, "length_normalization": lengths, "length_constant": 5.0}
    settings |= {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3}
    trainer = of(tmp_path, model, data, **settings)
    trainer.train()
    assert len(trainer.drawn) == 3  # once for each part
    samples = [found for part in trainer.drawn for found in part]
    costs = [normalized_edit_distance(found, [row["labels"][row["labels"] != -100]] * 3)
             for row, found in zip(data, samples, strict=True)]  # fmt: skip
    mean_length = sum(len(ids) for found in samples for ids in found) / 24
    old, logs = None, []
    for _ in range(3):
        loss, now, kl_sum, tokens, clipped = 0.0, [], 0.0, 0, 0
        for number, (row, found, cost) in enumerate(zip(data, samples, costs, strict=True)):
            advantages = (cost.mean() - cost) / (cost.std() + 1e-4)
            for sample, (ids, advantage) in enumerate(zip(found, advantages, strict=True)):
                divisor = {"sequence": len(ids), "tokens": mean_length, "constant": 5.0}[lengths]
                new, ref = token_logs(by_hand, row, ids), token_logs(reference, row, ids).detach()
                before = new.detach() if old is None else old[3 * number + sample]
                for t in range(len(ids)):
                    ratio = (new[t] - before[t]).exp()
                    terms = ratio * advantage, ratio.clamp(0.95, 1.05) * advantage
                    kl = (ref[t] - new[t]).exp() - 1 - (ref[t] - new[t])
                    loss = loss + (0.5 * kl - min(terms)) / divisor / 24
                    kl_sum, tokens, clipped = kl_sum + float(kl.detach()), tokens + 1, clipped + (terms[1] < terms[0])
                now.append(new.detach())
        old = now if old is None else old
        by_hand.zero_grad()
        loss.backward()
        logs.append((loss.item(), kl_sum / tokens, float(clipped) / tokens))
        with torch.no_grad():
            for parameter in by_hand.parameters():
                parameter -= 0.05 * parameter.grad
    assert logs[-1][1] > 1e-3 and logs[-1][2] > 0.05  # it has gone somewhere, and is held back
    found = [(log["loss"], log["kl"], log["clip_share"]) for log in trainer.state.log_history[:3]]
    assert [number for log in found for number in log] == pytest.approx(
        [n for log in logs for n in log], rel=1e-5, abs=1e-6
    )
    for one, two in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)


def test_the_reference_of_adapters_is_the_model_without_them(tmp_path):
    torch.manual_seed(0)
    lora = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], init_lora_weights=False)
    model, data = get_peft_model(tiny_causal(), lora).double(), completion_rows(4)
    base, merged = tiny_causal(), copy.deepcopy(model).merge_and_unload()
    trainer = of(tmp_path, model, data, kl_weight=1.0, per_device_train_batch_size=4)
    assert trainer.reference_model is None
    trainer.train()
    differences = torch.cat([
        token_logs(base, row, ids) - token_logs(merged, row, ids)
        for row, found in zip(data, trainer.drawn[0], strict=True) for ids in found
    ])  # fmt: skip
    expected = (differences.exp() - 1 - differences).mean()
    expected = expected.detach()
    assert float(expected) > 0.01
    assert trainer.state.log_history[0]["kl"] == pytest.approx(float(expected), rel=1e-5)


def test_a_reference_model_that_is_given_is_the_reference(tmp_path):
    other, data = tiny_causal(), completion_rows(4)
    for parameter in other.parameters():
        parameter.data.mul_(0.5)
    settings = {**ONE_STEP, "kl_weight": 1.0, "per_device_train_batch_size": 4, "num_candidates": 3}

    def made(model, reference, **changes):
        args = GRPOConfig(str(tmp_path), **{**settings, **changes})
        return GRPOTrainer(model, args, reference_model=reference, train_dataset=data, data_collator=collate_right)

    model = tiny_causal()
    trainer, before, drawn = made(model, other), copy.deepcopy(model), []
    sample = trainer.candidates.sample
    trainer.candidates.sample = lambda *given: drawn.append(sample(*given)) or drawn[0]
    weights = copy.deepcopy(other)
    trainer.train()
    differences = torch.cat([
        token_logs(weights, row, ids) - token_logs(before, row, ids)
        for row, found in zip(data, drawn[0][0], strict=True) for ids in found
    ]).detach()  # fmt: skip
    expected = float((differences.exp() - 1 - differences).mean())
    assert trainer.state.log_history[0]["kl"] == pytest.approx(expected, rel=1e-5) and expected > 0.01
    assert all(map(torch.equal, weights.parameters(), other.parameters()))
    watched, plain = (made(tiny_causal(), reference, kl_weight=0.0) for reference in (other, None))
    for one in (watched, plain):
        one.train()
    logs = [one.state.log_history[0] for one in (watched, plain)]
    assert logs[0]["kl"] == pytest.approx(expected, rel=1e-5) and "kl" not in logs[1]
    assert logs[0]["loss"] == logs[1]["loss"]
    assert all(map(torch.equal, watched.model.parameters(), plain.model.parameters()))
    for reference, message in (
        (model, "reference_model must be a model beside the one that is trained"),
        ("gpt2", "reference_model must be a model beside the one that is trained, got 'gpt2'"),
        (tiny_seq2seq("t5"), "reference_model must predict .* is_encoder_decoder=False"),
    ):
        with pytest.raises(ValueError, match=message):
            made(model, reference)
    base = tiny_causal()
    adapted = get_peft_model(base, LoraConfig(target_modules=["c_attn"]))
    with pytest.raises(ValueError, match=r"reference_model must not share parameters that are trained, as .*lora_A"):
        made(adapted, base)


def test_groups_without_a_difference_say_nothing(tmp_path):
    def alike(predictions, references):
        return [0.3] * len(predictions)

    alike.reads = "ids"
    trainer = of(tmp_path, cost=alike)
    before = copy.deepcopy(trainer.model)
    trainer.train()
    log = trainer.state.log_history[0]
    assert (log["zero_deviation_share"], log["advantage_std"], log["clip_share"]) == (1, 0, 0) and "kl" not in log
    assert all(map(torch.equal, before.parameters(), trainer.model.parameters()))


EPOCHS = {
    "max_steps": -1, "num_train_epochs": 2, "train_sampling_strategy": "random", "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
}  # fmt: skip


def test_an_epoch_has_each_update_several_times(tmp_path):
    """Of 9 rows in batches of two the fifth makes no update of two batches."""
    trainer = of(tmp_path, None, completion_rows(9), **ITERATED, **EPOCHS)
    seen = []
    step = trainer.training_step
    trainer.training_step = lambda model, inputs, *rest: seen.append(inputs["input_ids"]) or step(model, inputs, *rest)
    trainer.train()
    assert trainer.state.global_step == 2 * 2 * 3 and trainer.state.epoch == 2
    assert len(trainer.drawn) == 2 * 2 * 2 and len(seen) == 2 * 2 * 2 * 3
    updates = [seen[at : at + 2] for at in range(0, len(seen), 2)]
    for at, update in enumerate(updates):
        assert all(map(torch.equal, update, updates[at // 3 * 3]))
    firsts = [[ids.tolist() for ids in [*updates[at], *updates[at + 3]]] for at in (0, 6)]
    assert firsts[0] != firsts[1]  # epochs are shuffled
    assert trainer.num_examples(trainer.get_train_dataloader()) == 9
    with pytest.raises(ValueError, match="gradient_accumulation_steps must be at most the 2 batches of an epoch"):
        of(tmp_path, None, completion_rows(4), **ITERATED, **{**EPOCHS, "gradient_accumulation_steps": 3}).train()


@pytest.mark.parametrize("step", [4, 8])
def test_a_run_resumed_within_the_iterations_of_a_batch_is_the_same(step, tmp_path):
    """In the first and in the second epoch; without its samples it is refused."""
    settings = {**ITERATED, **EPOCHS, "optim": "adamw_torch", "length_normalization": "tokens"}
    data = completion_rows(8)
    whole = of(tmp_path / "a", None, data, save_strategy="steps", save_steps=step, **settings)
    whole.train()
    again = of(tmp_path / "b", None, data, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / f"checkpoint-{step}"))
    assert all(map(torch.equal, whole.model.parameters(), again.model.parameters()))
    names = ("loss", "kl", "clip_share", "candidate_cost", "decoded_length")
    logs = [{log["step"]: [log[name] for name in names] for log in one.state.log_history if "kl" in log}
            for one in (whole, again)]  # fmt: skip
    assert logs[0] == logs[1] and list(logs[0]) == list(range(1, 13))
    (tmp_path / "a" / f"checkpoint-{step}" / "rollouts_0.safetensors").unlink()
    with pytest.raises(ValueError, match="has no samples of it"):
        again.train(resume_from_checkpoint=str(tmp_path / "a" / f"checkpoint-{step}"))


def test_what_was_ruled_out_is_kept_as_the_few_that_it_is():
    torch.manual_seed(0)
    samples = [[torch.tensor([3, 1]), torch.tensor([4, 5, 1])], [torch.tensor([6]), torch.tensor([7])]]
    mask, costs = torch.rand(7, 100) < 0.02, torch.rand(2, 2)
    rollout = Rollout.drawn(samples, mask, costs)
    again = Rollout.of(rollout.tensors())
    assert torch.equal(rollout.mask, mask) and torch.equal(again.mask, mask) and bool(mask.any())
    assert max(tensor.numel() for tensor in rollout.tensors().values()) < 40
    assert [[ids.tolist() for ids in found] for found in again.samples] == [[[3, 1], [4, 5, 1]], [[6], [7]]]
    assert Rollout.of(Rollout.drawn(samples, None, costs).tensors()).mask is None


@pytest.mark.parametrize("settings", [{}, {"train_sampling_strategy": "group_by_length"}])
def test_streams_and_batches_of_like_lengths(settings, tmp_path):
    data = Dataset.from_list([{name: value.tolist() for name, value in row.items()} for row in completion_rows(8)])
    data = data.with_format("torch")
    if not settings:
        data = data.to_iterable_dataset()
    trainer = of(tmp_path, None, data, collate_right, **ITERATED, **{**EPOCHS, "max_steps": 6, **settings})
    trainer.train()
    assert trainer.state.global_step == 6 and len(trainer.drawn) == 4


def test_half_precision_of_an_encoder_decoder(tmp_path):
    trainer = of(tmp_path, tiny_seq2seq("t5").float(), rows(4), collate, bf16=True, max_steps=3, **ITERATED)
    trainer.train()
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    assert trainer.state.log_history[0]["clip_share"] == 0 and trainer.state.log_history[2]["kl"] > 0
