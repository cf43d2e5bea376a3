"""Rows that are kept are found by their content alone."""

import torch

from hf_ebm.scoring.row_memory import RowMemory

CPU = torch.device("cpu")
MASK = 9


def masked(ids: list[int], column: int) -> torch.Tensor:
    return torch.tensor([ids]).index_fill(1, torch.tensor([column]), MASK)


def note(memory: RowMemory, number: int, ids: list[int], column: int, value: float) -> None:
    memory.write(torch.tensor([number]), torch.tensor([column]), masked(ids, column), torch.full((1, 4), float(value)))


def found(memory: RowMemory, number: int, ids: list[int], column: int) -> float | None:
    where = torch.tensor([number]), torch.tensor([column])
    return float(memory.read(*where)[0, 0]) if bool(memory.find(*where, masked(ids, column))) else None


def test_what_is_tried_is_found_once_it_is_kept_and_only_there():
    memory = RowMemory((2, 3, 4), CPU)
    assert found(memory, 1, [1, 2, 3], 0) is None
    for column in range(3):
        note(memory, 1, [1, 2, 3], column, column + 0.5)
    assert found(memory, 1, [1, 2, 3], 0) is None
    memory.keep(torch.tensor([1]), torch.tensor([[1, 2, 3]]), MASK)
    assert [found(memory, 1, [1, 2, 3], column) for column in range(3)] == [0.5, 1.5, 2.5]
    assert found(memory, 1, [7, 2, 3], 0) == 0.5  # the token that is masked plays no part
    assert found(memory, 1, [1, 7, 3], 0) is None and found(memory, 0, [1, 2, 3], 0) is None


def test_a_rejected_sequence_leaves_what_is_kept():
    memory = RowMemory((1, 3, 4), CPU)
    for column in range(3):
        note(memory, 0, [1, 2, 3], column, column)
    memory.keep(torch.tensor([0]), torch.tensor([[1, 2, 3]]), MASK)
    for column in (0, 2):
        note(memory, 0, [1, 5, 3], column, 7.0)
    assert [found(memory, 0, [1, 2, 3], column) for column in range(3)] == [0.0, 1.0, 2.0]
    memory.keep(torch.tensor([0]), torch.tensor([[1, 5, 3]]), MASK)
    assert [found(memory, 0, [1, 5, 3], column) for column in range(3)] == [7.0, 1.0, 7.0]
    assert found(memory, 0, [1, 2, 3], 0) is None


def test_too_large_a_memory_is_not_made():
    assert RowMemory.if_it_fits((16, 16, 30_000), CPU) is not None
    assert RowMemory.if_it_fits((16, 64, 250_000), CPU) is None
    assert RowMemory.if_it_fits((256, 512, 30), CPU) is None  # ids weigh something, too
