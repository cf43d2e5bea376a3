"""`ResidualEnergyModel`: a causal language model times the exponential of minus an energy.

- `modeling_residual`: the Transformers model; `joined_models`: its configuration and the two models inside it;
- `candidates`: checked prefixes, continuations that the language model samples, their energies, and one token after
  another; `generation_residual`: sampling; `scoring_residual`: energies, perplexity.
"""

from hf_ebm.models.residual.generation_residual import JointGenerationConfig, JointGenerationOutput
from hf_ebm.models.residual.joined_models import ResidualEnergyConfig
from hf_ebm.models.residual.modeling_residual import ResidualEnergyModel, ResidualEnergyOutput
from hf_ebm.renamed import rename_modules

_MOVED = {
    "prefix_cache": "candidates", "retokenization": "joined_models", "stepwise": "candidates",
    "perplexity": "scoring_residual", "configuration_residual": "joined_models",
    "inputs_residual": "candidates",
}  # fmt: skip
rename_modules(__name__, {old: f"{__name__}.{new}" for old, new in _MOVED.items()})

__all__ = [
    "JointGenerationConfig",
    "JointGenerationOutput",
    "ResidualEnergyConfig",
    "ResidualEnergyModel",
    "ResidualEnergyOutput",
]
