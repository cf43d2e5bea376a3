"""What `import hf_ebm` gives, and with it the models that the Auto classes then know."""

from hf_ebm.exact import ExactDistribution, enumerate_distribution
from hf_ebm.models.autoregressive_product import ProductLM, ProductLMConfig
from hf_ebm.models.energy import EnergyConfig, EnergyModel, EnergyOutput
from hf_ebm.models.energy.energy_target import EnergyTarget
from hf_ebm.models.lstm import (
    BiLSTMForMaskedLM,
    BiLSTMMaskedLMConfig,
    LSTMCache,
    LSTMSeq2SeqConfig,
    LSTMSeq2SeqForConditionalGeneration,
)
from hf_ebm.models.minimum_bayes_risk import MBROutput, mbr, mbr_decode
from hf_ebm.models.residual import (
    JointGenerationConfig,
    JointGenerationOutput,
    ResidualEnergyConfig,
    ResidualEnergyModel,
)
from hf_ebm.relaxations.soft_beam import soft_beam_search
from hf_ebm.sampling.configuration import ChainGenerationConfig
from hf_ebm.sampling.run import ChainGenerationOutput
from hf_ebm.texts import ExpertEnergy, TextEnergy

__all__ = [
    "BiLSTMForMaskedLM",
    "BiLSTMMaskedLMConfig",
    "ChainGenerationConfig",
    "ChainGenerationOutput",
    "EnergyConfig",
    "EnergyModel",
    "EnergyOutput",
    "EnergyTarget",
    "ExactDistribution",
    "ExpertEnergy",
    "JointGenerationConfig",
    "JointGenerationOutput",
    "LSTMCache",
    "LSTMSeq2SeqConfig",
    "LSTMSeq2SeqForConditionalGeneration",
    "MBROutput",
    "ProductLM",
    "ProductLMConfig",
    "ResidualEnergyConfig",
    "ResidualEnergyModel",
    "TextEnergy",
    "enumerate_distribution",
    "mbr",
    "mbr_decode",
    "soft_beam_search",
]
