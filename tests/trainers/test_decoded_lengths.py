"""How far sequences are decoded: no further than the generation config allows; which lengths are logged."""

import pytest
import torch
from transformers import GenerationConfig

from tests.causal_families import END, PAD, completion_rows, tiny_causal
from tests.seq2seq_families import tiny_seq2seq
from tests.trainers import test_mgs, test_sampled_risk, test_trainers
from tests.trainers.test_trainers import collate, rows

pytestmark = pytest.mark.slow

COSTS = ["mgs", *test_sampled_risk.KINDS]
# A target of 6 tokens allows 8; the longest prompt has 4, a decoder starts with one.
LIMITS = {
    "nothing": ({}, 8, 8), "max_new_tokens": ({"max_new_tokens": 3}, 3, 3), "max_length": ({"max_length": 6}, 2, 5),
    "both": ({"max_length": 5, "max_new_tokens": 4}, 4, 4), "more": ({"max_new_tokens": 60}, 8, 8),
}  # fmt: skip

# All trainers on a cost hold the same object that decodes: for two every limit, for the others one.
CASES = [
    (kind, limit) for kind in COSTS for limit in LIMITS if kind in ("mgs", "minimum risk") or limit == "max_length"
]


def trainer_of(kind, tmp_path, model=None, *data, **settings):
    if kind == "mgs":
        return test_mgs.trainer_of(tmp_path, model, *data, **settings)
    return test_sampled_risk.trainer_of(kind, tmp_path, model, *data, **settings)


def never_ending(model):
    """The model, which gives its end token no chance."""
    head = model.get_output_embeddings()
    ends = model.generation_config.eos_token_id
    head.register_forward_hook(lambda _, inputs, logits: logits.index_fill(-1, torch.tensor([ends, PAD]), -1e4))
    return model


def spied(trainer):
    """Every sequence that a trainer decodes, with the length that it asked for."""
    found, decode = [], trainer.candidates.decode

    def spying(pairs, config, *arguments, **options):
        decoded = decode(pairs, config, *arguments, **options)
        found.extend((ids, config.max_new_tokens) for row in decoded for ids in row)
        return decoded

    trainer.candidates.decode = spying
    return found


@pytest.mark.parametrize(("kind", "limit"), CASES)
def test_no_more_is_decoded_than_the_generation_config_allows(kind, limit, tmp_path, caplog):
    """The model's own configuration, and one that is given; what is shorter than a target is told once."""
    own, causal, _ = LIMITS[limit]
    for given in (False, True):
        caplog.clear()
        model = never_ending(tiny_causal())
        if not given:
            model.generation_config.update(**own)
        settings = {"generation_config": GenerationConfig(eos_token_id=END, pad_token_id=PAD, **own)} if given else {}
        trainer = trainer_of(kind, tmp_path, model, **settings)
        decoded = spied(trainer)
        trainer.train()
        assert {len(ids) for ids, _ in decoded} == {causal}
        log = trainer.state.log_history[0]
        assert (log["decoded_length"], log["cut_share"]) == (causal, 1.0)
        found = trainer.evaluate(completion_rows(8))
        assert (found["eval_decoded_length"], found["eval_cut_share"]) == (causal, 1.0)
        told = [record.message for record in caplog.records if "ends decoding after" in record.message]
        assert len(told) == (causal < 6) and all(f"after {causal} tokens, and a target has 6" in text for text in told)


@pytest.mark.parametrize(("kind", "limit"), CASES)
def test_sequence_to_sequence_models(kind, limit, tmp_path):
    own, _, most = LIMITS[limit]
    model = tiny_seq2seq("bart")
    model.generation_config.update(forced_eos_token_id=None, **own)
    trainer = trainer_of(kind, tmp_path, model, rows(), collate)
    decoded = spied(trainer)
    trainer.train()
    assert max(len(ids) for ids, _ in decoded) <= most == {asked for _, asked in decoded}.pop()


@pytest.mark.parametrize("kind", COSTS)
def test_lengths_and_cuts_are_counted(kind, tmp_path):
    """Some rows end by themselves; the logged terms are counts over what was decoded."""
    trainer = trainer_of(kind, tmp_path, tiny_causal(seed=3))
    decoded = spied(trainer)
    trainer.train()
    log = trainer.state.log_history[0]
    first = 8 if kind == "mgs" else 8 * trainer.args.num_candidates  # at θ; of the samples
    lengths = [len(ids) for ids, _ in decoded[:first]]
    cut = [len(ids) == most and int(ids[-1]) != END for ids, most in decoded[:first]]
    assert 0 < sum(cut) < first
    assert log["decoded_length"] == pytest.approx(sum(lengths) / first)
    assert log["cut_share"] == pytest.approx(sum(cut) / first)
    decoded.clear()
    found = trainer.evaluate(completion_rows(8))
    assert found["eval_decoded_length"] == pytest.approx(sum(len(ids) for ids, _ in decoded) / 8)
    cut = [len(ids) == most and int(ids[-1]) != END for ids, most in decoded]
    assert found["eval_cut_share"] == pytest.approx(sum(cut) / 8)


def test_an_end_that_is_forced_is_a_cut(tmp_path):
    model = never_ending(tiny_causal())
    model.generation_config.update(max_new_tokens=3, forced_eos_token_id=END)
    found = trainer_of("mgs", tmp_path, model).evaluate(completion_rows(8))
    assert (found["eval_decoded_length"], found["eval_cut_share"]) == (3, 1)


def test_no_room_is_refused(tmp_path):
    model = tiny_causal()
    model.generation_config.max_length = 4
    with pytest.raises(ValueError, match=r"max_length must .*prompt of 4 tokens, got 4"):
        trainer_of("mgs", tmp_path, model).train()
    trainer = trainer_of("mgs", tmp_path, predict_with_generate=True)
    with pytest.raises(ValueError, match=r"max_length must .*prompt of 4 tokens, got 3"):
        trainer.predict(completion_rows(8), max_length=3)
    assert trainer.predict(completion_rows(8), max_length=6).predictions.shape[1] <= 2


@pytest.mark.parametrize("asked", [{}, {"max_new_tokens": 2}, {"max_length": 3}, "config"])
@pytest.mark.parametrize("own", [{}, {"max_length": 5}, {"max_new_tokens": 6}])
@pytest.mark.parametrize("kind", ["cross-entropy", "scheduled sampling", "soft beam"])
def test_what_evaluation_generates(kind, own, asked, tmp_path):
    """Trainers that train on the positions of the targets generate in evaluation alone: as far as `generate` would."""
    model = tiny_seq2seq("bart")
    model.generation_config.update(forced_eos_token_id=None, **own)
    trainer = test_trainers.trainer_of(kind, tmp_path, model, predict_with_generate=True, max_steps=1)
    asked = {"generation_config": GenerationConfig(max_new_tokens=2, eos_token_id=2)} if asked == "config" else asked
    output = trainer.predict(rows(6, 2), **asked)
    most = asked.get(
        "max_new_tokens", own.get("max_new_tokens", asked.get("max_length", own.get("max_length", 21)) - 1)
    )
    most = 2 if "generation_config" in asked else most
    rows_found = [row[1 : 1 + most] for row in output.predictions.tolist()]
    assert all(set(row[1 + most :]) <= {model.config.pad_token_id} for row in output.predictions.tolist())
    lengths = [row.index(2) + 1 if 2 in row else most for row in rows_found]
    assert output.metrics["test_decoded_length"] == pytest.approx(sum(lengths) / 6)
    assert output.metrics["test_cut_share"] == pytest.approx(sum(2 not in row for row in rows_found) / 6)
