"""Metrics against values worked out by hand."""

import math
import sys

import pytest

from hf_ebm.data.metrics import ngram_overlap, stress_scores, tagging_scores, transcription_scores


def test_tagging_scores():
    predictions = ["O B O", "B", "O O O", "C"]
    references = ["O B B", "B O", "O", "C"]
    # Positions 3 + 2 + 3 + 1, right 2 + 1 + 1 + 1. F1: O 2·2/(5+3), B 2·2/(2+3), C 1.
    scores = tagging_scores(predictions, references)
    assert scores == pytest.approx({"accuracy": 5 / 9, "macro_f1": (0.5 + 0.8 + 1) / 3, "sequence_accuracy": 0.25})
    assert tagging_scores(predictions, references, default_label="O")["macro_f1"] == pytest.approx(0.9)


def test_macro_f1_is_over_labels_of_the_references():
    assert tagging_scores(["A X"], ["A A"])["macro_f1"] == pytest.approx(2 / 3)
    assert tagging_scores(["A A"], ["A B"])["macro_f1"] == pytest.approx((2 / 3 + 0) / 2)
    assert math.isnan(tagging_scores(["O"], ["O"], default_label="O")["macro_f1"])


def test_transcription_scores_take_the_nearest_reference():
    predictions = ["K AE T", "D AO", "B", ""]
    references = [["K AH T", "K AE T S"], ["D AO G"], ["P", "B"], ["EY"]]
    # Edits by length: 1/4 (both are one edit away, the longer one counts), 1/3, 0/1, 1/1.
    scores = transcription_scores(predictions, references)
    assert scores["phoneme_error_rate"] == pytest.approx(3 / 9)
    assert scores["word_accuracy"] == 0.25
    one_each = transcription_scores(["a b c", "d"], ["a x c c", "d"])
    assert one_each["phoneme_error_rate"] == pytest.approx(2 / 5)  # a substitution and an insertion


def test_bleu_is_of_the_symbols_as_they_stand():
    # n-gram precisions 4/5, 3/4, 2/3, 1/2, whose product is 1/5; no brevity penalty.
    assert transcription_scores(["a b, c d e"], ["a b, c d f"])["bleu"] == pytest.approx(100 * 0.2**0.25)
    assert transcription_scores(["A b c d"], ["A b c d"])["bleu"] == pytest.approx(100)


def test_bleu_with_other_numbers_of_references():
    predictions, references = ["a b c d", "x y"], [["a b c e", "z b c d"], ["x y"]]
    # 6/6, 4/4 and 2/2; the one 4-gram is in neither, which BLEU's default smoothing makes half a match.
    assert transcription_scores(predictions, references)["bleu"] == pytest.approx(100 * 0.5**0.25)
    expected = {"precision_1": 100, "precision_2": 100, "precision_3": 100, "precision_4": 0, "length_ratio": 1}
    assert ngram_overlap(predictions, references) == pytest.approx(expected)


def test_ngram_overlap_is_clipped_and_not_smoothed():
    expected = {"precision_1": 100 / 3, "precision_2": 0, "precision_3": 0, "precision_4": 0, "length_ratio": 1.5}
    assert ngram_overlap(["a a a"], ["a b"]) == pytest.approx(expected)


@pytest.mark.parametrize("score", [tagging_scores, transcription_scores, ngram_overlap])
def test_arguments_are_checked(score):
    with pytest.raises(ValueError, match="equally many, one or more, got 2 and 1"):
        score(["a", "b"], ["a"])
    with pytest.raises(ValueError, match="equally many, one or more, got 0 and 0"):
        score([], [])
    with pytest.raises(ValueError, match=r"references must .* in row 1"):
        score(["a", "b"], ["a", " "])
    with pytest.raises(ValueError, match="got a single text"):
        score(["a"], "a")
    with pytest.raises(ValueError, match="got a single text"):
        score("a", ["a"])


@pytest.mark.parametrize("references", [[["a"], []], [["a"], ["b", ""]]])
def test_every_row_needs_a_reference(references):
    with pytest.raises(ValueError, match=r"references must be one text or more with a symbol each, got .* in row 1"):
        transcription_scores(["a", "b"], references)


def test_without_the_packages_the_error_says_what_to_install(monkeypatch):
    for name in ("rapidfuzz.distance", "sacrebleu.metrics"):
        monkeypatch.setitem(sys.modules, name, None)
    for score in (transcription_scores, ngram_overlap):
        with pytest.raises(ImportError, match=r"hf_ebm\[metrics\]"):
            score(["a"], ["a"])
    assert tagging_scores(["a"], ["a"])["accuracy"] == 1


def test_stress_is_scored_at_vowels():
    references = ["- 1 - 0", "0 1", "1 - 2 0"]
    found = stress_scores(["- 1 - 1", "0 1 - -", "1"], references)  # right, wrong; right, right; right, missing twice
    assert found["accuracy"] == pytest.approx(4 / 7)
    assert found["sequence_accuracy"] == pytest.approx(1 / 3)
    with pytest.raises(ValueError, match="a vowel each, got none in row 1"):
        stress_scores(["1", "-"], ["1", "-"])
