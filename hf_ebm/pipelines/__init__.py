"""Transformers pipelines: `pipeline("energy-scoring", model="bert-base-uncased")` and its kin, over lists and columns.

Importing this package registers four tasks, each a thin layer over the model's own method:

- `scoring`: `"energy-scoring"`, `EnergyModel.score`;
- `reranking`: `"energy-reranking"`, `rerank` of `EnergyModel` and `ResidualEnergyModel`;
- `sampling`: `"energy-sampling"`, `EnergyModel.generate`;
- `joint_sampling`: `"joint-sampling"`, `ResidualEnergyModel.generate`.

`rows` is what they share: which inputs there are and how they are batched; `generating` what the two samplers share;
`loading` how a name, or a model object, becomes the model of a pipeline.
"""

from transformers.pipelines import PIPELINE_REGISTRY

from hf_ebm.pipelines.joint_sampling import JointSamplingPipeline
from hf_ebm.pipelines.loading import loader_of
from hf_ebm.pipelines.reranking import EnergyRerankingPipeline
from hf_ebm.pipelines.sampling import EnergySamplingPipeline
from hf_ebm.pipelines.scoring import EnergyScoringPipeline

TASKS = {
    "energy-scoring": EnergyScoringPipeline,
    "energy-reranking": EnergyRerankingPipeline,
    "energy-sampling": EnergySamplingPipeline,
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
    "JointSamplingPipeline",
]
