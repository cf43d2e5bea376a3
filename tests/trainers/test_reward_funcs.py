"""Reward functions of the trainers for decoded sequences: hand-written sums, what is logged, what fails."""

import asyncio
import copy
import math
import threading
from functools import partial

import evaluate
import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorForSeq2Seq,
    GPT2Config,
    GPT2ForSequenceClassification,
)

from hf_ebm.evaluate_modules import module_path
from hf_ebm.objectives.rewards import Decoded
from hf_ebm.objectives.sequence_costs import normalized_edit_distance
from hf_ebm.trainers import MGSTrainer, MinimumRiskConfig
from hf_ebm.trainers.reward_functions import MetricReward, RewardModel, as_rewards
from hf_ebm.trainers.rewards import RewardTerms, with_deviations
from tests.causal_families import collate_right, completion_rows, tiny_causal
from tests.models.tokenizers_for_tests import small_tokenizer
from tests.seq2seq_families import tiny_seq2seq
from tests.trainers import test_sampled_risk
from tests.trainers.test_cost_columns import data_of, target_of, update_of
from tests.trainers.test_trainers import ONE_STEP

KINDS = ("mgs", *test_sampled_risk.KINDS)
CPU = torch.device("cpu")


def trainer_of(kind, tmp_path, reward_funcs=None, model=None, data=None, collator=collate_right, cost=None, **settings):
    trainer_class, config_class, own = {
        "mgs": (MGSTrainer, MGSTrainer.config_class, {"learning_rate": 0.3}),
        **test_sampled_risk.KINDS,
    }[kind]
    args = config_class(str(tmp_path), **{**ONE_STEP, **own, **settings})
    given = {} if reward_funcs is None else {"reward_funcs": reward_funcs}
    data = completion_rows() if data is None else data
    model = tiny_causal(dtype=torch.float32) if model is None else model
    return trainer_class(
        model, args, cost=cost, train_dataset=data, eval_dataset=completion_rows(5, 9), data_collator=collator, **given
    )


def ids_text(rows):
    return [" ".join(map(str, ids)) for ids in rows]


def decoded(completions=("a b", "c"), references=("a", "c d"), prompts=("p", "q q")):
    """Texts, each with the ids of its place."""
    texts = {}
    rows = []
    for column in (completions, references, prompts):
        ids = [[len(texts) + place] for place in range(len(column))]
        texts.update(zip(map(tuple, ids), column, strict=True))
        rows.append(ids)
    return Decoded(*rows, {}, lambda given: [texts[tuple(ids)] for ids in given])


def terms_of(*functions, **options):
    return RewardTerms(as_rewards(list(functions), True, CPU), **options)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cost_by_name_is_the_update_of_its_negative_reward(kind, tmp_path):
    """And of a weighted sum of functions that make it up, one of which is not applicable to some rows."""

    def half(completion_ids, reference_ids):
        return [-float(cost) / 2 for cost in normalized_edit_distance(completion_ids, reference_ids)]

    def some(completion_ids):
        return [None if len(ids) % 2 else 0.0 for ids in completion_ids]

    expected = update_of(trainer_of(kind, tmp_path, cost="edit_distance"))
    assert torch.equal(update_of(trainer_of(kind, tmp_path, "neg_edit_distance")), expected) and bool(expected.any())
    assert torch.equal(update_of(trainer_of(kind, tmp_path, reward_funcs=None)), expected)
    by_hand = trainer_of(kind, tmp_path, [half, some], reward_weights=[2.0, 7.0])
    torch.testing.assert_close(update_of(by_hand), expected)


def test_names_may_be_in_the_configuration(tmp_path):
    expected = update_of(trainer_of("self-critical", tmp_path, "neg_edit_distance"))
    named = trainer_of("self-critical", tmp_path, reward_funcs=None)
    args = test_sampled_risk.KINDS["self-critical"][1](
        str(tmp_path), **{**ONE_STEP, "num_candidates": 3, "reward_funcs": ["neg_edit_distance"]}
    )
    named = type(named)(
        tiny_causal(dtype=torch.float32), args, train_dataset=completion_rows(), data_collator=collate_right
    )
    assert torch.equal(update_of(named), expected)


