"""Names of before: what was importable still is, is the same thing, and warns."""

import importlib
import inspect
import sys

import pytest

import hf_ebm.objectives
from hf_ebm.renamed import rename_modules

OLD = {
    "hf_ebm.objectives.scorer_cost": ("ScorerCost", "hf_ebm.trainers.scorer_cost"),
    "hf_ebm.sampling.streams": ("chain_generator", "hf_ebm.sampling.sampler"),
    "hf_ebm.sampling.schedules": ("block_size_at", "hf_ebm.sampling.sampler"),
    "hf_ebm.sampling.diagnostics": ("energy_diagnostics", "hf_ebm.sampling.output"),
}


@pytest.mark.parametrize("old", OLD)
def test_modules_are_found_under_their_old_names(old):
    name, new = OLD[old]
    with pytest.warns(FutureWarning, match=f"{old}.{name} is called {new}.{name} now") as told:
        found = getattr(importlib.import_module(old), name)
    assert found is getattr(importlib.import_module(new), name)
    assert [one.filename for one in told] == [__file__]


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
