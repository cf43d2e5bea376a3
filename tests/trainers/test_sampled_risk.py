"""Minimum risk and policy gradient: hand-written steps over the drawn candidates, the whole output space, logs."""

import contextlib
import copy
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model

from hf_ebm.objectives.sequence_costs import normalized_edit_distance
from hf_ebm.trainers import (
    GRPOConfig,
    GRPOTrainer,
    MinimumRiskConfig,
    MinimumRiskTrainer,
    PolicyGradientConfig,
    PolicyGradientTrainer,
    RankingConfig,
    RankingTrainer,
    sequence_pairs,
)
from hf_ebm.trainers.sampled_risk import distinct
from tests.causal_families import END, PAD, V, collate_left, collate_right, completion_rows, tiny_causal
from tests.seq2seq_families import tiny_seq2seq
from tests.test_encoded_once import encoded_rows, error
from tests.trainers.test_mgs import greedy_predictions
from tests.trainers.test_trainers import ONE_STEP, collate, rows

pytestmark = pytest.mark.slow

KINDS = {
    "minimum risk": (MinimumRiskTrainer, MinimumRiskConfig, {"sharpness": 0.7}),
    "minimum risk, mixed": (
        MinimumRiskTrainer,
        MinimumRiskConfig,
        {"include_target": False, "cross_entropy_weight": 0.3, "sampling_temperature": 2.0},
    ),
    "minimum risk, by length": (MinimumRiskTrainer, MinimumRiskConfig, {"length_penalty": 0.6, "sharpness": 2.0}),
    "self-critical": (PolicyGradientTrainer, PolicyGradientConfig, {"num_candidates": 3}),
    "running mean, mixed": (
        PolicyGradientTrainer,
        PolicyGradientConfig,
        {"baseline": "running_mean", "cross_entropy_weight": 0.5},
    ),
    "leave one out": (PolicyGradientTrainer, PolicyGradientConfig, {"baseline": "leave_one_out", "num_candidates": 3}),
    "ranking": (RankingTrainer, RankingConfig, {"margin": 0.05}),
    "ranking, beams": (
        RankingTrainer,
        RankingConfig,
        {
            "candidates": "beams",
            "include_target": True,
            "length_penalty": 0.0,
            "margin": 2.0,
            "margin_by_rank": False,
            "cross_entropy_weight": 0.0,
        },
    ),
    "grpo": (GRPOTrainer, GRPOConfig, {"num_candidates": 3}),
    "grpo, iterated, mixed": (
        GRPOTrainer,
        GRPOConfig,
        {
            "num_iterations": 2,
            "kl_weight": 0.5,
            "cross_entropy_weight": 0.3,
            "scale_advantages": False,
            "length_normalization": "constant",
            "length_constant": 7.0,
        },
    ),
}


def trainer_of(kind, tmp_path, model=None, dataset=None, collator=collate_right, cost=None, **settings):
    trainer_class, config_class, own = KINDS[kind]
    args = config_class(str(tmp_path), **{**ONE_STEP, **own, **settings})
    model = tiny_causal() if model is None else model
    dataset = completion_rows() if dataset is None else dataset
    trainer = trainer_class(
        model, args, cost=cost, train_dataset=dataset, eval_dataset=completion_rows(5, 9), data_collator=collator
    )
    trainer.drawn = []
    sample = trainer.candidates.sample

    def remembered(*arguments, **options):
        drawn, ruled_out = sample(*arguments, **options)
        trainer.drawn.append(drawn)
        return drawn, ruled_out

    trainer.candidates.sample = remembered
    if getattr(args, "candidates", None) == "beams":
        decode = trainer.candidates.decode
        trainer.candidates.decode = lambda *given, **options: (
            trainer.drawn.append(decode(*given, **options)) or (trainer.drawn[-1])
        )
    return trainer


def log_prob_by_hand(model, prompt, ids, never=()):
    logits = model(torch.cat([prompt, ids])[None]).logits[0]
    logits[:, list(never)] = -torch.inf
    logs = torch.log_softmax(logits, -1)
    return sum(logs[len(prompt) - 1 + t, token] for t, token in enumerate(ids))


def group_loss_by_hand(args, model, prompt, candidates, costs):
    """Of a first iteration, whose ratios are 1, and whose reference is the model."""
    advantages = costs.mean() - costs
    if args.scale_advantages:
        advantages = advantages / (costs.std() + 1e-4)
    losses = []
    for ids, advantage in zip(candidates, advantages, strict=True):
        logits = model(torch.cat([prompt, ids])[None]).logits[0, len(prompt) - 1 : -1]
        logits[:, PAD] = -torch.inf
        logs = logits.log_softmax(-1)[range(len(ids)), ids]
        divisor = len(ids) if args.length_normalization == "sequence" else args.length_constant
        losses.append(-(advantage * (logs - logs.detach()).exp()).sum() / divisor)
    return torch.stack(losses).mean()


