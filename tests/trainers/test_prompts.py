"""Data sets of texts: batches made by hand, updates as of tokens, prompts without references, refusals."""

import math
from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorForSeq2Seq, GenerationConfig

from hf_ebm.data.symbols import encode_completions, encode_pairs, symbol_tokenizer
from hf_ebm.trainers import GRPOTrainer, MGSTrainer
from hf_ebm.trainers.costs import COLUMNS
from hf_ebm.trainers.prompts import PromptCollator
from tests.causal_families import tiny_causal
from tests.seq2seq_families import tiny_seq2seq
from tests.trainers import test_sampled_risk
from tests.trainers.test_cost_columns import update_of
from tests.trainers.test_trainers import ONE_STEP

pytestmark = pytest.mark.slow

KINDS = {
    "mgs": (MGSTrainer, MGSTrainer.config_class, {"learning_rate": 0.3}),
    "grpo": (GRPOTrainer, GRPOTrainer.config_class, {}),
    **test_sampled_risk.KINDS,
}
SYMBOLS = list("abcdefghijk")
TEXTS = [
    {"prompt": "a b c", "reference": "b a", "topic": "x"},
    {"prompt": "d", "reference": "e f g h", "topic": "y"},
    {"prompt": "e c", "reference": "k", "topic": "z"},
    {"prompt": "i j k a b", "reference": "a b c", "topic": "u"},
]
PAD, START, END = 0, 1, 2


def tokenizer_of():
    """With as many ids as the tiny models have."""
    return symbol_tokenizer([" ".join(SYMBOLS)], [])


def model_of(which):
    model = tiny_seq2seq("bart") if which == "bart" else tiny_causal(dtype=torch.float32)
    assert model.config.vocab_size >= len(tokenizer_of())
    for config in (model.config, model.generation_config):
        config.pad_token_id, config.bos_token_id, config.eos_token_id = PAD, START, END
    return model


def trainer_of(kind, which, tmp_path, data=TEXTS, model=None, reward_funcs="neg_edit_distance", **settings):
    trainer_class, config_class, own = KINDS[kind]
    given = {
        name: settings.pop(name) for name in ("data_collator", "processing_class", "eval_dataset") if name in settings
    }
    args = config_class(str(tmp_path), **{**ONE_STEP, **own, **settings})
    given = {"processing_class": tokenizer_of(), **given}
    model = model_of(which) if model is None else model
    return trainer_class(model, args, reward_funcs=reward_funcs, train_dataset=data, **given)


def encoded(which, rows=TEXTS):
    pairs = Dataset.from_list([{"source": row["prompt"], "target": row["reference"]} for row in rows])
    return encode_pairs(pairs, tokenizer_of()) if which == "bart" else encode_completions(pairs, tokenizer_of(), END)


@pytest.mark.parametrize("which", ["bart", "gpt2"])
def test_a_batch_is_as_made_by_hand(which):
    collator = PromptCollator(tokenizer_of(), which == "bart", END, PAD)
    rows = [{**TEXTS[0], "reference": ["b a", "a"]}, {"prompt": "d", "weight": 2}]
    batch = collator(rows)
    if which == "bart":
        assert batch["input_ids"].tolist() == [[4, 5, 6, END], [7, END, PAD, PAD]]
        assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
        assert batch["labels"].tolist() == [[5, 4, END], [-100, -100, -100]]
    else:
        assert batch["input_ids"].tolist() == [[4, 5, 6, 5, 4, END], [7, *[PAD] * 5]]
        assert batch["attention_mask"].tolist() == [[1] * 6, [1, *[0] * 5]]
        assert batch["labels"].tolist() == [[-100, -100, -100, 5, 4, END], [-100] * 6]
    assert batch[COLUMNS] == {
        "prompt": ["a b c", "d"], "reference": [["b a", "a"], None], "topic": ["x", None], "weight": [None, 2]
    }  # fmt: skip
    assert collator([{"prompt": "d"}])["labels"].tolist() == [[-100]]


