"""MGS: a hand-written step, accumulation, restored weights, decoders, adapters, memory."""

import copy
import gc
import math
import resource
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel, TrainerCallback

from hf_ebm.objectives.completions import ends_at
from hf_ebm.objectives.mgs import (
    Candidate,
    draw_candidates,
    log_proposal_density,
    noise_of,
    noise_scales,
    perturb_,
    proposal_sums,
)
from hf_ebm.objectives.sequence_costs import normalized_edit_distance
from hf_ebm.trainers import MGSConfig, MGSTrainer
from tests.causal_families import END, PAD, collate_left, collate_right, completion_rows, tiny_causal
from tests.processes import fresh
from tests.seq2seq_families import tiny_seq2seq
from tests.trainers.test_trainers import ONE_STEP, collate, rows

pytestmark = pytest.mark.slow


def trainer_of(tmp_path, model=None, dataset=None, collator=collate_right, cost=None, **settings):
    args = MGSConfig(str(tmp_path), **{**ONE_STEP, "num_candidates": 3, "alpha": 5.0, **settings})
    model = tiny_causal() if model is None else model
    dataset = completion_rows() if dataset is None else dataset
    return MGSTrainer(
        model, args, cost=cost, train_dataset=dataset, eval_dataset=completion_rows(5, 9), data_collator=collator
    )


def test_sharded_weights_are_refused(tmp_path):
    with pytest.raises(ValueError, match="deepspeed and fsdp must be off"):
        trainer_of(tmp_path, fsdp=True)
    for name in ("is_fsdp_enabled", "is_deepspeed_enabled"):
        trainer = trainer_of(tmp_path)
        setattr(trainer, name, True)  # as accelerate's settings make it
        with pytest.raises(ValueError, match="deepspeed and fsdp must be off"):
            trainer.set_up()


def cross_entropy_by_hand(model, batch):
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def greedy_predictions(model, batch):
    """Greedy decoding of single rows."""
    predictions = []
    longest = max(int((row != -100).sum()) for row in batch["labels"])
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        first = int((labels != -100).nonzero()[0])
        found = ids[:first]
        for _ in range(math.ceil(1.3 * longest)):
            found = torch.cat([found, model(found[None]).logits[0, -1].argmax()[None]])
            if int(found[-1]) == END:
                break
        predictions.append(found[first:])
    return predictions


def cost_by_hand(model, batch):
    """Edits by the length of the target."""
    references = [labels[labels != -100] for labels in batch["labels"]]
    return float(normalized_edit_distance(greedy_predictions(model, batch), references).mean())


@torch.no_grad()
def shifted(model, delta):
    moved = copy.deepcopy(model)
    for parameter, change in zip(moved.parameters(), delta, strict=True):
        parameter.add_(change)
    return moved


def direction_by_hand(model, batch, seed, alpha, mixture=0.5, count=3):
    """Algorithm 1, with whole copies of the model."""
    model = copy.deepcopy(model)
    cross_entropy_by_hand(model, batch).backward()
    gradients = [p.grad for p in model.parameters()]
    norm = torch.sqrt(sum(g.square().sum() for g in gradients))
    steps = [-g * min(1.0, 1.0 / (float(norm) + 1e-6)) for g in gradients]
    cost, deltas, logs, costs = cost_by_hand(model, batch), [], [], []
    for candidate in draw_candidates(seed, count, mixture):
        noises = [noise.clone().view(steps[i].shape) for i, _, noise in noise_of(candidate, steps)]
        deltas.append([candidate.from_likelihood * g + g.abs().mean() * e for g, e in zip(steps, noises, strict=True)])
        costs.append(cost_by_hand(shifted(model, deltas[-1]), batch))
        # In a thousand dimensions the other component has no density here: the mixture weight is left.
        logs.append(alpha * (cost - costs[-1]) - math.log(1 - mixture if candidate.from_likelihood else mixture))
    weights = torch.softmax(torch.tensor(logs, dtype=torch.float64), 0)
    return [sum(w * d[i] for w, d in zip(weights, deltas, strict=True)) for i in range(len(steps))], costs, weights