@pytest.mark.parametrize("which", ["bart", "gpt2"])
def test_functions_read_the_columns_of_their_row(which, tmp_path):
    data, seen = data_of(which), []
    known = {target_of(row): row for row in data}

    def by_target(completion_ids, reference_ids):
        return [sum(ids) * known[tuple(own)]["weight"] for ids, own in zip(completion_ids, reference_ids, strict=True)]

    def by_column(completion_ids, weight, **others):
        seen.extend(others["topic"])
        return torch.tensor([sum(ids) for ids in completion_ids]) * torch.tensor(weight)

    updates = []
    for function in (by_target, by_column):
        model = tiny_seq2seq("bart") if which == "bart" else tiny_causal()
        collator = DataCollatorForSeq2Seq(small_tokenizer("wordpiece"))
        trainer = trainer_of(
            "self-critical", tmp_path, function, model, Dataset.from_list(data), collator,
            remove_unused_columns=False, per_device_train_batch_size=3, gradient_accumulation_steps=3,
        )  # fmt: skip
        updates.append(update_of(trainer))
    assert torch.equal(*updates) and bool(updates[0].any())
    assert set(seen) == {row["topic"] for row in data}
    with pytest.raises(ValueError, match="the reward by_column reads weight of the data"):
        trainer_of("self-critical", tmp_path, by_column, data=Dataset.from_list(data))


