"""Columns of the data set reach the cost, each beside its own row; the model gets what its forward takes."""

import copy

import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq

from hf_ebm.objectives.sequence_costs import SequenceCost, normalized_edit_distance
from tests.causal_families import completion_rows, tiny_causal
from tests.models.tokenizers_for_tests import small_tokenizer
from tests.seq2seq_families import tiny_seq2seq
from tests.trainers import test_mgs, test_sampled_risk, test_trainers
from tests.trainers.test_trainers import rows

pytestmark = pytest.mark.slow

SOFT_BEAM = ["soft beam", "soft beam, hinge"]
ON_COSTS = [(kind, "gpt2") for kind in ("mgs", *test_sampled_risk.KINDS)]
ON_COSTS += [("mgs", "bart"), ("self-critical", "bart")]
WITH_COSTS = [*ON_COSTS, *((kind, "bart") for kind in SOFT_BEAM)]
SOME = [("mgs", "bart"), ("self-critical", "gpt2"), ("soft beam", "bart")]
WITHOUT = ["cross-entropy", "self-normalized", "scheduled sampling"]


def target_of(row):
    return tuple(int(id) for id in row["labels"] if id != -100)


def data_of(which):
    """Rows of lists, with a text and a number each; no two targets are equal."""
    tensors = rows() if which == "bart" else completion_rows()
    found = [{name: value.tolist() for name, value in row.items()} for row in tensors]
    for number, row in enumerate(found):
        row["topic"], row["weight"] = f"topic {number}", 1.0 + number
    assert len({target_of(row) for row in found}) == len(found)
    return found


def trainer_of(kind, which, tmp_path, cost, data, collator, **settings):
    model = tiny_seq2seq("bart") if which == "bart" else tiny_causal()
    settings = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3, **settings}
    if kind in test_trainers.KINDS:
        trainer_class, config_class, own = test_trainers.KINDS[kind]
        args = config_class(str(tmp_path), **{**test_trainers.ONE_STEP, **own, **settings})
        given = {} if kind in WITHOUT else {"cost": cost}
        return trainer_class(model, args, train_dataset=data, data_collator=collator, **given)
    if kind == "mgs":
        return test_mgs.trainer_of(tmp_path, model, data, collator, cost, **settings)
    return test_sampled_risk.trainer_of(kind, tmp_path, model, data, collator, cost, **settings)


def update_of(trainer):
    before = copy.deepcopy(trainer.model)
    trainer.train()
    pairs = zip(trainer.model.parameters(), before.parameters(), strict=True)
    return torch.cat([(found - start).detach().flatten() for found, start in pairs])


def stock(batch):
    return DataCollatorForSeq2Seq(small_tokenizer("wordpiece"))(batch)


def own_collator(batch):
    """One that makes tensors of columns by itself."""
    model_rows = [{name: row[name] for name in ("input_ids", "attention_mask", "labels")} for row in batch]
    weights = torch.tensor([row["weight"] for row in batch])
    return {**stock(model_rows), "weight": weights, "topic": [row["topic"] for row in batch]}


@pytest.mark.parametrize(
    "kind, which, way",
    [*((*case, "stock collator") for case in WITH_COSTS), *((*case, "own collator") for case in SOME)],
)
def test_a_cost_reads_the_columns_of_its_row(kind, which, way, tmp_path):
    """The update is that of a cost that knows each row by its target."""
    data, seen = data_of(which), []
    known = {target_of(row): row for row in data}

    def by_target(predictions, references):
        weights = torch.tensor([known[tuple(reference)]["weight"] for reference in references])
        return normalized_edit_distance(predictions, references) * weights

    def by_column(predictions, references, topic, *, weight):
        assert topic == [known[tuple(reference)]["topic"] for reference in references]
        seen.extend(topic)
        return normalized_edit_distance(predictions, references) * torch.as_tensor(weight)

    def tokens_by_target(labels, vocab_size):
        weights = [known[tuple(row[row != -100].tolist())]["weight"] for row in labels]
        return torch.tensor(weights)[:, None].expand(labels.shape)

    def tokens_by_column(labels, vocab_size, topic, weight):
        assert topic == [known[tuple(row[row != -100].tolist())]["topic"] for row in labels]
        seen.extend(topic)
        return torch.as_tensor(weight)[:, None].expand(labels.shape)

    by_target.reads = by_column.reads = "ids"
    costs = (tokens_by_target, tokens_by_column) if kind in SOFT_BEAM else (by_target, by_column)
    collator = DataCollatorForSeq2Seq(small_tokenizer("wordpiece"))
    expected = update_of(trainer_of(kind, which, tmp_path, costs[0], data, collator))
    collator = own_collator if way == "own collator" else collator
    dataset = data if way == "own collator" else Dataset.from_list(data)
    trainer = trainer_of(kind, which, tmp_path, costs[1], dataset, collator, remove_unused_columns=False)
    assert torch.equal(update_of(trainer), expected) and bool(expected.any())
    assert set(seen) == {row["topic"] for row in data}


