"""Energies from masked copies: rows and their packing, the head at chosen positions, scoring variants, words.

- `energies`: every energy there is; `variants`: which positions a score masks in each row; `conditionals`: likelihoods;
- `joint_fills`: energies of all fills of several blanks; `pair_joints`: joints of two; `mutations`: substitutions;
- `rows`: masked rows, the unit of work; `masked_batches`, `logits_cache`: what runs them, in batches, and keeps logits;
- `passes`, `head`: a forward pass, and the logits at chosen positions alone.
"""
