"""Rows that are kept are found only for the sequence they are of."""

import numpy as np
import torch

from hf_ebm.scoring.logits_cache import EachRowOnce, MaskedLogitsCache
from hf_ebm.scoring.masked_batches import MaskedBatchRunner
from hf_ebm.scoring.rows import Context, MaskedRows, Sequences

FREE = torch.tensor([[True, False, True, True], [False, True, True, True]])  # column 1 and column 0 are context
COLUMNS = (1, 2, 3)
NOTHING = MaskedBatchRunner(lambda *_: None, 3, 4)


def cache_of_two() -> MaskedLogitsCache:
    return MaskedLogitsCache(NOTHING, FREE, vocab_size=4, like=torch.empty(0))


def note(cache: MaskedLogitsCache, ids: list[int], values: dict[int, float], number: int = 1) -> None:
    columns, source = np.array(list(values)), np.full(len(values), number)
    logits = torch.tensor(list(values.values()))[:, None].expand(-1, 4)
    state = cache.begin(cache.compared(np.array([ids, ids])), source)
    cache.write(state[source], source, columns, logits)


def turn_to(cache: MaskedLogitsCache, ids: list[int], number: int = 1) -> None:
    cache.turn_to(cache.compared(np.array([ids, ids])), np.array([number]))


def found(cache: MaskedLogitsCache, ids: list[int], column: int, number: int = 1) -> float | None:
    source, columns = np.array([number]), np.array([column])
    if not cache.find(cache.compared(np.array([ids, ids])), source, columns).all():
        return None
    return float(cache.read(cache.present[source], source, columns)[0, 0])


def test_what_is_tried_is_found_once_it_is_kept_and_only_there():
    cache = cache_of_two()
    assert found(cache, [9, 1, 2, 3], 1) is None
    note(cache, [9, 1, 2, 3], {1: 0.5, 2: 1.5, 3: 2.5})
    assert found(cache, [9, 1, 2, 3], 1) is None
    turn_to(cache, [9, 1, 2, 3])
    assert [found(cache, [9, 1, 2, 3], column) for column in COLUMNS] == [0.5, 1.5, 2.5]
    assert found(cache, [9, 7, 2, 3], 1) == 0.5  # the token that is masked plays no part
    assert found(cache, [9, 1, 7, 3], 1) is None and found(cache, [9, 1, 2, 3], 2, number=0) is None


def test_a_rejected_sequence_leaves_what_is_kept():
    cache = cache_of_two()
    note(cache, [9, 1, 2, 3], {1: 0.0, 2: 1.0, 3: 2.0})
    turn_to(cache, [9, 1, 2, 3])
    note(cache, [9, 1, 5, 3], {1: 7.0, 3: 8.0})
    assert [found(cache, [9, 1, 2, 3], column) for column in COLUMNS] == [0.0, 1.0, 2.0]
    turn_to(cache, [9, 1, 5, 3])  # the row of column 2 is the same with either token
    assert [found(cache, [9, 1, 5, 3], column) for column in COLUMNS] == [7.0, 1.0, 8.0]
    assert found(cache, [9, 1, 2, 3], 1) is None


def test_what_was_noted_of_another_sequence_is_forgotten():
    cache = cache_of_two()
    note(cache, [9, 1, 2, 3], {1: 0.0, 2: 1.0})
    note(cache, [9, 1, 5, 6], {3: 2.0})
    turn_to(cache, [9, 1, 5, 6])
    assert [found(cache, [9, 1, 5, 6], column) for column in COLUMNS] == [None, None, 2.0]
    turn_to(cache, [9, 4, 4, 6])  # nothing is known of it, and two tokens have changed
    assert [found(cache, [9, 4, 4, 6], column) for column in COLUMNS] == [None, None, None]


def test_a_row_noted_of_a_sequence_with_another_token_under_its_mask_holds():
    """Sequential fill reads the row of a block's last position before that position's new token is known."""
    cache = cache_of_two()
    note(cache, [9, 1, 2, 3], {2: 1.0, 3: 2.0})
    note(cache, [9, 1, 5, 3], {1: 7.0})
    note(cache, [9, 4, 5, 3], {3: 6.0})
    turn_to(cache, [9, 4, 5, 3])
    assert [found(cache, [9, 4, 5, 3], column) for column in COLUMNS] == [7.0, None, 6.0]
    note(cache, [9, 4, 5, 6], {2: 8.0})
    note(cache, [9, 4, 8, 6], {1: 9.0})
    turn_to(cache, [9, 4, 8, 6])
    assert [found(cache, [9, 4, 8, 6], column) for column in COLUMNS] == [9.0, 8.0, None]


def test_a_state_that_was_tried_and_left_is_not_lost():
    """A later stage of a step gives a sequence as it is tried, and it may be rejected after all."""
    cache = cache_of_two()
    note(cache, [9, 1, 2, 3], {1: 0.0, 2: 1.0, 3: 2.0})
    turn_to(cache, [9, 1, 2, 3])
    note(cache, [9, 1, 5, 3], {1: 7.0})
    turn_to(cache, [9, 1, 5, 3])
    note(cache, [9, 1, 5, 3], {3: 8.0})
    assert [found(cache, [9, 1, 5, 3], column) for column in COLUMNS] == [7.0, 1.0, 8.0]
    turn_to(cache, [9, 1, 2, 3])
    assert [found(cache, [9, 1, 2, 3], column) for column in COLUMNS] == [0.0, 1.0, 2.0]