@pytest.mark.parametrize("kind, which", SOME)
def test_rows_without_labels_take_their_columns_along(kind, which, tmp_path):
    """In evaluation they are left out; predictions are of all rows, and need no cost."""
    data = data_of(which)
    for row in data[::2]:
        row["labels"] = [-100] * len(row["labels"])
    seen = []

    def cost(predictions, references, **columns):
        seen.append(columns)
        return [1.0] * len(predictions)

    def token_cost(labels, vocab_size, **columns):
        seen.append(columns)
        return torch.ones(labels.shape)

    cost.reads = "ids"
    given = token_cost if kind in SOFT_BEAM else cost
    trainer = trainer_of(
        kind, which, tmp_path, given, data, DataCollatorForSeq2Seq(small_tokenizer("wordpiece")),
        remove_unused_columns=False, predict_with_generate=True,
    )  # fmt: skip
    output = trainer.predict(data)
    assert len(output.predictions) == len(data)
    assert [found["topic"] for found in seen] == [[row["topic"] for row in data[1::2]]]
    unlabelled = [{name: value for name, value in row.items() if name != "labels"} for row in data]
    assert len(trainer.predict(unlabelled).predictions) == len(data)


@pytest.mark.parametrize("kind", WITHOUT)
def test_trainers_without_a_cost_leave_other_columns_out(kind, tmp_path):
    data = Dataset.from_list(data_of("bart"))
    collator = DataCollatorForSeq2Seq(small_tokenizer("wordpiece"))
    updates = [
        update_of(trainer_of(kind, "bart", tmp_path, None, data, collator, remove_unused_columns=removed))
        for removed in (True, False)
    ]
    assert torch.equal(*updates)


@pytest.mark.parametrize("kind, which", SOME)
def test_columns_that_a_cost_lacks_are_named(kind, which, tmp_path):
    collator = DataCollatorForSeq2Seq(small_tokenizer("wordpiece"))

    def cost(first, second, topic, prompts=None, scale=2.0):
        raise AssertionError("never called")

    cost.reads = "ids"
    with pytest.raises(ValueError, match="remove_unused_columns must be False, got True"):
        trainer_of(kind, which, tmp_path, cost, data_of(which), collator)

    def with_a_default(first, second, prompts=None, scale=2.0, weight=None):
        raise AssertionError("never called")

    with_a_default.reads = "ids"
    for data in (data_of(which), Dataset.from_list(data_of(which))):
        with pytest.raises(ValueError, match="got True: the cost with_a_default reads weight of the data"):
            trainer_of(kind, which, tmp_path, with_a_default, data, collator)
    data = [{name: value for name, value in row.items() if name != "topic"} for row in data_of(which)]
    trainer = trainer_of(kind, which, tmp_path, cost, data, collator, remove_unused_columns=False)
    with pytest.raises(ValueError, match=r"the cost cost reads the column 'topic' of the data set, .* model's weight"):
        trainer.train()
    data = [{**row, "topic": "one", "second": 3} for row in data]
    trainer = trainer_of(kind, which, tmp_path, cost, data, collator, remove_unused_columns=False)
    with pytest.raises(ValueError, match="columns must not be called 'second'"):
        trainer.train()


def test_a_cost_gets_what_it_has_parameters_for():
    columns, seen = {"topic": ["x", "y"], "weight": [1, 2]}, []
    for function, expected in (
        (lambda predictions, references: [0, 0], []),
        (lambda predictions, references, topic: seen.append(topic) or [0, 0], [["x", "y"]]),
        (lambda predictions, references, n=3, *, weight=0: seen.append((n, weight)) or [0, 0], [(3, [1, 2])]),
        (lambda predictions, references, **rest: seen.append(rest) or [0, 0], [{"prompts": ["p", "q"], **columns}]),
    ):
        seen.clear()
        SequenceCost("mine", function, "texts")(["a", "b"], ["c", "d"], ["p", "q"], columns)
        assert seen == expected
    with pytest.raises(ValueError, match="columns must not be called 'prompts'"):
        SequenceCost("mine", lambda a, b: [0, 0], "texts")(["a", "b"], ["c", "d"], None, {"prompts": [1, 2]})
