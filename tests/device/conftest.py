"""What runs on a card is compared with the CPU: `make test-device`, in a process of its own, as the device stays."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from tests.device import virtual_device


@pytest.fixture(autouse=True, scope="session")
def started() -> None:
    if virtual_device.compiler() is None:
        pytest.skip("the virtual device is built by a C++ compiler, and there is none: install g++, or name one in CXX")
    virtual_device.start()


@pytest.fixture(autouse=True)
def nothing_refused(started) -> None:
    virtual_device.refused.clear()
    yield
    assert virtual_device.refused == []


def agree(of: Callable[[str], Any], atol: float = 1e-5) -> None:
    """What a function makes of models on a card is what it makes of them on the CPU.

    The card isn't the current one, on which there would be whatever doesn't ask where the model is.
    """
    found, launches = [], []
    for device in ("cpu", "vgpu:1"):
        torch.manual_seed(0)
        with virtual_device.numbers_of_the_cpu(), virtual_device.trainers_on(device):
            found.append(of(device))
        launches.append(torch.ops.vgpu.launches())
    assert_same(*found, atol)
    assert launches[0] < launches[1], "nothing ran on the card"


def assert_same(expected: Any, found: Any, atol: float = 1e-5, where: str = "") -> None:
    if isinstance(expected, torch.Tensor):
        options = dict(atol=atol, rtol=1e-4, equal_nan=True, msg=lambda message: f"{where}: {message}")
        torch.testing.assert_close(found.detach().cpu(), expected.detach(), **options)
    elif isinstance(expected, Mapping):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same(expected[key], found[key], atol, f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for number, parts in enumerate(zip(expected, found, strict=True)):
            assert_same(*parts, atol, f"{where}/{number}")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, abs=atol, rel=1e-4, nan_ok=True), where
    else:
        assert found == expected, where


def json_lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]
