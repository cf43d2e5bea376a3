"""Trainer subclasses with search-aware and energy objectives, imported as `hf_ebm.trainers`.

- `objective`: `ObjectiveTrainer`, the base of all; `publishing`: the cards it writes and the code it uploads;
- `seq2seq`: `Seq2SeqObjectiveTrainer`, the base of those of sequence-to-sequence models, with `CrossEntropyTrainer` and
  `SelfNormalizedTrainer`; `targets`: checks and lengths of what models that generate are trained on, and decode;
- `stepwise`: trainers that decode step by step, `ScheduledSamplingTrainer` and `SoftBeamTrainer`;
- `mgs`, `sampled_risk` (minimum risk, policy gradient), `grpo`, `ranking`: trainers for a cost of decoded sequences, of
  sequence-to-sequence and causal models; `task_loss` is their base, `candidates` what decodes, costs and scores, on the
  batches of `sequence_pairs`; `costs`: columns of the data that costs read, and the cost under another model;
  `reward_functions`: what `reward_funcs` may be; `rewards`: all of them together, and what is logged of them;
  `prompts`: batches of texts; `completion_log`: tables of what was decoded;
  `rollouts`: samples that several updates use;
- `residual_nce`: the trainer of residual energy models; `energy`: that of masked language models as energies, and
  `energy_rows`, which of its rows can be trained on.
"""

if __name__ == "trainers":
    raise ImportError("import hf_ebm.trainers, not trainers: this folder is installed inside the hf_ebm package")

from hf_ebm.renamed import rename_modules, renamed_attributes
from hf_ebm.trainers.energy import EnergyTrainer, EnergyTrainingConfig
from hf_ebm.trainers.grpo import GRPOConfig, GRPOTrainer
from hf_ebm.trainers.mgs import MGSConfig, MGSTrainer
from hf_ebm.trainers.ranking import RankingConfig, RankingTrainer
from hf_ebm.trainers.residual_nce import ResidualNCEConfig, ResidualNCETrainer
from hf_ebm.trainers.sampled_risk import (
    MinimumRiskConfig,
    MinimumRiskTrainer,
    PolicyGradientConfig,
    PolicyGradientTrainer,
)
from hf_ebm.trainers.seq2seq import (
    CrossEntropyConfig,
    CrossEntropyTrainer,
    SelfNormalizedConfig,
    SelfNormalizedTrainer,
    Seq2SeqObjectiveTrainer,
)
from hf_ebm.trainers.stepwise import ScheduledSamplingConfig, ScheduledSamplingTrainer, SoftBeamConfig, SoftBeamTrainer

__all__ = [
    "CrossEntropyConfig",
    "CrossEntropyTrainer",
    "EnergyTrainer",
    "EnergyTrainingConfig",
    "GRPOConfig",
    "GRPOTrainer",
    "MGSConfig",
    "MGSTrainer",
    "MinimumRiskConfig",
    "MinimumRiskTrainer",
    "PolicyGradientConfig",
    "PolicyGradientTrainer",
    "RankingConfig",
    "RankingTrainer",
    "ResidualNCEConfig",
    "ResidualNCETrainer",
    "ScheduledSamplingConfig",
    "ScheduledSamplingTrainer",
    "SelfNormalizedConfig",
    "SelfNormalizedTrainer",
    "Seq2SeqObjectiveTrainer",
    "SoftBeamConfig",
    "SoftBeamTrainer",
]

__getattr__ = renamed_attributes(
    __name__, {"SearchAwareConfig": "CrossEntropyConfig", "SearchAwareTrainer": "Seq2SeqObjectiveTrainer"}
)
rename_modules(
    __name__,
    {
        "batches": (f"{__name__}.targets", f"{__name__}.costs"),
        "decoding_trial": f"{__name__}.sequence_pairs",
        "labels": f"{__name__}.targets",
        "minimum_risk": f"{__name__}.sampled_risk",
        "policy_gradient": f"{__name__}.sampled_risk",
        "soft_beam": f"{__name__}.stepwise",
        "scorer_cost": f"{__name__}.costs",
        "scheduled_sampling": f"{__name__}.stepwise",
        "self_normalized": f"{__name__}.seq2seq",
    },
)
