"""Values that change in training: the share of gold inputs, and the inverse temperature of the relaxations."""

from __future__ import annotations

import math

from hf_ebm.checks import as_number, check_choice

LARGEST_ALPHA = 1e6
SCHEDULE_UNITS = ("epoch", "step", "percent")
TEACHER_FORCING_SCHEDULES = ("inverse_sigmoid", "linear", "constant", "always")


def teacher_forcing_probability(
    time: float, schedule: str, *, decay_strength: float = 10.0, probability: float = 0.5, last: float = 0
) -> float:
    """Probability that the decoder's next input is the gold token.

    Time is counted in epochs, steps or hundredths of the training, from 0; the first of them is all gold under every
    schedule but `always`.

    - `inverse_sigmoid`: `k / (k + exp(time / k))`, k = `decay_strength` (Bengio et al. 2015, section 2.4); larger k
      decays later and more gently, to 1/2 at `k log k` (23 for k = 10).
    - `linear`: from 1 at the start to `probability` at the time `last`.
    - `constant`: `probability`.
    - `always`: 0, the model's own choices from the start (table 3.2 of the thesis).

    Raises:
        ValueError: for another schedule, or a value out of range.

    Example:
        >>> [round(teacher_forcing_probability(time, "inverse_sigmoid"), 2) for time in (0, 10, 23, 60)]
        [1.0, 0.79, 0.5, 0.02]
    """
    decay_strength, probability = check_teacher_forcing(schedule, decay_strength, probability)
    if schedule == "always":
        return 0.0
    if time < 1:
        return 1.0
    if schedule == "inverse_sigmoid":
        # As 1 / (1 + exp(time / k - log k)), which cannot overflow for a small k.
        exponent = time / decay_strength - math.log(decay_strength)
        return math.exp(-exponent) / (1 + math.exp(-exponent)) if exponent > 0 else 1 / (1 + math.exp(exponent))
    if schedule == "linear":
        return 1 - (1 - probability) * min(1.0, time / max(1, last))
    return probability


def check_teacher_forcing(schedule: str, decay_strength: float, probability: float) -> tuple[float, float]:
    """The two numbers, plain. Raises `ValueError` for an unknown schedule or a value out of range.

    Example:
        >>> check_teacher_forcing("linear", decay_strength=10, probability=0.5)
        (10.0, 0.5)
    """
    check_choice("teacher_forcing_schedule", schedule, TEACHER_FORCING_SCHEDULES)
    return (
        as_number("decay_strength", decay_strength, above=0),
        as_number("teacher_forcing_probability", probability, least=0, most=1),
    )


def inverse_temperature(time: float, alpha: float, growth: float) -> float:
    """`alpha * growth ** time`: constant for growth 1, annealed towards the hard choice for growth above 1.

    At most `LARGEST_ALPHA`, where the choice is hard for all practical purposes and float32 doesn't overflow.

    Raises:
        ValueError: unless both are finite and above 0.

    Example:
        >>> round(inverse_temperature(2, alpha=1.0, growth=3.0), 4)
        9.0
    """
    alpha, growth = check_inverse_temperature(alpha, growth)
    exponent = math.log(alpha) + time * math.log(growth)
    return math.exp(min(exponent, math.log(LARGEST_ALPHA)))


def check_inverse_temperature(alpha: float, growth: float) -> tuple[float, float]:
    """Both as plain numbers. Raises `ValueError` unless they are finite and above 0.

    Example:
        >>> check_inverse_temperature(1, growth=2)
        (1.0, 2.0)
    """
    return as_number("alpha", alpha, above=0), as_number("alpha_growth", growth, above=0)
