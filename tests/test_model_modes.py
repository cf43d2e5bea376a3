"""A model is what it was before its passes, whatever its own `forward` does to it."""

import logging
import threading

import pytest
import torch
from torch import nn

from hf_ebm.model_modes import ModelState, state_kept


class Restless(nn.Module):
    """Counts, replaces a buffer, keeps something new, and at `deep` replaces a submodule of a submodule."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0))
        self.register_buffer("table", torch.zeros(2))
        self.passes = 0

    def forward(self, deep=False):
        self.passes += 1
        self.table = torch.ones(3)
        self.remembered = self.passes
        if deep:
            logging.getLogger(__name__).warning(f"changing at pass {self.passes}")
            self.inner[0] = nn.Linear(2, 2)


@pytest.mark.parametrize("deep", [False, True])
def test_what_a_pass_changes_is_put_back(deep):
    model = Restless().eval()
    linear, table = model.inner[0], model.table
    with state_kept(model):
        model(deep)
        assert model.passes == 1 and model.inner[0] is not linear if deep else model.inner[0] is linear
    assert model.inner[0] is linear and model.table is table and model.passes == 0
    assert not hasattr(model, "remembered") and list(model.inner._modules) == ["0", "1"]


def test_what_is_changed_between_passes_stays():
    model = Restless().eval()
    state = ModelState(model)
    with state.kept():
        model(deep=True)
    model.passes, model.inner[1], model.further = 5, nn.Sequential(nn.Tanh()), "kept"
    model.inner[0].weight = weight = nn.Parameter(torch.ones(2, 2))
    linear, tanh = model.inner[0], model.inner[1]
    with state.kept():
        model(deep=True)
        model.further, model.inner[1][0] = "changed", nn.ReLU()
    assert model.inner[0] is linear and linear.weight is weight and model.passes == 5 and model.further == "kept"
    assert model.inner[1] is tanh and isinstance(tanh[0], nn.Tanh) and not hasattr(model, "remembered")


def test_what_a_model_counts_while_it_is_trained_stays_and_so_does_its_mode():
    model = Restless().train()
    linear = model.inner[0]
    with state_kept(model):
        model()
    assert model.passes == 1 and len(model.table) == 3
    with state_kept(model):
        model(deep=True)
    assert model.passes == 1 and model.inner[0] is linear
    with state_kept(model):
        model.eval()
    assert not model.training and not model.inner[1].training


def test_weights_written_in_place_and_errors_go_through():
    model = Restless().eval()
    with pytest.raises(RuntimeError, match="inside"), state_kept(model):
        model.inner[0].weight.data.fill_(7)
        model(deep=True)
        raise RuntimeError("inside")
    assert model.passes == 0 and bool((model.inner[0].weight == 7).all())


class Rescaled(nn.Module):
    """As RWKV: halves its weights at the first pass, and remembers that."""

    def __init__(self):
        super().__init__()
        self.inner, self.halved = nn.Linear(2, 2), False

    def forward(self):
        if not self.halved:
            with torch.no_grad():
                self.inner.weight.div_(2)
        self.halved = True
        return float(self.inner.weight.detach().sum())


def test_what_says_that_weights_were_rewritten_stays_with_them():
    model, found = Rescaled().eval(), []
    for _ in range(3):
        with state_kept(model):
            found.append(model())
    assert found[0] == found[1] == found[2] and model.halved


class Growing(nn.Module):
    """Replaces its table of positions, which isn't saved, and its weight, as rows get longer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(2), persistent=False)
        self.weight, self.longest, self.seen = nn.Parameter(torch.ones(2)), 2, 0

    def forward(self, length):
        self.seen += 1
        if length > self.longest:
            self.longest, self.table = length, torch.ones(length)
            self.weight = nn.Parameter(torch.ones(length))


def test_tables_of_a_model_in_training_are_put_back():
    model = nn.Sequential(Growing(), Restless()).train()
    growing, weight, table = model[0], model[0].weight, model[0].table
    with state_kept(model):
        growing(1)
        model[1]()
    assert growing.seen == 1 and model[1].passes == 1
    with state_kept(model):
        growing(5)
        model[1]()
    assert growing.weight is weight and growing.table is table and (growing.longest, growing.seen) == (2, 1)
    assert model[1].passes == 2  # what others count is left alone


def test_threads_take_turns():
    model, inside, overlaps = Restless().eval(), [], []

    def run():
        for _ in range(50):
            with state_kept(model):
                inside.append(None)
                overlaps.append(len(inside))
                model(deep=True)
                inside.pop()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(overlaps) == 1 and model.passes == 0


def test_a_model_that_says_that_it_changes_says_so_once(caplog):
    model = Restless().eval()
    for _ in range(5):
        with state_kept(model):
            model(deep=True)
    assert len(caplog.records) <= 2  # the first pass shows that there is something to be put back
