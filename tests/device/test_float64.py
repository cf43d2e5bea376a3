"""A device without float64, as Apple's are: whatever is reckoned in it is reckoned on the CPU."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_ebm import EnergyModel, runtime
from hf_ebm.models.energy.configuration_energy import token_roles
from hf_ebm.scoring.mutations import SCHEMES
from tests.conftest import tiny_energy_model
from tests.models.families import tiny_family_model
from tests.models.test_mutations import letter_tokenizer

PAIRS = dict(block_size=2, block_fill="sequential", block_layout="contiguous", delayed_acceptance=1)


class WithoutFloat64(TorchDispatchMode):
    """Refuses whatever makes a tensor of float64 on a card."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        for value in tree_leaves(found):
            if isinstance(value, torch.Tensor) and value.device.type == "vgpu" and value.dtype == torch.float64:
                raise TypeError(f"{func} made a tensor of float64 on a device that has none")
        return found


def sampled(device):
    for settings in ({}, PAIRS, {"exclude_current": True, "proposal_top_p": 0.9}, {"decoder": "mask_predict"}):
        out = tiny_energy_model().to(device).generate(lengths=[5, 3], num_chains=2, num_epochs=2, seed=1, **settings)
        yield from (out.samples, out.energies)


def of_letters(device):
    tokenizer = letter_tokenizer()
    mlm = tiny_family_model("bert", vocab_size=len(tokenizer))
    return EnergyModel(mlm, **token_roles(tokenizer, len(tokenizer))).eval().to(device), tokenizer


def filled(device):
    model, tokenizer = of_letters(device)
    for given in ({"method": "exact"}, {"method": "candidates", "row_limit": 30}, {"reading": "sequential"}):
        out = model.fill("M <mask> T <mask> Y", tokenizer, **given)
        yield from (out.log_partition, out.left_out, torch.tensor([own.energy for own in out.fills[0]]))
    yield model.fill("<mask> <mask> <mask> <mask> Y", tokenizer, method="chains", row_limit=40).log_partition


def variants(device):
    model, tokenizer = of_letters(device)
    for scheme in SCHEMES:
        yield model.score_variants("MKTAY", ["K2R", "K2R:A4G"], tokenizer, scheme=scheme, letters="KRAG").scores


def scored(device):
    model, tokenizer = of_letters(device)
    yield model.score(["M K T", "M A"], tokenizer).energy


@pytest.mark.parametrize("values", [sampled, filled, variants, scored], ids=lambda function: function.__name__)
def test_values_are_those_of_the_cpu(values, monkeypatch):
    expected = list(values("cpu"))
    monkeypatch.setattr(runtime, "WITHOUT_FLOAT64", {"vgpu"})
    with WithoutFloat64():
        found = list(values("vgpu"))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other.cpu(), one, atol=1e-5, rtol=1e-4)
