"""`EnergyModel`: any masked language model as an energy model, with its configuration, scoring and generation."""

from hf_ebm.models.energy.configuration_energy import EnergyConfig
from hf_ebm.models.energy.modeling_energy import EnergyModel, EnergyOutput

__all__ = ["EnergyConfig", "EnergyModel", "EnergyOutput"]
