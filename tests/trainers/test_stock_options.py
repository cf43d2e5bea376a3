"""What is expected of every Trainer: label smoothing as in the stock one, and activations that are computed again."""

import copy
import inspect
import json

import pytest
import torch
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer
from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from hf_ebm import trainers
from hf_ebm.trainers.task_loss import TaskLossTrainer
from tests.seq2seq_families import tiny_seq2seq
from tests.trainers import test_mgs
from tests.trainers.test_half_precision import trainer_of as trainer_of_kind
from tests.trainers.test_sampled_risk import KINDS as SAMPLED
from tests.trainers.test_trainers import KINDS, ONE_STEP, collate, rows, trainer_of

TRAINERS = [one for one in map(trainers.__dict__.get, trainers.__all__) if issubclass(one, Trainer)]
STEPWISE = ("scheduled sampling", "soft beam", "soft beam, hinge")
RECOMPUTING = [
    "cross-entropy", "self-normalized", *SAMPLED, "mgs", "residual", "bert, mle, enumerated", "bert, mlm, enumerated",
    "bert, pll, packed", "bert, kl+pll, packed",
]  # fmt: skip


@pytest.mark.parametrize("family", ["lstm additive", "bart", "t5", "marian, two vocabularies"])
def test_smoothed_labels_are_those_of_the_stock_trainer(family, tmp_path):
    """In loss, update and evaluation; of one whole batch, where its mean over tokens is ours."""
    model, stock_model = tiny_seq2seq(family), tiny_seq2seq(family)

    def with_inputs(batch):  # the stock one wants them beside the labels
        batch = collate(batch)
        return {**batch, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])}

    args = Seq2SeqTrainingArguments(str(tmp_path), **ONE_STEP, label_smoothing_factor=0.2)
    data = {"train_dataset": rows(), "eval_dataset": rows(4, 9), "data_collator": with_inputs}
    stock = Seq2SeqTrainer(stock_model, args, **data)
    own = trainer_of("cross-entropy", tmp_path, model, label_smoothing_factor=0.2)
    before = copy.deepcopy(model)
    assert own.evaluate()["eval_loss"] == pytest.approx(stock.evaluate()["eval_loss"], rel=1e-6)
    plain = trainer_of("cross-entropy", tmp_path, before).evaluate()["eval_loss"]
    assert own.evaluate()["eval_loss"] != pytest.approx(plain, rel=1e-4)
    for trainer in (stock, own):
        trainer.train()
    losses = [next(log["loss"] for log in one.state.log_history if "loss" in log) for one in (own, stock)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for found, expected, start in zip(*(one.parameters() for one in (model, stock_model, before)), strict=True):
        torch.testing.assert_close(found - start, expected - start, rtol=1e-5, atol=1e-8)


def test_smoothing_is_a_share_and_of_the_cross_entropy_alone(tmp_path):
    with pytest.raises(ValueError, match=r"label_smoothing_factor must be .*below 1, got 1.0"):
        trainer_of("cross-entropy", tmp_path, label_smoothing_factor=1.0)
    for kind in set(KINDS) - {"cross-entropy"} | set(SAMPLED) | {"mgs", "residual", "bert, mlm, enumerated"}:
        with pytest.raises(ValueError, match=r"label_smoothing_factor must be 0, got 0.1"):
            trainer_of_kind(kind, tmp_path, label_smoothing_factor=0.1)


def test_cards_state_smoothing_where_there_is_any(tmp_path):
    for smoothing in (0.0, 0.2):
        stated = (
            trainer_of("cross-entropy", tmp_path, label_smoothing_factor=smoothing).training_facts().hyperparameters
        )
        assert stated.get("label_smoothing_factor", 0.0) == smoothing
        assert ("label_smoothing_factor" in stated) == bool(smoothing) and "smooths_labels" not in stated


def trained(kind, tmp_path, **changes):
    """The update, and how often layers ran in training mode."""
    trainer = trainer_of_kind(kind, tmp_path, **changes)
    model, ran = trainer.model, []
    before = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):  # its own hooks stay outside of what runs again
            inner = next(part for part in module.modules() if isinstance(part, (torch.nn.Linear, Conv1D)))
            inner.register_forward_pre_hook(lambda part, _: ran.append(1) if part.training else None)
    trainer.train()
    pairs = zip(model.parameters(), before.parameters(), strict=True)
    return torch.cat([(found - start).detach().flatten() for found, start in pairs]), len(ran)