def ranking_by_hand(args, scores, costs):
    loss, ranks = scores.sum() * 0, [sum(other < own for other in costs) for own in costs]
    for i, better in enumerate(costs):
        for j, worse in enumerate(costs):
            if better < worse:
                margin = args.margin * (ranks[j] - ranks[i] if args.margin_by_rank else 1)
                loss = loss + max(scores[j] - scores[i] + margin, 0 * loss)
    return loss


def loss_by_hand(trainer, model, data, drawn, past=0.0):
    """Mean over rows, one sequence at a time."""
    args, losses = trainer.args, []
    greedy = greedy_predictions(model, collate_right(data))
    for row, candidates, decoded in zip(data, drawn, greedy, strict=True):
        target = row["labels"][row["labels"] != -100]
        prompt = row["input_ids"][: len(row["input_ids"]) - len(target)]
        of_set = isinstance(trainer, (MinimumRiskTrainer, RankingTrainer))
        if of_set:
            candidates = [*([target] if args.include_target else []), *candidates]
            candidates = [torch.tensor(ids) for ids in {tuple(ids.tolist()) for ids in candidates}]
        costs = normalized_edit_distance(candidates, [target] * len(candidates)).double()
        never = () if of_set else (PAD,)  # padding is not sampled
        logs = torch.stack([log_prob_by_hand(model, prompt, ids, never) for ids in candidates])
        if of_set:
            logs = torch.stack(
                [value / len(ids) ** args.length_penalty for value, ids in zip(logs, candidates, strict=True)]
            )
        if isinstance(trainer, RankingTrainer):
            loss = ranking_by_hand(args, logs, costs.tolist())
        elif isinstance(trainer, MinimumRiskTrainer):
            powers = logs.exp() ** args.sharpness
            loss = (powers / powers.sum() * costs).sum()
        elif isinstance(trainer, GRPOTrainer):
            loss = group_loss_by_hand(args, model, prompt, candidates, costs)
        else:
            baseline = {
                "self_critical": normalized_edit_distance([decoded], [target]).double(),
                "running_mean": past,
                "leave_one_out": torch.stack(
                    [costs[[j for j in range(len(costs)) if j != i]].mean() for i in range(len(costs))]
                ),
            }[args.baseline]
            loss = ((costs - baseline) * logs).mean()
        losses.append(loss - args.cross_entropy_weight * log_prob_by_hand(model, prompt, target) / len(target))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("collator", [collate_right, collate_left])
