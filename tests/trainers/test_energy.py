"""Objectives of energies against brute force over all sequences, their gradients, and steps of the trainer."""

import itertools
import math
import re

import pytest
import torch
from datasets import Dataset
from transformers import Trainer

from hf_ebm import EnergyModel
from hf_ebm.models.energy.chains import proposal_support
from hf_ebm.scoring.conditionals import conditional_log_probs
from hf_ebm.scoring.head import PositionLogits
from hf_ebm.scoring.rows import Sequences
from hf_ebm.trainers import EnergyTrainer, EnergyTrainingConfig
from tests.conftest import tiny_energy_model
from tests.models.test_bilstm import ROLES, tiny_bilstm

pytestmark = pytest.mark.slow

ROWS = [[1, 5, 6, 2], [1, 7, 7, 2], [1, 8, 5, 2], [1, 6, 2], [1, 5, 2], [1, 8, 6, 2]]
WORDS = [5, 6, 7, 8]


def make(kind: str, energy: str, seed: int = 0) -> EnergyModel:
    if kind == "bert":
        return tiny_energy_model(energy, dtype=torch.float64, seed=seed)
    return EnergyModel(tiny_bilstm(seed=seed), energy=energy, **{**ROLES, "excluded_token_ids": [4]})


def energies_by_hand(model: EnergyModel, length: int) -> dict[tuple, torch.Tensor]:
    """The energy of every sequence of words, one masked position of all of them at a time, with its gradient."""
    sequences = list(itertools.product(WORDS, repeat=length))
    ids, total = torch.tensor([[1, *words, 2] for words in sequences]), 0.0
    for position in range(1, length + 1):
        masked = ids.clone()
        masked[:, position] = 3
        logits = model.mlm(input_ids=masked).logits[:, position]
        scores = logits if model.config.energy == "raw" else logits.log_softmax(-1)
        total = total - scores[range(len(ids)), ids[:, position]]
    return dict(zip(sequences, total, strict=True))


def loss_by_hand(model: EnergyModel, objective: str, rows, teacher=None) -> torch.Tensor:
    """The objective as the thesis has it, a mean over rows."""
    tables = {length: energies_by_hand(model, length) for length in {len(row) - 2 for row in rows}}
    losses = []
    for row in rows:
        words, table = tuple(row[1:-1]), tables[len(row) - 2]
        if objective == "mle":
            losses.append(table[words] + torch.stack([-e for e in table.values()]).logsumexp(0))
            continue
        loss = 0.0
        for t in range(len(words)):
            masked = torch.tensor([row])
            masked[0, t + 1] = 3
            if objective == "mlm":
                loss = loss - model.mlm(input_ids=masked).logits[0, t + 1].log_softmax(-1)[words[t]]
                continue
            own = torch.stack([-table[(*words[:t], w, *words[t + 1 :])] for w in WORDS]).log_softmax(0)
            if "pll" in objective:
                loss = loss - own[WORDS.index(words[t])]
            if "kl" in objective:
                theirs = teacher.mlm(input_ids=masked).logits[0, t + 1, WORDS].log_softmax(0).detach()
                loss = loss + (theirs.exp() * (theirs - own)).sum()
        losses.append(loss)
    return torch.stack(losses).mean()


def arguments(folder, objective: str, **changes) -> EnergyTrainingConfig:
    settings = dict(
        output_dir=str(folder), objective=objective, max_steps=1, learning_rate=0.1, optim="sgd", report_to=[],
        per_device_train_batch_size=len(ROWS), use_cpu=True, save_strategy="no", logging_steps=1, disable_tqdm=True,
        lr_scheduler_type="constant", max_grad_norm=0.0, train_sampling_strategy="sequential",
    )  # fmt: skip
    return EnergyTrainingConfig(**{**settings, **changes})


