"""Transformers models of the project, in a folder each: configuration_*.py and modeling_*.py, as in Transformers.

- `energy`: masked language models as energies; `residual`: a causal language model corrected by an energy;
- `autoregressive_product`: a product of two causal models; `lstm`: recurrent sequence-to-sequence models;
- `minimum_bayes_risk`: a decoder of any model that generates;
- `checkpoints`, `adapters`, `fingerprints`, `reranking`: what they share.
"""

from hf_ebm.renamed import rename_modules

_MOVED = {
    "configs": "models.checkpoints", "own_code": "models.checkpoints", "weights": "models.checkpoints",
    "position_limits": "model_facts", "probes": "model_facts",
    "autoregressive_product.modeling_product": "models.autoregressive_product",
}  # fmt: skip
_PUBLISHING = ("hf_ebm.models.checkpoints", "hf_ebm.registration")
rename_modules(__name__, {old: f"hf_ebm.{new}" for old, new in _MOVED.items()})
rename_modules(__name__, {"common": ("hf_ebm.models.reranking", *_PUBLISHING), "publishing": _PUBLISHING})
