"""Rows and batches without any label, data without labels, and how predictions are padded, for every trainer."""

import math

import pytest
import torch
from transformers import GenerationConfig, Seq2SeqTrainer, Seq2SeqTrainingArguments

from tests.causal_families import END, PAD, collate_left, collate_right, completion_rows, tiny_causal
from tests.seq2seq_families import tiny_seq2seq
from tests.trainers import test_mgs, test_sampled_risk, test_trainers
from tests.trainers.test_trainers import collate, rows

pytestmark = pytest.mark.slow

TOKEN_LOSSES = test_trainers.KINDS
ROW_LOSSES = ("mgs", "minimum risk, mixed", "self-critical", "running mean, mixed")
FAMILIES = [
    *((kind, "bart") for kind in (*TOKEN_LOSSES, *ROW_LOSSES)),
    *((kind, family) for kind in ("cross-entropy", "soft beam", "mgs") for family in ("mbart", "lstm fixed")),
]
METRICS = {
    "self-normalized": ["cross_entropy", "log_z_mean", "log_z_variance", "loss"],
    **{kind: ["cost", "cut_share", "decoded_length", "loss"] for kind in ROW_LOSSES},
}


def trainer_of(kind, tmp_path, model=None, dataset=None, collator=collate, **settings):
    """On a sequence-to-sequence model, unless one is given."""
    model = tiny_seq2seq("bart") if model is None else model
    dataset = rows() if dataset is None else dataset
    if kind in TOKEN_LOSSES:
        return test_trainers.trainer_of(kind, tmp_path, model, dataset, **settings)
    if kind == "mgs":
        return test_mgs.trainer_of(tmp_path, model, dataset, collator, **settings)
    return test_sampled_risk.trainer_of(kind, tmp_path, model, dataset, collator, **settings)


def without_labels(data):
    return [{**row, "labels": torch.full_like(row["labels"], -100)} for row in data]


def warnings_of(caplog):
    return [record.message for record in caplog.records if "nan" in record.message]


@pytest.mark.parametrize("kind", [*TOKEN_LOSSES, *ROW_LOSSES])
def test_an_evaluation_without_any_label_is_nan_as_the_stock_ones(kind, tmp_path, caplog):
    for data in (without_labels(rows(5)), [{**row, "labels": row["labels"][:0]} for row in rows(5)]):
        caplog.clear()
        trainer = trainer_of(kind, tmp_path, per_device_eval_batch_size=2, predict_with_generate=True)
        metrics = trainer.evaluate(data)
        names = METRICS.get(kind, ["loss"])
        assert all(math.isnan(metrics[f"eval_{name}"]) for name in names)
        assert warnings_of(caplog) == [
            f"{', '.join(f'eval_{name}' for name in names)}: nan, as there is nothing to score. labels: row 0 must "
            "have a target (a label that isn't -100), or else another row."
        ]
    args = Seq2SeqTrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True)
    stock = Seq2SeqTrainer(tiny_seq2seq("bart"), args, data_collator=collate)
    assert math.isnan(stock.evaluate(without_labels(rows(5)))["eval_loss"])


@pytest.mark.parametrize(("kind", "family"), FAMILIES)
def test_rows_without_labels_count_for_nothing_in_evaluation(kind, family, tmp_path, caplog):
    """Beside others, and in a batch of their own."""
    bare, found = without_labels(rows(3, 5)), []
    for data in (rows(4, 9), [bare[0], *rows(4, 9)[:2], *bare[1:], *rows(4, 9)[2:]]):
        trainer = trainer_of(kind, tmp_path, tiny_seq2seq(family), per_device_eval_batch_size=2)
        trainer.args.max_length_ratio = 9  # so that the batch doesn't say the greatest length
        if hasattr(trainer, "candidates"):
            trainer.candidates.config = GenerationConfig(eos_token_id=2, pad_token_id=1, max_length=9)
        found.append(trainer.evaluate(data))
    for name in METRICS.get(kind, ["loss"]):
        assert found[1][f"eval_{name}"] == pytest.approx(found[0][f"eval_{name}"], rel=1e-6)
        assert math.isfinite(found[1][f"eval_{name}"])
    assert not warnings_of(caplog)


@pytest.mark.parametrize("family", ["lstm additive", "mbart"])
@pytest.mark.parametrize("kind", TOKEN_LOSSES)
def test_rows_without_labels_count_for_nothing_in_training(kind, family, tmp_path):
    weights, bare = [], without_labels(rows(2, 5))
    for data in (rows(4), [bare[0], *rows(4), bare[1]]):
        model = tiny_seq2seq(family)
        trainer_of(kind, tmp_path, model, data).train()
        weights.append(model.state_dict())
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("kind", [*TOKEN_LOSSES, *ROW_LOSSES])
def test_training_names_the_row(kind, tmp_path):
    with pytest.raises(ValueError, match=r"labels: row 0 must have a target \(a label that isn't -100\)"):
        trainer_of(kind, tmp_path, dataset=without_labels(rows(3))).train()
    if kind in ROW_LOSSES:
        for model, data, collator in (
            (tiny_seq2seq("bart"), rows(3), collate),
            (tiny_causal(dtype=torch.float32), completion_rows(3), collate_left),
        ):
            data[1] = without_labels(data)[1]
            with pytest.raises(ValueError, match="labels: row 1 must have a target"):
                trainer_of(kind, tmp_path, model, data, collator).train()


