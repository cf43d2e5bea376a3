"""Sampling from energies: random streams, schedules, blocks, proposals, kernels, chains and their diagnostics.

Pure functions on tensors: no tokenizer, no Trainer. `EnergyModel.generate` is the thin layer over them.
"""

from hf_ebm.renamed import rename_modules

_MOVED = {"schedules": "sampler", "streams": "sampler", "diagnostics": "output"}
rename_modules(__name__, {old: f"{__name__}.{new}" for old, new in _MOVED.items()})
