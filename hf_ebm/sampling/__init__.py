"""Sampling from energies: random streams, schedules, blocks, proposals, kernels, chains and their diagnostics.

Pure functions on tensors: no tokenizer, no Trainer. `EnergyModel.generate` is the thin layer over them.
"""
