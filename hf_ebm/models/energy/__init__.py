"""`EnergyModel`: any masked language model as an energy model, with its configuration, scoring and generation."""

from hf_ebm.models.energy.conditional_energy import ConditionalGenerationOutput, length_log_probs
from hf_ebm.models.energy.configuration_energy import EnergyConfig
from hf_ebm.models.energy.modeling_energy import EnergyModel, EnergyOutput
from hf_ebm.renamed import rename_modules

_ROLES = dict.fromkeys(("resizing", "token_roles"), "configuration_energy")
_MOVED = {"context": "inputs", "prompts": "chains"} | _ROLES
rename_modules(__name__, {old: f"{__name__}.{new}" for old, new in _MOVED.items()})

__all__ = ["ConditionalGenerationOutput", "EnergyConfig", "EnergyModel", "EnergyOutput", "length_log_probs"]
