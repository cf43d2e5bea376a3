"""Names of before: what was importable still is, is the same thing, and warns."""

import importlib
import inspect
import sys

import pytest
import torch

import hf_ebm.objectives
import hf_ebm.trainers
from hf_ebm import EnergyModel
from hf_ebm.renamed import rename_modules
from tests.conftest import tiny_energy_model

OLD = {
    "hf_ebm.unknown_tokens": ("unknown_of", "hf_ebm.texts"),
    "hf_ebm.vocabulary": ("num_embeddings", "hf_ebm.model_facts"),
    "hf_ebm.plain_values": ("as_whole", "hf_ebm.checks"),
    "hf_ebm.encoders": ("encoded_once", "hf_ebm.model_modes"),
    "hf_ebm.models.probes": ("is_causal", "hf_ebm.model_facts"),
    "hf_ebm.models.publishing": ("register", "hf_ebm.registration"),
    "hf_ebm.models.common": ("RerankOutput", "hf_ebm.models.reranking"),
    "hf_ebm.models.autoregressive_product.modeling_product": ("ProductLM", "hf_ebm.models.autoregressive_product"),
    "hf_ebm.models.lstm.configuration_lstm": ("LSTMSeq2SeqConfig", "hf_ebm.models.lstm.modules_lstm"),
    "hf_ebm.models.residual.configuration_residual": (
        "ResidualEnergyConfig",
        "hf_ebm.models.residual.joined_models",
    ),
    "hf_ebm.models.energy.token_roles": ("token_roles", "hf_ebm.models.energy.configuration_energy"),
    "hf_ebm.models.residual.stepwise": ("clamped_energies", "hf_ebm.models.residual.candidates"),
    "hf_ebm.models.lstm.factored_partition": ("factored_log_partition", "hf_ebm.models.lstm.modeling_bilstm"),
    "hf_ebm.models.residual.perplexity": ("residual_perplexity", "hf_ebm.models.residual.scoring_residual"),
    "hf_ebm.data.continuations": ("split_continuations", "hf_ebm.data.conditional"),
    "hf_ebm.data.kjv": ("split_clauses", "hf_ebm.data.bibles"),
    "hf_ebm.data.minimal_pairs": ("accuracy_of", "hf_ebm.data.metrics"),
    "hf_ebm.data.verse_pairs": ("parse_verses", "hf_ebm.data.bibles"),
    "hf_ebm.memory": ("check_fits", "hf_ebm.runtime"),
    "hf_ebm.models.own_code": ("check_trust", "hf_ebm.models.checkpoints"),
    "hf_ebm.models.position_limits": ("limit_of", "hf_ebm.model_facts"),
    "hf_ebm.models.energy.prompts": ("build_chains", "hf_ebm.models.energy.chains"),
    "hf_ebm.data.prompts": ("plain_ids", "hf_ebm.texts"),
    "hf_ebm.evaluate_modules.shared": ("id_rows", "hf_ebm.evaluate_modules"),
    "hf_ebm.evaluate_modules.inputs": ("CheckedInputs", "hf_ebm.evaluate_modules"),
    "hf_ebm.evaluate_modules.scoring": ("energy_model", "hf_ebm.evaluate_modules"),
    "hf_ebm.models.residual.prefix_cache": ("can_share_prefix", "hf_ebm.models.residual.candidates"),
    "hf_ebm.models.residual.retokenization": ("Retokenizer", "hf_ebm.models.residual.joined_models"),
    "hf_ebm.objectives.scorer_cost": ("ScorerCost", "hf_ebm.trainers.costs"),
    "hf_ebm.scoring.variants": ("MASKINGS", "hf_ebm.scoring.masking"),
    "hf_ebm.sampling.streams": ("chain_generator", "hf_ebm.sampling.sampler"),
    "hf_ebm.sampling.schedules": ("block_size_at", "hf_ebm.sampling.sampler"),
    "hf_ebm.sampling.diagnostics": ("energy_diagnostics", "hf_ebm.sampling.convergence"),
    "hf_ebm.sampling.output": ("ChainGenerationOutput", "hf_ebm.sampling.run"),
    "hf_ebm.objectives.cost_columns": ("columns_for", "hf_ebm.objectives.costs"),
    "hf_ebm.objectives.decomposable_costs": ("HammingCost", "hf_ebm.objectives.costs"),
    "hf_ebm.objectives.enumerated": ("log_partition", "hf_ebm.exact"),
    "hf_ebm.objectives.noise_contrastive": ("noise_contrastive_loss", "hf_ebm.objectives.losses"),
    "hf_ebm.objectives.parameter_search": ("draw_candidates", "hf_ebm.objectives.mgs"),
    "hf_ebm.objectives.partition_function": ("log_partition_bounds", "hf_ebm.objectives.losses"),
    "hf_ebm.models.residual.inputs_residual": ("check_prefixes", "hf_ebm.models.residual.candidates"),
    "hf_ebm.relaxations.soft_beam_search": ("soft_beam_search", "hf_ebm.relaxations.soft_beam"),
    "hf_ebm.objectives.schedules": ("inverse_temperature", "hf_ebm.relaxations.soft_choices"),
    "hf_ebm.objectives.sequence_risk": ("minimum_risk", "hf_ebm.objectives.losses"),
    "hf_ebm.objectives.token_losses": ("cross_entropy_sum", "hf_ebm.objectives.losses"),
    "hf_ebm.relaxations.decoder_state": ("DecoderState", "hf_ebm.relaxations.stepwise"),
    "hf_ebm.relaxations.soft_argmax": ("token_weights", "hf_ebm.relaxations.soft_choices"),
    "hf_ebm.relaxations.soft_top_k": ("soft_top_k", "hf_ebm.relaxations.soft_choices"),
    "hf_ebm.trainers.decoding_trial": ("decodes_as_scored", "hf_ebm.trainers.sequence_pairs"),
    "hf_ebm.trainers.labels": ("check_labels", "hf_ebm.trainers.targets"),
    "hf_ebm.trainers.batches": ("columns_at", "hf_ebm.trainers.costs"),
    "hf_ebm.trainers.soft_beam": ("SoftBeamTrainer", "hf_ebm.trainers.stepwise"),
    "hf_ebm.relaxations.weight_gradients": ("SummedWeightGradients", "hf_ebm.relaxations.stepwise"),
    "hf_ebm.trainers.scorer_cost": ("ScorerCost", "hf_ebm.trainers.costs"),
    "hf_ebm.trainers.minimum_risk": ("MinimumRiskConfig", "hf_ebm.trainers.sampled_risk"),
    "hf_ebm.trainers.policy_gradient": ("RunningMean", "hf_ebm.trainers.sampled_risk"),
    "hf_ebm.trainers.scheduled_sampling": ("scheduled_sampling_logits", "hf_ebm.trainers.stepwise"),
    "hf_ebm.trainers.self_normalized": ("SelfNormalizedTrainer", "hf_ebm.trainers.seq2seq"),
}


