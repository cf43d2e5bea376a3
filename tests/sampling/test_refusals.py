"""What `generate` refuses before any work, naming the argument."""

import pytest
import torch

from hf_ebm import EnergyModel
from tests.conftest import tiny_energy_model, tiny_mlm
from tests.sampling.chains import BASE, StopAfter

REFUSED = {
    "kernel": ["nuts"], "block_size": [0, -1, 1.5, [], [1, 0]], "lengths": [0, [], [3, 0], {3: -1.0}, {}],
    "num_chains": [0], "num_epochs": [0, 2.5], "burn_in": [-1, 4], "thinning": [0], "energy_temperature": [0, -1.0],
    "proposal_temperature": [0.0, float("inf")], "min_energy_temperature": [0], "energy_temperature_decay": [-0.1],
    "proposal_top_k": [0, 2.0], "proposal_top_p": [0.0, 1.2, "much"], "proposal_epsilon": [-0.1, 1.0],
    "delayed_acceptance": [-1], "accept_all_epochs": [-1, 5], "block_fill": ["slow"], "block_layout": ["square"],
    "order": ["backwards"], "warm_start": ["cold"], "seed": [-1], "suppress_tokens": [5, [-1], [99]],
    "replica_temperatures": [1, 2.5, [1], [1.5, 2], [1, 2, 2], [1, 0.5], [1, "hot"], [1, float("inf")], "hot"],
    "exclude_current": ["yes"], "final_block_size": [0],
}  # fmt: skip


@pytest.mark.parametrize("name,value", [(name, value) for name, values in REFUSED.items() for value in values])
def test_bad_settings_are_refused_before_any_work(name, value, rows_run):
    model = tiny_energy_model()
    with pytest.raises(ValueError, match=name):
        model.generate(**BASE | {name: value})
    assert not rows_run


@pytest.mark.parametrize(
    "extra,message",
    [
        ({"block_size": [1, 2], "final_block_size": 1}, "final_block_size goes with a single"),
        ({"kernel": "gibbs", "delayed_acceptance": 0}, "delayed_acceptance has no effect with kernel"),
        ({"decoder": "mask_predict", "exclude_current": True}, "exclude_current has no effect with decoder"),
        ({"kernel": "gibbs", "replica_temperatures": [1, 2]}, "replica_temperatures has no effect with kernel"),
        (
            {"decoder": "mask_predict", "replica_temperatures": [1, 2]},
            "replica_temperatures has no effect with decoder",
        ),
        ({"replica_temperatures": 3, "burn_in": 2}, "replica_temperatures=3 .* burn_in must be at least 30"),
        ({"proposal_top_k": 1, "proposal_epsilon": 0.0}, "a chain could never move"),
        ({"temperature": 0.5}, "unknown generation settings: temperature"),
        ({"block_size": 5}, "block_size 5 is above the 4 free positions"),
        ({"lengths": 40}, "lengths: 40 free tokens"),
        ({"suppress_tokens": [5, 6, 7, 8]}, "no token is left"),
        ({"chain_keys": [(1, 0)]}, "chain_keys"),
        ({"chain_keys": []}, "chain_keys"),
        ({"attention_mask": torch.ones(1, 4)}, "attention_mask was given without input_ids"),
        ({"lengths": None}, "neither input_ids nor lengths"),
    ],
)
def test_contradictions_are_refused(extra, message, rows_run):
    model = tiny_energy_model()
    with pytest.raises(ValueError, match=message):
        model.generate(**BASE | extra)
    assert not rows_run


@pytest.mark.parametrize(
    "inputs,message",
    [
        ({"input_ids": torch.tensor([[1, 5, 99, 2]])}, "position 2 holds id 99"),
        ({"input_ids": torch.tensor([[1, 5, -1, 2]])}, "position 2 holds id -1"),
        ({"input_ids": torch.tensor([[1, 2]])}, "prompt 0 has no free position"),
        ({"input_ids": torch.tensor([1, 5, 2])}, "shape"),
        ({"input_ids": torch.tensor([[1.0, 5.0]])}, "token ids"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "at least one token"),
        (
            {"input_ids": torch.tensor([[1, 3, 2]]), "attention_mask": torch.ones(1, 4)},
            "attention_mask must be a tensor of the ids' shape",
        ),
        ({"input_ids": torch.tensor([[1, 3, 2]]), "free_mask": torch.ones(2, 3)}, "free_mask has shape"),
        ({"input_ids": torch.tensor([[1, 5, 3, 2]]), "free_mask": torch.tensor([[0, 1, 0, 0]])}, "mask token at fixed"),
        ({"input_ids": torch.full((1, 40), 5)}, "40 tokens, the model has positions for 32"),
        ({"input_ids": torch.tensor([[1, 3, 2]]), "token_type_ids": torch.ones(1, 3)}, "token_type_ids"),
        ({"input_ids": torch.tensor([[1, 3, 2]]), "encoder_input_ids": torch.ones(1, 3).long()}, "encoder_input_ids"),
        ({"input_ids": torch.tensor([[1, 3, 2]]), "generation_config": 5}, "generation_config must be"),
    ],
)
def test_bad_inputs_are_refused(inputs, message, rows_run):
    model = tiny_energy_model()
    with pytest.raises(ValueError, match=message):
        model.generate(**inputs)
    assert not rows_run


def test_sampling_without_token_roles_is_refused():
    model = EnergyModel(tiny_mlm(), energy="raw", mask_token_id=3)
    with pytest.raises(ValueError, match="sampling needs mask_token_id and special_token_ids"):
        model.generate(**BASE)


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"extra_energies": [3.0]}, "entry 0 must be a pair"),
        ({"extra_energies": [(float("nan"), torch.sum)]}, "entry 0 must be a pair"),
        ({"input_ids": [[1, 3, 2]]}, r"input_ids must be .* got \[\[1, 3, 2\]\]; .*return_tensors"),
        ({"input_ids": torch.zeros(0, 3, dtype=torch.long)}, "input_ids must hold at least one token"),
        ({"input_ids": torch.tensor([[1, 3, 2]]), "lengths": 3}, "lengths was given together with input_ids"),
        ({"lengths": {"a": 1}}, "lengths"),
        ({"lengths": {2.7: 1.0}}, "lengths"),
        ({"lengths": 3, "energy_temperature_decay": 0.1, "min_energy_temperature": 2.0}, "min_energy_temperature"),
        ({"lengths": 3, "kernel": "gibbs", "energy_temperature": 0.5}, "energy_temperature has no effect"),
        ({"lengths": 3, "decoder": "mask_predict", "block_size": 2}, "block_size has no effect"),
        ({"lengths": 3, "decoder": "mask_predict", "stopping_criteria": [StopAfter(1)]}, "have no effect"),
        ({"lengths": 3, "kernel": "gibbs", "extra_energies": [(1.0, torch.sum)]}, "extra_energies have no effect"),
        ({"lengths": 3, "foo": None}, "unknown generation settings: foo"),
        ({"lengths": 3, "energy": "raw"}, "energy is chosen when the model is made or loaded"),
    ],
)
def test_further_refusals(arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny_energy_model().generate(**arguments)
