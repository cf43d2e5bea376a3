"""Sequence models that are not left-to-right: energies, exact samplers and search-aware training for Transformers.

- `models`: the Transformers models (`EnergyModel`, `ResidualEnergyModel`, `ProductLM`,
  `LSTMSeq2SeqForConditionalGeneration`, `BiLSTMForMaskedLM`).
- `exact`: enumeration of small spaces, the oracle of the tests; `lattices`: Ising and Potts models.
- `scoring`, `sampling`: pure functions on tensors: energies of masked copies; Metropolis–Hastings chains.
- `relaxations`, `objectives`: soft search, and the decoder it runs step by step; losses, costs, estimates of log Z.
- `assets`: embedded models; `data`: offline data sets; `cli`: the command `hf-ebm`; `demo`: a page around a model.
- `trainers`: Trainer subclasses; `pipelines`: Transformers pipelines; `evaluate_modules`: metrics for `evaluate`.
- `publishing`: uploads to the Hub; `hub_cards`: templates of model cards; `plots`: plots of chains and energies.
- `checks` of arguments; `texts` and tokenizers; `model_facts`: what a model is; `model_modes`: how it is run;
  `loading`: models by name; `generation_settings`: settings, each declared once; `random_state`, `runtime`: seeds,
  memory, processes.
- `exports`: what `import hf_ebm` gives; `registration`: models of the auto classes; `renamed`: old names.

Nothing is imported before it is used. Transformers' auto classes know the models from the start.
"""

from typing import TYPE_CHECKING, Any

from hf_ebm import registration
from hf_ebm.renamed import rename_modules

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hf_ebm.exports import *  # noqa: F403
    from hf_ebm.exports import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        from importlib import import_module
        from importlib.util import find_spec

        exports = import_module("hf_ebm.exports")
        if name == "__all__" or name in exports.__all__:
            return getattr(exports, name)
        if not name.startswith("_") and find_spec(f"hf_ebm.{name}"):
            return import_module(f"hf_ebm.{name}")
        raise AttributeError(f"module 'hf_ebm' has no attribute {name!r}")

    def __dir__() -> list[str]:
        from hf_ebm.exports import __all__ as names

        return sorted([*(name for name in globals() if name.startswith("__")), *names])


registration.announce()
_RUNTIME = ("files", "memory", "processes")
_MOVED = {"plain_values": "checks", "unknown_tokens": "texts", "vocabulary": "model_facts", "encoders": "model_modes"}
rename_modules(__name__, {old: f"hf_ebm.{new}" for old, new in (_MOVED | dict.fromkeys(_RUNTIME, "runtime")).items()})