@pytest.mark.parametrize("which", ["bart", "gpt2"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_update_is_that_of_tokens(kind, which, tmp_path):
    """Of lists, data sets and streams, with accumulation; a function reads texts as they are, and other columns."""
    read = []

    def function(completions, prompts, references, topic):
        read.extend(zip(prompts, references, topic, strict=True))
        return [-abs(len(text) - len(truth)) for text, truth in zip(completions, references, strict=True)]

    def same(completions, references):
        return [-abs(len(text) - len(truth)) for text, truth in zip(completions, references, strict=True)]

    settings = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "reward_funcs": same}
    of_tokens = {**settings, "data_collator": DataCollatorForSeq2Seq(tokenizer_of())}
    expected = update_of(trainer_of(kind, which, tmp_path, encoded(which), **of_tokens))
    settings["reward_funcs"] = function
    renamed = [{"source": row["prompt"], "target": row["reference"], "topic": row["topic"]} for row in TEXTS]
    columns = {"prompt_column": "source", "reference_column": "target"}
    stream = Dataset.from_list(TEXTS).to_iterable_dataset()
    for data, more in ((TEXTS, {}), (Dataset.from_list(renamed), columns), (stream, {"max_steps": 1})):
        trainer = trainer_of(kind, which, tmp_path, data, **{**settings, **more})
        assert torch.equal(update_of(trainer), expected) and bool(expected.any())
    assert set(read) == {(row["prompt"], row["reference"], row["topic"]) for row in TEXTS}


@pytest.mark.parametrize("which, strategy", [("bart", "group_by_length"), ("gpt2", "batch_rebalance")])
def test_batches_of_like_lengths_are_those_of_tokens(which, strategy, tmp_path):
    """In training and evaluation, of the stock samplers; a column of lengths goes before."""
    texts = [
        {"prompt": " ".join(SYMBOLS[: 1 + 5 * at % 7]), "reference": " ".join(SYMBOLS[: 1 + at % 4])}
        for at in range(12)
    ]
    seen, settings = [], {"train_sampling_strategy": strategy, "per_device_train_batch_size": 2, "max_steps": 3}
    settings |= {"per_device_eval_batch_size": 2, "gradient_accumulation_steps": 2}

    def remembered(prompts, completions):
        seen[-1].append(tuple(prompts))
        return [float(len(text)) for text in completions]

    runs = []
    for data, collator in ((encoded(which, texts), DataCollatorForSeq2Seq(tokenizer_of())), (texts, None)):
        seen.append([])
        trainer = trainer_of(
            "leave one out", which, tmp_path, data, reward_funcs=remembered, data_collator=collator, eval_dataset=data,
            **settings,
        )  # fmt: skip
        runs.append((update_of(trainer), trainer.evaluate()["eval_reward"]))
    assert torch.equal(runs[0][0], runs[1][0]) and bool(runs[0][0].any()) and runs[0][1] == runs[1][1]
    assert seen[0] == seen[1] and len(seen[0]) == 2 * 3 + 6
    known = Dataset.from_list([{**row, "length": 1} for row in texts])
    assert trainer._lengths(known) is known and trainer._lengths(texts)["length"] != [1] * 12


@pytest.mark.parametrize(
    "kind, which, streamed",
    [
        ("mgs", "bart", False),
        ("running mean, mixed", "gpt2", True),
        ("ranking", "bart", False),
        ("grpo, iterated, mixed", "gpt2", False),
        ("grpo, iterated, mixed", "bart", True),
    ],
)
def test_a_resumed_run_of_texts_is_the_same_run(kind, which, streamed, tmp_path):
    """From within an epoch of rows in an order drawn at random, and within the iterations of a batch."""
    data = Dataset.from_list(TEXTS * 2)
    settings = {
        "train_sampling_strategy": "random",
        "per_device_train_batch_size": 2,
        "max_steps": 6,
        "optim": "adamw_torch",
        "num_candidates": 2,
    }
    data = data.to_iterable_dataset().shuffle(seed=1, buffer_size=5) if streamed else data
    whole, again = (
        trainer_of(kind, which, tmp_path / name, data, save_strategy="steps", save_steps=3, **settings) for name in "ab"
    )
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert all(map(torch.equal, whole.model.parameters(), again.model.parameters()))
    logs = [[{name: value for name, value in log.items() if "_runtime" not in name and "_per_second" not in name}
             for log in one.state.log_history if "loss" in log] for one in (whole, again)]  # fmt: skip
    assert logs[0] == logs[1] and len(logs[0]) == 6


@pytest.mark.parametrize("which", ["bart", "gpt2"])
@pytest.mark.parametrize("kind", ["minimum risk", "self-critical", "grpo"])
def test_prompts_without_references_are_decoded_as_long_as_the_configuration_says(kind, which, tmp_path):
    """A step on the drawn candidates, written by hand; evaluation and predictions."""
    prompts = [{"prompt": row["prompt"]} for row in TEXTS]

    def reward(completion_ids):
        return [float(sum(ids) % 7) for ids in completion_ids]

    length = GenerationConfig(max_new_tokens=4)
    trainer = trainer_of(
        kind, which, tmp_path, prompts, reward_funcs=reward, generation_config=length, predict_with_generate=True
    )
    drawn, sample = [], trainer.candidates.sample

    def remembered(*given, **options):
        found = sample(*given, **options)
        drawn.extend(found[0])
        return found

    trainer.candidates.sample = remembered
    assert bool(update_of(trainer).any())
    assert max(len(ids) for found in drawn for ids in found) <= 4 and all(len(ids) for found in drawn for ids in found)
    log = trainer.state.log_history[0]
    rewards = [[sum(ids.tolist()) % 7 for ids in found] for found in drawn]
    if kind != "minimum risk":  # which takes equal candidates once
        assert log["reward"] == pytest.approx(sum(map(sum, rewards)) / sum(map(len, rewards)))
    output = trainer.predict(prompts)
    assert len(output.predictions) == len(prompts) and output.predictions.shape[1] <= 4
    ids = [[id for id in row if id != PAD] for row in output.predictions.tolist()]
    assert output.metrics["test_reward"] == pytest.approx(sum(reward(ids)) / len(ids))
    assert math.isnan(output.metrics["test_loss"])
    mixed = trainer.evaluate([*TEXTS[:2], *prompts[2:]])
    with_targets = trainer.evaluate(TEXTS[:2])
    assert mixed["eval_loss"] == pytest.approx(with_targets["eval_loss"])


@pytest.mark.parametrize("kind, settings", [("mgs", {}), ("minimum risk, mixed", {}), ("self-critical", None)])
def test_references_that_are_needed_are_asked_for(kind, settings, tmp_path):
    reward = "neg_edit_distance" if settings is None else lambda completion_ids: [0.0] * len(completion_ids)
    rows = [TEXTS[0], {"prompt": "a b"}, *TEXTS[1:]]
    with pytest.raises(ValueError, match="reference: row 1 must have a text"):
        trainer_of(kind, "bart", tmp_path, rows, reward_funcs=reward).train()
    metrics = trainer_of(kind, "bart", tmp_path, TEXTS, reward_funcs=reward).evaluate(rows)
    expected = trainer_of(kind, "bart", tmp_path, TEXTS, reward_funcs=reward).evaluate(TEXTS)
    assert metrics["eval_loss"] == pytest.approx(expected["eval_loss"])


def test_adapters_and_metrics_of_predictions(tmp_path):
    """An adapter on the model; `predict_with_generate` and `compute_metrics`; the best model by reward."""
    model = get_peft_model(model_of("gpt2"), LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False))
    seen = []

    def metrics(prediction):
        seen.append(prediction.predictions.shape)
        return {"rows": len(prediction.label_ids)}

    trainer = trainer_of(
        "self-critical", "gpt2", tmp_path, TEXTS, model, lambda completions: [len(text) for text in completions],
        eval_dataset=TEXTS[:3], predict_with_generate=True, eval_strategy="steps", eval_steps=1, save_strategy="steps",
        save_steps=1, max_steps=2, load_best_model_at_end=True, metric_for_best_model="reward",
    )  # fmt: skip
    trainer.compute_metrics = metrics
    trainer.train()
    logs = [log for log in trainer.state.log_history if "eval_reward" in log]
    assert len(logs) == 2 and all(log["eval_rows"] == 3 for log in logs) and len(seen) == 2
    assert trainer.state.best_metric == max(log["eval_reward"] for log in logs)


