"""`EnergyModel`: any masked language model as an energy model, with its configuration, scoring and generation.

- `configuration_energy`, `modeling_energy`, `loading_energy`: the Transformers model, and what it is loaded from;
- `inputs`, `encoding`: checks of what callers give, and texts to ids;
- `scoring_energy`: energies of texts; `mutations_energy`: scores of variants of a sequence;
- `perplexity_energy`: log probabilities of texts;
- `generation_energy`, `chains`, `saved_runs`: sampling, with what callers ask for as chains, and runs in files;
- `energy_target`: sampling of any energy of ids, without a model;
- `conditional_energy`: targets of sources; `custom_generate`: sampling as a `generate` of Transformers' own models;
- `blanks`: which blanks rows have, and what may fill them; `fill_energy`: the likeliest fills of all;
- `particles`, `smc_energy`, `partition_energy`: sequential Monte Carlo, and log Z;
- `pair_energy`: joint distributions of two blanks.
"""

from hf_ebm.models.energy.conditional_energy import ConditionalGenerationOutput, length_log_probs
from hf_ebm.models.energy.configuration_energy import EnergyConfig
from hf_ebm.models.energy.modeling_energy import EnergyModel, EnergyOutput
from hf_ebm.renamed import rename_modules

_ROLES = dict.fromkeys(("resizing", "token_roles"), "configuration_energy")
_MOVED = {"context": "inputs", "prompts": "chains"} | _ROLES
rename_modules(__name__, {old: f"{__name__}.{new}" for old, new in _MOVED.items()})

__all__ = ["ConditionalGenerationOutput", "EnergyConfig", "EnergyModel", "EnergyOutput", "length_log_probs"]