@pytest.mark.parametrize("kind", ["bert", "bilstm"])
@pytest.mark.parametrize("energy", ["raw", "local"])
@pytest.mark.parametrize(
    "objective, way",
    [
        (objective, way)
        for objective in ("mle", "pll", "mlm", "kl", "kl+pll")
        for way in ("enumerated", "packed", "accumulated")
        if (objective, way) != ("mle", "packed")  # the likelihood is enumerated or not at all
    ],
)
def test_a_step_equals_one_by_hand(tmp_path, kind, energy, objective, way):
    teacher = make(kind, "raw", seed=3) if "kl" in objective else None
    model, reference = make(kind, energy), make(kind, energy)
    loss = loss_by_hand(reference, objective, ROWS, teacher)
    loss.backward()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    changes = {"enumeration_limit": 1} if way == "packed" else {}
    if way == "accumulated":
        changes = dict(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    rows = [{"input_ids": row} for row in ROWS]
    trainer = EnergyTrainer(model, arguments(tmp_path, objective, **changes), train_dataset=rows, teacher=teacher)
    trainer.train()
    for (name, found), (_, expected) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8, msg=name)
    log = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert float(log["loss"]) == pytest.approx(float(loss.detach()), rel=1e-4)
    if objective == "mle":
        log_z = [float(torch.stack([-e for e in energies_by_hand(make(kind, energy), n).values()]).logsumexp(0))
                 for n in (1, 2)]  # fmt: skip
        assert log["log_partition"] == pytest.approx((2 * log_z[0] + 4 * log_z[1]) / 6, rel=1e-6)


@pytest.mark.parametrize("energy", ["raw", "local"])
@pytest.mark.parametrize("objective", ["mle", "pll", "kl"])
def test_gradients_of_exact_objectives_equal_finite_differences(tmp_path, energy, objective):
    model, teacher = make("bilstm", energy), make("bilstm", "raw", seed=3)
    args = arguments(tmp_path, objective)
    trainer = EnergyTrainer(model, args, teacher=teacher if objective == "kl" else None, train_dataset=[])
    batch = trainer.data_collator([{"input_ids": row} for row in ROWS])
    for parameter in (model.mlm.lm_head.weight, model.mlm.bilstm.left.weight_hh_l0):
        model.zero_grad()
        trainer.loss_terms(model, batch).loss.backward()
        for place in ((5, 2), (7, 0)):
            analytic, values, step = float(parameter.grad[place]), [], 1e-5
            for sign in (1, -1):
                with torch.no_grad():
                    parameter[place] += sign * step
                    values.append(float(trainer.loss_terms(model, batch).loss))
                    parameter[place] -= sign * step
            assert analytic == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("kind", ["bert", "bilstm"])
@pytest.mark.parametrize("objective", ["mlm", "pll", "kl+pll"])
def test_passes_that_are_run_again_give_exact_gradients(tmp_path, monkeypatch, kind, objective):
    """Of a few tokens each, the conditionals laid out for a few positions at a time."""
    teacher = make(kind, "raw", seed=3) if "kl" in objective else None
    model, reference = make(kind, "local"), make(kind, "local")
    loss = loss_by_hand(reference, objective, ROWS, teacher)
    loss.backward()
    monkeypatch.setattr("hf_ebm.scoring.conditionals._ROWS_AT_ONCE", 20)
    trainer = EnergyTrainer(
        model, arguments(tmp_path, objective, enumeration_limit=1), train_dataset=[], teacher=teacher
    )
    monkeypatch.setattr("hf_ebm.scoring.masked_batches.default_token_budget", lambda *_: 9)
    shares, together = [], PositionLogits.together
    monkeypatch.setattr(
        PositionLogits, "together", lambda *args: shares.append(torch.is_grad_enabled()) or together(*args)
    )
    found = trainer.loss_terms(model, trainer.data_collator([{"input_ids": row} for row in ROWS])).loss / len(ROWS)
    forward = sum(shares)
    found.backward()
    assert sum(shares) > 1.5 * forward > 4
    assert float(found.detach()) == pytest.approx(float(loss.detach()), rel=1e-12)
    for (name, own), (_, other) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        if other.grad is None:
            assert own.grad is None or not bool(own.grad.any()), name
        else:
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-10, atol=1e-10, msg=name)


def test_a_hyperparameter_search_may_keep_its_value_in_the_trainer(tmp_path):
    rows = [{"input_ids": row} for row in ROWS]
    trainer = EnergyTrainer(make("bilstm", "raw"), arguments(tmp_path, "pll"), train_dataset=rows)
    trainer.objective = None  # as Transformers' backends begin a trial
    trainer.train()
    assert trainer.state.global_step == 1


