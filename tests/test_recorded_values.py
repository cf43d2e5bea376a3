"""What compares recorded values tells every kind of difference."""

import torch

from tests.recorded_values import differences


def test_every_kind_of_difference_is_told():
    before = {"same": torch.tensor([1.0, torch.nan]), "gone": torch.zeros(1), "ids": torch.tensor([1, 2])}
    before |= {"value": torch.tensor([4.0, 0.0]), "kind": torch.zeros(1), "infinite": torch.tensor([torch.inf])}
    after = {"same": torch.tensor([1.0, torch.nan]), "new": torch.zeros(1), "ids": torch.tensor([1, 3])}
    after |= {
        "value": torch.tensor([4.0, 1e-6]),
        "kind": torch.zeros(1).double(),
        "infinite": torch.tensor([torch.nan]),
    }
    told = [line.split(":")[0] for line in differences(before, after, 0.0)]
    assert told == ["gone", "ids", "infinite", "kind", "new", "value"]
    assert "value" not in [line.split(":")[0] for line in differences(before, after, 1e-6)]
    assert differences(before, before, 0.0) == []
