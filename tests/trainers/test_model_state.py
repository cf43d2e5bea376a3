"""What a trainer is made for, evaluates or trains on leaves nothing behind in a model but its weights."""

import pytest
import torch

from tests.module_state import state_of
from tests.seq2seq_families import seq2seq_batch, tiny_seq2seq
from tests.trainers.test_unlabelled import ROW_LOSSES, TOKEN_LOSSES, trainer_of

pytestmark = pytest.mark.slow

LONG = seq2seq_batch("bigbird_pegasus", source_lengths=(62, 50, 60))  # block-sparse, as sources of 3 tokens aren't


def rows_of(*lengths):
    batches = [LONG if long else seq2seq_batch("bigbird_pegasus", source_lengths=(3, 2, 1)) for long in lengths]
    return [{name: value[row] for name, value in batch.items()} for batch in batches for row in range(3)]


def collate(rows):
    pads = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    pad = torch.nn.utils.rnn.pad_sequence
    return {name: pad([row[name] for row in rows], True, value) for name, value in pads.items()}


@pytest.mark.parametrize("kind", [*TOKEN_LOSSES, *ROW_LOSSES])
def test_bigbird_pegasus_stays_block_sparse(kind, tmp_path):
    model = tiny_seq2seq("bigbird_pegasus").float()
    before = state_of(model)
    settings = dict(
        per_device_eval_batch_size=3, per_device_train_batch_size=3, predict_with_generate=True, learning_rate=0.0,
        weight_decay=0.0, num_train_epochs=1,
    )  # fmt: skip
    trainer = trainer_of(kind, tmp_path, model, rows_of(False), collate, **settings)
    trainer.data_collator = collate
    alone, mixed = (trainer.predict(rows_of(*lengths)) for lengths in ([True], [True, False, True]))
    for part in (mixed.predictions[:3], mixed.predictions[6:]):
        assert (part[:, : alone.predictions.shape[1]] == alone.predictions).all()
    halves = [trainer.predict(rows_of(*lengths)).metrics["test_loss"] for lengths in ([False], [True], [False, True])]
    assert halves[2] == pytest.approx((halves[0] + halves[1]) / 2, rel=1e-5)
    trainer.train()
    with torch.no_grad():
        logits = model.eval()(**LONG).logits
    torch.testing.assert_close(logits, tiny_seq2seq("bigbird_pegasus").float()(**LONG).logits)
    kept = [name for name in before if name.endswith(("attention_type", ".self"))]
    assert kept and {name: state_of(model)[name] for name in kept} == {name: before[name] for name in kept}