def test_the_script_of_the_guide_is_short():
    """`tests/docs` runs it."""
    guide = Path("docs/guides/task_loss_training.md").read_text(encoding="utf-8")
    blocks = [part.partition("```")[0] for part in guide.split("```python\n")[1:]]
    block = next(block for block in blocks if "reward_funcs" in block)
    assert len([line for line in block.splitlines() if line]) <= 15 and ".train()" in block


def test_what_is_no_text_is_refused(tmp_path):
    conversation = [{"prompt": [{"role": "user", "content": "hello"}], "reference": "a"}]
    for data in (conversation, Dataset.from_list(conversation), Dataset.from_list(conversation).to_iterable_dataset()):
        with pytest.raises(ValueError, match=r"prompt: row 0 .* conversational"):
            trainer_of("self-critical", "bart", tmp_path, data)
    with pytest.raises(ValueError, match=r"prompt: row 1 .* conversational"):
        trainer_of("self-critical", "bart", tmp_path, [TEXTS[0], *conversation]).train()
    with pytest.raises(ValueError, match="processing_class must be a tokenizer"):
        trainer_of("self-critical", "bart", tmp_path, processing_class=None)
    with pytest.raises(ValueError, match="reference: row 0 must be a string, got 3"):
        trainer_of("self-critical", "bart", tmp_path, [{"prompt": "a", "reference": 3}]).train()
    with pytest.raises(ValueError, match="prompt: row 0 must have a token"):
        trainer_of("self-critical", "gpt2", tmp_path, [{"prompt": "", "reference": "a"}]).train()
    short = tokenizer_of()
    short.model_max_length = 3
    with pytest.raises(ValueError, match="prompt: row 0 has 4 tokens, more than the 3 allowed"):
        trainer_of("self-critical", "bart", tmp_path, TEXTS[:1], processing_class=short).train()
    with pytest.raises(ValueError, match="reference: row 1 has 5 tokens, more than the 3 allowed"):
        PromptCollator(short, True, END, PAD)([{"prompt": "a"}, TEXTS[1]])


