"""Energies from masked copies: rows and their packing, the head at chosen positions, scoring variants, words."""
