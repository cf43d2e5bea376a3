"""Costs of sequences against values worked out by hand, and the scorer's against one token at a time."""

import functools
import logging
import math
import sys

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_ebm.data.metrics import transcription_scores
from hf_ebm.objectives.sequence_costs import (
    COSTS,
    SequenceCost,
    as_cost,
    meteor_without_synonyms_cost,
    non_termination,
    normalized_edit_distance,
    repetition,
    repetition_cost,
    sentence_bleu_cost,
)
from hf_ebm.trainers.costs import ScorerCost
from tests.seq2seq_families import tiny_seq2seq
from tests.test_encoded_once import encoded_rows

NORMALIZED = [normalized_edit_distance, sentence_bleu_cost, meteor_without_synonyms_cost]


def ids_of(texts):
    """The same symbols as ids: equal symbols get equal ids."""
    return [[100 + sum(map(ord, symbol)) for symbol in text.split()] for text in texts]


def test_edit_distance():
    predictions, references = ["a x c", "", "a b c d e", "b"], ["a b c d", "a b", "a  b", "b"]
    expected = [2 / 4, 1, 3 / 2, 0]  # a substitution and an insertion; two insertions; three deletions
    costs = normalized_edit_distance(predictions, references)
    assert costs.tolist() == pytest.approx(expected)
    assert costs.dtype == torch.float32
    assert normalized_edit_distance(ids_of(predictions), ids_of(references)).tolist() == pytest.approx(expected)


def test_edit_distance_to_the_nearest_reference():
    predictions, references = ["K AE T", "D AO"], [["K AH T", "K AE T S", "T"], ["D AO G"]]
    # Two are one edit away, the longer one counts; as in the rate of the corpus.
    assert normalized_edit_distance(predictions, references).tolist() == pytest.approx([1 / 4, 1 / 3])
    assert transcription_scores(predictions, references)["phoneme_error_rate"] == pytest.approx(2 / 7)


def test_ids_may_be_tensors_and_arrays():
    predictions, references = torch.tensor([[1, 2, 3], [4, 5, 6]]), np.array([[1, 2, 7], [4, 5, 6]])
    assert normalized_edit_distance(predictions, references).tolist() == pytest.approx([1 / 3, 0])
    assert repetition([torch.tensor([7, 7, 7])], n=1).tolist() == pytest.approx([2 / 3])


def test_sentence_bleu():
    predictions = ["a b, c d e", "a b c", "a b", "", "x y", "d"]
    references = ["a b, c d f", "a b d", "a b c d", "a", "a b", "d"]
    expected = [
        1 - 0.2**0.25,  # 4/5, 3/4, 2/3, 1/2, whose product is 1/5
        1 - (1 / 6) ** (1 / 3),  # 2/3, 1/2, and no 3-gram, which smoothing makes half a match; no 4-grams are had
        1 - math.exp(1 - 4 / 2),  # all right, and half as long
        1,
        1,
        0,
    ]
    assert sentence_bleu_cost(predictions, references).tolist() == pytest.approx(expected)
    assert sentence_bleu_cost(ids_of(predictions), ids_of(references)).tolist() == pytest.approx(expected)
    assert sentence_bleu_cost(["a b c d"], ["a b c d"]).tolist() == [0]  # sacrebleu gives slightly more than 100
    assert sentence_bleu_cost(["a b c"], [["x b c", "a b y"]]).tolist() == pytest.approx([1 - 0.5 ** (1 / 3)])


def test_bleu_of_other_symbols_and_without_advice(caplog):
    predictions, references = ["A dog."] * 200, ["A dog ."] * 200
    with caplog.at_level(logging.WARNING):
        assert sentence_bleu_cost(predictions, references, tokenize="13a")[0] == 0
        assert sentence_bleu_cost(references, predictions)[0] > 0.3
    assert not caplog.records