def test_the_model_may_come_from_model_init(tmp_path):
    rows = [{"input_ids": row} for row in ROWS]
    trained = []
    for given in (dict(model=make("bilstm", "raw")), dict(model_init=lambda: make("bilstm", "raw"))):
        trainer = EnergyTrainer(args=arguments(tmp_path, "pll"), train_dataset=rows, **given)
        trainer.train()
        trained.append(trainer.model.mlm.lm_head.weight)
    torch.testing.assert_close(trained[1], trained[0], rtol=0, atol=0)


@pytest.mark.parametrize("objective", ["pll", "mle", "mlm"])
def test_rows_without_free_tokens_are_not_counted(objective, tmp_path, caplog):
    """The step and the evaluation are those of the other rows; where there are none, an error and nan."""
    full, empty = [{"input_ids": [1, 5, 6, 2]}, {"input_ids": [1, 7, 2]}], [{"input_ids": [1, 2]}] * 2
    found = []
    for rows in (full, empty[:1] + full + empty[:1]):
        model = make("bilstm", "raw")
        trainer = EnergyTrainer(model, arguments(tmp_path, objective), train_dataset=rows)
        trainer.train()
        found.append((trainer.evaluate(rows), model.mlm.lm_head.weight))
    torch.testing.assert_close(found[1][1], found[0][1])
    for name in {"eval_loss", "eval_log_partition"} & found[0][0].keys():
        assert found[1][0][name] == pytest.approx(found[0][0][name], rel=1e-6)
    metrics = trainer.evaluate(empty)
    names = ["eval_log_partition", "eval_loss"][objective != "mle" :]
    assert all(math.isnan(metrics[name]) for name in names)
    assert [r.message.split(":")[0] for r in caplog.records if "nan" in r.message] == [", ".join(names)]
    with pytest.raises(ValueError, match="input_ids: row 0 must have a token that isn't special"):
        EnergyTrainer(model, arguments(tmp_path, objective), train_dataset=empty).train()


def test_true_conditionals_are_not_the_masked_ones():
    model = make("bert", "raw")
    ids = torch.tensor([[1, 5, 6, 7, 2]])
    sequences = Sequences(ids, torch.tensor([0]), torch.tensor([5]))
    scored, tokens = (ids >= 5), proposal_support(model, None).nonzero()[:, 0]
    found = conditional_log_probs(model.masked_batch_runner(), sequences, scored, tokens, "raw")
    table = energies_by_hand(model, 3)
    expected = torch.stack([-table[(5, w, 7)] for w in WORDS]).log_softmax(0)
    torch.testing.assert_close(found[1], expected)
    masked = ids.clone()
    masked[0, 2] = 3
    wrong = model.mlm(input_ids=masked).logits[0, 2, WORDS].log_softmax(0)
    assert float((wrong - expected).abs().max()) > 0.05


def test_likelihood_training_reaches_the_entropy_of_the_data(tmp_path):
    rows = [[1, 5, 6, 7, 2]] * 40 + [[1, 8, 8, 5, 2]] * 20 + [[1, 6, 5, 8, 2]] * 20 + [[1, 7, 7, 7, 2]] * 20
    entropy = -(0.4 * math.log(0.4) + 3 * 0.2 * math.log(0.2))
    model = EnergyModel(tiny_bilstm(dtype=torch.float32), energy="raw", **{**ROLES, "excluded_token_ids": [4]})
    args = arguments(
        tmp_path, "mle", max_steps=250, per_device_train_batch_size=100, optim="adamw_torch", learning_rate=3e-2,
        lr_scheduler_type="linear", logging_steps=250,
    )  # fmt: skip
    trainer = EnergyTrainer(model, args, train_dataset=[{"input_ids": row} for row in rows], eval_dataset=None)
    trainer.train()
    data = [{"input_ids": row} for row in rows]
    found = trainer.evaluate(data)["eval_loss"]
    assert entropy - 1e-4 < found < entropy + 0.02


def test_the_default_objective_runs_a_masked_row_a_token():
    assert EnergyTrainingConfig("unused", report_to=[]).objective == "mlm"


