"""Values that change with the epoch: the share of gold inputs, and the inverse temperature of the relaxations."""

from __future__ import annotations

import math

LARGEST_ALPHA = 1e6
TEACHER_FORCING_SCHEDULES = ("inverse_sigmoid", "linear", "constant", "always")


def teacher_forcing_probability(
    epoch: int, schedule: str, *, decay_strength: float = 10.0, probability: float = 0.5, num_epochs: int = 1
) -> float:
    """Probability that the decoder's next input is the gold token.

    The first epoch is all gold under every schedule but `always`.

    - `inverse_sigmoid`: `k / (k + exp(epoch / k))`, k = `decay_strength` (Bengio et al. 2015, section 2.4); larger k
      decays later and more gently.
    - `linear`: from 1 in the first epoch to `probability` in the last of `num_epochs`.
    - `constant`: `probability`.
    - `always`: 0, the model's own choices from the start (table 3.2 of the thesis).

    Raises:
        ValueError: for another schedule, or a value out of range.
    """
    check_teacher_forcing(schedule, decay_strength, probability)
    if schedule == "always":
        return 0.0
    if epoch == 0:
        return 1.0
    if schedule == "inverse_sigmoid":
        # As 1 / (1 + exp(epoch / k - log k)), which cannot overflow for a small k.
        exponent = epoch / decay_strength - math.log(decay_strength)
        return math.exp(-exponent) / (1 + math.exp(-exponent)) if exponent > 0 else 1 / (1 + math.exp(exponent))
    if schedule == "linear":
        return 1 - (1 - probability) * min(1.0, epoch / max(1, num_epochs - 1))
    return probability


def check_teacher_forcing(schedule: str, decay_strength: float, probability: float) -> None:
    """Raises `ValueError` for an unknown schedule or a value out of range."""
    if schedule not in TEACHER_FORCING_SCHEDULES:
        raise ValueError(
            f"teacher_forcing_schedule must be one of {', '.join(TEACHER_FORCING_SCHEDULES)}, got {schedule!r}"
        )
    if not decay_strength > 0:
        raise ValueError(f"decay_strength must be above 0, got {decay_strength}")
    if not 0 <= probability <= 1:
        raise ValueError(f"teacher_forcing_probability must be from 0 to 1, got {probability}")


def inverse_temperature(epoch: int, alpha: float, growth: float) -> float:
    """`alpha * growth ** epoch`: constant for growth 1, annealed towards the hard choice for growth above 1.

    At most `LARGEST_ALPHA`, where the choice is hard for all practical purposes and float32 doesn't overflow.

    Raises:
        ValueError: unless both are finite and above 0.
    """
    check_inverse_temperature(alpha, growth)
    exponent = math.log(alpha) + epoch * math.log(growth)
    return math.exp(min(exponent, math.log(LARGEST_ALPHA)))


def check_inverse_temperature(alpha: float, growth: float) -> None:
    """Raises `ValueError` unless both are finite and above 0."""
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha must be finite and above 0, got {alpha}")
    if not 0 < growth < math.inf:
        raise ValueError(f"alpha_growth must be finite and above 0, got {growth}")