@pytest.mark.parametrize("collator", [collate_right, collate_left])
@pytest.mark.parametrize("mixture", [0.5, 0.25])
def test_one_step_equals_a_hand_written_one(mixture, collator, tmp_path):
    model = tiny_causal()
    before, seed = copy.deepcopy(model), hash((42, 0, 0)) % 2**63
    batch = collate_right(completion_rows())
    direction, costs, weights = direction_by_hand(before, batch, seed, 5.0, mixture)
    assert len(set(costs)) > 1, "the candidates must differ for the test to say anything"
    trainer = trainer_of(tmp_path, model, collator=collator, mixture=mixture, seed=42)
    trainer.train()
    for start, change, found in zip(before.parameters(), direction, model.parameters(), strict=True):
        torch.testing.assert_close(found, start + 0.1 * change, rtol=1e-6, atol=1e-8)
    log = trainer.state.log_history[0]
    from_likelihood = torch.tensor([c.from_likelihood for c in draw_candidates(seed, 3, mixture)])
    assert log["loss"] == pytest.approx(cross_entropy_by_hand(before, batch).item(), rel=1e-5)
    assert log["cost"] == pytest.approx(cost_by_hand(before, batch), rel=1e-6)
    assert log["candidate_cost"] == pytest.approx(sum(costs) / 3, rel=1e-6)
    assert log["effective_candidates"] == pytest.approx(float(1 / weights.square().sum()), rel=1e-6)
    assert log["weight_std"] == pytest.approx(float(weights.std(correction=0)), rel=1e-6)
    assert log["likelihood_weight"] == pytest.approx(float(weights[from_likelihood].sum()), abs=1e-6)
    assert log["likelihood_wins"] == float(from_likelihood[weights.argmax()])


def test_accumulation_averages_directions(tmp_path):
    """Two windows of a batch each, the seed of the second batch its own."""
    model, data = tiny_causal(), completion_rows()
    before, expected = copy.deepcopy(model), None
    for index, part in enumerate((data[:4], data[4:])):
        seed = hash((42, 0, index)) % 2**63
        direction, _, _ = direction_by_hand(before, collate_right(part), seed, 5.0)
        expected = direction if expected is None else [(a + b) / 2 for a, b in zip(expected, direction, strict=True)]
    trainer_of(tmp_path, model, per_device_train_batch_size=4, gradient_accumulation_steps=2).train()
    for start, change, found in zip(before.parameters(), expected, model.parameters(), strict=True):
        torch.testing.assert_close(found, start + 0.1 * change, rtol=1e-6, atol=1e-8)


class Failing:
    """Costs that fail at a candidate."""

    reads, calls = "ids", 0

    def __call__(self, predictions, references):
        self.calls += 1
        return [float("nan") if self.calls == 3 else 1.0] * len(predictions)


def test_weights_come_back_bit_for_bit_after_every_search_and_every_failure(tmp_path):
    model = tiny_causal(dtype=torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = trainer_of(tmp_path, model, learning_rate=0.0)
    trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="the cost Failing must be finite, got nan in row 0"):
        trainer_of(tmp_path, model, cost=Failing()).train()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("returned", "message"),
    [([1.0], r"the cost short returned \[1.0\], must return .* of shape \(8,\)"), (None, "short")],
)
def test_costs_of_the_wrong_shape_are_named(returned, message, tmp_path):
    def short(predictions, references):
        return returned

    short.reads = "ids"
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, cost=short).train()


@pytest.mark.parametrize(
    "family, decoder",
    [(family, {}) for family in ("lstm additive", "bart", "marian")]
    + [(family, {"num_beams": 3}) for family in ("lstm fixed", "t5")]
    + [(family, {"do_sample": True, "top_k": 0}) for family in ("lstm additive", "bart")],
)
def test_seq2seq_models_and_decoders(family, decoder, tmp_path):
    """The same run again is the same run, sampled decoding included; the cost is that of the decoder it was given."""
    results = []
    for _ in range(2):
        model = tiny_seq2seq(family)
        own = copy.deepcopy(model.generation_config.to_dict())
        config = GenerationConfig.from_dict({**own, **decoder})
        trainer = trainer_of(tmp_path, model, rows(), collate, generation_config=config, max_steps=2)
        trainer.train()
        assert model.generation_config.to_dict() == own
        results.append((trainer.state.log_history[1]["cost"], model.state_dict()))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(value, results[1][1][name]) for name, value in results[0][1].items())


