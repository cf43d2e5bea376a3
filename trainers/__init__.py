"""Trainer subclasses with search-aware and energy objectives, imported as `hf_ebm.trainers`.

- `loss_terms`: what all trainers share; `search_aware`: what those of sequence-to-sequence models share, and
  `CrossEntropyTrainer`, their baseline;
- `stepwise`: what those that decode step by step share, their schedules among it;
- `scheduled_sampling`, `self_normalized`, `soft_beam`: one trainer each, its configuration beside it;
- `mgs`, `minimum_risk`, `policy_gradient`: trainers for a cost of decoded sequences, of sequence-to-sequence and causal
  models; `task_loss`, `sampled_risk` and `sequence_pairs` are what they share;
- `residual_nce`: the trainer of residual energy models; `energy`: that of masked language models as energies, and
  `energy_rows`, which of its rows can be trained on.
"""

if __name__ == "trainers":
    raise ImportError("import hf_ebm.trainers, not trainers: this folder is installed inside the hf_ebm package")

from hf_ebm.trainers.energy import EnergyTrainer, EnergyTrainingConfig
from hf_ebm.trainers.mgs import MGSConfig, MGSTrainer
from hf_ebm.trainers.minimum_risk import MinimumRiskConfig, MinimumRiskTrainer
from hf_ebm.trainers.policy_gradient import PolicyGradientConfig, PolicyGradientTrainer
from hf_ebm.trainers.residual_nce import ResidualNCEConfig, ResidualNCETrainer
from hf_ebm.trainers.scheduled_sampling import ScheduledSamplingConfig, ScheduledSamplingTrainer
from hf_ebm.trainers.search_aware import CrossEntropyTrainer, SearchAwareConfig, SearchAwareTrainer
from hf_ebm.trainers.self_normalized import SelfNormalizedConfig, SelfNormalizedTrainer
from hf_ebm.trainers.soft_beam import SoftBeamConfig, SoftBeamTrainer

__all__ = [
    "CrossEntropyTrainer",
    "EnergyTrainer",
    "EnergyTrainingConfig",
    "MGSConfig",
    "MGSTrainer",
    "MinimumRiskConfig",
    "MinimumRiskTrainer",
    "PolicyGradientConfig",
    "PolicyGradientTrainer",
    "ResidualNCEConfig",
    "ResidualNCETrainer",
    "ScheduledSamplingConfig",
    "ScheduledSamplingTrainer",
    "SearchAwareConfig",
    "SearchAwareTrainer",
    "SelfNormalizedConfig",
    "SelfNormalizedTrainer",
    "SoftBeamConfig",
    "SoftBeamTrainer",
]