def greedy(model, prompt, most):
    ids = prompt
    while len(ids) < len(prompt) + most and (len(ids) == len(prompt) or int(ids[-1]) != END):
        ids = torch.cat([ids, model(ids[None]).logits[0, -1].argmax()[None]])
    return ids[len(prompt) :].tolist()


@pytest.mark.parametrize("kind", ROW_LOSSES)
@pytest.mark.parametrize("asked", [{}, {"max_new_tokens": 3}])
def test_a_causal_row_without_labels_is_a_prompt(kind, asked, tmp_path):
    """Whether a batch has no labels, None or -100 for them."""
    model, data = tiny_causal(), completion_rows(5)
    prompts = [row["input_ids"][row["labels"] == -100] for row in data]
    expected = [greedy(model, prompt, asked.get("max_new_tokens", 7)) for prompt in prompts]
    collators = {
        "none": lambda batch: {n: v for n, v in collate_left(batch).items() if n != "labels"},
        "None": lambda batch: {**collate_right(batch), "labels": None},
        "ignored": collate_right,
    }
    whole = [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.full_like(ids, -100)}
             for ids in prompts]  # fmt: skip
    for name, collator in collators.items():
        trainer = trainer_of(
            kind, tmp_path, model, data, collator, predict_with_generate=True, per_device_eval_batch_size=2,
            generation_config=GenerationConfig(eos_token_id=END, pad_token_id=PAD, max_new_tokens=7),
        )  # fmt: skip
        output = trainer.predict(whole, **asked)
        found = [[token for token in row if token != PAD] for row in output.predictions.tolist()]
        assert found == [[token for token in row if token != PAD] for row in expected]
        assert (output.label_ids is None) == (name != "ignored")
        assert ("test_loss" in output.metrics) == (name == "ignored")


def unlabelled(batch):
    return {name: value for name, value in collate(batch).items() if name != "labels"}


@pytest.mark.parametrize(("kind", "family"), FAMILIES)
def test_data_without_labels_is_decoded_as_by_the_stock_trainer(kind, family, tmp_path):
    """Relaxed beam search trains for beams of its own: as with labels."""
    args = Seq2SeqTrainingArguments(
        str(tmp_path), report_to=[], predict_with_generate=True, use_cpu=True, disable_tqdm=True
    )
    expected = Seq2SeqTrainer(tiny_seq2seq(family), args, data_collator=unlabelled)
    if kind.startswith("soft"):
        expected = trainer_of(kind, tmp_path, tiny_seq2seq(family), predict_with_generate=True)
    trainer = trainer_of(kind, tmp_path, tiny_seq2seq(family), predict_with_generate=True)
    trainer.data_collator = unlabelled
    output = trainer.predict(rows(5), max_new_tokens=9)
    pad = trainer.model.config.pad_token_id
    start = 1 if kind in ROW_LOSSES else 0  # what is decoded for a cost has no start token
    expected = [row[start:] for row in expected.predict(rows(5), max_new_tokens=9).predictions.tolist()]
    found = output.predictions.tolist()
    assert [[i for i in row if i != pad] for row in found] == [[i for i in row if i != pad] for row in expected]
    assert output.label_ids is None and "test_loss" not in output.metrics
    assert 0 < output.metrics["test_decoded_length"] <= 9 and 0 <= output.metrics["test_cut_share"] <= 1


class Decoder:
    """Decodes as fast tokenizers do, which overflow at what is below 0."""

    pad_token_id = 1
    eos_token_id = 2

    def batch_decode(self, sequences, skip_special_tokens=False):
        assert all(0 <= token < 2**32 for ids in sequences for token in ids)
        return [" ".join(str(int(i)) for i in ids if int(i) != self.pad_token_id) for ids in sequences]


@pytest.mark.parametrize(
    ("kind", "with_tokenizer"), [*((kind, True) for kind in (*TOKEN_LOSSES, *ROW_LOSSES)), ("cross-entropy", False)]
)
def test_predictions_of_batches_of_unequal_lengths_are_padded_with_the_pad_token(kind, with_tokenizer, tmp_path):
    data, seen = sorted(rows(6), key=lambda row: len(row["labels"])), []

    def metrics(found):
        seen.append((found.predictions.copy(), found.label_ids.copy()))
        return {"texts": len(Decoder().batch_decode(found.predictions))}

    trainer = trainer_of(kind, tmp_path, tiny_seq2seq("bart"), predict_with_generate=True, per_device_eval_batch_size=2)
    trainer.compute_metrics = metrics
    if with_tokenizer:
        trainer.processing_class = Decoder()
    step, widths = trainer.prediction_step, []
    lengths = iter((4, 7, 23) * 2)

    def unequal(model, inputs, prediction_loss_only, **options):
        loss, found, labels = step(model, inputs, prediction_loss_only, max_new_tokens=next(lengths), **options)
        widths.append(found.shape[1])
        return loss, found, labels

    trainer.prediction_step = unequal
    output = trainer.predict(data)
    assert len(set(widths)) > 1, "the batches must differ for the test to say anything"
    assert (output.predictions >= 0).all() and output.predictions.shape == (6, max(widths))
    first = output.predictions[:2]
    assert (first[:, widths[0] :] == 1).all() and max(widths) > widths[0]
    assert sorted({int(i) for i in output.label_ids.flatten()})[0] == -100
    Decoder().batch_decode(output.predictions)
    assert trainer.evaluate(data)["eval_texts"] == 6
    assert all((predictions >= 0).all() and (labels == -100).any() for predictions, labels in seen)
    assert trainer.compute_metrics is metrics
