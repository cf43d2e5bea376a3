"""Transformers models of the project, one folder each: configuration_*.py and modeling_*.py, as in Transformers.

- `energy`: masked language models as energies; `residual`: a causal language model corrected by an energy;
- `autoregressive_product`: a product of two causal models; `lstm`: recurrent sequence-to-sequence models;
- `checkpoints`, `adapters`, `probes`, `fingerprints`, `reranking`, `publishing`: what they share.
"""
