"""Costs of a wrong kind, and trainers and pipelines given what they can't take: errors that name the argument."""

import numpy as np
import pytest
import torch
from transformers import pipeline

import hf_ebm.pipelines  # noqa: F401  # registers the tasks
from hf_ebm.evaluate_modules import module_path
from hf_ebm.objectives.costs import HammingCost, check_costs
from hf_ebm.objectives.sequence_costs import COSTS, SequenceCost, as_cost, repetition
from hf_ebm.trainers import (
    CrossEntropyConfig,
    CrossEntropyTrainer,
    EnergyTrainingConfig,
    MGSConfig,
    MinimumRiskConfig,
    PolicyGradientConfig,
    ResidualNCEConfig,
    ScheduledSamplingConfig,
    SoftBeamConfig,
    SoftBeamTrainer,
)
from hf_ebm.trainers.costs import ScorerCost
from hf_ebm.trainers.residual_nce import collate_rows
from tests.models.tokenizers_for_tests import small_model, small_tokenizer


@pytest.mark.parametrize("cost", [7, None, ["edit_distance"], {"a": 1}, np.array(["edit_distance"]), dict])
def test_costs(cost):
    with pytest.raises(ValueError, match=r"cost must be a callable or one of edit_distance.*, got"):
        as_cost(cost)


@pytest.mark.parametrize("settings", [("mine", None, "ids"), ("mine", 3, "texts"), ("mine", len, ["ids"])])
def test_sequence_costs(settings):
    with pytest.raises(ValueError, match="of the cost mine must be"):
        SequenceCost(*settings)


@pytest.mark.parametrize("returned", [{"a": 1.0}, "x", None, torch.ones(1, device="meta"), [1j], [[1.0]], {1.0}])
def test_what_a_cost_returns(returned):
    cost = SequenceCost("mine", lambda predictions, references: returned, "ids")
    with pytest.raises(
        ValueError, match=r"the cost mine returned .* must return a number for each row, of shape \(1,\)"
    ):
        cost([[1, 2]], [[1, 2]])


@pytest.mark.parametrize("returned", [None, 1.0, [[1.0]], torch.ones(1, 2, dtype=torch.long), torch.ones(2, 2)])
def test_what_a_decomposable_cost_returns(returned):
    with pytest.raises(ValueError, match=r"cost must return a tensor of floats of shape .* got"):
        check_costs(returned, torch.zeros(1, 2, dtype=torch.long), 3)


@pytest.mark.parametrize(
    "predictions", [7, b"ab", {1: 2}, {1}, torch.tensor(1), torch.ones(1, 2, device="meta").long()]
)
def test_rows_of_ids(predictions):
    for function in (repetition, lambda given: COSTS["repetition"](given, [[1]])):
        with pytest.raises(ValueError, match=r"predictions must be .*list"):
            function(predictions)


@pytest.mark.parametrize("model", [None, "gpt2", torch.nn.Linear(1, 1)])
def test_scorers(model):
    with pytest.raises(ValueError, match="model must be a language model"):
        ScorerCost(model, 0)


def test_trainers(tmp_path):
    with pytest.raises(ValueError, match="model must be a model object, got 'gpt2'"):
        CrossEntropyTrainer("gpt2", CrossEntropyConfig(tmp_path, report_to=[], use_cpu=True))
    with pytest.raises(ValueError, match="cost must be callable, got 'edit_distance'"):
        SoftBeamTrainer(None, SoftBeamConfig(tmp_path, report_to=[], use_cpu=True), cost="edit_distance")


@pytest.mark.parametrize("weights", [7, "ab", {1: 2.0}, [None], [torch.nan], [-1.0], ["1"]])
def test_weights_of_tokens(weights):
    with pytest.raises(ValueError, match=r"token_weights must be a (list of numbers|number from 0 up)"):
        HammingCost(weights)


@pytest.mark.parametrize(
    "config,argument,value",
    [
        (SoftBeamConfig, "loss", ["direct"]), (SoftBeamConfig, "normalization", 3),
        (SoftBeamConfig, "checkpoint_steps", "no"),
        (MGSConfig, "density", np.array(["full", "x"])), (PolicyGradientConfig, "baseline", None),
        (ScheduledSamplingConfig, "inputs", {}), (ScheduledSamplingConfig, "teacher_forcing_schedule", 1),
        (MinimumRiskConfig, "include_target", None), (ResidualNCEConfig, "online", "yes"),
        (EnergyTrainingConfig, "objective", ("mle",)),
    ],
)  # fmt: skip
def test_settings_of_trainers(tmp_path, config, argument, value):
    with pytest.raises(ValueError, match=f"{argument} must be (one of '|True or False, got)"):
        config(tmp_path, report_to=[], use_cpu=True, **{argument: value})


@pytest.mark.parametrize("ids", [[0.5], "ab", None, [[1]], torch.rand(2)])
@pytest.mark.parametrize("name", ["prefix_ids", "continuation_ids", "negatives"])
def test_rows_of_residual_training(name, ids):
    row = {"prefix_ids": [0], "continuation_ids": [3, 1], "negatives": [[4, 1]]}
    with pytest.raises(ValueError, match=f"{name}: row 0 must be a list of ids, got"):
        collate_rows([{**row, name: [ids] if name == "negatives" else ids}])


@pytest.mark.parametrize("inputs", [b"the cat", {"the cat"}, torch.tensor(1.5), np.array("the cat")])
def test_pipelines(inputs):
    tokenizer = small_tokenizer("wordpiece")
    pipe = pipeline("energy-scoring", model=small_model(tokenizer), tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"inputs must be one input, or .*, got"):
        pipe(inputs)


@pytest.mark.parametrize("name", [None, 7, np.array(["repetition", "novel_rate"])])
def test_names_of_modules(name):
    with pytest.raises(ValueError, match="name must be one of 'edit_distance'"):
        module_path(name)