def test_a_likelihood_only_proposal_without_noise_is_gradient_descent(tmp_path):
    model = tiny_causal()
    before = copy.deepcopy(model)
    cross_entropy_by_hand(before, collate_right(completion_rows())).backward()
    trainer_of(tmp_path, model, mixture=0.0, noise=1e-12, likelihood_max_grad_norm=1e9).train()
    for start, found in zip(before.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, start - 0.1 * start.grad, rtol=1e-6, atol=1e-9)


def test_searching_lowers_a_cost_that_likelihood_does_not_see(tmp_path):
    """The cost is to say token 5 anywhere: random search finds it, cross entropy knows nothing of it."""

    def without_five(predictions, references):
        return [1 - row.count(5) / len(row) for row in predictions]

    without_five.reads = "ids"
    settings = dict(max_steps=30, learning_rate=0.5, alpha=200.0, mixture=1.0, noise=20.0, num_candidates=8)
    trainer = trainer_of(tmp_path, tiny_causal(dtype=torch.float32), cost=without_five, **settings)
    trainer.train()
    costs = [log["cost"] for log in trainer.state.log_history if "cost" in log]
    assert min(costs[-10:]) < 0.8 * costs[0]


@pytest.mark.half_precision
def test_adapters_alone_are_searched(tmp_path):
    base = tiny_causal("llama", dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"]))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen = []

    def spying(predictions, references):
        seen.append({name for name, value in model.state_dict().items() if not torch.equal(value, before[name])})
        return [float(len(row)) for row in predictions]

    spying.reads = "ids"
    trainer = trainer_of(tmp_path, model, cost=spying, gradient_checkpointing=True, bf16=True, max_steps=2)
    trainer.train()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed and all("lora_" in name for name in changed.union(*seen))
    assert len(seen) == 8 and not seen[0] and seen[1]
    metrics = trainer.evaluate()
    assert metrics["eval_cost"] > 0 and math.isfinite(metrics["eval_loss"])


def test_the_model_is_left_as_it_was(tmp_path, caplog):
    """Gradient checkpointing on, a configuration with its own ideas of decoding."""
    model = tiny_causal(dtype=torch.float32)
    model.config.use_cache = True  # which the stock Trainer would turn off
    model.generation_config.update(max_length=11, do_sample=False, num_beams=2)
    own = model.generation_config
    settings = copy.deepcopy(own.to_dict())
    modes = []

    class Modes(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            modes.append((model.training, model.config.use_cache))

    trainer = trainer_of(tmp_path, model, gradient_checkpointing=True, max_steps=2)
    trainer.add_callback(Modes())
    trainer.train()
    costs = [log["cost"] for log in trainer.state.log_history if "cost" in log]
    assert modes == [(True, True)] * 2
    assert model.generation_config is own and own.to_dict() == settings
    assert not [record for record in caplog.records if "use_cache" in record.message]
    plain = trainer_of(tmp_path, tiny_causal(dtype=torch.float32), max_steps=2,
                       generation_config=GenerationConfig(
                           num_beams=2, max_length=11, eos_token_id=END, pad_token_id=PAD))  # fmt: skip
    plain.train()
    assert costs == pytest.approx([log["cost"] for log in plain.state.log_history if "cost" in log])


def test_what_a_generation_config_leaves_open_is_not_taken_from_the_model(tmp_path, capfd):
    """Greedy, though the model's own configuration has beams and a length."""
    costs = []
    for own in ({}, {"num_beams": 3, "length_penalty": -3.0, "max_length": 5, "min_length": 4}):
        model = tiny_causal()
        model.generation_config.update(**own)
        config = GenerationConfig(eos_token_id=END, pad_token_id=PAD)
        trainer = trainer_of(tmp_path, model, generation_config=config)
        costs.append(trainer.evaluate()["eval_cost"])
        assert all(getattr(model.generation_config, name) == value for name, value in own.items())
    assert costs[0] == costs[1]
    assert "max_length" not in capfd.readouterr().err


def test_evaluation_reports_cross_entropy_and_cost_and_predicts_continuations(tmp_path):
    model = tiny_causal()
    trainer = trainer_of(tmp_path, model, predict_with_generate=True, per_device_eval_batch_size=5)
    batch = collate_right(completion_rows(5, 9))
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(cross_entropy_by_hand(model, batch).item(), rel=1e-5)
    assert metrics["eval_cost"] == pytest.approx(cost_by_hand(model, batch), rel=1e-6)
    output = trainer.predict(completion_rows(5, 9))
    found = [ids.tolist() for ids in ends_at(torch.tensor(output.predictions), [END])]
    expected = [[int(i) for i in row if i != -100] for row in output.label_ids]
    assert float(normalized_edit_distance(found, expected).mean()) == pytest.approx(metrics["eval_cost"], rel=1e-6)
    short = trainer.predict(completion_rows(5, 9), max_new_tokens=2)
    assert short.predictions.shape[1] == 2


def test_a_resumed_run_is_the_same_run(tmp_path):
    settings = dict(per_device_train_batch_size=2, save_strategy="steps", save_steps=3, optim="adamw_torch")
    whole = trainer_of(tmp_path / "a", max_steps=6, **settings)
    whole.train()
    again = trainer_of(tmp_path / "b", max_steps=6, **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    for one, two in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_candidates": 0}, "num_candidates must be a whole number from 1 up, got 0"),
        ({"mixture": 1.2}, "mixture must be a number from 0 to 1, got 1.2"),
        ({"mixture": -0.1}, "mixture must be a number from 0 to 1"),
        ({"alpha": 0.0}, "alpha must be a number above 0, got 0"),
        ({"noise": -1.0}, "noise must be a number above 0"),
        ({"density": "other"}, "density must be one of 'given_noise', 'full', got 'other'"),
        ({"max_length_ratio": 0.0}, "max_length_ratio must be a number above 0"),
        ({"cost": "bleurt"}, "cost must be a callable or one of edit_distance"),
        ({"fp16": True}, "fp16 must be False"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor must be 0"),
        ({"cost": "sentence_bleu"}, "processing_class must be given: the cost 'sentence_bleu' reads texts"),
    ],
)
def test_refusals(settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path, **settings)


def test_models_that_do_not_fit_are_refused(tmp_path):
    endless = tiny_causal()
    endless.config.eos_token_id = endless.generation_config.eos_token_id = None
    with pytest.raises(ValueError, match="eos_token_id, got none"):
        trainer_of(tmp_path, endless)
    with pytest.raises(ValueError, match="trained weights must be in float32, got torch"):
        trainer_of(tmp_path, tiny_causal(dtype=torch.bfloat16))
    long = [{name: value.repeat(40)[:65] for name, value in completion_rows(1)[0].items()}]
    long[0]["labels"][:-1] = -100
    with pytest.raises(ValueError, match=r"prompts must .*got one of 64 with 64 positions"):
        trainer_of(tmp_path, tiny_causal("llama"), dataset=long).train()


def measure_memory(folder: Path) -> None:
    config = GPT2Config(vocab_size=23, n_positions=64, n_embd=1024, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=1)
    model = GPT2LMHeadModel(config)
    args = MGSConfig(
        str(folder), per_device_train_batch_size=2, max_steps=1, optim="sgd", report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, max_length_ratio=1.0, num_candidates=3,
    )  # fmt: skip
    trainer = MGSTrainer(model, args, train_dataset=completion_rows(2), data_collator=collate_right)
    gc.collect()
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 1024
    trainer.train()
    size = sum(parameter.numel() * 4 for parameter in model.parameters()) / 1024
    # ru_maxrss would begin at the peak of the process that started this one
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    print("PEAK", (peak - before) / size)


def test_peak_memory_is_the_gradient_and_one_copy(tmp_path):
    (done,) = fresh(tmp_path, measure_memory, tmp_path)
    peak = float(done.stdout.split("PEAK")[1])
    assert 1.8 < peak < 2.7  # in models of this size, beside the model; activations and one tensor's noise included


def measure_large() -> None:
    d, scale = 10**8, 1e-4
    direction = torch.empty(d).uniform_(-scale, scale)
    original = torch.zeros(d)
    parameter = original.clone()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    scales = noise_scales([direction], 1.0)
    assert abs(scales[0] / (scale / 2) - 1) < 1e-3, scales
    proposal = proposal_sums([direction], scales)
    candidate = Candidate(True, 3)
    sums = perturb_([parameter], [original], [direction], scales, candidate, "full")
    square = sum(float(noise.double().square().sum()) for _, _, noise in noise_of(candidate, [direction]))
    assert abs(float(sums.square) - square) < 1e-1, (float(sums.square), square)
    for density in ("full", "given_noise"):
        assert log_proposal_density(candidate, sums, proposal, 0.5, density).isfinite()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / (4 * d / 1024))


def test_a_hundred_million_parameters(tmp_path):
    """Sums agree with float64 to a tenth of a nat, and nothing of that size is held for a candidate."""
    (done,) = fresh(tmp_path, measure_large)
    assert float(done.stdout) < 0.3  # tensors of that size, beside weights, original and direction


def test_a_configuration_of_beams_alone_decodes_seq2seq_models(tmp_path):
    """Where decoding starts is not said by it."""
    for family in ("bart", "t5", "marian", "lstm additive"):
        trainer = trainer_of(
            tmp_path, tiny_seq2seq(family), rows(), collate, generation_config=GenerationConfig(num_beams=3)
        )
        trainer.train()
        assert math.isfinite(trainer.state.log_history[0]["cost"])


def test_evaluation_with_sampling_repeats_itself(tmp_path):
    config = GenerationConfig(do_sample=True, top_k=0, eos_token_id=END, pad_token_id=PAD)
    trainer = trainer_of(tmp_path, generation_config=config)
    assert trainer.evaluate()["eval_cost"] == trainer.evaluate()["eval_cost"]


@pytest.mark.half_precision
def test_adapters_decode_as_precisely_as_they_are_scored(tmp_path):
    base = tiny_causal("llama", dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"]))
    seen = []
    layer = base.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    trainer = trainer_of(tmp_path, model, bf16=True)
    seen.clear()  # what the trainer tries a model on runs as the weights are
    trainer.train()
    assert len(seen) > 10 and set(seen) == {torch.bfloat16}


def test_every_end_token_ends(tmp_path):
    trainer = trainer_of(tmp_path, generation_config=GenerationConfig(eos_token_id=[END, 7], pad_token_id=PAD))
    decoded = trainer.candidates.decode(
        pairs := trainer.candidates.pairs(collate_right(completion_rows())), trainer.candidates.settings(pairs)
    )
    assert all(not {END, 7} & set(found[0][:-1].tolist()) for found in decoded)
    assert trainer.candidates.end_ids == [END, 7]


def test_labels_are_checked(tmp_path):
    wrong = [{name: value.clone() for name, value in row.items()} for row in completion_rows(2)]
    wrong[1]["labels"][-1] = wrong[1]["input_ids"][-1] = 99
    with pytest.raises(ValueError, match="labels: row 1 has 99"):
        trainer_of(tmp_path, dataset=wrong).train()


def test_costs_can_read_prompts(tmp_path):
    seen = []

    def prompted(predictions, references, prompts):
        seen.extend(zip(prompts, references, strict=True))
        return [1.0] * len(predictions)

    prompted.reads = "ids"
    trainer_of(tmp_path, cost=prompted).train()
    expected = [(row["input_ids"][row["labels"] == -100].tolist(), row["labels"][row["labels"] != -100].tolist())
                for row in completion_rows()]  # fmt: skip
    assert seen[:8] == expected
