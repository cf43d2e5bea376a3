"""The device refuses what CUDA does, and tells of launches and waits."""

import pytest
import torch
from torch import nn

from tests.device import virtual_device

INDEX = torch.zeros(2, 1, dtype=torch.long)
REFUSED = {
    "a sum": lambda card, other: card + torch.ones(2, 3),
    "indexes of gather": lambda card, other: card.gather(1, INDEX),
    "indexes of an embedding": lambda card, other: nn.functional.embedding(INDEX, card),
    "indexes on a card": lambda card, other: torch.ones(2, 3)[INDEX.to("vgpu")],
    "stacked numbers": lambda card, other: torch.stack([card[0, 0], torch.tensor(1.0)]),
    "two cards": lambda card, other: card + other,
    "a generator": lambda card, other: torch.randn(3, device="vgpu", generator=torch.Generator()),
    "products of integers": lambda card, other: card.long() @ card.long().T,
    "into the CPU": lambda card, other: torch.zeros(2, 3).add_(card),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    with pytest.raises(RuntimeError):
        REFUSED[case](torch.ones(2, 3, device="vgpu"), torch.ones(2, 3, device="vgpu:1"))
    assert len(virtual_device.refused) == 1
    virtual_device.refused.clear()


def test_what_is_taken():
    card = torch.ones(2, 3, device="vgpu")
    assert (card * torch.tensor(2.0) + 1).sum().item() == 18
    card[torch.tensor([1])] = torch.tensor(5.0)  # an index, and a number
    assert torch.where(card > 1, card, torch.tensor(0.0)).cpu().tolist() == [[0, 0, 0], [5, 5, 5]]


def test_launches_and_waits_are_counted_by_line():
    card = torch.ones(3, device="vgpu")
    with virtual_device.counted() as events:
        bool((card + 1).any())
        card[card > 0]
    by_kind = {event: [operation for kind, operation, _ in events if kind == event] for event in ("launch", "wait")}
    assert by_kind == {"launch": ["add", "any", "gt", "index"], "wait": ["item", "index with bools"]}
    assert {line.rpartition(":")[0] for *_, line in events} == {"tests/device/test_virtual_device.py"}


def test_recurrent_nets_have_no_gradients_in_evaluation_mode_under_cudnn():
    net = nn.LSTM(2, 3).to("vgpu").eval()
    inputs = torch.ones(1, 1, 2, device="vgpu")
    with pytest.raises(RuntimeError, match="training mode"):
        net(inputs)[0].sum().backward()
    with torch.backends.cudnn.flags(enabled=False):
        net(inputs)[0].sum().backward()
