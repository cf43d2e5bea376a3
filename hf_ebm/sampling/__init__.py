"""Sampling from energies: random streams, schedules, blocks, proposals, kernels, chains and their diagnostics.

- `configuration`: every setting; `target`: the distribution a chain is after;
- `blocks`, `proposals`, `kernels`, `warm_start`: which positions are updated, by what, by which step, from which start;
- `sampler`: the loop over epochs; `run`: what it keeps, and what `generate` returns;
- `convergence`: how far chains have converged; `report`: what is told of it, and what to change;
- `smc`: sequential Monte Carlo, and log Z;
- `fill_estimates`: what samples tell of fills.

Pure functions on tensors: no tokenizer, no Trainer. `EnergyModel.generate` is the thin layer over them.
"""

from hf_ebm.renamed import rename_modules

_MOVED = {"schedules": "sampler", "streams": "sampler", "diagnostics": "convergence", "output": "run"}
rename_modules(__name__, {old: f"{__name__}.{new}" for old, new in _MOVED.items()})
