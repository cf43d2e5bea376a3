"""Energies from masked copies: rows and their packing, the head at chosen positions, maskings, words.

- `energies`: every energy there is; `masking`: which positions a score masks in each row; `conditionals`: likelihoods;
- `joint_fills`: energies of all fills of several blanks; `pair_joints`: joints of two; `mutations`: substitutions;
- `rows`: masked rows, the unit of work; `masked_batches`, `logits_cache`: what runs them, in batches, and keeps logits;
- `passes`, `head`: a forward pass, and the logits at chosen positions alone.
"""

from hf_ebm.renamed import rename_modules

rename_modules(__name__, {"variants": f"{__name__}.masking"})