@pytest.mark.parametrize("kind", KINDS)
def test_one_step_equals_a_hand_written_one(kind, collator, tmp_path):
    model, data = tiny_causal(), completion_rows()
    before = copy.deepcopy(model)
    trainer = trainer_of(kind, tmp_path, model, collator=collator)
    trainer.train()
    loss = loss_by_hand(trainer, before, data, trainer.drawn[0])
    loss.backward()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), rel=1e-5, abs=1e-7)
    for start, found in zip(before.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, start - 0.1 * start.grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_is_a_mean_over_all_rows(kind, tmp_path):
    """Batches of 3, 3 and 2 rows: each batch has its own draws, every row the same weight."""
    model, data = tiny_causal(), completion_rows()
    before = copy.deepcopy(model)
    trainer = trainer_of(kind, tmp_path, model, per_device_train_batch_size=3, gradient_accumulation_steps=3)
    trainer.train()
    parts = [data[:3], data[3:6], data[6:]]
    losses = [loss_by_hand(trainer, before, part, drawn) for part, drawn in zip(parts, trainer.drawn, strict=True)]
    (sum(len(part) * loss for part, loss in zip(parts, losses, strict=True)) / 8).backward()
    for start, found in zip(before.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, start - 0.1 * start.grad, rtol=1e-6, atol=1e-7)


def test_samples_follow_the_model(tmp_path):
    """Total variation of the first token against the model's own distribution without padding; no default cuts it."""
    model, row = tiny_causal(), completion_rows(1)
    model.generation_config.update(top_k=2, temperature=0.1, do_sample=True)
    trainer = trainer_of("self-critical", tmp_path, model, row, num_candidates=4000)
    trainer.train()
    counts = torch.zeros(23, dtype=torch.float64)
    for ids in trainer.drawn[0][0]:
        counts[ids[0]] += 1 / 4000
    prompt = row[0]["input_ids"][row[0]["labels"] == -100]
    logits = tiny_causal()(prompt[None]).logits[0, -1]
    logits[PAD] = -torch.inf
    expected = torch.softmax(logits, -1)
    distance = float((counts - expected).abs().sum() / 2)
    bound = float((expected * (1 - expected) / 4000).sqrt().sum())
    assert distance < bound
    colder = torch.softmax(logits / 0.7, -1)
    assert float((counts - colder).abs().sum() / 2) > bound  # a temperature would be noticed


def test_the_policy_gradient_is_that_of_the_expected_cost(tmp_path):
    """Many samples of one row against all sequences of up to two tokens; within the Monte Carlo error."""
    count, data = 6000, completion_rows(1)
    data[0] = {name: value[:4] for name, value in data[0].items()}
    data[0]["input_ids"][-1] = data[0]["labels"][-1] = END  # two targets: at most ceil(1.0 * 2) tokens are decoded
    model = tiny_causal()
    before = copy.deepcopy(model)
    trainer = trainer_of("self-critical", tmp_path, model, data, num_candidates=count, max_length_ratio=1.0)
    trainer.train()
    prompt, target = data[0]["input_ids"][:2], data[0]["input_ids"][2:]
    left = [token for token in range(V) if token != PAD]
    every = [torch.tensor([END])] + [torch.tensor([a, b]) for a in left if a != END for b in left]
    never = (torch.arange(V) == PAD).expand(sum(map(len, every)), V)
    costs = normalized_edit_distance(every, [target] * len(every)).double()
    logs = trainer.candidates.pairs(collate_right(data)).log_probs(before, [0] * len(every), every, never)
    assert logs.exp().sum().item() == pytest.approx(1, abs=1e-9)
    assert logs[0].item() == pytest.approx(log_prob_by_hand(before, prompt, every[0], [PAD]).item())
    (logs.exp() * costs).sum().backward()
    exact = torch.cat([p.grad.flatten() for p in before.parameters()])
    found = torch.cat([
        (start - after).detach().flatten() / 0.1
        for start, after in zip(before.parameters(), model.parameters(), strict=True)
    ])  # fmt: skip
    relative = float((found - exact).norm() / exact.norm())
    assert relative < 0.25
    logs = trainer.candidates.pairs(collate_right(data)).log_probs(before, [0] * len(every), every, never)
    shuffled = costs[torch.randperm(len(costs), generator=torch.Generator().manual_seed(0))]
    other = torch.autograd.grad((logs.exp() * shuffled).sum(), list(before.parameters()))
    assert float((found - torch.cat([g.flatten() for g in other])).norm() / exact.norm()) > 0.6  # other costs: noticed


def test_the_running_mean_is_of_earlier_steps(tmp_path):
    trainer = trainer_of(
        "running mean, mixed", tmp_path, max_steps=4, per_device_train_batch_size=2, running_mean_decay=0.75,
        gradient_accumulation_steps=2, cross_entropy_weight=0.0,
    )  # fmt: skip
    trainer.train()
    logs = [log for log in trainer.state.log_history if "baseline" in log]
    mean = 0.0
    for index, log in enumerate(logs):
        assert log["baseline"] == pytest.approx(mean, rel=1e-6)
        mean = log["candidate_cost"] if index == 0 else 0.75 * mean + 0.25 * log["candidate_cost"]
    assert trainer.running_mean.value == pytest.approx(mean)
    trainer.args.max_steps = 1
    trainer.train()
    assert [log for log in trainer.state.log_history if "baseline" in log][-1]["baseline"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_same_run(kind, tmp_path):
    settings = dict(
        per_device_train_batch_size=2, save_strategy="steps", save_steps=3, optim="adamw_torch", max_steps=6
    )
    whole = trainer_of(kind, tmp_path / "a", **settings)
    whole.train()
    again = trainer_of(kind, tmp_path / "b", **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    for one, two in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("family", ["lstm additive", "lstm fixed", "bart", "t5", "marian", "mbart"])
@pytest.mark.parametrize("kind", KINDS)
def test_seq2seq_models(kind, family, tmp_path):
    model = tiny_seq2seq(family)
    before = copy.deepcopy(model)
    trainer = trainer_of(kind, tmp_path, model, rows(), collate)
    trainer.train()
    assert math.isfinite(trainer.state.log_history[0]["loss"])
    assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), model.parameters(), strict=True))


