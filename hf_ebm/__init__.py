"""Sequence models that are not left-to-right: energies, exact samplers and search-aware training for Transformers.

- `models`: the Transformers models (`EnergyModel`, `ResidualEnergyModel`, `ProductLM`,
  `LSTMSeq2SeqForConditionalGeneration`, `BiLSTMForMaskedLM`).
- `exact`: enumeration of small spaces, the oracle of the tests.
- `scoring`, `sampling`: pure functions on tensors: energies of masked copies; Metropolis–Hastings chains.
- `relaxations`, `objectives`: pure functions on tensors: soft search, stepwise decoding, schedules, losses and costs.
- `assets`: embedded trained models; `data`: offline data sets; `cli`: the command `hf-ebm`.
- `trainers`: Trainer subclasses; `hub_cards`: templates of model cards.
"""

import sys
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"


def _is_command() -> bool:
    """Whether this process is the command, as a script or by -m: it imports what it needs after it has begun."""
    modules = [module for flag, module in pairwise(sys.orig_argv) if flag == "-m"]
    return modules[:1] == ["hf_ebm"] or Path(sys.argv[0]).stem == "hf-ebm"


if TYPE_CHECKING or not _is_command():
    from hf_ebm.public import *  # noqa: F403
    from hf_ebm.public import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        from hf_ebm import public

        return getattr(public, name)