def test_terms_are_logged_by_name(tmp_path):
    """Of all candidates of a step, computed from them by hand."""

    def length(completion_ids):
        return [len(ids) for ids in completion_ids]

    def sometimes(completion_ids):
        return [None if ids[0] % 2 else float(ids[0]) for ids in completion_ids]

    trainer = trainer_of("self-critical", tmp_path, [length, sometimes], reward_weights=[1.0, 0.5], num_candidates=3)
    drawn, sample = [], trainer.candidates.sample

    def remembered(*given, **options):
        found = sample(*given, **options)
        drawn.extend(found[0])
        return found

    trainer.candidates.sample = remembered
    trainer.train()
    log = trainer.state.log_history[0]
    groups = [[ids.tolist() for ids in found] for found in drawn]
    lengths = [len(ids) for found in groups for ids in found]
    firsts = [ids[0] for found in groups for ids in found if not ids[0] % 2]
    totals = [[len(ids) + (0 if ids[0] % 2 else 0.5 * ids[0]) for ids in found] for found in groups]
    assert 0 < len(firsts) < len(lengths)
    expected = {
        "rewards/length/mean": np.mean(lengths),
        "rewards/length/std": np.std(lengths),
        "rewards/sometimes/mean": np.mean(firsts),
        "rewards/sometimes/std": np.std(firsts),
        "reward": np.mean(totals),
        "reward_std": np.mean([np.std(found) for found in totals]),
        "zero_deviation_share": np.mean([np.std(found) == 0 for found in totals]),
        "candidate_cost": -np.mean(totals),
        "decoded_length": np.mean(lengths),
    }
    assert {name: log[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    metrics = trainer.evaluate()
    assert metrics["eval_reward"] == pytest.approx(-metrics["eval_cost"])
    assert {"eval_rewards/length/mean", "eval_rewards/length/std", "eval_rewards/sometimes/mean"} <= metrics.keys()
    assert not any("square" in name for name in (*log, *metrics))


def test_equal_candidates_are_a_group_without_deviation(tmp_path):
    trainer = trainer_of("self-critical", tmp_path, lambda completion_ids: [0.1] * len(completion_ids))
    trainer.train()
    log = trainer.state.log_history[0]
    assert (log["zero_deviation_share"], log["reward_std"]) == (1, 0)
    assert log["rewards/<lambda>/std"] == pytest.approx(0, abs=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_call_ends_a_run_or_is_skipped_and_counted(kind, tmp_path, caplog):
    """What fails at every third row counts as the mean of the row's others: the update is that of the filled values."""
    calls = []

    def judged(completion_ids, reference_ids):
        return [float(len(ids)) for ids in completion_ids]

    def failing(completion_ids, reference_ids):
        calls.append(len(completion_ids))
        return [math.nan if at % 3 == 1 else len(ids) for at, ids in enumerate(completion_ids)]

    def filled(completion_ids, reference_ids):
        values = [None if at % 3 == 1 else float(len(ids)) for at, ids in enumerate(completion_ids)]
        rows = [tuple(ids) for ids in reference_ids]
        assert len(set(rows)) in (1, 8)
        groups = {row: [v for v, r in zip(values, rows, strict=True) if r == row and v is not None] for row in rows}
        every = [value for value in values if value is not None]
        return [
            value if value is not None else sum(groups[row] or every) / len(groups[row] or every)
            for value, row in zip(values, rows, strict=True)
        ]

    with pytest.raises(ValueError, match="the reward failing must be a finite number or None, got nan in row 1"):
        trainer_of(kind, tmp_path, failing).train()
    trainer = trainer_of(kind, tmp_path, failing, reward_errors="skip")
    caplog.clear()
    found = update_of(trainer)
    torch.testing.assert_close(found, update_of(trainer_of(kind, tmp_path, filled)))
    assert len([record for record in caplog.records if "failing" in record.message]) == 1
    share = trainer.state.log_history[0]["rewards/failing/skipped"]
    assert 0.25 < share < 0.45
    assert trainer.evaluate()["eval_rewards/failing/skipped"] == pytest.approx(0.4)  # 2 of 5 rows


def test_a_function_that_raises_or_miscounts_leaves_the_others(caplog):
    def raises(completions):
        raise ConnectionError("no judge")

    async def raises_later(completions):
        await asyncio.sleep(0)
        raise TimeoutError("late")

    def one(completions):
        return [1.0]

    def good(completions):
        return [1.0, 3.0]

    for function, error in ((raises, ConnectionError), (raises_later, TimeoutError), (one, ValueError)):
        with pytest.raises(error) as raised:
            terms_of(good, function)(decoded(), [0, 1])
        assert any(function.__name__ in note for note in raised.value.__notes__)
    terms = terms_of(raises, good, raises_later, one, errors="skip")
    scores = terms(decoded(), [0, 1])
    assert scores.total.tolist() == [1, 3]
    sums = terms.sums(scores, CPU)
    assert [float(sums[f"rewards/{name}/skipped"][0]) for name in ("raises", "good", "raises_later", "one")] == [
        2,
        0,
        2,
        2,
    ]


def test_a_sum_beyond_single_precision_is_no_reward():
    terms = RewardTerms(as_rewards(lambda completions: [3e38, 1.0], True, CPU), weights=[2.0])
    with pytest.raises(ValueError, match="reward_weights: the sum of rewards must be finite, got inf in row 0"):
        terms(decoded(), [0, 0])


def test_of_what_is_never_applicable_neither_mean_nor_deviation_is_known():
    terms = RewardTerms(as_rewards(lambda completions: [None, None], True, CPU))
    sums = terms.sums(terms(decoded(), [0, 1]), CPU)
    averages = {name: float(total) / float(count) if count else math.nan for name, (total, count) in sums.items()}
    found = with_deviations(averages)
    assert math.isnan(found["rewards/<lambda>/mean"]) and math.isnan(found["rewards/<lambda>/std"])


def test_async_functions_wait_together_in_one_loop():
    """Each waits for the other, so one after the other they would never end; inside a running loop as well."""
    loops, calls = [], []

    async def first(completions):
        loops.append(asyncio.get_running_loop())
        calls.append("first")
        while "second" not in calls:
            await asyncio.sleep(0)
        return [1.0, 2.0]

    async def second(completions):
        calls.append("second")
        while "first" not in calls:
            await asyncio.sleep(0)
        return [10.0, 20.0]

    terms = terms_of(first, lambda completions: [100.0, None], second)

    async def in_a_notebook():
        return terms(decoded(), [0, 1]).total.tolist()

    assert terms(decoded(), [0, 1]).total.tolist() == [111, 22]
    calls.clear()
    assert asyncio.run(in_a_notebook()) == [111, 22]
    assert loops[0] is loops[1]
    assert threading.current_thread() is threading.main_thread()


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_reward_model_scores_as_one_row_at_a_time(kind, tmp_path):
    tokenizer = small_tokenizer("wordpiece" if kind == "bert" else "bpe")
    torch.manual_seed(0)
    size = len(tokenizer) + 4
    if kind == "bert":
        model = BertForSequenceClassification(
            BertConfig(
                vocab_size=size, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                num_labels=1, max_position_embeddings=40,
            )
        )  # fmt: skip
    else:
        tokenizer.pad_token, tokenizer.eos_token = None, "</s>"
        config = GPT2Config(
            vocab_size=size, n_embd=16, n_layer=1, n_head=2, num_labels=1, n_positions=40, eos_token_id=3
        )
        model = GPT2ForSequenceClassification(config)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    as_pair = kind == "bert"
    model.train()
    given = decoded(("a b", "the king", "c"), ("x",) * 3, ("p", "in the land of", "q q"))
    scores = RewardModel(model, tokenizer, as_pair, batch_size=2)(given.completions, given.prompts)
    assert model.training and not scores.requires_grad
    model.eval()
    for prompt, completion, found in zip(given.prompts, given.completions, scores.tolist(), strict=True):
        texts = (prompt, completion) if as_pair else (prompt + completion,)
        alone = model(**tokenizer(*texts, return_tensors="pt")).logits
        assert float(alone[0, 0]) == pytest.approx(found, abs=1e-5)
    with pytest.raises(ValueError, match="row 1"):
        RewardModel(model, tokenizer, as_pair)(["a", "b " * 50], ["p", "q"])
    folder = tmp_path / "judge"
    model.save_pretrained(folder)
    with pytest.raises(ValueError, match="tokenizer"):
        as_rewards(str(folder), as_pair, CPU)
    tokenizer.save_pretrained(folder)
    for one in (str(folder), type(model).from_pretrained(folder)):
        (term,) = as_rewards(one, as_pair, CPU)
        assert term.name == "judge"
        torch.testing.assert_close(term(given), scores)
    many = copy.deepcopy(model.config)
    many.num_labels = 2
    with pytest.raises(ValueError, match="num_labels=2"):
        RewardModel(type(model)(many), tokenizer)


def test_a_metric_of_evaluate_is_computed_for_each_row():
    path = module_path("edit_distance")
    given = decoded(("a b", "c", "a b"), ("a", "c d", "a"), ("p",) * 3)
    terms = as_rewards([path, f"neg_{path}", f"{path}:normalized_edit_distance"], True, CPU)
    assert [term.name for term in terms] == [
        "edit_distance", "neg_edit_distance", "edit_distance:normalized_edit_distance"
    ]  # fmt: skip
    assert [term(given) for term in terms] == [[1, 1, 1], [-1, -1, -1], [1, 0.5, 1]]
    (term,) = as_rewards(evaluate.load(path), True, CPU)
    given = decoded(("a b", "c", "a b"), (["x y", "a b"], ["c"], "a"), ("p",) * 3)
    assert term(given) == [0, 0, 1] and all(one.needs_references and one.needs_texts for one in terms)
    with pytest.raises(ValueError, match="edit_distance, normalized_edit_distance"):
        MetricReward(evaluate.load(path), "f1")(["a"], ["a"])


def test_what_is_no_reward_is_refused(tmp_path):
    for given, message in (
        ("edit_distance", "neg_edit_distance"),
        ("no_such_metric", "no_such_metric"),
        ("nobody/no-such-model", "no-such-model"),
        ([], "none"),
        (3, "got 3"),
        ([dict], "dict"),
        (torch.nn.Linear(1, 1), "Linear"),
    ):
        with pytest.raises(ValueError, match=message):
            as_rewards(given, True, CPU)
    with pytest.raises(ValueError, match="reward_weights must be 1"):
        terms_of("neg_edit_distance", weights=[1.0, 2.0])
    with pytest.raises(ValueError, match="cost and reward_funcs"):
        trainer_of("mgs", tmp_path, "neg_edit_distance", cost="edit_distance")
    with pytest.raises(ValueError, match="cost and reward_funcs"):
        MinimumRiskConfig(str(tmp_path), cost="repetition", reward_funcs=["neg_edit_distance"])
    with pytest.raises(ValueError, match="reward_errors"):
        MinimumRiskConfig(str(tmp_path), reward_errors="ignore")
    with pytest.raises(ValueError, match="the reward '<lambda>' reads texts"):
        trainer_of("mgs", tmp_path, lambda completions: [1.0])
    same = [lambda completions: [], lambda completions: [], partial(with_deviations, {})]
    names = [term.name for term in as_rewards([*same, "neg_repetition"], True, CPU)]
    assert names == ["<lambda>", "<lambda>#2", "with_deviations", "neg_repetition"]
