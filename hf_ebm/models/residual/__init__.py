"""`ResidualEnergyModel`: a causal language model times the exponential of minus an energy.

- `configuration_residual`, `modeling_residual`: the Transformers model; `retokenization`: encoders with other tokens;
- `candidates`, `prefix_cache`: continuations of the language model and their energies;
- `generation_residual`, `stepwise`: joint sampling; `scoring_residual`: texts and reranking; `perplexity`: bounds.
"""

from hf_ebm.models.residual.configuration_residual import ResidualEnergyConfig
from hf_ebm.models.residual.generation_residual import JointGenerationConfig, JointGenerationOutput
from hf_ebm.models.residual.modeling_residual import ResidualEnergyModel, ResidualEnergyOutput

__all__ = [
    "JointGenerationConfig",
    "JointGenerationOutput",
    "ResidualEnergyConfig",
    "ResidualEnergyModel",
    "ResidualEnergyOutput",
]
