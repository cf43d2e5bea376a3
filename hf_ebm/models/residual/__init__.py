"""`ResidualEnergyModel`: a causal language model times the exponential of minus an energy.

- `configuration_residual`, `modeling_residual`: the Transformers model; `joined_models`: the two models inside it;
- `inputs_residual`: checks of what callers give; `candidates`: continuations of the language model and their energies;
- `generation_residual`, `stepwise`: joint sampling; `scoring_residual`: energies of texts; `perplexity`: bounds.
"""

from hf_ebm.models.residual.configuration_residual import ResidualEnergyConfig
from hf_ebm.models.residual.generation_residual import JointGenerationConfig, JointGenerationOutput
from hf_ebm.models.residual.modeling_residual import ResidualEnergyModel, ResidualEnergyOutput
from hf_ebm.renamed import rename_modules

rename_modules(__name__, {"prefix_cache": f"{__name__}.candidates", "retokenization": f"{__name__}.joined_models"})

__all__ = [
    "JointGenerationConfig",
    "JointGenerationOutput",
    "ResidualEnergyConfig",
    "ResidualEnergyModel",
    "ResidualEnergyOutput",
]