@pytest.mark.parametrize("kind", RECOMPUTING)
def test_activations_are_computed_again_and_the_update_is_the_same(kind, tmp_path):
    update, ran = trained(kind, tmp_path)
    again, ran_again = trained(kind, tmp_path, activation_checkpointing=True)
    assert bool(update.any()) and torch.equal(again, update)
    assert ran_again == 2 * ran > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["cross-entropy", "soft beam", "minimum risk", "mgs", "residual", "bert, mlm, enumerated"]
)
def test_compiled_models_are_trained_alike(kind, tmp_path, monkeypatch):
    update, _ = trained(kind, tmp_path)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # the arguments set it for good
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled, _ = trained(kind, tmp_path, torch_compile=True, torch_compile_backend="eager")
    torch.testing.assert_close(compiled, update, rtol=1e-5, atol=1e-7)
    assert kind == "mgs" or torch._dynamo.utils.counters["stats"]["unique_graphs"]  # MGS decodes with the model itself
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", STEPWISE)
def test_sharded_weights_are_refused_where_steps_read_them(kind, tmp_path):
    zero3 = {"zero_optimization": {"stage": 3}}
    (tmp_path / "zero3.json").write_text(json.dumps(zero3))
    for sharded in ({"fsdp": True}, {"deepspeed": zero3}, {"deepspeed": str(tmp_path / "zero3.json")}):
        with pytest.raises(ValueError, match="fsdp and ZeRO-3 of deepspeed must be off"):
            trainer_of(kind, tmp_path, tiny_seq2seq("lstm additive"), **sharded)
    settings = HfDeepSpeedConfig(zero3)
    set_hf_deepspeed_config(settings)  # as accelerate's settings do
    try:
        with pytest.raises(ValueError, match="ZeRO-3 of deepspeed must be off"):
            trainer_of(kind, tmp_path, tiny_seq2seq("lstm additive"))
    finally:
        unset_hf_deepspeed_config()


@pytest.mark.parametrize("kind", ["bert, mlm, enumerated", "residual", "minimum risk", "self-critical"])
def test_sharded_weights_are_refused_where_what_is_no_forward_reads_them(kind, tmp_path):
    online = {"online": True} if kind == "residual" else {}
    with pytest.raises(ValueError, match="fsdp and ZeRO-3 of deepspeed must be off"):
        trainer_of_kind(kind, tmp_path, fsdp=True, **online)


@pytest.mark.parametrize("kind", STEPWISE)
def test_what_decodes_step_by_step_refuses_it(kind, tmp_path):
    message = "activation_checkpointing .* must be off, of the model too: it drops the decoder's cache"
    with pytest.raises(ValueError, match=message) as refused:
        trainer_of(kind, tmp_path, tiny_seq2seq("bart"), activation_checkpointing=True)
    assert ("checkpoint_steps" in str(refused.value)) == ("checkpoint_steps" in KINDS[kind][1].__dataclass_fields__)
    model = tiny_seq2seq("bart")
    model.activation_checkpointing_enable()
    with pytest.raises(ValueError, match=message):
        trainer_of(kind, tmp_path, model)
    trainer = trainer_of(kind, tmp_path, tiny_seq2seq("bart"))
    trainer.model_init = lambda: model
    with pytest.raises(ValueError, match=message):
        trainer.train()


@pytest.mark.parametrize(
    "kind, model",
    [("cross-entropy", "LSTMSeq2SeqForConditionalGeneration"), ("mgs", "LSTMSeq2SeqForConditionalGeneration"),
     ("bilstm, mlm, enumerated", "EnergyModel")],
)  # fmt: skip
def test_models_without_layers_to_recompute_are_refused_when_a_trainer_is_made(kind, model, tmp_path):
    with pytest.raises(ValueError, match=f"must be off: model, {model}, has no layers that can be recomputed"):
        if kind == "cross-entropy":
            trainer_of(kind, tmp_path, activation_checkpointing=True)
        elif kind == "mgs":
            test_mgs.trainer_of(tmp_path, tiny_seq2seq("lstm additive"), activation_checkpointing=True)
        else:
            trainer_of_kind(kind, tmp_path, activation_checkpointing=True)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_what_a_trainer_is_given_stands_in_its_signature(trainer):
    """Of the stock ones by their names there, and what is its own; the rest is theirs as well."""
    parameters, stock = (inspect.signature(one).parameters for one in (trainer, Seq2SeqTrainer))
    own = {"cost"} if trainer is trainers.SoftBeamTrainer or issubclass(trainer, TaskLossTrainer) else set()
    own |= {"teacher"} if trainer is trainers.EnergyTrainer else set()
    own |= {"reference_model"} if trainer is trainers.GRPOTrainer else set()
    own |= {"reward_funcs"} if issubclass(trainer, TaskLossTrainer) else set()
    assert set(parameters) - set(stock) == own | {"kwargs"}
    wanted = {"data_collator", "train_dataset", "eval_dataset", "processing_class", "model_init", "callbacks"}
    assert wanted | own <= {name for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY}
    assert ("compute_metrics" in parameters) or trainer is trainers.EnergyTrainer


@pytest.mark.parametrize("kind", ["residual", "bert, mlm, enumerated"])
def test_metrics_without_predictions_are_refused(kind, tmp_path):
    made = trainer_of_kind(kind, tmp_path)
    with pytest.raises(ValueError, match=f"compute_metrics must be None: {type(made).__name__} makes no predictions"):
        type(made)(made.model, made.args, compute_metrics=lambda found: {})