@pytest.mark.parametrize("objective", ["pll", "kl", "mle"])
def test_too_much_work_is_refused_before_any(tmp_path, objective, caplog, rows_run):
    """The counts are those of the rows that are run."""
    model, teacher = make("bert", "raw"), make("bert", "raw", seed=3) if objective == "kl" else None
    rows = [{"input_ids": row} for row in ([1, 5, 2], [1, 5, 6, 2], [1, 5, 6, 7, 2])]
    packed, limit = objective != "mle", {"enumeration_limit": 1} if objective != "mle" else {}
    expected = 3 * (1 + 4 * 2) if packed else 3 * 4**2

    def trainer(**changes) -> EnergyTrainer:
        args = arguments(tmp_path, objective, **limit, **changes)
        return EnergyTrainer(model, args, train_dataset=rows[:2], eval_dataset=rows, teacher=teacher)

    with pytest.raises(ValueError, match=rf"eval_dataset: row 2: .* runs {expected} masked rows for 3 positions of 4 "):
        trainer(masked_row_limit=expected - 1)
    assert not rows_run
    assert not [r for r in caplog.records if "masked rows for a row of the data" in r.message]
    allowed = trainer(masked_row_limit=expected)
    with torch.no_grad():
        allowed.loss_terms(model, allowed.data_collator(rows[2:]))
    assert sum(rows_run) == expected + 3 * (teacher is not None)  # each masked by the teacher
    long = [{"input_ids": [1, *[5] * 2000, 2]}]
    for config in (allowed.args, arguments(tmp_path, objective)):
        with pytest.raises(
            ValueError, match=r"train_dataset: row 0: objective .* (for 2000 positions|4\^2000 sequences)"
        ):
            EnergyTrainer(model, config, train_dataset=long, teacher=teacher)


