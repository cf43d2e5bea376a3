"""Examples in docstrings give what they say, and public functions of the pure modules, and of data, have one."""

import doctest
import importlib
import inspect
from pathlib import Path

import pytest

import hf_ebm

FOLDER = Path(hf_ebm.__file__).parent
PURE = [FOLDER / "exact.py", FOLDER / "lattices.py"]
PURE += [
    path for name in ("scoring", "sampling", "relaxations", "objectives") for path in (FOLDER / name).glob("[!_]*")
]
MODULES = [
    ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts) for path in sorted(PURE) if path.suffix == ".py"
]
DATA = [f"hf_ebm.data.{name}" for name in ("conditional", "metrics", "symbols", "synthetic")]
OTHERS = [
    *DATA, "hf_ebm.assets", "hf_ebm.checks", "hf_ebm.data.cmudict_tasks", "hf_ebm.data.bibles",
    "hf_ebm.models.autoregressive_product", "hf_ebm.models.reranking", "hf_ebm.models.energy.conditional_energy",
    "hf_ebm.models.energy.energy_target", "hf_ebm.models.energy.fill_energy", "hf_ebm.models.energy.generation_energy",
    "hf_ebm.models.energy.mutations_energy", "hf_ebm.models.energy.pair_energy",
    "hf_ebm.models.energy.perplexity_energy", "hf_ebm.models.energy.scoring_energy",
    "hf_ebm.models.residual.modeling_residual", "hf_ebm.models.residual.scoring_residual", "hf_ebm.plots",
    "hf_ebm.random_state", "hf_ebm.texts",
]  # fmt: skip
# What takes a model or what runs one, a state of chains, or numbers of a step is shown by the methods that call it, and
# by the guides.
SHOWN_ELSEWHERE = {
    "drawn_fills", "encode_splits", "fill_energies", "independent_log_probs", "joint_log_probs", "joint_tables",
    "fill_sequentially", "further_of_fills", "length_limits", "sequential_log_probs", "substitution_scores",
    "log_weights", "parallel_log_probs", "sequential_tables", "slot_conditionals", "slot_log_probs", "slot_terms",
    "chain_generator", "check_run_fits", "compared_pairs", "conditional_log_probs", "contiguous", "decoded",
    "default_token_budget", "energy_terms", "epoch_blocks", "epoch_steps", "gather_positions", "gibbs",
    "import_arviz", "is_over", "kernel_at",
    "last_expansions", "mask_predict", "metropolis_hastings", "output_of", "proposal_of", "read_in_compiled",
    "reads_own_token", "run_epoch", "sample_masks", "sampler_names", "scattered", "scores_in_contexts",
    "settings_without_effect", "started", "token_energies", "masked_token_energies", "warn_of_poor_samples",
}  # fmt: skip


@pytest.mark.parametrize("name", MODULES + OTHERS)
def test_examples_give_what_they_say(name):
    found = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert not found.failed and (found.attempted or name in MODULES)


def test_functions_have_an_example():
    modules = [importlib.import_module(name) for name in MODULES + DATA]
    functions = [
        function
        for module in modules
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    ]
    assert {one.__name__ for one in functions if ">>>" not in (one.__doc__ or "")} <= SHOWN_ELSEWHERE