@pytest.mark.half_precision
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("lstm additive", {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3}),
        ("lstm additive", {"bf16": True}),
        ("bart", {"adapters": ["q_proj", "v_proj"], "gradient_checkpointing": True}),
        ("bart", {"bf16": True}),
        ("t5", {"adapters": ["q", "v"], "per_device_train_batch_size": 3, "gradient_accumulation_steps": 3}),
    ],
)
@pytest.mark.parametrize("kind", ["minimum risk, mixed", "self-critical"])
def test_a_step_is_that_of_an_encoder_run_for_each_candidate(kind, family, settings, tmp_path, monkeypatch):
    adapters, steps, most = settings.get("adapters"), [], []
    changes = {name: value for name, value in settings.items() if name != "adapters"}
    for repeated in (False, True):
        model = tiny_seq2seq(family).to(torch.float32 if "bf16" in settings else torch.float64)
        if adapters:
            torch.manual_seed(0)
            lora = LoraConfig(task_type="SEQ_2_SEQ_LM", r=2, target_modules=adapters, init_lora_weights=False)
            model = get_peft_model(model, lora).double()
        if repeated:
            monkeypatch.setattr(sequence_pairs, "encoded_once", lambda *arguments: contextlib.nullcontext())
        before = [parameter.detach().clone() for parameter in model.parameters()]
        trainer = trainer_of(kind, tmp_path, model, rows(), collate, **changes)
        runs = encoded_rows(model.get_encoder())
        trainer.train()
        most.append(max(runs))
        steps.append(torch.cat([(a - b).flatten() for a, b in zip(model.parameters(), before, strict=True)]).detach())
    assert most[0] == settings.get("per_device_train_batch_size", 8) < most[1]
    assert error(*steps) < (1e-2 if "bf16" in settings else 1e-7)


def test_logs_of_minimum_risk(tmp_path):
    trainer = trainer_of("minimum risk", tmp_path)
    trainer.train()
    log = trainer.state.log_history[0]
    candidates = [distinct([row["labels"][row["labels"] != -100], *found])
                  for row, found in zip(completion_rows(), trainer.drawn[0], strict=True)]  # fmt: skip
    assert log["num_distinct"] == pytest.approx(sum(map(len, candidates)) / 8)
    assert log["risk"] == pytest.approx(log["loss"], rel=1e-6)
    prompts = [row["input_ids"][row["labels"] == -100] for row in completion_rows()]
    effective = []
    for prompt, found in zip(prompts, candidates, strict=True):
        powers = torch.stack([log_prob_by_hand(tiny_causal(), prompt, ids) for ids in found]).detach().exp() ** 0.7
        effective.append(float(powers.sum() ** 2 / powers.square().sum()))
    assert log["effective_candidates"] == pytest.approx(sum(effective) / 8, rel=1e-6)


@pytest.mark.parametrize(
    ("turn", "settings", "told"),
    [
        (1, {}, None),
        (1, {"sharpness": 1.0}, "lower sharpness, which is 1"),
        (1, {"sharpness": 1.0, "max_steps": 9}, None),
        (0, {"include_target": False}, "the model draws one over and over"),
    ],
)
def test_weights_that_stay_on_one_candidate_are_told_once(turn, settings, told, tmp_path, caplog):
    """Sequences of 30 tokens, whose log probabilities are tens of nats apart: the default weighs them all."""
    settings = {"max_steps": 21, "logging_steps": 21, "learning_rate": 0.0, **settings}
    settings.setdefault("sharpness", MinimumRiskConfig.sharpness)
    trainer = trainer_of("minimum risk", tmp_path, dataset=completion_rows(2), **settings)
    ids = torch.arange(30).remainder(20) + 3
    trainer.candidates.sample = lambda pairs, count, temperature: (
        [[ids.roll(turn * n) for n in range(count)]] * len(pairs),
        None,
    )
    trainer.train()
    found = [record.message for record in caplog.records if "effective candidates" in record.message]
    assert len(found) == (told is not None) and all(told in text for text in found)
    if settings["max_steps"] == 21:
        effective = trainer.state.log_history[0]["effective_candidates"]
        assert effective > 4 if told is None else effective < 1.5  # of five


def test_equal_candidates_count_once():
    ids = [torch.tensor(row) for row in ([3, 1], [4, 1], [3, 1], [3], [4, 1])]
    assert [row.tolist() for row in distinct(ids)] == [[3, 1], [4, 1], [3]]


