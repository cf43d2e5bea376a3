"""Compiled passes: the same values, the head at chosen positions alone, few graphs."""

import shutil
from threading import Thread

import pytest
import torch

from hf_ebm import EnergyModel
from hf_ebm.assets import load_embedded
from hf_ebm.scoring.head import PositionLogits, gather_positions
from hf_ebm.scoring.passes import few_sizes
from tests.models.families import tiny_family_model
from tests.models.residual_models import toy_residual

pytestmark = pytest.mark.slow  # tracing takes seconds

ROWS = torch.tensor([[1, 5, 6, 7, 2], [1, 8, 7, 5, 2], [1, 6, 8, 2, 0]])
PAIRS = dict(block_size=2, block_fill="sequential", block_layout="contiguous", delayed_acceptance=1)


@pytest.fixture(autouse=True)
def graphs():
    """The sizes of what each graph returns, filled by the backend of `recording`."""
    torch._dynamo.reset()
    yield []
    torch._dynamo.reset()


def recording(found):
    """A backend that runs what is traced as it is, and adds the number of positions that each graph returns."""

    def backend(graph, inputs):
        (outputs,) = next(node for node in graph.graph.nodes if node.op == "output").args
        found.extend(node.meta["example_value"].shape[1] for node in outputs)
        return graph

    return backend


def family_model(model_type: str) -> EnergyModel:
    if model_type == "embedded":
        return load_embedded()[0].double()
    layers = dict(encoder_layers=1, decoder_layers=1) if model_type == "bart" else dict(num_hidden_layers=1)
    roles = dict(mask_token_id=4, pad_token_id=0, special_token_ids=[0, 1, 2])
    roles |= dict(prefix_token_ids=[1], suffix_token_ids=[2])
    return EnergyModel(tiny_family_model(model_type, **layers).double(), **roles)


@torch.no_grad()
def results(model: EnergyModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Energies of two rows and of chains, and the chains: passes of one size, so there is one graph."""
    context = {"encoder_input_ids": torch.tensor([[5, 6, 2]])} if model.mlm.config.is_encoder_decoder else {}
    out = model.generate(lengths=3, num_chains=2, num_epochs=2, seed=0, **PAIRS, **context)
    rows = {name: ids.expand(2, -1) for name, ids in context.items()}
    return torch.cat([model(ROWS[:2], **rows).energy, *out.trace.energy]), out.sequences


@pytest.mark.parametrize("model_type", ["bert", "roberta", "esm", "albert", "bart", "embedded"])
def test_a_compiled_model_has_the_values_of_the_model_and_its_head_at_chosen_positions(model_type, graphs):
    model = family_model(model_type)
    expected, chains = results(model)
    model.mlm.compile(backend=recording(graphs))
    found, same = results(model)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    assert torch.equal(same, chains)
    assert graphs == [1]
    with torch.compiler.set_stance("force_eager"):  # with the sizes of compiled code
        assert torch.equal(results(model)[0], found)


def mlm_compiled(model: EnergyModel, backend) -> EnergyModel:
    model.mlm = torch.compile(model.mlm, backend=backend)
    return model


def in_place(model: EnergyModel, backend) -> EnergyModel:
    model.compile(backend=backend)
    return model


def made_of_compiled(model: EnergyModel, backend) -> EnergyModel:
    fields = ("mask_token_id", "pad_token_id", "special_token_ids", "prefix_token_ids", "suffix_token_ids")
    own = {field: getattr(model.config, field) for field in fields}
    return EnergyModel(torch.compile(model.mlm, backend=backend), **own)


def whole(model: EnergyModel, backend) -> EnergyModel:
    return torch.compile(model, backend=backend)


@pytest.mark.parametrize("compiled", [mlm_compiled, in_place, made_of_compiled, whole])
def test_every_way_to_compile_has_the_same_values_and_is_saved_as_ever(compiled, graphs, tmp_path):
    model = family_model("bert")
    expected, names = model(ROWS).energy, list(model.state_dict())
    own = compiled(model, recording(graphs))
    torch.testing.assert_close(own(ROWS).energy, expected, rtol=0, atol=1e-11)
    own(ROWS).energy.sum().backward()
    assert (not graphs) == (compiled is whole)
    own.save_pretrained(tmp_path)
    again = EnergyModel.from_pretrained(tmp_path)
    assert list(again.state_dict()) == names and again.dtype == torch.float64
    assert torch.equal(again(ROWS).energy, expected)


def test_parts_of_a_residual_model_are_compiled_in_place(graphs):
    model, ids = toy_residual(), torch.tensor([[0, 3, 4, 5], [0, 4, 4, 3]])
    energies, names = model(input_ids=ids, attention_mask=torch.ones_like(ids)).energy, list(model.state_dict())
    model.encoder = torch.compile(model.encoder, backend=recording(graphs))
    assert torch.equal(model(input_ids=ids, attention_mask=torch.ones_like(ids)).energy, energies)
    assert graphs and list(model.state_dict()) == names


def test_gradients_are_those_of_the_model():
    model = family_model("bert")
    energies = model(ROWS, (ROWS > 0).long()).energy
    expected = torch.autograd.grad(energies.square().sum(), [*model.parameters()], allow_unused=True)
    model.compile(backend="aot_eager")
    found = torch.autograd.grad(
        model(ROWS, (ROWS > 0).long(), token_budget=30).energy.square().sum(), [*model.parameters()], allow_unused=True
    )
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-8)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
def test_inductor_has_the_values_of_the_model():
    model = family_model("bert").float()
    expected, chains = results(model)
    model.compile(mode="reduce-overhead")  # CUDA graphs on a card
    found, same = results(model)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(same, chains)


@pytest.mark.parametrize("dynamic", [None, False])
def test_compilation_ends(dynamic, graphs):
    """Numbers of rows and lengths that vary; of static shapes there is a graph for each of a few sizes."""
    model = family_model("bert")
    model.compile(backend=recording(graphs), dynamic=dynamic)
    logits = PositionLogits(model.mlm)
    counts = []
    for sizes in ([7, 12, 40], range(1, 41, 6)):
        for rows in sizes:
            for length in (5, 7, 9) if dynamic is None else (5,):
                with torch.no_grad():
                    assert logits(torch.full((rows, length), 5), torch.ones(rows, 1, dtype=torch.long)).shape[0] == rows
        counts.append(len(graphs))
    assert counts[0] == counts[1] <= 3


@pytest.mark.parametrize("ran_before", [False, True])
@torch.no_grad()
def test_others_get_the_whole_forward_of_a_compiled_model(ran_before, graphs):
    model = family_model("bert")
    expected = model.mlm(ROWS).logits
    model.mlm.compile(backend=recording(graphs))
    positions = torch.tensor([[2], [1], [3]])
    found = [model.mlm(ROWS).logits] if ran_before else []
    cut = PositionLogits(model.mlm)(ROWS, positions)
    torch.testing.assert_close(cut, gather_positions(expected, positions), rtol=0, atol=1e-11)
    thread = Thread(target=lambda: found.append(model.mlm(ROWS).logits))
    thread.start()
    thread.join()
    for logits in (*found, model.mlm(ROWS).logits):
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("rows", [1, 8, 9, 100, 208, 256, 1000])
def test_sizes_are_few_and_waste_little(rows):
    parts = list(few_sizes(rows))
    sizes = [stop - first for first, stop in parts]
    assert [first for first, _ in parts] == [sum(sizes[:i]) for i in range(len(sizes))]
    assert all(size >= 8 and size.bit_count() == 1 for size in sizes)
    assert rows <= sum(sizes) <= rows + max(8, rows // 7)
