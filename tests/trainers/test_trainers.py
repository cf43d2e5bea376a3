"""The sequence-to-sequence trainers: losses against hand-written steps, accumulation, logs, resuming, refusals."""

import copy
import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Seq2SeqTrainingArguments, set_seed

from hf_ebm.objectives.costs import HammingCost
from hf_ebm.relaxations.soft_beam import (
    SoftBeamSettings,
    direct_loss,
    gold_scores,
    hinge_loss,
    relaxed_beam_search,
    soft_beam_search,
)
from hf_ebm.relaxations.stepwise import StepwiseDecoder
from hf_ebm.trainers import (
    CrossEntropyConfig,
    CrossEntropyTrainer,
    ScheduledSamplingConfig,
    ScheduledSamplingTrainer,
    SelfNormalizedConfig,
    SelfNormalizedTrainer,
    SoftBeamConfig,
    SoftBeamTrainer,
)
from hf_ebm.trainers.stepwise import scheduled_sampling_logits
from tests.seq2seq_families import seq2seq_batch, tiny_seq2seq

KINDS = {
    "cross-entropy": (CrossEntropyTrainer, CrossEntropyConfig, {}),
    "self-normalized": (SelfNormalizedTrainer, SelfNormalizedConfig, {"log_z_weight": 0.3}),
    "scheduled sampling": (
        ScheduledSamplingTrainer,
        ScheduledSamplingConfig,
        {"teacher_forcing_schedule": "always", "inputs": "soft_argmax", "alpha": 2.0},
    ),
    "soft beam": (SoftBeamTrainer, SoftBeamConfig, {"beam_size": 2, "normalization": "global"}),
    "soft beam, hinge": (SoftBeamTrainer, SoftBeamConfig, {"beam_size": 2, "loss": "hinge"}),
}

ONE_STEP = dict(
    per_device_train_batch_size=8, max_steps=1, learning_rate=0.1, optim="sgd", lr_scheduler_type="constant",
    max_grad_norm=0.0, report_to=[], use_cpu=True, save_strategy="no", logging_steps=1, disable_tqdm=True,
    train_sampling_strategy="sequential",
)  # fmt: skip


def rows(count=8, seed=0):
    """Unequal lengths: the last windows and batches have other numbers of tokens."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for row in range(count):
        length = 3 + row % 4
        draw = [torch.randint(4, 28, (length,), generator=generator) for _ in range(2)]
        found.append({"input_ids": draw[0], "attention_mask": torch.ones_like(draw[0]), "labels": draw[1]})
    return found


def collate(batch):
    pad = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: torch.nn.utils.rnn.pad_sequence([row[name] for row in batch], batch_first=True, padding_value=value)
        for name, value in pad.items()
    }


def trainer_of(kind, tmp_path, model=None, dataset=None, **settings):
    trainer_class, config_class, own = KINDS[kind]
    args = config_class(str(tmp_path), **{**ONE_STEP, **own, **settings})
    model = tiny_seq2seq("lstm additive") if model is None else model
    dataset = rows() if dataset is None else dataset
    return trainer_class(model, args, train_dataset=dataset, eval_dataset=rows(4, 9), data_collator=collate)


def by_hand(kind, model, batch):
    """The objective's mean over tokens, written out."""
    labels = batch["labels"]
    tokens = (labels != -100).sum()
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    decoder = None if kind == "cross-entropy" else StepwiseDecoder(model)
    if kind in ("cross-entropy", "self-normalized"):
        logits = model(**batch).logits
        scores = torch.log_softmax(logits, -1)
        kept = labels != -100
        loss = -scores.gather(2, labels.clamp_min(0)[..., None])[..., 0][kept].sum()
        if kind == "self-normalized":
            loss = loss + 0.3 * (logits.logsumexp(-1)[kept] ** 2).sum()
    elif kind == "scheduled sampling":
        embeddings, loss = decoder.embed(decoder.gold_ids(labels))[:, :1], 0.0
        for step in range(labels.shape[1]):
            logits = model(**inputs, decoder_inputs_embeds=embeddings, use_cache=False).logits[:, -1]
            loss = loss + torch.nn.functional.cross_entropy(logits, labels[:, step], ignore_index=-100, reduction="sum")
            mixed = torch.softmax(2.0 * logits, -1) @ decoder.embedding_weight * decoder.scale
            embeddings = torch.cat([embeddings, mixed[:, None]], 1)
    else:
        start, hinge = decoder.embed(decoder.gold_ids(labels)[:, 0]), kind.endswith("hinge")
        settings = SoftBeamSettings(2, 1.0, "local" if hinge else "global")
        result = relaxed_beam_search(decoder, start, inputs, labels, HammingCost(), settings, hinge)
        if hinge:
            loss = hinge_loss(result, gold_scores(model(**batch).logits, labels, "local"), 1.0).sum()
        else:
            loss = direct_loss(result, 1.0).sum()
    return loss / tokens


