"""Encoders of sound, images and embeddings: what a trainer makes of them, against hand-written steps and the model."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from hf_ebm.trainers import (
    MGSConfig,
    MGSTrainer,
    MinimumRiskConfig,
    MinimumRiskTrainer,
    PolicyGradientConfig,
    PolicyGradientTrainer,
)
from hf_ebm.trainers.costs import ScorerCost
from hf_ebm.trainers.sequence_pairs import SequencePairs
from tests.causal_families import collate_right, completion_rows, tiny_causal
from tests.other_encoders import MAKERS, collate_other, other_rows, tiny_other
from tests.seq2seq_families import seq2seq_batch, tiny_seq2seq
from tests.trainers.test_trainers import KINDS, ONE_STEP, by_hand

pytestmark = pytest.mark.slow

ON_COSTS = {
    "mgs": (MGSTrainer, MGSConfig, {}),
    "risk": (MinimumRiskTrainer, MinimumRiskConfig, {}),
    "gradient": (PolicyGradientTrainer, PolicyGradientConfig, {}),
}
# The first takes positions from ids alone, the other wants a mask of its own beside its encoder's states.
STEPWISE = [name for name in MAKERS if name not in ("speech to text", "moonshine")]


def trainer_of(kind, tmp_path, model, data, collator=collate_other, cost=None, **settings):
    trainer, config, own = (KINDS | ON_COSTS)[kind]
    further = {} if cost is None else {"cost": cost}
    args = config(str(tmp_path), **{**ONE_STEP, **own, **settings})
    return trainer(model, args, train_dataset=data, eval_dataset=data, data_collator=collator, **further)


@pytest.mark.parametrize(
    ("kind", "name"), [*(("cross-entropy", name) for name in MAKERS), *((k, name) for k in KINDS for name in STEPWISE)]
)
def test_one_step_equals_a_hand_written_one(kind, name, tmp_path):
    model = tiny_other(name)
    expected = copy.deepcopy(model).train()
    loss = by_hand(kind, expected, collate_other(other_rows(name)))
    loss.backward()
    trainer = trainer_of(kind, tmp_path, model, other_rows(name))
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(float(loss), rel=1e-6)
    for (parameter, updated), start in zip(model.named_parameters(), expected.parameters(), strict=True):
        gradient = 0 if start.grad is None else start.grad
        torch.testing.assert_close(updated, start - 0.1 * gradient, atol=1e-8, rtol=1e-6, msg=parameter)


@pytest.mark.parametrize("name", MAKERS)
def test_pairs_are_scored_and_decoded_as_the_model_does(name):
    """Log probabilities are those of the labels; each row is decoded as by a loop over it alone."""
    model, batch = tiny_other(name), collate_other(other_rows(name, 4))
    start = model.config.decoder_start_token_id
    pairs = SequencePairs.of(model, batch, model.config.pad_token_id, [2])
    logs, labels = torch.log_softmax(model(**batch).logits, -1), batch["labels"]
    expected = logs.gather(2, labels.clamp_min(0)[..., None])[..., 0].masked_fill(labels == -100, 0).sum(1)
    torch.testing.assert_close(pairs.log_probs(model, range(4), pairs.targets), expected, rtol=1e-6, atol=1e-6)
    order = [2, 0, 2]
    again = pairs.log_probs(model, order, [pairs.targets[row] for row in order])
    torch.testing.assert_close(again, expected[order], rtol=1e-6, atol=1e-6)
    config = GenerationConfig(
        max_new_tokens=5, eos_token_id=2, pad_token_id=model.config.pad_token_id, do_sample=False, use_cache=True
    )
    found = pairs.decode(model, config, num_samples=1)
    for row in range(4):
        inputs = {key: value[row : row + 1] for key, value in batch.items() if key != "labels"}
        ids = torch.tensor([[start]])
        while ids.shape[1] < 6 and (ids.shape[1] == 1 or int(ids[0, -1]) != 2):
            chosen = model(**inputs, decoder_input_ids=ids).logits[0, -1].argmax()
            ids = torch.cat([ids, chosen.view(1, 1)], 1)
        assert found[row][0].tolist() == ids[0, 1:].tolist()


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("kind", ON_COSTS)
def test_trainers_on_costs_train_evaluate_and_predict(kind, name, tmp_path):
    def sum_of_ids(predictions, references):
        return torch.tensor([float(sum(ids)) for ids in predictions])

    sum_of_ids.reads = "ids"
    rows = other_rows(name, 3)
    trainer = trainer_of(kind, tmp_path, tiny_other(name), rows, cost=sum_of_ids, predict_with_generate=True)
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    trainer.train()
    assert any(not torch.equal(value, before[key]) for key, value in trainer.model.state_dict().items())
    assert trainer.evaluate()["eval_cost"] >= 0
    bare = [{key: value for key, value in row.items() if key != "labels"} for row in rows]
    trainer.data_collator = lambda batch: {key: torch.stack([row[key] for row in batch]) for key in batch[0]}
    assert len(trainer.predict(bare, max_new_tokens=4).predictions) == 3


@pytest.mark.parametrize("kind", [*KINDS, *ON_COSTS])
def test_embeddings_of_ids_are_as_good_as_the_ids(kind, tmp_path):
    batch, losses = seq2seq_batch("bart"), []
    for embedded in (False, True):
        model = tiny_seq2seq("bart")
        given = dict(batch)
        if embedded:
            given["inputs_embeds"] = model.get_encoder().embed_tokens(given.pop("input_ids")).detach()
        rows = [{key: value[row] for key, value in given.items()} for row in range(3)]
        trainer = trainer_of(
            kind, tmp_path, model, rows, lambda rows: {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        )
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


@pytest.mark.parametrize("name", ["whisper", "images"])
def test_adapters_are_found_to_be_in_the_layers(name, tmp_path):
    module = "q_proj" if name == "whisper" else "c_attn"
    typed = get_peft_model(tiny_other(name), LoraConfig(target_modules=[module], task_type="SEQ_2_SEQ_LM"))
    if name == "whisper":  # which takes no input_ids, not even None
        with pytest.raises(ValueError, match=r"a PeftModelForSeq2SeqLM doesn't run Whisper.* leave task_type out"):
            trainer_of("cross-entropy", tmp_path, typed, other_rows(name, 2))
    else:
        trainer_of("cross-entropy", tmp_path, typed, other_rows(name, 2)).train()
    for kind in ("scheduled sampling", "risk"):
        adapted = get_peft_model(tiny_other(name), LoraConfig(target_modules=[module]))
        trainer_of(kind, tmp_path, adapted, other_rows(name, 2)).train()


def test_what_cannot_be_served_is_refused_by_name(tmp_path):
    for kind in ("scheduled sampling", "soft beam"):
        for name in ("speech to text", "moonshine"):
            with pytest.raises(ValueError, match="cannot be decoded step by step on embed"):
                trainer_of(kind, tmp_path, tiny_other(name), None)
    broken = tiny_seq2seq("bart")
    broken.prepare_inputs_for_generation = lambda *args, **kwargs: {}["source"]
    for kind in ON_COSTS:
        with pytest.raises(
            ValueError, match="model: BartForConditionalGeneration can't be decoded and scored here: 's"
        ):
            trainer_of(kind, tmp_path, broken, None)

    def from_prompts(predictions, references, prompts):
        return torch.zeros(len(predictions))

    from_prompts.reads = "ids"
    with pytest.raises(ValueError, match=r"inputs must have input_ids: .*'from_prompts'"):
        trainer_of("risk", tmp_path, tiny_other("whisper"), other_rows("whisper", 2), cost=from_prompts).train()
    with pytest.raises(ValueError, match="model must read token ids, got WhisperFor"):
        ScorerCost(tiny_other("whisper"), 0)
    batch = collate_right(completion_rows(2))
    states = torch.ones(*batch["input_ids"].shape, 16)
    labels = {"inputs_embeds": states, "labels": batch["labels"]}
    with pytest.raises(ValueError, match=r"inputs must have input_ids .*got inputs_emb"):
        SequencePairs.of(tiny_causal(), labels, 2, [1])
    with pytest.raises(ValueError, match="inputs: inputs_embeds must be left out"):
        SequencePairs.of(tiny_causal(), {**batch, "inputs_embeds": states}, 2, [1])