def test_costs_of_a_thousand_nats_train(tmp_path):
    def huge(predictions, references):
        return [1000.0 + len(row) for row in predictions]

    huge.reads = "ids"
    for kind in KINDS:
        trainer = trainer_of(kind, tmp_path, tiny_causal(dtype=torch.float32), cost=huge)
        trainer.train()
        assert all(p.isfinite().all() for p in trainer.model.parameters())


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("minimum risk", {"num_candidates": 0}, "num_candidates must be a whole number from 1 up, got 0"),
        ("minimum risk", {"candidates": "greedy"}, "candidates must be one of 'sampling', 'beams', got 'greedy'"),
        ("ranking", {"margin": -0.1}, "margin must be a number from 0 up"),
        ("ranking", {"num_candidates": 1}, "num_candidates must be 2 or more without include_target"),
        ("minimum risk", {"sharpness": 0.0}, "sharpness must be a number above 0, got 0"),
        ("minimum risk", {"sampling_temperature": -1.0}, "sampling_temperature must be a number above 0"),
        ("minimum risk", {"cross_entropy_weight": -0.1}, "cross_entropy_weight must be a number from 0 up"),
        ("self-critical", {"baseline": "none"}, "baseline must be one of .*'leave_one_out', got 'none'"),
        ("grpo", {"num_candidates": 1}, "num_candidates must be a whole number from 2 up"),
        ("grpo", {"num_iterations": 0}, "num_iterations must be a whole number from 1 up"),
        ("grpo", {"clip_range": 0.0}, "clip_range must be a number above 0"),
        ("grpo", {"kl_weight": -1.0}, "kl_weight must be a number from 0 up"),
        ("grpo", {"length_normalization": "none"}, "length_normalization must be one of 'sequence', 'tokens', 'const"),
        ("grpo", {"num_iterations": 2, "ignore_data_skip": True}, "ignore_data_skip must be False with num_iterations"),
        ("leave one out", {"num_candidates": 1}, "num_candidates must be 2 or more with the baseline leave_one_out"),
        ("self-critical", {"running_mean_decay": 1.0}, "running_mean_decay must be a number from 0 up and below 1"),
    ],
)
def test_refusals(kind, settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trainer_of(kind, tmp_path, **settings)


@pytest.mark.parametrize("own", [{"min_p": 0.99}, {"no_repeat_ngram_size": 1}, {"repetition_penalty": 9.0}])
def test_what_the_models_own_decoding_says_does_not_touch_samples(own, tmp_path):
    plain, changed = (
        trainer_of("self-critical", tmp_path, tiny_causal(), completion_rows(2), num_candidates=20) for _ in range(2)
    )
    changed.model.generation_config.update(**own)
    changed.candidates.config.update(**own)
    for trainer in (plain, changed):
        trainer.train()
    drawn = [[ids.tolist() for found in trainer.drawn[0] for ids in found] for trainer in (plain, changed)]
    assert drawn[0] == drawn[1]
    assert changed.model.generation_config.to_dict() != plain.model.generation_config.to_dict()


def test_sampled_duplicates_count_once_in_a_step(tmp_path):
    trainer = trainer_of("minimum risk", tmp_path, include_target=False, num_candidates=4)
    twice = [torch.tensor([5, END]), torch.tensor([6, END])]
    trainer.candidates.sample = lambda pairs, count, temperature: ([[*twice, *twice] for _ in range(len(pairs))], None)
    trainer.train()
    assert trainer.state.log_history[0]["num_distinct"] == 2


def test_the_sampling_temperature_is_used(tmp_path):
    kinds = []
    for temperature in (0.05, 5.0):
        trainer = trainer_of("minimum risk", tmp_path, num_candidates=30, sampling_temperature=temperature)
        trainer.train()
        kinds.append(trainer.state.log_history[0]["num_distinct"])
    assert kinds[0] < 5 < 20 < kinds[1]


def test_the_self_critical_baseline_is_greedy(tmp_path):
    baselines = []
    for own in ({}, {"do_sample": True, "num_beams": 3, "top_k": 0}):
        trainer = trainer_of("self-critical", tmp_path)
        trainer.candidates.config.update(**own)
        trainer.train()
        baselines.append(trainer.state.log_history[0]["baseline"])
    assert baselines[0] == baselines[1]


def test_going_on_from_another_trainers_checkpoint(tmp_path):
    settings = dict(save_strategy="steps", save_steps=1, per_device_train_batch_size=2)
    trainer_of("minimum risk", tmp_path / "a", max_steps=1, **settings).train()
    later = trainer_of("running mean, mixed", tmp_path / "b", max_steps=2, **settings)
    later.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-1"))
    assert later.running_mean.value is not None


def test_a_single_candidate_without_the_target_is_refused(tmp_path):
    with pytest.raises(ValueError, match="num_candidates must be 2 or more without include_target"):
        trainer_of("minimum risk", tmp_path, num_candidates=1, include_target=False)