def test_much_work_is_told(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("hf_ebm.trainers.energy_rows.MUCH_WORK", 8)
    rows = [{"input_ids": [1, 5, 2]}, {"input_ids": [1, 5, 6, 2]}]
    for objective, told in (("mlm", 0), ("pll", 1)):
        caplog.clear()
        EnergyTrainer(make("bert", "raw"), arguments(tmp_path, objective, enumeration_limit=1), train_dataset=rows)
        texts = [r.message for r in caplog.records if "masked rows for a row of the data" in r.message]
        assert len(texts) == told
    assert "runs 5 masked rows for a row of the data on average, and 10 for one" in texts[0]


def test_conditionals_are_enumerated_only_where_that_is_less_work(tmp_path, rows_run):
    """Two positions, one row of data: 2 * (1 + 4) masked rows against 2 * 4; three: 3 * (1 + 8) against 3 * 16."""
    for words, expected in (([5, 6], 8), ([5, 6, 7], 27)):
        rows_run.clear()
        model = make("bert", "raw")
        trainer = EnergyTrainer(model, arguments(tmp_path, "pll"), train_dataset=[])
        with torch.no_grad():
            trainer.loss_terms(model, trainer.data_collator([{"input_ids": [1, *words, 2]}]))
        assert sum(rows_run) == expected


def test_what_cannot_be_trained_is_refused(tmp_path):
    rows = [{"input_ids": row} for row in ROWS]
    model = make("bilstm", "raw")
    with pytest.raises(ValueError, match="objective must be one of 'mle', 'pll', 'mlm', 'kl', "):
        arguments(tmp_path, "gan")
    with pytest.raises(
        ValueError, match=r"dataset: row 0: .* enumerates 4 tokens at 2 positions, 4\^2 sequences, above .*_limit 15"
    ):
        EnergyTrainer(model, arguments(tmp_path, "mle", enumeration_limit=15), train_dataset=rows[:1]).train()
    with pytest.raises(ValueError, match="teacher must be given for the objectives kl"):
        EnergyTrainer(model, arguments(tmp_path, "kl"), train_dataset=rows)
    with pytest.raises(ValueError, match="teacher must be given for the objectives kl"):
        EnergyTrainer(model, arguments(tmp_path, "pll"), train_dataset=rows, teacher=model)
    other = EnergyModel(tiny_bilstm(12), energy="raw", **{**ROLES, "excluded_token_ids": [4]})
    with pytest.raises(ValueError, match="teacher must have the model's 9 ids, got 12"):
        EnergyTrainer(model, arguments(tmp_path, "kl"), train_dataset=rows, teacher=other)
    with pytest.raises(ValueError, match="model must be an EnergyModel, got BiLSTMForMaskedLM"):
        EnergyTrainer(model.mlm, arguments(tmp_path, "mle"), train_dataset=rows)
    assert issubclass(EnergyTrainer, Trainer)


MASKED, UNKNOWN = [1, 5, 3, 2], [1, 6, 4, 2]  # 3 is the mask, 4 excluded


@pytest.mark.parametrize("objective", ["mle", "pll", "kl", "kl+pll", "mlm"])
@pytest.mark.parametrize("place", ["train_dataset", "eval_dataset", "named"])
def test_rows_without_a_value_are_named_before_training_or_skipped(tmp_path, objective, place, caplog):
    model, calls = make("bilstm", "raw"), []
    model.mlm.register_forward_hook(lambda *given: calls.append(given))
    teacher = make("bilstm", "raw", 3) if objective.startswith("kl") else None
    unusable = [MASKED] if objective == "mlm" else [UNKNOWN, MASKED]
    mixed = [{"input_ids": torch.tensor(ids)} for ids in (ROWS[0], *unusable, ROWS[1])]
    clean = [{"input_ids": ids} for ids in ROWS[:2]]
    data = {"train_dataset": clean, "eval_dataset": clean}
    data |= {"eval_dataset": {"named": mixed}} if place == "named" else {place: mixed}
    args = arguments(tmp_path, objective, per_device_train_batch_size=2)
    held = "3 at position 2, the mask" if objective == "mlm" else f"4 at .* objective '{re.escape(objective)}'"
    with pytest.raises(ValueError, match=f"{place}: row 1 holds the token {held}.*; skip_unusable_rows leaves"):
        EnergyTrainer(model, args, teacher=teacher, **data)
    assert not calls
    reference = EnergyTrainer(model, args, teacher=teacher, train_dataset=clean, eval_dataset=clean)
    with pytest.raises(ValueError, match=f"eval_dataset: row 1 holds the token {held}"):
        reference.evaluate(mixed)
    args.skip_unusable_rows = True
    trainer = EnergyTrainer(model, args, teacher=teacher, **data)
    assert f"; {len(unusable)} of {len(mixed)} rows are left out" in caplog.text
    assert trainer.evaluate(mixed)["eval_loss"] == reference.evaluate()["eval_loss"]
    loss = trainer.evaluate()["eval_named_loss" if place == "named" else "eval_loss"]
    assert loss == reference.evaluate()["eval_loss"]
    batches = [[batch["input_ids"].tolist() for batch in one.get_train_dataloader()] for one in (trainer, reference)]
    assert batches[0] == batches[1]


def test_rows_of_a_datasets_table_are_skipped_with_their_columns(tmp_path):
    table = Dataset.from_dict({"input_ids": [UNKNOWN, *ROWS[:2]], "note": ["a", "b", "c"]})
    args = arguments(tmp_path, "pll", skip_unusable_rows=True)
    assert EnergyTrainer(make("bilstm", "raw"), args, train_dataset=table).train_dataset["note"] == ["b", "c"]
    with pytest.raises(ValueError, match=r"train_dataset: row 0 .* no row is left"):
        EnergyTrainer(make("bilstm", "raw"), args, train_dataset=table.select([0]))
    with pytest.raises(ValueError, match="skip_unusable_rows must be True or False, got 'yes'"):
        arguments(tmp_path, "pll", skip_unusable_rows="yes")


def test_a_row_without_a_value_of_a_stream_is_found_when_it_comes(tmp_path):
    stream = Dataset.from_dict({"input_ids": [ROWS[0], UNKNOWN]}).to_iterable_dataset()
    trainer = EnergyTrainer(make("bilstm", "raw"), arguments(tmp_path, "pll"), train_dataset=stream)
    with pytest.raises(ValueError, match="input_ids: a row holds the token 4, which is never proposed"):
        trainer.train()
