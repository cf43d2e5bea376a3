"""Noise-contrastive training: a step by hand, and convergence to a distribution that can be enumerated."""

import math

import pytest
import torch
from transformers import BertConfig, BertModel
from transformers.trainer_utils import get_last_checkpoint

from hf_ebm.models.residual import ResidualEnergyModel
from hf_ebm.trainers import ResidualNCEConfig, ResidualNCETrainer
from hf_ebm.trainers.residual_nce import collate_rows
from tests.models.residual_models import (
    END,
    LENGTH,
    PREFIX,
    VOCAB,
    all_continuations,
    exact_energies,
    exact_log_probs,
    spread,
    toy_encoder,
    toy_lm,
    toy_residual,
)
from tests.models.tokenizers_for_tests import small_tokenizer

pytestmark = pytest.mark.slow

ROWS = [
    {"prefix_ids": [0, 3, 4], "continuation_ids": [5, 4, 3], "negatives": [[4, END]]},
    {"prefix_ids": [0], "continuation_ids": [END], "negatives": [[3, 3, 3]]},
    {"prefix_ids": [0, 5], "continuation_ids": [3, END], "negatives": [[5, 5, END]]},
    {"prefix_ids": [0, 2, 4, 3], "continuation_ids": [3, 3, END], "negatives": [[END]]},
    {"prefix_ids": [4], "continuation_ids": [4, 4, 4], "negatives": [[3, END]]},
    {"prefix_ids": [4, 4], "continuation_ids": [2, 0, END], "negatives": [[0, 0, 0]]},
]


def arguments(folder, **changes) -> ResidualNCEConfig:
    settings = dict(
        output_dir=str(folder), max_steps=1, learning_rate=0.1, per_device_train_batch_size=len(ROWS), optim="sgd",
        report_to=[], use_cpu=True, save_strategy="no", logging_steps=1, disable_tqdm=True, max_new_tokens=LENGTH,
        lr_scheduler_type="constant", max_grad_norm=0.0, train_sampling_strategy="sequential", seed=0,
    )  # fmt: skip
    return ResidualNCEConfig(**{**settings, **changes})


def by_hand(model, rows) -> tuple[torch.Tensor, dict[str, float]]:
    """The loss of equation 3 and what is logged, one row at a time."""

    def energy(prefix, after):
        return model(input_ids=torch.tensor([[*prefix, *after]])).energy[0]

    real = torch.stack([energy(row["prefix_ids"], row["continuation_ids"]) for row in rows])
    fake = torch.stack([energy(row["prefix_ids"], row["negatives"][0]) for row in rows])
    loss = -(1 / (1 + real.exp())).log().mean() - (1 / (1 + (-fake).exp())).log().mean()
    logged = {
        "accuracy_real": float((real < 0).double().mean()),
        "accuracy_generated": float((fake > 0).double().mean()),
        "energy_real": float(real.mean()),
        "energy_generated": float(fake.mean()),
        "log_self_normalizer": math.log(float((-fake).exp().mean())),
    }
    return loss, logged


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_step_equals_one_by_hand_for_any_accumulation(tmp_path, family, accumulation):
    model, reference = toy_residual(family), toy_residual(family)
    loss, logged = by_hand(reference, ROWS)
    loss.backward()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    # Batches of two, and a last short one of the accumulated batch would be empty: six rows are three batches.
    size = len(ROWS) if accumulation == 1 else 2
    changes = dict(per_device_train_batch_size=size, gradient_accumulation_steps=1 if accumulation == 1 else 3)
    trainer = ResidualNCETrainer(model, arguments(tmp_path, **changes), train_dataset=ROWS)
    trainer.train()
    for (name, found), (_, expected) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7, msg=name)
    log = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert float(log["loss"]) == pytest.approx(float(loss.detach()), rel=1e-4)
    for name, value in logged.items():
        assert float(log[name]) == pytest.approx(value, rel=1e-5, abs=1e-7), name