def test_meteor_without_synonyms():
    def meteor(matches, predicted, expected, chunks):
        precision, recall = matches / predicted, matches / expected
        mean = precision * recall / (0.9 * precision + 0.1 * recall)
        return mean * (1 - 0.5 * (chunks / matches) ** 3)

    cases = {
        ("a b x", "b a c d"): meteor(2, 3, 4, chunks=2),
        ("Running dogs", "run dog"): meteor(2, 2, 2, chunks=1),  # by stems, in lower case
        ("a b c d x y", "a b c z y"): meteor(4, 6, 5, chunks=2),
        # "the" is matched with the last one: three chunks, though two would do
        ("the cat sat on mat", "the cat sat on the mat"): meteor(5, 5, 6, chunks=3),
        ("a", "a"): 0.5,
        ("a b c d", "a b c d"): 1 - 0.5 / 4**3,
        ("car", "automobile"): 0,
        ("", "a b"): 0,
    }
    predictions, references = zip(*cases, strict=True)
    expected = [1 - score for score in cases.values()]
    assert meteor_without_synonyms_cost(predictions, references).tolist() == pytest.approx(expected)
    found = meteor_without_synonyms_cost([[12, 3, 5], [], [7]], [[3, 12, 4, 6], [1], [7]])
    assert found.tolist() == pytest.approx([expected[0], 1, 0.5])
    assert meteor_without_synonyms_cost(["a b"], [["x", "a b"]]).tolist() == pytest.approx([0.5 / 8])


def test_repetition():
    ids = [[1, 2, 1, 2, 1, 2], [1, 2, 3], [1, 1, 1, 1], []]
    # 4-grams 1212, 2121, 1212; none; one; none.
    assert repetition(ids).tolist() == pytest.approx([1 / 3, 0, 0, 0])
    assert repetition(ids, n=2).tolist() == pytest.approx([3 / 5, 0, 2 / 3, 0])
    assert repetition(["a b a b a b", "a"], n=2).tolist() == pytest.approx([3 / 5, 0])
    assert repetition_cost(ids, None, n=2).tolist() == pytest.approx([3 / 5, 0, 2 / 3, 0])
    with pytest.raises(ValueError, match="n must be a whole number from 1 up, got 0"):
        repetition(ids, n=0)


def test_non_termination():
    costs = non_termination([[5, 2], [5, 6], [], [2, 5]], eos_token_id=2)
    assert costs.tolist() == [0, 1, 1, 0]
    assert costs.dtype == torch.float32
    with pytest.raises(ValueError, match=r"predictions must be .*got the text 'a' in row 1"):
        non_termination([[1], "a"], 2)


@pytest.mark.parametrize("cost", NORMALIZED)
@pytest.mark.parametrize(
    ("predictions", "references", "message"),
    [
        (["a", "b"], ["a"], "equally many, got 2 and 1"),
        ([], [], r"predictions must be a list of one or more .*, got \[\]"),
        ("a", ["a"], "predictions must be a list of one or more .*, got 'a'"),
        (["a"], "a", "references must be a list of one or more .*, got 'a'"),
        (["a"], None, "references must be a list of one or more .*, got None"),
        (["a", "b"], ["a", " "], "references must hold a symbol each, got ' ' in row 1"),
        (["a", "b"], ["a", ["b", ""]], r"references must hold a symbol each, got \['b', ''\] in row 1"),
        ([[1], [2]], [[1], []], r"references must hold a symbol each, got \[\] in row 1"),
        ([1, 2], [[1], [2]], "predictions must be texts or lists of token ids, got 1 in row 0"),
        ([[1], ["a"]], [[1], [2]], r"predictions must be texts or lists of token ids, got \['a'\] in row 1"),
        (["a", "b"], ["a", [1]], "both texts or both token ids, which row 1 isn't"),
        ([[1]], [["a"]], "both texts or both token ids, which row 0 isn't"),
    ],
)
def test_arguments_are_checked(cost, predictions, references, message):
    with pytest.raises(ValueError, match=message):
        cost(predictions, references)


@pytest.mark.parametrize("cost", NORMALIZED)
def test_without_the_packages_the_error_says_what_to_install(cost, monkeypatch):
    for name in ("rapidfuzz.distance", "sacrebleu.metrics", "nltk.translate.meteor_score"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"hf_ebm\[metrics\]"):
        cost(["a"], ["a"])


def test_named_costs():
    assert {name: cost.reads for name, cost in COSTS.items()} == {
        "edit_distance": "ids",
        "sentence_bleu": "texts",
        "meteor_without_synonyms": "texts",
        "phoneme_error": "texts",
        "repetition": "ids",
    }
    ids = [[1, 2, 1, 2, 1, 2]]
    given = {"texts": (["a b"], ["a c"]), "ids": (ids, [[1, 2, 1, 2]])}
    found = {name: cost(*given[cost.reads], ["prompt"]).tolist() for name, cost in COSTS.items()}
    assert found["edit_distance"] == [0.5]
    assert found["phoneme_error"] == [0.5]
    assert found["repetition"] == pytest.approx([1 / 3])
    assert found["sentence_bleu"] == pytest.approx([0.5])  # 1/2, and half a match of one 2-gram
    assert found["meteor_without_synonyms"] == pytest.approx([0.75])  # mean 1/2, penalty 1/2


