"""Transformers models of the project, one folder each: configuration_*.py and modeling_*.py, as in Transformers.

- `energy`: masked language models as energies; `residual`: a causal language model corrected by an energy;
- `autoregressive_product`: a product of two causal models; `lstm`: recurrent sequence-to-sequence models;
- `checkpoints`, `adapters`, `probes`, `fingerprints`, `reranking`, `publishing`: what they share.
"""

from hf_ebm.renamed import rename_modules

_CHECKPOINTS = ("configs", "own_code", "weights")
rename_modules(
    __name__, dict.fromkeys(_CHECKPOINTS, f"{__name__}.checkpoints") | {"position_limits": "hf_ebm.model_facts"}
)