@pytest.mark.parametrize("kind", KINDS)
def test_one_step_equals_a_hand_written_one(kind, tmp_path):
    model = tiny_seq2seq("lstm additive")
    expected = copy.deepcopy(model)
    loss = by_hand(kind, expected, collate(rows()))
    loss.backward()
    trainer = trainer_of(kind, tmp_path, model)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(float(loss), rel=1e-6)
    for (name, updated), start in zip(model.named_parameters(), expected.parameters(), strict=True):
        gradient = 0 if start.grad is None else start.grad
        torch.testing.assert_close(updated, start - 0.1 * gradient, atol=1e-9, rtol=1e-7, msg=name)


@pytest.mark.parametrize(
    ("kind", "family"),
    [
        *((kind, "lstm additive") for kind in KINDS),
        ("cross-entropy", "bart"),
        ("soft beam", "bart"),
        ("soft beam", "t5"),
    ],
)
def test_accumulation_gives_the_update_of_one_large_batch(kind, family, tmp_path):
    """Two rows four times, with other numbers of tokens in each; and a last window that is smaller than the rest."""
    weights = []
    for batch_size, accumulation in ((8, 1), (2, 4), (3, 3)):
        model = tiny_seq2seq(family)
        settings = {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
        trainer = trainer_of(kind, tmp_path, model, **settings)
        trainer.train()
        weights.append([p.detach() for p in model.parameters()])
    for whole, *others in zip(*weights, strict=True):
        for other in others:
            torch.testing.assert_close(other, whole, atol=1e-6, rtol=1e-6)


def test_the_logged_loss_does_not_depend_on_accumulation(tmp_path):
    logged = []
    for batch_size, accumulation in ((8, 1), (2, 4)):
        trainer = trainer_of(
            "soft beam", tmp_path, per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulation
        )
        trainer.train()
        logged.append(trainer.state.log_history[0]["loss"])
    assert logged[0] == pytest.approx(logged[1], rel=1e-6)


def test_coins_are_tossed_for_each_token():
    model, batch = tiny_seq2seq("lstm additive"), seq2seq_batch("lstm additive")
    decoder = StepwiseDecoder(model)
    gold = scheduled_sampling_logits(decoder, batch, torch.ones(3, 8, dtype=torch.bool), "argmax", 1.0)
    torch.testing.assert_close(gold, model(**batch).logits)
    coins = torch.ones(3, 8, dtype=torch.bool)
    coins[1, 4] = False
    mixed = scheduled_sampling_logits(decoder, batch, coins, "argmax", 1.0)
    changed = (mixed != gold).any(-1)
    assert not changed[0].any() and not changed[2].any() and not changed[1, :4].any()
    assert changed[1, 4]


@pytest.mark.parametrize("inputs", ["argmax", "soft_argmax"])
def test_only_soft_inputs_tell_earlier_steps_about_later_losses(inputs):
    model, batch = tiny_seq2seq("lstm additive"), seq2seq_batch("lstm additive")
    decoder = StepwiseDecoder(model)
    logits = scheduled_sampling_logits(decoder, batch, torch.zeros(3, 8, dtype=torch.bool), inputs, 1.0)
    bias = torch.autograd.grad(logits[:, 1].square().sum(), model.lm_head.bias)[0]
    direct = 2 * logits[:, 1].sum(0)
    assert torch.allclose(bias, direct) == (inputs == "argmax")


def test_self_normalization_reports_and_lowers_log_z(tmp_path):
    trainer = trainer_of("self-normalized", tmp_path, max_steps=60, learning_rate=0.1, log_z_weight=1.0)
    before = trainer.evaluate()
    with torch.no_grad():
        batch = collate(rows(4, 9))
        log_z = trainer.model(**batch).logits.logsumexp(-1)[batch["labels"] != -100]
    assert before["eval_log_z_mean"] == pytest.approx(float(log_z.mean()))
    assert before["eval_log_z_variance"] == pytest.approx(float(log_z.var(unbiased=False)))
    trainer.train()
    after = [log for log in trainer.state.log_history if "log_z_mean" in log]
    assert abs(after[-1]["log_z_mean"]) < 0.5 * abs(after[0]["log_z_mean"])


def test_the_evaluation_loss_is_a_mean_over_tokens(tmp_path):
    losses = []
    for size in (1, 4):
        trainer = trainer_of("soft beam", tmp_path, per_device_eval_batch_size=size)
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    batch = collate(rows(4, 9))
    with torch.no_grad():
        assert losses[0] == pytest.approx(float(by_hand("soft beam", tiny_seq2seq("lstm additive"), batch)), rel=1e-6)


def test_generation_metrics_with_the_objective_as_the_loss(tmp_path):
    trainer_class, config_class, own = KINDS["soft beam"]
    seen = {}

    def metrics(prediction):
        seen["shapes"] = prediction.predictions.shape, prediction.label_ids.shape
        return {"rows": len(prediction.predictions)}

    args = config_class(
        output_dir=str(tmp_path), predict_with_generate=True, generation_max_length=9, per_device_eval_batch_size=2,
        report_to=[], use_cpu=True, **own,
    )  # fmt: skip
    trainer = trainer_class(
        tiny_seq2seq("lstm additive"), args, eval_dataset=rows(5, 9), data_collator=collate, compute_metrics=metrics
    )
    found = trainer.evaluate()
    assert found["eval_rows"] == 5
    assert found["eval_loss"] < 2  # the rate of wrong tokens, not the cross entropy
    assert seen["shapes"][0][0] == seen["shapes"][1][0] == 5
    greedy = trainer.predict(rows(5, 9), num_beams=1, custom_generate=None).predictions
    assert greedy.shape[0] == 5
    assert trainer.model.generation_config.max_length is None  # the stock step would leave 20 there, to be saved


@pytest.mark.parametrize("kind", ["cross-entropy", "soft beam"])
def test_generation_does_not_see_the_gold_that_a_collator_adds(kind, tmp_path):
    model = tiny_seq2seq("bart")
    found = []
    for added in (False, True):

        def collate_more(batch, added=added):
            batch = collate(batch)
            return (
                {**batch, "decoder_input_ids": model.prepare_decoder_input_ids_from_labels(batch["labels"])}
                if added
                else batch
            )

        trainer = trainer_of(kind, tmp_path, model, predict_with_generate=True, generation_max_length=9)
        trainer.data_collator = collate_more
        found.append(trainer.predict(rows(4, 9)).predictions)
    assert (found[0] == found[1]).all()


@pytest.mark.parametrize("kind", ["scheduled sampling", "soft beam"])
def test_a_model_that_train_makes_is_the_one_that_is_trained(kind, tmp_path):
    given = trainer_of(kind, tmp_path, max_steps=3)
    given.train()
    made = trainer_of(kind, tmp_path, max_steps=3)
    made.model_init = lambda: tiny_seq2seq("lstm additive")
    made.train()
    losses = [[log["loss"] for log in t.state.log_history if "loss" in log] for t in (given, made)]
    assert losses[0] == losses[1]


def test_a_second_run_of_a_trainer_begins_anew(tmp_path):
    trainer = trainer_of(
        "scheduled sampling", tmp_path, max_steps=3, learning_rate=0.0, inputs="sample", logging_steps=2
    )
    losses = []
    for _ in range(2):
        trainer.train()
        losses.append(next(log["loss"] for log in trainer.state.log_history if "loss" in log))
        assert losses[-1] == losses[0]


def test_soft_decoding_in_evaluation_keeps_the_trained_normalization(tmp_path):
    trainer = trainer_of("soft beam", tmp_path, predict_with_generate=True, generation_max_length=9)
    seen = {}
    generate = trainer.model.generate
    trainer.model.generate = lambda *args, **kwargs: seen.update(kwargs) or generate(*args, **kwargs)
    trainer.predict(rows(4, 9), custom_generate=soft_beam_search, alpha=2.0)
    assert (seen["normalization"], seen["alpha"], seen["num_beams"]) == ("global", 2.0, 2)


@pytest.mark.parametrize("kind", ["scheduled sampling", "soft beam"])
def test_a_resumed_run_is_the_same_run(kind, tmp_path):
    settings = dict(
        max_steps=-1, num_train_epochs=4, per_device_train_batch_size=2, dataset=rows(6), optim="adamw_torch",
        save_strategy="epoch", learning_rate=1e-2, train_sampling_strategy="random",
    )  # fmt: skip
    if kind == "scheduled sampling":
        settings |= {"inputs": "soft_sample", "teacher_forcing_schedule": "constant"}
    set_seed(0)
    whole = trainer_of(kind, tmp_path / "whole", **settings)
    whole.train()
    resumed = trainer_of(kind, tmp_path / "whole", tiny_seq2seq("lstm additive", seed=5), **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-6"))
    losses = [[log["loss"] for log in t.state.log_history if "loss" in log] for t in (whole, resumed)]
    assert losses[0] == losses[1]
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.half_precision
@pytest.mark.parametrize("family", ["bart", "lstm additive", "lstm fixed"])
def test_dropout_and_autocast_train(family, tmp_path):
    for kind in KINDS:
        model = tiny_seq2seq(family).float()
        exact = trainer_of(kind, tmp_path, model).evaluate()["eval_loss"]
        trainer = trainer_of(kind, tmp_path, model, bf16=True, max_steps=2)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(exact, rel=0.02)
        for module in model.modules():
            if hasattr(module, "dropout") and isinstance(module.dropout, float):
                module.dropout = 0.2
            elif isinstance(module, torch.nn.Dropout):
                module.p = 0.2
        trainer.train()
        assert math.isfinite(trainer.state.log_history[1]["loss"])


def test_max_search_steps_shortens_the_search_and_says_so(tmp_path):
    trainer = trainer_of("soft beam", tmp_path, max_search_steps=3)
    trainer.train()
    log = trainer.state.log_history[0]
    lengths = [len(row["labels"]) for row in rows()]
    assert log["searched_share"] == pytest.approx(sum(min(3, n) for n in lengths) / sum(lengths))
    assert log["loss"] < trainer_of("soft beam", tmp_path).evaluate(rows())["eval_loss"]


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("soft beam", {"alpha": 0.0}, "alpha must be a number above 0, got 0.0"),
        ("soft beam", {"beam_size": 0}, "beam_size must be a whole number from 1 up, got 0"),
        ("soft beam", {"beam_size": 38}, "beam_size must be at most the vocabulary of 37 tokens, got 38"),
        ("soft beam", {"loss": "ramp"}, "loss must be one of 'direct', 'hinge', got 'ramp'"),
        ("soft beam", {"normalization": "no"}, "normalization must be one of 'local', 'global', got 'no'"),
        ("soft beam", {"max_search_steps": 0}, "max_search_steps must be a whole number from 1 up, got 0"),
        ("soft beam", {"label_smoothing_factor": 0.1}, "label_smoothing_factor must be 0, got 0.1"),
        ("soft beam", {"activation_checkpointing": True}, "activation_checkpointing .* must be off"),
        ("self-normalized", {"log_z_weight": -1.0}, "log_z_weight must be a number from 0 up, got -1.0"),
        ("scheduled sampling", {"inputs": "beam"}, "inputs must be one of .*, got 'beam'"),
        ("scheduled sampling", {"alpha": -1.0}, "alpha must be a number above 0, got -1.0"),
        ("scheduled sampling", {"teacher_forcing_schedule": "no"}, "teacher_forcing_schedule must be one of"),
        ("soft beam", {"schedule_unit": "day"}, "schedule_unit must be one of 'epoch', 'step', 'percent', got 'day'"),
    ],
)
def test_refusals(kind, settings, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        trainer_of(kind, tmp_path, **settings)


def test_models_and_metrics_that_do_not_fit_are_refused(tmp_path):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1))
    for kind in KINDS:
        with pytest.raises(ValueError, match=r"model must be a sequence-to-sequence model .*GPT2LMHeadModel"):
            trainer_of(kind, tmp_path, model)
    args = SoftBeamConfig(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(ValueError, match="compute_metrics needs predict_with_generate=True"):
        SoftBeamTrainer(tiny_seq2seq("bart"), args, compute_metrics=lambda p: {})


def test_arguments_of_another_kind_are_refused(tmp_path):
    model, args = tiny_seq2seq("bart"), Seq2SeqTrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    for trainer_class, config_class, _ in KINDS.values():
        with pytest.raises(ValueError, match=f"args must be a {config_class.__name__}, got Seq2SeqTrainingArguments"):
            trainer_class(model, args)
    with pytest.raises(ValueError, match="compute_loss_func must be None"):
        CrossEntropyTrainer(
            model, CrossEntropyConfig(str(tmp_path), report_to=[], use_cpu=True), compute_loss_func=lambda *a: 0
        )
    unlabeled = [{"input_ids": row["input_ids"]} for row in rows()]
    trainer = trainer_of("soft beam", tmp_path, dataset=unlabeled)
    trainer.data_collator = lambda batch: {"input_ids": torch.stack([row["input_ids"][:3] for row in batch])}
    with pytest.raises(ValueError, match="inputs must have labels, got input_ids"):
        trainer.train()


@pytest.mark.parametrize("family", ["lstm additive", "bart", "marian, two vocabularies"])
def test_labels_that_are_no_tokens_are_refused(family, tmp_path):
    bad = rows()
    bad[2]["labels"][1] = 41
    for kind in KINDS:
        with pytest.raises(ValueError, match="labels: row 2 has 41"):
            trainer_of(kind, tmp_path, tiny_seq2seq(family), dataset=bad).train()


def test_a_fixed_attention_model_names_the_row_whose_lengths_differ(tmp_path):
    bad = rows()
    for labels, targets in ((bad[5]["labels"].repeat(2), 8), (bad[5]["labels"][:2], 2)):
        bad[5]["labels"] = labels
        for kind in KINDS:
            with pytest.raises(ValueError, match=f"row 5 has {targets} targets and its source 4 positions"):
                trainer_of(kind, tmp_path, tiny_seq2seq("lstm fixed"), dataset=bad).train()