def test_as_cost():
    assert as_cost("edit_distance") is COSTS["edit_distance"]
    assert as_cost(COSTS["repetition"]) is COSTS["repetition"]

    def length(predictions, references):
        return [len(text) for text in predictions]

    assert (as_cost(length).name, as_cost(length).reads) == ("length", "texts")
    length.reads = "ids"
    assert as_cost(length).reads == "ids"
    partial = as_cost(functools.partial(sentence_bleu_cost, tokenize="13a"))
    assert (partial.name, float(partial(["a dog."], ["a dog ."]))) == ("sentence_bleu_cost", 0)
    length.reads = "words"
    with pytest.raises(ValueError, match="reads of the cost length must be one of 'texts', 'ids', got 'words'"):
        as_cost(length)
    for unknown in ("bleu", 3):
        with pytest.raises(ValueError, match=f"one of edit_distance, .*, repetition, got {unknown!r}"):
            as_cost(unknown)


class _Length(torch.nn.Module):
    def forward(self, predictions, references):
        return torch.tensor([float(len(ids)) for ids in predictions])


def test_prompts_go_to_functions_that_take_them():
    def named(predictions, references, prompts):
        return list(map(len, prompts))

    def any_named(predictions, references, **others):
        return list(map(len, others["prompts"]))

    def neither(predictions, references, temperature=1.0):
        return [temperature for _ in predictions]

    arguments = (["a", "b"], ["a", "b"], ["xx", "yyy"])
    assert [as_cost(cost)(*arguments).tolist() for cost in (named, any_named)] == [[2, 3], [2, 3]]
    assert as_cost(neither)(*arguments).tolist() == [1, 1]
    assert as_cost(_Length())(*arguments).tolist() == [1, 1]  # a module's own call takes anything


@pytest.mark.parametrize(
    "returned",
    [[0, 1.5], (0, 1.5), np.array([0, 1.5]), torch.tensor([0, 1.5], dtype=torch.float64), [np.float32(0), 1.5]],
)
def test_returned_numbers_become_a_float_tensor(returned):
    costs = SequenceCost("mine", lambda predictions, references: returned, "texts")(["a", "b"], ["a", "b"])
    assert costs.tolist() == [0, 1.5]
    assert costs.dtype == torch.float32


def test_costs_have_no_gradient():
    weight = torch.ones(2, requires_grad=True)
    for function in (lambda p, r: weight, lambda p, r: weight * 2):
        assert not SequenceCost("mine", function, "ids")([[1], [2]], [[1], [2]]).requires_grad


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (1.0, r"the cost mine returned 1.0, must return a number for each row, of shape \(2,\)"),
        ([1.0], r"the cost mine returned \[1.0\], must return a number for each row, of shape \(2,\)"),
        (torch.ones(2, 1), r"the cost mine returned a tensor of shape \(2, 1\) and torch.float32, must return"),
        ([1.0, math.nan], "the cost mine must be finite, got nan in row 1"),
        ([math.inf, math.nan], "the cost mine must be finite, got inf in row 0"),
        ([1.0, 1e300], "the cost mine must be finite, got inf in row 1"),
        (None, "the cost mine returned None, must return a number for each row"),
        (["a", "b"], r"the cost mine returned \['a', 'b'\], must return a number for each row"),
        ([[1.0], []], "the cost mine returned .* must return a number for each row"),
    ],
)
def test_returned_values_are_checked(returned, message):
    cost = SequenceCost("mine", lambda predictions, references: returned, "texts")
    with pytest.raises(ValueError, match=message):
        cost(["a", "b"], ["a", "b"])


def tiny_gpt2(scale: float = 0.5, **settings) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = dict(vocab_size=41, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=2)
    model = GPT2LMHeadModel(GPT2Config(**sizes, **settings))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, scale)
    return model.eval()


PROMPTS = [[5, 6, 7, 8], [9], [10, 11], [4, 4, 4], [12]]
PREDICTIONS = [[20, 2], [21, 22, 23, 24, 2], [], [25], [26, 1, 0, 2]]  # ids of padding count like others


def nats_one_by_one(model, prompt, prediction):
    """-log p from one forward pass a token, without padding."""
    total = 0.0
    for k, token in enumerate(prediction):
        with torch.no_grad():
            if model.config.is_encoder_decoder:
                start = [model.config.decoder_start_token_id]
                decoder = torch.tensor([start + prediction[:k]])
                logits = model(input_ids=torch.tensor([prompt]), decoder_input_ids=decoder).logits
            else:
                logits = model(input_ids=torch.tensor([prompt + prediction[:k]])).logits
        total -= float(logits[0, -1].log_softmax(-1)[token])
    return total


