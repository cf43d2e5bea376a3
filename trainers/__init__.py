"""Trainer subclasses with search-aware and energy objectives, imported as `hf_ebm.trainers`.

- `search_aware`: what the sequence-to-sequence trainers share, and `CrossEntropyTrainer`, their baseline;
- `scheduled_sampling`, `self_normalized`, `soft_beam`: one trainer each, its configuration beside it.
"""

if __name__ == "trainers":
    raise ImportError("import hf_ebm.trainers, not trainers: this folder is installed inside the hf_ebm package")

from hf_ebm.trainers.scheduled_sampling import ScheduledSamplingConfig, ScheduledSamplingTrainer
from hf_ebm.trainers.search_aware import CrossEntropyTrainer, SearchAwareConfig, SearchAwareTrainer
from hf_ebm.trainers.self_normalized import SelfNormalizedConfig, SelfNormalizedTrainer
from hf_ebm.trainers.soft_beam import SoftBeamConfig, SoftBeamTrainer

__all__ = [
    "CrossEntropyTrainer",
    "ScheduledSamplingConfig",
    "ScheduledSamplingTrainer",
    "SearchAwareConfig",
    "SearchAwareTrainer",
    "SelfNormalizedConfig",
    "SelfNormalizedTrainer",
    "SoftBeamConfig",
    "SoftBeamTrainer",
]
