"""Gradients that are summed over steps against those of ordinary layers."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from hf_ebm.relaxations import stepwise
from hf_ebm.relaxations.stepwise import SummedWeightGradients


class Net(nn.Module):
    """A recurrent net whose output layer is the table of what it reads, and a layer without bias."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Linear(5, 7)
        self.inner = nn.Linear(5, 5, bias=False)
        self.double()


def run(net, steps, products=None):
    """Loss of some steps of three rows, (3, 1, d) inside as in a decoder."""
    hidden, total = torch.linspace(-1, 1, 15, dtype=torch.float64).view(3, 1, 5), 0.0
    for _ in range(steps):
        if products is None:
            weights = net.table(net.inner(hidden).tanh()).softmax(-1)
            hidden = weights @ net.table.weight
        else:
            with products:
                weights = net.table(net.inner(hidden).tanh()).softmax(-1)
            hidden = products.mixed(weights, net.table.weight)
        total = total + (weights**2).sum()
    return total


def gradients(net, loss, **options):
    return torch.autograd.grad(loss, list(net.parameters()), **options)


@pytest.mark.parametrize("enough", [1, 7, 1000])
def test_gradients_are_those_of_ordinary_layers(enough, monkeypatch):
    monkeypatch.setattr(stepwise, "_ENOUGH_ROWS", enough)
    net = Net()
    plain, summed = run(net, 6), run(net, 6, SummedWeightGradients())
    assert torch.equal(plain, summed)
    for found, expected in zip(gradients(net, summed), gradients(net, plain), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_passes_that_ask_for_other_gradients_leave_nothing():
    net = Net()
    loss = run(net, 3, SummedWeightGradients())
    torch.autograd.grad(loss, net.table.bias, retain_graph=True)
    twice = [gradients(net, loss, retain_graph=True) for _ in range(2)]
    for found in twice:
        for one, expected in zip(found, gradients(net, run(net, 3)), strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-12, atol=1e-14)


def test_what_comes_out_can_be_changed_in_place():
    """As decoders do that add positions to what their layers made."""
    net, inputs, found = Net(), torch.linspace(-1, 1, 15, dtype=torch.float64).view(3, 1, 5), []
    for products in (nullcontext(), SummedWeightGradients()):
        with products:
            changed = net.table(inputs)
        changed += 1
        found.append((changed.detach(), *gradients(net, changed.square().sum(), allow_unused=True)[:2]))
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)


def test_weights_that_do_not_learn_are_left_alone():
    net, products = Net(), SummedWeightGradients()
    net.inner.requires_grad_(False)
    with torch.no_grad():
        assert not run(net, 2, products).requires_grad
    learning = [parameter for parameter in net.parameters() if parameter.requires_grad]
    found, expected = (torch.autograd.grad(run(net, 3, own), learning) for own in (products, None))
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)


@pytest.mark.half_precision
def test_autocast_is_as_without():
    net = Net().float()
    values = []
    for products in (None, SummedWeightGradients()):
        net.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            hidden = torch.linspace(-1, 1, 15).view(3, 5)
            for _ in range(3):
                if products is None:
                    hidden = net.table(net.inner(hidden)) @ net.table.weight
                else:
                    with products:
                        hidden = products.mixed(net.table(net.inner(hidden)), net.table.weight)
        hidden.float().sum().backward()
        values.append([parameter.grad for parameter in net.parameters()])
    for one, two in zip(*values, strict=True):
        assert torch.equal(one, two)