@pytest.mark.parametrize("make", [tiny_gpt2, lambda: tiny_seq2seq("bart"), lambda: tiny_seq2seq("t5")])
@pytest.mark.parametrize("batch_size", [2, 64])
def test_scorer_against_one_token_at_a_time(make, batch_size):
    model = make()
    cost = as_cost(ScorerCost(model, pad_token_id=1, batch_size=batch_size))
    assert (cost.name, cost.reads) == ("ScorerCost", "ids")
    found = cost(PREDICTIONS, None, PROMPTS)
    expected = [nats_one_by_one(model, *row) for row in zip(PROMPTS, PREDICTIONS, strict=True)]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)
    assert found[2] == 0
    assert cost([[], []], None, [[1], [2]]).tolist() == [0, 0]


def test_a_scorer_encodes_a_prompt_once():
    model = tiny_seq2seq("bart")
    prompts, predictions = [[5, 6], [7, 8, 9], [5, 6], [5, 6]], [[4, 5], [6], [7, 8, 2], [9]]
    expected = [nats_one_by_one(model, *row) for row in zip(prompts, predictions, strict=True)]
    runs = encoded_rows(model.get_encoder())
    assert ScorerCost(model, pad_token_id=1)(predictions, None, prompts).tolist() == pytest.approx(expected, rel=1e-5)
    assert runs == {2}


def test_scorer_of_probabilities_below_the_smallest_float():
    model = tiny_gpt2(scale=8.0)
    cost = ScorerCost(model, pad_token_id=0)
    found = cost([list(range(3, 23))], None, [[1, 2]])
    assert math.isfinite(found[0])
    assert float(found[0]) > 745 and math.exp(-float(found[0])) == 0
    assert float(found[0]) == pytest.approx(nats_one_by_one(model, [1, 2], list(range(3, 23))), rel=1e-5)


@pytest.mark.half_precision
def test_scorer_in_half_precision_sums_in_float32():
    model = tiny_gpt2().bfloat16()
    found = ScorerCost(model, pad_token_id=0)([[3, 4, 5]], None, [[1, 2]])
    with torch.no_grad():
        log_p = model(input_ids=torch.tensor([[1, 2, 3, 4, 5]])).logits[0, 1:4].float().log_softmax(-1)
    assert found.tolist() == pytest.approx([-float(log_p[[0, 1, 2], [3, 4, 5]].sum())])


def test_scorer_is_left_as_it_was():
    model = tiny_gpt2(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    expected = nats_one_by_one(model, PROMPTS[0], PREDICTIONS[0])
    model.train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    state, random_state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    found = ScorerCost(model, pad_token_id=0)(PREDICTIONS[:1], None, PROMPTS[:1])
    assert found.tolist() == pytest.approx([expected], rel=1e-5)
    assert not found.requires_grad
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_scorer_refusals():
    model = tiny_gpt2()
    cost = ScorerCost(model, pad_token_id=0)
    fits = cost([[3] * 30], None, [[1] * 2])
    assert fits.isfinite().all()
    for predictions, prompts, message in [
        ([[3], [3]], [[1], []], "prompts must hold a token each, got none in row 1"),
        ([[3]], [[1], [2]], "equally many, got 1 and 2"),
        ([[3]], None, "prompts must be a list of one or more .*, got None"),
        ([[3]], ["a"], "prompts must be lists of token ids, got the text 'a' in row 0"),
        ([[3], [3] * 30], [[1], [1] * 3], "32 positions, got a prompt of 3 tokens and a prediction of 30 in row 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            cost(predictions, None, prompts)
    with pytest.raises(ValueError, match="batch_size must be a whole number from 1 up, got 0"):
        ScorerCost(model, 0, batch_size=0)
    with pytest.raises(ValueError, match="pad_token_id must be a token id, got None"):
        ScorerCost(model, None)
    encoder_decoder = ScorerCost(tiny_seq2seq("bart"), pad_token_id=1)  # each side has 64 positions of its own
    assert encoder_decoder([[3] * 64], None, [[4] * 64]).isfinite().all()
    with pytest.raises(ValueError, match=r"64 positions, got .* prediction of 65 in row 0"):
        encoder_decoder([[3] * 65], None, [[4]])
