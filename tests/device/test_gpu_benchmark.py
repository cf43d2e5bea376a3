"""The parts of what is measured on a card run on one that isn't the current one."""

import pytest

from benchmarks import gpu
from tests.device import virtual_device

PARTS = ["equality", "rows, float32", "rows, float32, compiled", "effective samples", "training", "joint sampling"]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs_on_a_card(part):
    with virtual_device.numbers_of_the_cpu(), virtual_device.trainers_on("vgpu:1"):
        figures = list(gpu.PARTS[part][0]("vgpu:1", True))
    assert figures
    if part == "equality":
        differences = list(figures[0].values())
        assert max(differences[:2]) < 1e-4 and differences[2:] == [1.0, 1.0]
