"""A trained model of chemical reactions, scored, filled and sampled, against its inner model alone."""

import itertools

import pytest
import torch
from transformers import AutoTokenizer

from examples.reactions import save_checkpoint
from hf_ebm import EnergyModel
from hf_ebm.demo.components import examples_for
from hf_ebm.demo.filling import read_fill
from hf_ebm.demo.scoring import read_scan, variant_rows
from tests.models.test_fill import assert_is, normalized, plain_energies
from tests.real_models import reaction_wheel

pytestmark = pytest.mark.slow

ACYLATION = "CC(=O)Cl.{}Cc1ccccc1>>CC(=O){}Cc1ccccc1"


@pytest.fixture(scope="module")
def reactions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reactions")
    save_checkpoint(reaction_wheel(), folder)
    return EnergyModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def test_energy_of_an_esterification(reactions):
    model, tokenizer = reactions
    text = "CC(=O)O.OCC>>CC(=O)OCC"
    tokens = ["C", "C", "(", "=", "O", ")", "O", ".", "O", "C", "C", ">>", "C", "C", "(", "=", "O", ")", "O", "C", "C"]
    assert tokenizer.tokenize(text) == tokens
    ids, scored = tokenizer(text, return_tensors="pt").input_ids, model.score([text], tokenizer)
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == text
    assert float(scored.energy[0]) == pytest.approx(float(plain_energies(model, ids, list(range(1, 22)))[0]), abs=1e-4)
    assert float(scored.energy[0]) == pytest.approx(42.13, abs=0.01) and int(scored.num_tokens[0]) == 21
    right, wrong = model.score([ACYLATION.format("N", "N"), ACYLATION.format("N", "O")], tokenizer).energy.tolist()
    assert wrong > right + 5  # oxygen from nowhere


def test_tokens_of_brackets_and_rings(reactions):
    tokens = ["C", "[C@@H]", "(", "[NH3+]", ")", "c", "1", "%10", "Br", ".", "Cl", "[MASK]"]
    assert reactions[1].tokenize("".join(tokens)) == tokens


def test_a_masked_atom_is_ranked(reactions):
    """What leaves in a Suzuki coupling is a halogen, and boron brings the other half."""
    model, tokenizer = reactions
    out = model.fill("[MASK]c1ccccc1.OB(O)c1ccncc1>>c1ccc(-c2ccncc2)cc1", tokenizer, 3, words=["Br", "Cl", "O", "N"])
    assert [fill.token_strs for fill in out.fills[0]][:2] == [["Br"], ["Cl"]] and out.fills[0][0].probability > 0.6
    out = model.fill("Brc1ccccc1.O[MASK](O)c1ccncc1>>c1ccc(-c2ccncc2)cc1", tokenizer, 1)
    assert out.fills[0][0].token_strs == ["B"] and out.num_masked_rows == 1


@pytest.mark.parametrize("text,atoms", [(ACYLATION, "NOS"), (ACYLATION.replace("Cl", "[MASK]"), "NO")])
def test_chains_have_the_law_of_exact_joint_fills(text, atoms, reactions):
    """Warm, where chains of single atoms mix."""
    model, tokenizer = reactions
    ids = tokenizer(text.format("[MASK]", "[MASK]"), return_tensors="pt").input_ids
    free = (ids[0] == tokenizer.mask_token_id).nonzero()[:, 0].tolist()
    fills = [tuple((n,) for n in own) for own in itertools.product(map(tokenizer.vocab.get, atoms), repeat=len(free))]
    rows = ids.repeat(len(fills), 1)
    rows[:, free] = torch.tensor(fills)[..., 0]
    expected = normalized(fills, plain_energies(model, rows, free), 4.0)
    exact, chains = (
        model.fill(ids, tokenizer, 100, words=list(atoms), temperature=4.0, method=method)
        for method in ("exact", "chains")
    )
    assert_is(exact, expected)
    assert float(chains.r_hat[0]) < 1.3
    for fill in chains.fills[0]:
        assert abs(fill.probability - expected[tuple(map(tuple, fill.tokens))]) < 5 * fill.error
    assert len(chains.fills[0]) > len(fills) / 2


def test_chains_that_are_stuck_say_so(reactions):
    """Each atom alone can't become another one, as it stands on both sides."""
    model, tokenizer = reactions
    text = ACYLATION.format("[MASK]", "[MASK]")
    joint = {tuple(fill.token_strs): fill for fill in model.fill(text, tokenizer, 9, words=["N", "O", "S"]).fills[0]}
    assert sum(joint[atom, atom].probability for atom in "NOS") > 0.99 and joint["N", "N"].probability < 0.4
    chains = model.fill(text, tokenizer, words=["N", "O", "S"], method="chains", row_limit=50)
    assert float(chains.r_hat[0]) > 1.5


def test_infilling_keeps_the_rest(reactions):
    model, tokenizer = reactions
    text = ACYLATION.format("[MASK]", "[MASK]")
    ids = tokenizer(text, return_tensors="pt").input_ids
    out = model.generate(ids, num_chains=4, num_epochs=6, burn_in=2, seed=0)
    assert (out.sequences[:, ids[0] != tokenizer.mask_token_id] == ids[ids != tokenizer.mask_token_id]).all()
    assert all(tokenizer.decode(row, skip_special_tokens=True).startswith("CC(=O)Cl.") for row in out.sequences)


def test_the_demo_opens_with_reactions(reactions):
    model, tokenizer = reactions
    own = examples_for(model, tokenizer)
    order = read_fill(model, tokenizer, *own.fills[0], "any words", "together", 1.0)
    fills = model.fill(order.text, tokenizer, 3, **order.settings).fills[0]
    assert {tuple(fill.token_strs) for fill in fills} == {("N", "N"), ("O", "O"), ("S", "S")}
    right, wrong = model.score(own.lines[0].splitlines(), tokenizer).energy.tolist()
    assert wrong > right + 5
    scan = read_scan(*own.references[0], "", "masked_marginals")  # of aspirin
    scores = model.score_variants(scan.reference, scan.variants, tokenizer).scores.tolist()
    assert variant_rows(scan, scores)[0][0] == "O7N"  # the amide