def test_a_pool_is_run_as_far_as_it_is_unknown_and_comes_back_in_order():
    """Sequences of two lengths, rows of one and of two masks, some known: the results are those of the runner alone."""
    asked = []

    def logits(ids, positions):
        asked.append(len(ids))
        weights = torch.arange(1, 1 + ids.shape[1])
        return (ids * weights).sum(1)[:, None, None] * torch.ones(*positions.shape, 4) + positions[..., None]

    plain = MaskedBatchRunner(logits, 3, 4)
    cache = MaskedLogitsCache(plain, FREE, 4, torch.empty(0))
    ids = torch.tensor([[7, 9, 8, 5], [9, 7, 8, 0]])
    sequences = Sequences(ids, torch.tensor([0, 0]), torch.tensor([4, 3]))
    source, column = torch.tensor([0, 1, 0, 1]), torch.tensor([[2], [1], [0], [2]])
    rows = MaskedRows(source, column, column)
    reduce = lambda logits, n: torch.stack([logits[:, 0, 0], torch.arange(4.0)[n]], 1)  # noqa: E731
    expected = plain(sequences, rows, reduce)
    assert torch.equal(cache(sequences, rows.some(torch.tensor([0, 3])), reduce)[:, 0], expected[[0, 3], 0])
    asked.clear()
    for runs in ([1, 1], []):  # of each length the row that isn't known yet, then none
        assert torch.equal(cache(sequences, rows, reduce), expected) and asked == runs
        asked.clear()
    both = MaskedRows(source[:2], torch.tensor([[2, 3], [1, 2]]), column[:2])
    found, again = plain(sequences, both, reduce), cache(sequences, both, reduce)
    assert torch.equal(found, again) and asked == [1, 1] * 2
    assert cache.num_rows == plain.num_rows


def test_rows_that_are_alike_run_once():
    """Tokens, masks, read columns and bounds tell them apart, not padding; results are those of the runner alone."""
    asked = []

    def logits(ids, positions, **inputs):
        asked.append(len(ids))
        weights = torch.arange(1, 1 + ids.shape[1])
        return (ids * weights).sum(1)[:, None, None] * torch.ones(*positions.shape, 4) + positions[..., None]

    plain = MaskedBatchRunner(logits, 3, 4)
    once = EachRowOnce(plain)
    ids = torch.tensor([[7, 9, 8, 5], [9, 7, 8, 0], [7, 9, 5, 5], [9, 7, 8, 6], [7, 9, 8, 5]])
    sequences = Sequences(ids, torch.tensor([0, 0, 0, 0, 1]), torch.tensor([4, 3, 4, 3, 4]))
    source = torch.tensor([3, 0, 1, 2, 0, 0, 4, 2])
    masked = torch.tensor([[1, 2], [2, 2], [1, 2], [2, 2], [2, 2], [3, 2], [2, 2], [2, 1]])
    read = torch.tensor([[1], [2], [1], [2], [3], [2], [2], [2]])
    rows = MaskedRows(source, masked, read)
    reduce = lambda logits, n: torch.stack([logits[:, 0, 0], torch.arange(8.0)[n]], 1)  # noqa: E731
    expected = plain(sequences, rows, reduce)
    asked.clear()
    assert torch.equal(once(sequences, rows, reduce), expected)
    assert sum(asked) == 6 and once.num_asked == 8 and once.num_rows == plain.num_rows == 8 + 6
    # Where sequences have a context, it would be one more thing to compare.
    langs = {"langs": torch.arange(5)}
    asked.clear()
    once(Sequences(ids, sequences.start, sequences.stop, Context({}, langs)), rows, reduce)
    assert sum(asked) == 8


def test_rows_are_kept_at_free_positions_alone():
    cache = cache_of_two()
    note(cache, [1, 9, 2, 3], {0: 0.5, 2: 1.5}, number=0)
    turn_to(cache, [1, 9, 2, 3], number=0)
    assert [found(cache, [1, 9, 2, 3], column, number=0) for column in (0, 2, 3)] == [0.5, 1.5, None]
    assert cache.logits.shape == (2 * 2 * 3, 4)


def test_too_large_a_cache_is_not_made():
    free = torch.zeros(16, 512, dtype=torch.bool)
    free[:, :3] = True  # what is context needs no room
    many = torch.ones(16, 100, dtype=torch.bool)
    for where, dtype, fits in (
        (free, torch.float32, True), (~free, torch.float32, False), (many, torch.float32, True),
        (many, torch.float64, False),
    ):  # fmt: skip
        like = torch.empty(0, dtype=dtype)
        assert (MaskedLogitsCache.around(NOTHING, where, 30_000, like) is not NOTHING) == fits
