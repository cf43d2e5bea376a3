"""Two processes make the update that one makes, though their batches are decoded in other numbers of steps."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch

from tests.causal_families import PAD
from tests.processes import fresh
from tests.trainers import distributed_runs, sharded_run
from tests.trainers.energy_run import KINDS as ENERGY_KINDS
from tests.trainers.task_loss_run import KINDS as TASK_LOSS_KINDS
from tests.trainers.test_trainers import KINDS

pytestmark = pytest.mark.slow


def run_all(folder):
    distributed_runs.run_all(folder)
    (folder / "sharded").mkdir(exist_ok=True)
    sharded_run.run_all(folder / "sharded")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where all updates lie, made by one process and by two."""
    folder = tmp_path_factory.mktemp("distributed")
    run_all(folder)
    fresh(folder, run_all, folder, count=2)
    counted = [json.loads(path.read_text()) for path in folder.glob("process-*.json")]
    assert sorted(counted) == [[1, 0], [2, 0], [2, 1]], "two processes that know of each other, and the one of the test"
    return folder


@pytest.mark.parametrize("kind", ENERGY_KINDS)
def test_updates_of_energies_are_those_of_one_process(kind, folder):
    (one_log, one), (two_log, two), (_, other) = (
        torch.load(folder / "energies" / f"{kind}-{name}.pt") for name in ("1-0", "2-0", "2-1")
    )
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-9, rtol=1e-6)
        assert torch.equal(two[name], other[name])
    for name, value in one_log.items():
        if name not in ("learning_rate", "epoch", "step"):
            assert two_log[name] == pytest.approx(value, rel=1e-5, abs=1e-8), name


@pytest.mark.parametrize("kind", sharded_run.KINDS)
def test_updates_of_sharded_weights_are_those_of_one_process(kind, folder):
    one, two = (torch.load(folder / "sharded" / f"{kind}-{processes}.pt") for processes in (1, 2))
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_update_of_two_processes_is_that_of_one(kind, folder):
    (one_log, one), (two_log, two), (_, other) = (
        torch.load(folder / "search" / f"{kind}-{name}.pt") for name in ("1-0", "2-0", "2-1")
    )
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-6, rtol=1e-6)
        assert torch.equal(two[name], other[name])
    for name in ("log_z_mean", "cross_entropy", "alpha"):
        if name in one_log:
            assert two_log[name] == pytest.approx(one_log[name], rel=1e-6)
    assert two_log["loss"] == pytest.approx(one_log["loss"], rel=1e-5)


@pytest.mark.parametrize("kind", TASK_LOSS_KINDS)
def test_updates_for_a_cost_are_those_of_one_process(kind, folder):
    """MGS: every process sees every batch, decodes for its share of the candidates, and makes the same update."""
    (one_logs, one, decodes), (two_logs, two, half), (_, other, rest) = (
        torch.load(folder / "task_losses" / f"{kind}-{name}.pt") for name in ("1-0", "2-0", "2-1")
    )
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=1e-6, rtol=1e-6)
        assert torch.equal(two[name], other[name])
    if kind.startswith("mgs"):
        assert all(torch.equal(two[name], value) for name, value in one.items())
        assert half == rest == decodes / 2
    for one_log, two_log in zip(one_logs, two_logs, strict=True):
        for name, value in one_log.items():
            assert two_log[name] == pytest.approx(value, rel=1e-5), name


def test_completions_of_all_processes_are_one_table(folder):
    """Which the first of them prints."""
    for step in (1, 2):
        one, two = (
            pd.read_parquet(folder / "task_losses" / "work" / processes / "completions" / f"train-{step:05d}.parquet")
            for processes in "12"
        )
        assert len(one) >= 16
        assert sorted(map(tuple, one.values.tolist())) == sorted(map(tuple, two.values.tolist()))
    printed = [(folder / f"stdout-{process}").read_text(encoding="utf-8") for process in (0, 1)]
    assert [text.count("train, step 2") for text in printed] == [1, 0]


def test_predictions_are_those_of_one_process(folder):
    """Padded with the pad token alone, whichever process decoded further; rows without labels count for nothing."""
    (one, one_labels, one_metrics, one_nothing), *others = (
        torch.load(folder / "task_losses" / f"predictions-{name}.pt", weights_only=False)
        for name in ("1-0", "2-0", "2-1")
    )
    assert (one == PAD).any() and not (one < 0).any() and (one_labels == -100).any()
    for predictions, labels, metrics, nothing in others:
        assert np.array_equal(predictions, one) and np.array_equal(labels, one_labels)
        for name in ("test_loss", "test_cost", "test_decoded_length", "test_cut_share"):
            assert metrics[name] == pytest.approx(one_metrics[name], rel=1e-6)
        assert all(math.isnan(found[f"eval_{name}"]) for found in (nothing, one_nothing) for name in ("loss", "cost"))
