"""What changes from epoch to epoch: block size and target temperature."""

from __future__ import annotations


def block_size_at(epoch: int, num_epochs: int, block_size: int | list[int], final_block_size: int | None) -> int:
    """Block size of an epoch (numbered from 0).

    A list is cycled through; with `final_block_size` the size goes linearly from the one to the other over the epochs,
    rounded to the nearest integer (thesis ch. 6, block annealing); otherwise it is constant.
    """
    if isinstance(block_size, list):
        return block_size[epoch % len(block_size)]
    if final_block_size is None or num_epochs == 1:
        return block_size
    return round(block_size + (final_block_size - block_size) * epoch / (num_epochs - 1))


def temperature_at(epoch: int, start: float, decay: float, floor: float) -> float:
    """Target temperature of an epoch: decreases by `decay` an epoch, not below `floor` (thesis ch. 6)."""
    return max(start - decay * epoch, min(floor, start))
