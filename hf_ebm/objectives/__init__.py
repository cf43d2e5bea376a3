"""Training objectives as pure functions on tensors: schedules, token losses, costs by position.

`sequence_costs` and `scorer_cost` are costs of whole decoded sequences.
"""