@pytest.mark.parametrize("columns", [("prompt", "reference"), ("source", "completions")])
def test_rewards_read_prompts_and_references_as_their_columns_are_called(columns, tmp_path):
    prompt, reference = columns
    data = [{prompt: row["prompt"], reference: row["reference"], "topic": row["topic"]} for row in TEXTS]
    seen = []

    def by_column(completions, prompts, references, topic, **others):
        assert others[prompt] == prompts
        assert reference == "completions" or others[reference] == references
        seen.extend(topic)
        return [float(len(text)) for text in completions]

    def with_reference(predictions, reference):  # of a cost the second parameter is the reference, whatever its name
        return [float(one != other) for one, other in zip(predictions, reference, strict=True)]

    names = {"prompt_column": prompt, "reference_column": reference}
    trainer_of("self-critical", "bart", tmp_path, data, reward_funcs=by_column, **names).train()
    assert seen
    trainer_class, config_class, own = KINDS["self-critical"]
    args = config_class(str(tmp_path), **{**ONE_STEP, **own, **names})
    given = {"train_dataset": data, "processing_class": tokenizer_of()}
    trainer_class(model_of("bart"), args, cost=with_reference, **given).train()


def test_data_sets_that_are_none_or_several_are_refused(tmp_path):
    for several in (DatasetDict(train=Dataset.from_list(TEXTS)), {"train": TEXTS}):
        with pytest.raises(ValueError, match="train_dataset must be one data set, got several by name: train"):
            trainer_of("self-critical", "bart", tmp_path, several)
    other = [{"source": "a", "target": "b"}]
    for data in (other, Dataset.from_list(other), Dataset.from_list(other).to_iterable_dataset()):
        with pytest.raises(ValueError, match=r"train_dataset must have a column 'prompt' .*got source, target"):
            trainer_of("self-critical", "bart", tmp_path, data)
    for sets, name in ((other, "eval_dataset"), ({"wrong": other, "fine": TEXTS}, r"eval_dataset\['wrong'\]")):
        with pytest.raises(ValueError, match=rf"{name} must have a column 'prompt' \(by prompt_column\), got source"):
            trainer_of("self-critical", "bart", tmp_path, TEXTS, eval_dataset=sets)
    tokens = [{"input_ids": [4, 5], "labels": [6, 2]}]
    with pytest.raises(ValueError, match=r"eval_dataset must have a column 'prompt'.*got input_ids, labels"):
        trainer_of("self-critical", "bart", tmp_path, TEXTS, eval_dataset=tokens)