@pytest.mark.parametrize("old", OLD)
def test_modules_are_found_under_their_old_names(old):
    name, new = OLD[old]
    with pytest.warns(FutureWarning, match=f"{old}.{name} is called {new}.{name} now") as told:
        found = getattr(importlib.import_module(old), name)
    assert found is getattr(importlib.import_module(new), name)
    assert [one.filename for one in told] == [__file__]


MOVED = {
    ("hf_ebm.sampling.run", "energy_diagnostics"): ("hf_ebm.sampling.convergence", "energy_diagnostics"),
    ("hf_ebm.sampling.proposals", "Warp"): ("hf_ebm.sampling.proposals", "ProposalDistribution"),
    ("hf_ebm.exact", "conditional_log_probs"): ("hf_ebm.exact", "log_conditionals"),
    ("hf_ebm.relaxations.soft_beam", "token_scores"): ("hf_ebm.relaxations.soft_beam", "step_scores"),
    ("hf_ebm.sampling.target", "TextEnergy"): ("hf_ebm.texts", "TextEnergy"),
    ("hf_ebm.trainers.candidates", "TaskLossConfig"): ("hf_ebm.trainers.task_loss", "TaskLossConfig"),
    ("hf_ebm.trainers.task_loss", "SampledRiskConfig"): ("hf_ebm.trainers.sampled_risk", "SampledRiskConfig"),
}


@pytest.mark.parametrize("old", MOVED)
def test_things_are_found_under_their_old_names(old):
    module, name = MOVED[old]
    with pytest.warns(FutureWarning, match=rf"{'.'.join(old)} is called {module}.{name} now"):
        found = getattr(importlib.import_module(old[0]), old[1])
    assert found is getattr(importlib.import_module(module), name)


def test_maskings_are_taken_under_their_old_names(tmp_path):
    ids = torch.tensor([[1, 6, 5, 2]])
    with pytest.warns(FutureWarning, match="scoring_variant is called masking now"):
        model = EnergyModel(
            tiny_energy_model().mlm, mask_token_id=3, special_token_ids=[1, 2], scoring_variant="unmasked"
        )
    with pytest.warns(FutureWarning, match="variant is called masking now"):
        exact = model.score_ids(ids, variant="exact")
    assert torch.equal(exact, model.score_ids(ids, masking="exact")) and not torch.equal(exact, model.score_ids(ids))
    with pytest.warns(FutureWarning, match="scoring_variant is called masking now"):
        assert model.config.scoring_variant == "unmasked"
    model.save_pretrained(tmp_path)
    saved = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(saved.replace('"masking"', '"scoring_variant"'))  # as by versions of before
    again = EnergyModel.from_pretrained(tmp_path)
    assert again.config.masking == "unmasked" and "scoring_variant" not in again.config.to_dict()


def test_what_a_run_is_of_is_found_under_its_old_name():
    run = tiny_energy_model().generate(lengths=2, num_epochs=1).run
    with pytest.warns(FutureWarning, match="recipe is called run_config now"):
        assert run.recipe is run.run_config


def test_a_module_is_imported_when_something_of_it_is_asked_for(monkeypatch):
    rename_modules("hf_ebm.objectives", {"before": "this"})
    stand_in = hf_ebm.objectives.before
    monkeypatch.delattr(hf_ebm.objectives, "before")
    monkeypatch.delitem(sys.modules, "hf_ebm.objectives.before")
    monkeypatch.delitem(sys.modules, "this", raising=False)
    inspect.getmodule(test_modules_are_found_under_their_old_names)  # which asks every module for its file
    assert "this" not in sys.modules
    with pytest.warns(FutureWarning, match="hf_ebm.objectives.before.s is called this.s now"):
        assert len(stand_in.s) > 100
    with pytest.raises(AttributeError):
        stand_in.nothing  # noqa: B018
