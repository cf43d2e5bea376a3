"""Training objectives as pure functions on tensors: schedules, token losses, costs by position."""
