"""Every family, trainer and command on a card: what `tests.recorded_values` records is that of the CPU."""

import pytest
import torch

from tests import recorded_values
from tests.device.conftest import agree, json_lines

PARTS = {
    "energies": lambda folder, device: recorded_values.energies(device),
    "joint samples": lambda folder, device: recorded_values.joint_samples(device),
    "trainers": lambda folder, device: recorded_values.trainers(folder),  # on the device that they find
    "commands": recorded_values.commands,
}


@pytest.mark.parametrize("part", PARTS)
def test_values_are_those_of_the_cpu(part, tmp_path):
    def of(device):
        folder = tmp_path / device
        folder.mkdir()
        return {name: _readable(value) for name, value in PARTS[part](folder, device)}

    agree(of)


def _readable(value):
    """What commands write, of which the last digits may be others, as values; all else as it is."""
    return json_lines(bytes(value.tolist()).decode()) if value.dtype == torch.uint8 else value