def test_uneven_accumulation_counts_rows(tmp_path):
    models = []
    for size, steps in ((5, 1), (2, 3)):
        model = toy_residual()
        ResidualNCETrainer(
            model, arguments(tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=steps),
            train_dataset=ROWS[:5],
        ).train()  # fmt: skip
        models.append(model)
    for found, expected in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_the_language_model_is_not_touched_and_evaluation_is_the_objective(tmp_path):
    model = toy_residual()
    before = {name: value.clone() for name, value in model.lm.state_dict().items()}
    trainer = ResidualNCETrainer(model, arguments(tmp_path, max_steps=3), train_dataset=ROWS, eval_dataset=ROWS[:3])
    trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in model.lm.state_dict().items())
    loss, logged = by_hand(model.eval(), ROWS[:3])
    found = trainer.evaluate()
    assert found["eval_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, value in logged.items():
        assert found[f"eval_{name}"] == pytest.approx(value, rel=1e-5)


def test_an_online_evaluation_is_repeatable_and_has_noise_of_its_own_in_each_batch(tmp_path):
    model, rows = toy_residual(), [{"prefix_ids": [0, 3], "continuation_ids": [4, 4, 4]}] * 40
    args = arguments(tmp_path, online=True, per_device_eval_batch_size=4)
    trainer = ResidualNCETrainer(model, args, train_dataset=rows, eval_dataset=rows)
    first, encode, seen = trainer.evaluate(), model.encoder_rows, []
    model.encoder_rows = lambda all_rows: (
        seen.extend(map(tuple, (r.tolist() for r in all_rows[4:]))) or encode(all_rows)
    )
    again = trainer.evaluate()
    assert again["eval_loss"] == first["eval_loss"] and len(seen) == 40 and len(set(seen)) > 8


def test_nan_energies_name_the_row(tmp_path):
    model = toy_residual()
    model.encoder.embeddings.word_embeddings.weight.data[2] = torch.nan
    with pytest.raises(ValueError, match=r"energies: row [0-9], [01] has the energy nan"):
        ResidualNCETrainer(model, arguments(tmp_path), train_dataset=ROWS[:4]).train()


def test_negatives_are_chosen_at_random_and_again_the_same(tmp_path):
    rows = [{**ROWS[0], "negatives": [[token, END] for token in (0, 2, 3, 4, 5)]}] * 200
    seen = []
    for seed in (1, 1, 2):
        model = toy_residual()
        trainer = ResidualNCETrainer(
            model, arguments(tmp_path, per_device_train_batch_size=200, seed=seed), train_dataset=rows
        )
        encode, chosen = model.encoder_rows, []
        model.encoder_rows = lambda all_rows, _encode=encode, _chosen=chosen: (
            _chosen.append([int(row[3]) for row in all_rows[200:]]) or _encode(all_rows)
        )
        trainer.train()
        seen.append(chosen[0])
    assert seen[0] == seen[1] != seen[2]
    counts = torch.bincount(torch.tensor(seen[0]), minlength=VOCAB)[[0, 2, 3, 4, 5]]
    assert bool((counts > 20).all())


def test_resuming_changes_nothing(tmp_path):
    rows = [{**row, "negatives": [[3, END], [4, 4, 4], [END]]} for row in ROWS]
    settings = dict(max_steps=6, per_device_train_batch_size=2, optim="adamw_torch", learning_rate=1e-2)
    whole = toy_residual(dtype=torch.float32)
    ResidualNCETrainer(whole, arguments(tmp_path / "a", **settings), train_dataset=rows).train()
    first = toy_residual(dtype=torch.float32)
    args = arguments(tmp_path / "b", **settings, save_strategy="steps", save_steps=3)
    ResidualNCETrainer(first, args, train_dataset=rows).train()
    again = toy_residual(dtype=torch.float32)
    trainer = ResidualNCETrainer(again, args, train_dataset=rows)
    trainer.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-3"))
    for found, expected in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_checkpoints_by_reference_hold_no_language_model_and_load_again(tmp_path):
    lm = toy_lm(dtype=torch.float32)
    lm.save_pretrained(tmp_path / "lm")

    def make() -> ResidualEnergyModel:
        return ResidualEnergyModel(lm, toy_encoder(dtype=torch.float32), lm_reference=tmp_path / "lm")

    args = arguments(tmp_path / "out", max_steps=2, save_strategy="steps", save_steps=1)
    model = make()
    ResidualNCETrainer(model, args, train_dataset=ROWS).train()
    checkpoint = get_last_checkpoint(str(tmp_path / "out"))
    loaded = ResidualEnergyModel.from_pretrained(checkpoint)
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    trainer = ResidualNCETrainer(make(), arguments(tmp_path / "out", max_steps=2), train_dataset=ROWS)
    trainer.train(resume_from_checkpoint=checkpoint)
    assert all(torch.equal(value, expected[name]) for name, value in trainer.model.state_dict().items())


def test_a_tokenizer_goes_into_the_checkpoint_and_changes_no_setting(tmp_path):
    tokenizer = small_tokenizer("wordpiece")
    lm = toy_lm(len(tokenizer), dtype=torch.float32)
    model = ResidualEnergyModel(lm, toy_encoder(vocab_size=len(tokenizer), dtype=torch.float32))
    ends, settings = list(model.end_ids), model.generation_config.settings()
    trainer = ResidualNCETrainer(model, arguments(tmp_path), train_dataset=ROWS, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    again = ResidualEnergyModel.from_pretrained(tmp_path)
    assert again.end_ids == model.end_ids == ends and again.generation_config.settings() == settings
    assert again.lm_tokenizer.get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("online", [False, True])
def test_training_to_convergence_gives_the_distribution_of_the_data(tmp_path, online):
    """P_LM exp(-E) becomes the data's distribution, and log Z 0, where every continuation can be enumerated.

    Of twice as many steps runs of four seeds and both kinds end at total variations of 0.016 to 0.031, and of these
    two at 0.045 and 0.042; rounding as on another processor moves them by 0.001.
    """
    lm = toy_lm(dtype=torch.float32, scale=0.3)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=48, num_hidden_layers=1, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = ResidualEnergyModel(lm, spread(BertModel(config, add_pooling_layer=False), 0.3))
    length, continuations = 2, all_continuations(length=2)
    base = exact_log_probs(lm, PREFIX, continuations)
    generator = torch.Generator().manual_seed(0)
    data = (base + torch.randn(len(base), generator=generator, dtype=torch.float64)).softmax(0)
    count = 30_000
    drawn = torch.multinomial(data, count, replacement=True, generator=generator).tolist()
    noise = torch.multinomial(base.exp(), count, replacement=True, generator=generator).tolist()
    rows = [
        {"prefix_ids": PREFIX.tolist(), "continuation_ids": list(continuations[real])}
        | ({} if online else {"negatives": [list(continuations[fake])]})
        for real, fake in zip(drawn, noise, strict=True)
    ]

    def distance() -> tuple[float, float]:
        joint = base - exact_energies(model.eval(), PREFIX, continuations)
        shares = torch.bincount(torch.tensor(drawn), minlength=len(continuations)) / count
        return float((joint.softmax(0) - shares).abs().sum() / 2), float(joint.logsumexp(0))

    start, _ = distance()
    trainer = ResidualNCETrainer(
        model,
        arguments(
            tmp_path, max_steps=150, per_device_train_batch_size=192, optim="adamw_torch", learning_rate=5e-3,
            lr_scheduler_type="cosine", warmup_steps=15, max_grad_norm=1.0, online=online, logging_steps=50,
            train_sampling_strategy="random", max_new_tokens=length,
        ),
        train_dataset=rows,
    )  # fmt: skip
    trainer.train()
    end, log_z = distance()
    print(f"total variation {start:.3f} -> {end:.3f}, log Z {log_z:+.3f}")
    assert start > 0.3 and end < 0.1 and abs(log_z) < 0.05
    assert abs(trainer.state.log_history[-2]["log_self_normalizer"]) < 0.1


@pytest.mark.parametrize(
    "rows, changes, message",
    [
        ([{"prefix_ids": [0], "continuation_ids": [3, END]}], {}, "inputs must have negatives"),
        ([{**ROWS[0], "continuation_ids": [3, 4]}], {}, "continuations: row 0 must end with an end token"),
        ([{**ROWS[0], "negatives": [[3, END, 3]]}], {}, "continuations: row 0 must end with an end token"),
        ([{**ROWS[0], "prefix_ids": [0] * 31}], {}, "row 0 has 31 tokens, with max_new_tokens 34"),
        ([{**ROWS[0], "continuation_ids": [9, 9, 9]}], {}, "continuations: row 0 holds the id 9"),
    ],
)
def test_rows_that_cannot_be_are_refused(tmp_path, rows, changes, message):
    with pytest.raises(ValueError, match=message):
        ResidualNCETrainer(toy_residual(), arguments(tmp_path, **changes), train_dataset=rows).train()


def test_other_models_and_settings_are_refused(tmp_path):
    with pytest.raises(ValueError, match="model must be a ResidualEnergyModel, got GPT2LMHeadModel"):
        ResidualNCETrainer(toy_lm(), arguments(tmp_path), train_dataset=ROWS)
    with pytest.raises(ValueError, match="max_new_tokens must be a whole number from 1 up, got 0"):
        arguments(tmp_path, max_new_tokens=0)
    with pytest.raises(ValueError, match="label_smoothing_factor must be 0"):
        arguments(tmp_path, label_smoothing_factor=0.1)
    defaults = ResidualNCEConfig(str(tmp_path))
    assert defaults.lr_scheduler_type == "cosine" and defaults.max_grad_norm == 0.25
    assert defaults.get_warmup_steps(1000) == 20


def test_collated_rows_keep_their_lengths():
    batch = collate_rows(ROWS)
    assert batch["prefix_lengths"].tolist() == [3, 1, 2, 4, 1, 2]
    assert batch["negative_ids"].shape == (6, 1, 3) and batch["negative_lengths"][:, 0].tolist() == [2, 3, 3, 1, 2, 3]
    assert "negative_ids" not in collate_rows([{**ROWS[0], "negatives": []}])
