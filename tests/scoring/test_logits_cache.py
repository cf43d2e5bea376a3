"""Rows that are kept are found only for the sequence they are of."""

import torch

from hf_ebm.scoring.logits_cache import RowMemory

FREE = torch.tensor([[True, False, True, True], [False, True, True, True]])  # column 1 and column 0 are context
COLUMNS = (1, 2, 3)


def memory_of_two() -> RowMemory:
    return RowMemory(FREE, vocab_size=4, dtype=torch.float32)


def note(memory: RowMemory, ids: list[int], values: dict[int, float], number: int = 1) -> None:
    columns = torch.tensor(list(values))
    logits = torch.tensor(list(values.values()))[:, None].expand(-1, 4)
    memory.write(torch.full_like(columns, number), columns, torch.tensor([ids] * len(columns)), logits)


def keep(memory: RowMemory, ids: list[int], number: int = 1) -> None:
    memory.keep(torch.tensor([number]), torch.tensor([ids]))


def found(memory: RowMemory, ids: list[int], column: int, number: int = 1) -> float | None:
    where = torch.tensor([number]), torch.tensor([column])
    return float(memory.read(*where)[0, 0]) if bool(memory.find(*where, torch.tensor([ids]))) else None


def test_what_is_tried_is_found_once_it_is_kept_and_only_there():
    memory = memory_of_two()
    assert found(memory, [9, 1, 2, 3], 1) is None
    note(memory, [9, 1, 2, 3], {1: 0.5, 2: 1.5, 3: 2.5})
    assert found(memory, [9, 1, 2, 3], 1) is None
    keep(memory, [9, 1, 2, 3])
    assert [found(memory, [9, 1, 2, 3], column) for column in COLUMNS] == [0.5, 1.5, 2.5]
    assert found(memory, [9, 7, 2, 3], 1) == 0.5  # the token that is masked plays no part
    assert found(memory, [9, 1, 7, 3], 1) is None and found(memory, [9, 1, 2, 3], 2, number=0) is None


def test_a_rejected_sequence_leaves_what_is_kept():
    memory = memory_of_two()
    note(memory, [9, 1, 2, 3], {1: 0.0, 2: 1.0, 3: 2.0})
    keep(memory, [9, 1, 2, 3])
    note(memory, [9, 1, 5, 3], {1: 7.0, 3: 8.0})
    assert [found(memory, [9, 1, 2, 3], column) for column in COLUMNS] == [0.0, 1.0, 2.0]
    keep(memory, [9, 1, 5, 3])  # the row of column 2 is the same with either token
    assert [found(memory, [9, 1, 5, 3], column) for column in COLUMNS] == [7.0, 1.0, 8.0]
    assert found(memory, [9, 1, 2, 3], 1) is None


def test_what_was_noted_of_another_sequence_is_forgotten():
    memory = memory_of_two()
    note(memory, [9, 1, 2, 3], {1: 0.0, 2: 1.0})
    note(memory, [9, 1, 5, 6], {3: 2.0})
    keep(memory, [9, 1, 5, 6])
    assert [found(memory, [9, 1, 5, 6], column) for column in COLUMNS] == [None, None, 2.0]
    keep(memory, [9, 4, 4, 6])  # nothing is known of it, and two tokens have changed
    assert [found(memory, [9, 4, 4, 6], column) for column in COLUMNS] == [None, None, None]


def test_a_row_noted_of_a_sequence_with_another_token_under_its_mask_holds():
    """Sequential fill reads the row of a block's last position before that position's new token is known."""
    memory = memory_of_two()
    note(memory, [9, 1, 2, 3], {2: 1.0, 3: 2.0})
    note(memory, [9, 1, 5, 3], {1: 7.0})
    keep(memory, [9, 4, 5, 3])
    assert [found(memory, [9, 4, 5, 3], column) for column in COLUMNS] == [7.0, None, None]
    note(memory, [9, 4, 5, 6], {3: 8.0})
    note(memory, [9, 4, 8, 6], {2: 9.0})
    keep(memory, [9, 4, 8, 6])
    assert [found(memory, [9, 4, 8, 6], column) for column in COLUMNS] == [None, 9.0, None]


def test_rows_are_kept_at_free_positions_alone():
    memory = memory_of_two()
    note(memory, [1, 9, 2, 3], {0: 0.5, 2: 1.5}, number=0)
    keep(memory, [1, 9, 2, 3], number=0)
    assert [found(memory, [1, 9, 2, 3], column, number=0) for column in (0, 2, 3)] == [0.5, 1.5, None]
    assert memory.kept.logits.shape == (2, 3, 4)


def test_too_large_a_memory_is_not_made():
    free = torch.zeros(16, 512, dtype=torch.bool)
    free[:, :3] = True  # what is context needs no room
    assert RowMemory.if_it_fits(free, 30_000, torch.float32) is not None
    assert RowMemory.if_it_fits(~free, 30_000, torch.float32) is None
    assert RowMemory.if_it_fits(torch.ones(16, 100, dtype=torch.bool), 30_000, torch.float32) is not None
    assert RowMemory.if_it_fits(torch.ones(16, 100, dtype=torch.bool), 30_000, torch.float64) is None
