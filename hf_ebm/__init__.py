"""Sequence models that are not left-to-right: energies, exact samplers and search-aware training for Transformers.

- `models`: the Transformers models (`EnergyModel`, `ResidualEnergyModel`, `ProductLM`,
  `LSTMSeq2SeqForConditionalGeneration`, `BiLSTMForMaskedLM`).
- `exact`: enumeration of small spaces, the oracle of the tests.
- `scoring`, `sampling`: pure functions on tensors: energies of masked copies; Metropolis–Hastings chains.
- `relaxations`, `objectives`: pure functions on tensors: soft search, stepwise decoding, schedules, losses and costs.
- `assets`: embedded trained models; `data`: offline data sets; `cli`: the command `hf-ebm`.
- `trainers`: Trainer subclasses; `hub_cards`: templates of model cards.
"""

from hf_ebm.exact import ExactDistribution, enumerate_distribution
from hf_ebm.models.autoregressive_product import ProductLM, ProductLMConfig
from hf_ebm.models.energy import EnergyConfig, EnergyModel, EnergyOutput
from hf_ebm.models.lstm import (
    BiLSTMForMaskedLM,
    BiLSTMMaskedLMConfig,
    LSTMCache,
    LSTMSeq2SeqConfig,
    LSTMSeq2SeqForConditionalGeneration,
)
from hf_ebm.models.residual import (
    JointGenerationConfig,
    JointGenerationOutput,
    ResidualEnergyConfig,
    ResidualEnergyModel,
)
from hf_ebm.relaxations.soft_beam_search import soft_beam_search
from hf_ebm.sampling.configuration import ChainGenerationConfig
from hf_ebm.sampling.output import ChainGenerationOutput
from hf_ebm.sampling.target import TextEnergy

__version__ = "0.1.0"

__all__ = [
    "BiLSTMForMaskedLM",
    "BiLSTMMaskedLMConfig",
    "ChainGenerationConfig",
    "ChainGenerationOutput",
    "EnergyConfig",
    "EnergyModel",
    "EnergyOutput",
    "ExactDistribution",
    "JointGenerationConfig",
    "JointGenerationOutput",
    "LSTMCache",
    "LSTMSeq2SeqConfig",
    "LSTMSeq2SeqForConditionalGeneration",
    "ProductLM",
    "ProductLMConfig",
    "ResidualEnergyConfig",
    "ResidualEnergyModel",
    "TextEnergy",
    "enumerate_distribution",
    "soft_beam_search",
]
