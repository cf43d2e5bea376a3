"""`"joint-fill-mask"` against `EnergyModel.fill`, and its shape against that of `"fill-mask"`."""

import pytest
from transformers import FillMaskPipeline, pipeline

import hf_ebm.pipelines
from hf_ebm.pipelines import JointFillMaskPipeline
from tests.pipelines.models_for_pipelines import assert_like, calls_of, energy_model, tokenizer

TEXTS = ["the cat [MASK] on the mat", "the [MASK] sat on [MASK]", "[MASK] dog"]


@pytest.fixture
def filling():
    return JointFillMaskPipeline(model=energy_model(), tokenizer=tokenizer())


def test_one_mask_is_filled_as_by_fill_mask(filling):
    theirs = FillMaskPipeline(model=filling.model.mlm, tokenizer=tokenizer())
    targets = ["dog", "cat", "log"]
    expected = theirs(TEXTS[0], targets=targets)
    found = filling(TEXTS[0], words=targets)
    total = sum(one["score"] for one in expected)  # which is a share of the whole vocabulary there
    assert [list(one) for one in found] == [["score", "token", "token_str", "sequence", "energy"]] * 3
    for one, other in zip(found, expected, strict=True):
        assert one["score"] == pytest.approx(other["score"] / total, rel=1e-4)
        assert {name: one[name] for name in ("token", "token_str", "sequence")} == {
            name: other[name] for name in ("token", "token_str", "sequence")
        }


def test_several_masks_and_a_mask_of_several_pieces(filling):
    words = ["cat", "unbelievable", "the"]
    (found,) = filling(TEXTS[1:2], words=words, top_k=9)
    expected = filling.model.fill(TEXTS[1], tokenizer(), 9, words=words)
    for one, other in zip(found, expected.fills[0], strict=True):
        assert one["score"] == pytest.approx(other.probability) and one["energy"] == pytest.approx(other.energy)
        assert one["token_str"] == other.token_strs and one["sequence"] == other.sequence
        assert one["token"] == [own[0] if len(own) == 1 else own for own in other.tokens]
    by_blank = filling(TEXTS[1], words=words, marginals=True, top_k=9)
    assert [[one["score"] for one in words] for words in by_blank] == [
        pytest.approx([word.probability for word in words]) for words in expected.marginals[0]
    ]


def test_a_batch_is_one_call_and_changes_nothing(filling, monkeypatch):
    settings = dict(top_k=3, row_limit=20, method="candidates")
    expected = [filling(text, **settings) for text in TEXTS]
    sizes = calls_of(monkeypatch, filling.model, "fill", lambda texts, *args, **kwargs: len(texts))
    assert_like(filling(TEXTS, batch_size=2, **settings), expected)
    assert sizes == [2, 1]


def test_by_its_name():
    made = pipeline("joint-fill-mask", model=energy_model(), tokenizer=tokenizer(), top_k=2)
    assert hf_ebm.pipelines.TASKS["joint-fill-mask"] is type(made) and len(made(TEXTS[2])) == 2


@pytest.mark.parametrize(
    "given,settings,message",
    [
        (["[MASK]", 3], {}, r"inputs must be texts, got int \(input 1\)"),
        (["[MASK]", "the cat"], {}, r"holds no mask token .*\(input 1\)"),
        (["[MASK]"], {"targets": ["cat"]}, "JointFillMaskPipeline has no argument targets"),
    ],
)
def test_what_is_no_text_with_a_mask_is_refused(filling, given, settings, message):
    with pytest.raises(ValueError, match=message):
        filling(given, **settings)
