"""Training objectives as pure functions on tensors: schedules, token losses, costs by position.

`sequence_costs` are costs of whole decoded sequences.
"""

from hf_ebm.renamed import rename_modules

rename_modules(__name__, {"scorer_cost": "hf_ebm.trainers.scorer_cost"})
