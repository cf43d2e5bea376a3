"""Transformers pipelines: `pipeline("energy-scoring", model="bert-base-uncased")` and its kin, over lists and columns.

Importing this package registers five tasks. `tasks` says what each takes and gives; `base` is what they share: how a
name, or a model object, becomes the model of a pipeline, which inputs there are, and how they are batched.
"""

from transformers.pipelines import PIPELINE_REGISTRY

from hf_ebm.pipelines.base import loader_of
from hf_ebm.pipelines.tasks import (
    EnergyRerankingPipeline,
    EnergySamplingPipeline,
    EnergyScoringPipeline,
    JointFillMaskPipeline,
    JointSamplingPipeline,
)

TASKS = {
    "energy-scoring": EnergyScoringPipeline,
    "energy-reranking": EnergyRerankingPipeline,
    "energy-sampling": EnergySamplingPipeline,
    "joint-fill-mask": JointFillMaskPipeline,
    "joint-sampling": JointSamplingPipeline,
}

for _task, _class in TASKS.items():
    PIPELINE_REGISTRY.register_pipeline(_task, _class, pt_model=loader_of(*_class.model_classes), type="text")
    # With it `save_pretrained` would write the pipeline's code beside the model, to be run as remote code.
    delattr(_class, "_registered_impl")

__all__ = [
    "TASKS",
    "EnergyRerankingPipeline",
    "EnergySamplingPipeline",
    "EnergyScoringPipeline",
    "JointFillMaskPipeline",
    "JointSamplingPipeline",
]
