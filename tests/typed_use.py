"""How the public interface is used, for mypy alone (`make lint`): nothing here is run.

What must be refused has an ignore, and an ignore that nothing needs any more is an error.
"""

from __future__ import annotations

from typing import assert_type

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, default_data_collator

from hf_ebm import (
    ChainGenerationConfig,
    ChainGenerationOutput,
    EnergyModel,
    JointGenerationConfig,
    ResidualEnergyModel,
    TextEnergy,
    enumerate_distribution,
)
from hf_ebm.assets import load_embedded
from hf_ebm.plots import plot_energy_trace
from hf_ebm.sampling.configuration import ResolvedChainConfig
from hf_ebm.trainers import EnergyTrainer, EnergyTrainingConfig, MGSConfig, MGSTrainer


def sampling(model: EnergyModel, tokenizer: PreTrainedTokenizerBase) -> None:
    config = ChainGenerationConfig(num_chains=2)
    assert_type(config.num_epochs, int | None)
    assert_type(config.resolved(config, {}), ResolvedChainConfig)
    assert_type(config.resolved(config, {}).num_epochs, int)
    assert_type(config.resolved(config, {}).final_block_size, int | None)
    nothing = TextEnergy(lambda texts: [0.0] * len(texts), tokenizer)
    out = model.generate(lengths=6, generation_config=config, extra_energies=[(1.0, nothing)])
    assert_type(out, ChainGenerationOutput)
    assert_type(out.energies[:, -1], Tensor)
    assert_type(out.kept_epochs, tuple[int, ...])
    model.generate(**tokenizer("and [MASK]", return_tensors="pt"), num_chains=8, seed=0)
    plot_energy_trace(out)
    enumerate_distribution(lambda ids: model(ids).energy, tokens=range(4, 9), length=5)

    out.sequence  # type: ignore[attr-defined]  # noqa: B018
    config.num_epoch  # type: ignore[attr-defined]  # noqa: B018
    model.generate("a text")  # type: ignore[arg-type]
    model.generate(generation_config={"num_chains": 2})  # type: ignore[arg-type]


def scoring(tokenizer: PreTrainedTokenizerBase) -> None:
    assert_type(EnergyModel.from_pretrained("bert-base-uncased", energy="local"), EnergyModel)
    model, tokenizer = load_embedded()
    assert_type(model.score(["light"], tokenizer).energy, Tensor)
    assert_type(model.rerank([["he went up", "up he go"]], tokenizer).best, Tensor)

    model.score(["light"])  # type: ignore[call-arg]
    model.score(["light"], tokenizer, variants="exact")  # type: ignore[call-arg]


def residual(model: ResidualEnergyModel) -> None:
    out = model.generate([[1, 2]], generation_config=JointGenerationConfig(num_candidates=8))
    assert_type(out.sequences, Tensor)
    assert_type(out.effective_sample_size, Tensor | None)

    model.generate([[1, 2]], generation_config=ChainGenerationConfig())  # type: ignore[arg-type]


def training(model: EnergyModel, causal: PreTrainedModel) -> None:
    args = MGSConfig("out", num_candidates=4, alpha=1.0)
    trainer = MGSTrainer(causal, args, cost="edit_distance", train_dataset=[], data_collator=default_data_collator)
    assert_type(trainer.args.num_candidates, int)
    EnergyTrainer(model, EnergyTrainingConfig("exact", objective="mle"))

    MGSConfig("out", candidates=4)  # type: ignore[call-arg]
    EnergyTrainer(model, args)  # type: ignore[arg-type]
    MGSTrainer(causal, args, cost=3)  # type: ignore[arg-type]
    MGSTrainer(causal, args, data_collator="pad")  # type: ignore[arg-type]
