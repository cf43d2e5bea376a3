"""Schedules of the share of gold inputs and of alpha: by epoch, step and percent; those that change nothing."""

import pytest
import torch

from tests.trainers.test_trainers import rows, trainer_of

pytestmark = pytest.mark.slow

UNUSED = "schedule_unit='percent'"


def logged(trainer, name):
    trainer.train()
    return [log[name] for log in trainer.state.log_history if "loss" in log]


def test_scheduled_sampling_logs_and_mixes(tmp_path):
    trainer = trainer_of(
        "scheduled sampling", tmp_path, dataset=rows(64), max_steps=-1, num_train_epochs=3,
        teacher_forcing_schedule="constant", teacher_forcing_probability=0.3, alpha=1.0, alpha_growth=2.0,
        logging_strategy="epoch",
    )  # fmt: skip
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["teacher_forcing_probability"] for log in logs] == [1.0, 0.3, 0.3]
    assert [log["alpha"] for log in logs] == [1.0, 2.0, 4.0]
    assert logs[0]["model_input_share"] == 0
    assert all(0.55 < log["model_input_share"] < 0.85 for log in logs[1:])


@pytest.mark.parametrize("unit", ["epoch", "step", "percent"])
def test_a_linear_schedule_ends_with_the_run(unit, tmp_path):
    """A step is an epoch here, and accumulates two batches."""
    trainer = trainer_of(
        "scheduled sampling", tmp_path, max_steps=5, schedule_unit=unit, teacher_forcing_schedule="linear",
        teacher_forcing_probability=0.2, per_device_train_batch_size=4, gradient_accumulation_steps=2,
    )  # fmt: skip
    assert logged(trainer, "teacher_forcing_probability") == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize(
    "unit, alphas, shares",
    [
        ("epoch", [1, 1, 2, 2, 4, 4], [0, 0, 1, 1, 1, 1]),
        ("step", [1, 2, 4, 8, 16, 32], [0, 1, 1, 1, 1, 1]),
        ("percent", [2 ** (100 * step / 6) for step in range(6)], [0, 1, 1, 1, 1, 1]),
    ],
)
def test_schedules_count_what_they_are_told_to(unit, alphas, shares, tmp_path):
    """Two steps an epoch, three epochs; the choices are the model's own behind one unit of gold."""
    settings = dict(schedule_unit=unit, max_steps=-1, num_train_epochs=3, per_device_train_batch_size=4, alpha_growth=2)
    trainer = trainer_of("soft beam", tmp_path, **settings)
    expected = [min(1e6, alpha) for alpha in alphas]
    assert logged(trainer, "alpha") == pytest.approx(expected)
    assert trainer.evaluate()["eval_alpha"] == pytest.approx(expected[-1])
    settings |= {"teacher_forcing_schedule": "constant", "teacher_forcing_probability": 0.0, "inputs": "argmax"}
    assert logged(trainer_of("scheduled sampling", tmp_path, **settings), "model_input_share") == shares


def test_the_inverse_sigmoid_counts_hundredths_of_any_run(tmp_path):
    """k / (k + exp(i / k)) at the percents of a run of eight steps."""
    trainer = trainer_of(
        "scheduled sampling", tmp_path, max_steps=8, schedule_unit="percent",
        teacher_forcing_schedule="inverse_sigmoid", decay_strength=10.0,
    )  # fmt: skip
    found = logged(trainer, "teacher_forcing_probability")
    later = [10 / (10 + 2.718281828459045 ** (12.5 * step / 10)) for step in range(1, 8)]
    assert found == pytest.approx([1.0, *later])


def test_evaluation_uses_the_alpha_of_the_epoch_trained_last(tmp_path):
    trainer = trainer_of("soft beam", tmp_path, max_steps=3, alpha_growth=2.0)
    assert trainer.evaluate()["eval_alpha"] == 1.0
    trainer.train()
    assert [log["alpha"] for log in trainer.state.log_history if "loss" in log] == pytest.approx([1.0, 2.0, 4.0])
    assert trainer.evaluate()["eval_alpha"] == pytest.approx(4.0)


@pytest.mark.parametrize(
    "kind, settings, message",
    [
        (
            "scheduled sampling",
            {"teacher_forcing_schedule": "inverse_sigmoid"},
            "reads gold with a probability of at least 1 ",
        ),
        ("scheduled sampling", {"teacher_forcing_schedule": "linear"}, "reads gold with a probability of at least 1 "),
        (
            "scheduled sampling",
            {"teacher_forcing_schedule": "constant"},
            "reads gold with a probability of at least 1 ",
        ),
        (
            "scheduled sampling",
            {"teacher_forcing_schedule": "inverse_sigmoid", "schedule_unit": "step", "decay_strength": 1000},
            "reads gold with a probability of at least 0.999 ",
        ),
        ("scheduled sampling", {"alpha_growth": 1.5}, "alpha stays at 2.0, as alpha_growth=1.5 counts by epoch"),
        ("soft beam", {"alpha_growth": 1.6}, "alpha stays at 1.0, as alpha_growth=1.6 counts by epoch"),
        ("soft beam, hinge", {"alpha_growth": 1.6, "max_steps": 1}, "alpha stays at 1.0"),
    ],
)
def test_a_schedule_that_changes_nothing_is_told_of_before_training(kind, settings, message, tmp_path, caplog):
    """Fewer steps than an epoch has, which the Trainer itself never mentions."""
    trainer = trainer_of(kind, tmp_path, **{"max_steps": 3, "per_device_train_batch_size": 2} | settings)
    trainer.loss_terms = lambda *arguments: (_ for _ in ()).throw(InterruptedError)
    with pytest.raises(InterruptedError):
        trainer.train()
    assert message in caplog.text and UNUSED in caplog.text
    assert f"the run has {settings.get('max_steps', 3)} steps in 1 epochs" in caplog.text


@pytest.mark.parametrize(
    "kind, settings",
    [
        ("scheduled sampling", {"teacher_forcing_schedule": "always"}),
        ("scheduled sampling", {"teacher_forcing_schedule": "linear", "max_steps": 5}),  # the second epoch has a step
        ("scheduled sampling", {"teacher_forcing_schedule": "linear", "schedule_unit": "step"}),
        ("scheduled sampling", {"teacher_forcing_schedule": "linear", "schedule_unit": "percent"}),
        ("soft beam", {"alpha_growth": 1.0}),
        ("soft beam", {"schedule_unit": "percent"}),
        ("cross-entropy", {}),
    ],
)
def test_nothing_is_said_of_schedules_that_do_something(kind, settings, tmp_path, caplog):
    trainer_of(kind, tmp_path, **{"max_steps": 3, "per_device_train_batch_size": 2} | settings).train()
    assert UNUSED not in caplog.text


class _Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from rows()


def test_streams_have_no_epochs(tmp_path):
    for kind, settings in (("soft beam", {}), ("scheduled sampling", {"alpha_growth": 1.2})):
        with pytest.raises(ValueError, match="train_dataset must have a length"):
            trainer_of(kind, tmp_path, dataset=_Stream(), train_sampling_strategy="random", **settings)
    for settings in ({"alpha_growth": 1.0}, {"schedule_unit": "step"}, {"schedule_unit": "percent"}):
        trainer_of("soft beam", tmp_path, dataset=_Stream(), train_sampling_strategy="random", **settings).train()
