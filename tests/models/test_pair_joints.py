"""`EnergyModel.pair_joints` against the inner model's logits of each pair, one masked position at a time."""

import pytest
import torch

from tests.conftest import tiny_mlm
from tests.models.families import VOCAB, tiny_family_model
from tests.models.test_fill import TEXT, model_of, plain_energies, word_tokenizer

WORDS = [["w5", "w40", "w77"], ["w40", "w6", "w77", "w90"]]


def total_variation(one, other) -> float:
    return float((one.exp() - other.exp()).abs().sum() / 2)


@pytest.mark.parametrize("family", ["bert", "roberta", "esm", "albert", "bart"])
def test_joints_of_families_with_context_constraints_and_further_energies(family, energy):
    tokenizer = word_tokenizer(VOCAB)
    model = model_of(tiny_family_model(family), tokenizer, energy)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    source = tokenizer("w30 w31 w32", return_tensors="pt").input_ids if family == "bart" else None
    rows = ids.repeat(12, 1)
    rows[:, [2, 5]] = torch.cartesian_prod(torch.tensor([5, 40, 77]), torch.tensor([6, 40, 77, 90]))

    def liking(ids: torch.Tensor) -> torch.Tensor:
        both = (ids[:, 2] == 40) & (ids[:, 5] == 40)
        return ((ids[:, 2] - ids[:, 5]).double() / 50).masked_fill(both, torch.inf)

    first, second = (plain_energies(model, rows, [free], source).view(3, 4) for free in (2, 5))
    added = 2 * liking(rows).view(3, 4)
    found = model.pair_joints(
        TEXT, tokenizer, words=WORDS, extra_energies=(2, liking), encoder_text=None if source is None else "w30 w31 w32"
    )
    assert [own.tolist() for own in found.tokens] == [[5, 40, 77], [6, 40, 77, 90]]
    expected = (-first - added).log_softmax(0), (-second - added).log_softmax(1)
    assert all(
        torch.allclose(own.exp(), one.exp(), atol=1e-5) for own, one in zip(found.conditionals, expected, strict=True)
    )
    field = (-first - second - added).flatten().log_softmax(0).view(3, 4)
    assert total_variation(found.joints["random_field"], field) < 1e-5
    besag = [
        (expected[0] - expected[0][a] + expected[1][a]).flatten().log_softmax(0).view(3, 4) for a in (0, 2)
    ]  # not 40
    assert min(total_variation(found.joints["besag"], own) for own in besag) < 1e-5
    nearest = found.joints["arnold_gokhale"]
    marginals = [-nearest.logsumexp(axis, keepdim=True) for axis in (1, 0)]
    both = torch.logaddexp(*expected) - torch.logaddexp(*marginals)  # where the gradient of the divergence is 0
    assert total_variation(nearest, both.flatten().log_softmax(0).view(3, 4)) < 1e-5
    assert found.num_masked_rows == 3 + 4 + 2
    means = {name: one.mean for name, one in found.divergences.items()}
    assert min(means, key=means.get) == "arnold_gokhale" and means["arnold_gokhale"] > 1e-6


def test_ids_and_the_whole_support():
    tokenizer = word_tokenizer(16)
    model = model_of(tiny_mlm(16, scale=0.2), tokenizer)
    found = model.pair_joints(tokenizer("w7 [MASK] w9 [MASK]", return_tensors="pt").input_ids, tokenizer)
    filled = model.fill("w7 [MASK] w9 [MASK]", tokenizer, 200)
    places = {(int(a), int(b)): (n, m) for n, a in enumerate(found.tokens[0]) for m, b in enumerate(found.tokens[1])}
    assert len(filled.fills[0]) == len(places) == 121
    for fill in filled.fills[0]:
        (one,), (other,) = fill.tokens
        assert float(found.joints["random_field"][places[one, other]].exp()) == pytest.approx(
            fill.probability, abs=1e-6
        )


@pytest.mark.parametrize(
    "text,settings,message",
    [
        ("w7 [MASK]", {}, "two masks, got 1"),
        ("w7 [MASK] [MASK] [MASK]", {}, "two masks, got 3"),
        ("w7 w8", {}, "nothing to fill"),
        (["[MASK] [MASK]"], {}, "text must be"),
        ("[MASK] [MASK]", {"words": []}, "words must be"),
        ("[MASK] [MASK]", {"words": ["nothing"]}, "row 0, blank 0"),
        ("[MASK] [MASK]", {"encoder_text": "w7"}, "encoder"),
        ("[MASK] w7 [MASK]", {"extra_energies": lambda ids: 1 / (ids[:, 3] != 8).double() - 1}, "of the second blank"),
    ],
)
def test_what_has_no_joint_is_refused(text, settings, message):
    tokenizer = word_tokenizer(16)
    model = model_of(tiny_mlm(16, scale=0.2), tokenizer)
    with pytest.raises(ValueError, match=message):
        model.pair_joints(text, tokenizer, **settings)


def test_no_pivot_where_every_word_is_forbidden_beside_one():
    tokenizer = word_tokenizer(16)
    model = model_of(tiny_mlm(16, scale=0.2), tokenizer)
    differ = lambda ids: torch.zeros(len(ids)).masked_fill(ids[:, 1] == ids[:, 3], torch.inf)  # noqa: E731
    joints = model.pair_joints("[MASK] w7 [MASK]", tokenizer, extra_energies=differ).joints
    assert set(joints) == {"independent", "random_field", "arnold_gokhale"}
    for joint in joints.values():
        assert float(joint.exp().sum()) == pytest.approx(1) and (joint.diagonal() == -torch.inf).all()
