"""Scores of texts against plain loops, over three kinds of tokenizers; refusals that name the row."""

import io
import math
from pathlib import Path

import datasets
import pytest
import torch

from hf_ebm.scoring.head import PositionLogits
from tests.conftest import plain_token_energies
from tests.models.tokenizers_for_tests import KINDS, small_model, small_tokenizer

TEXTS = [
    "the cat sat on the mat",
    "x",
    "",
    "   the   cat \t sat  ",
    "سلام على الأرض",
    "😀 the 👩‍👩‍👧 cat",
    "!!! ??? --- ''' \"the\" ... ;;",
    "Donaudampfschifffahrt 天地玄黄",
    "unbelievable " * 8,
    "the cat sat on the mat",
]


@pytest.fixture(params=KINDS)
def pair(request):
    tokenizer = small_tokenizer(request.param)
    return small_model(tokenizer), tokenizer


def scored_positions(tokenizer, ids: list[int]) -> list[int]:
    special = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
    return [i for i, token in enumerate(ids) if token not in special]


def test_values_equal_each_text_alone_one_position_at_a_time(pair, energy):
    model, tokenizer = pair
    model.config.energy = energy
    found = model.score(TEXTS, tokenizer)
    assert found.energy.shape == (len(TEXTS),)
    for row, text in enumerate(TEXTS):
        ids = torch.tensor(tokenizer(text)["input_ids"])
        expected = plain_token_energies(model, ids, scored_positions(tokenizer, ids.tolist()))
        assert found.token_energies[row] == pytest.approx(expected, abs=1e-4)
        assert float(found.energy[row]) == pytest.approx(sum(expected), abs=1e-4)
        assert sum(found.word_energies[row]) == pytest.approx(sum(expected), abs=1e-4)
        assert len(found.tokens[row]) == len(expected) == int(found.num_tokens[row])
    assert float(found.energy[2]) == 0.0
    if energy == "local":
        perplexity = (found.energy / found.num_tokens).exp()
        torch.testing.assert_close(found.pseudo_perplexity, perplexity, equal_nan=True)
        total = float((found.energy.sum() / found.num_tokens.sum()).exp())
        assert found.corpus_pseudo_perplexity == pytest.approx(total)
    else:
        assert found.pseudo_perplexity is None
        with pytest.raises(ValueError, match="local energy only"):
            found.corpus_pseudo_perplexity  # noqa: B018


def test_any_container_of_rows_gives_the_same_rows(pair, tmp_path):
    model, tokenizer = pair
    texts = [text for text in TEXTS if "\n" not in text]
    expected = model.score(texts, tokenizer).energy
    column = datasets.Dataset.from_dict({"text": texts})["text"]
    (tmp_path / "texts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    for given in (
        tuple(texts),
        (text for text in texts),
        column,
        io.StringIO("\n".join(texts) + "\n"),
        Path(tmp_path / "texts.txt"),
    ):
        assert torch.equal(model.score(given, tokenizer).energy, expected)
    assert model.score("the cat", tokenizer).energy.shape == (1,)
    assert model.score([], tokenizer).energy.shape == (0,)


def test_words_follow_the_tokenizers_word_ids(pair):
    model, tokenizer = pair
    text = "Donaudampfschifffahrt und 天地玄黄, the cat"
    found = model.score([text], tokenizer)
    ids = tokenizer(text)
    groups = {}
    for position, word in enumerate(ids.word_ids(0)):
        if word is not None:
            groups.setdefault(word, []).append(position)
    assert len(found.words[0]) == len(groups)
    offset = 1  # the cls token
    for word, energy, positions in zip(found.words[0], found.word_energies[0], groups.values(), strict=True):
        assert energy == pytest.approx(sum(found.token_energies[0][p - offset] for p in positions), abs=1e-5)
        assert word.strip() in text
    assert "Donaudampfschifffahrt" in [word.strip() for word in found.words[0]]


def test_context_contributes_nothing(pair):
    model, tokenizer = pair
    prefixes, suffixes = ["the dog and", "", "in the"], ["", "on the log", "sat"]
    texts = ["the cat", "the cat sat", "mat"]
    found = model.score(texts, tokenizer, prefixes=prefixes, suffixes=suffixes)
    for row in range(3):
        before = f"{prefixes[row]} " if prefixes[row] else ""
        after = f" {suffixes[row]}" if suffixes[row] else ""
        batch = tokenizer(before + texts[row] + after, return_offsets_mapping=True)
        first, last = len(before), len(before) + len(texts[row])
        mine = [i for i, (a, b) in enumerate(batch["offset_mapping"]) if a < b and max(a, first) < min(b, last)]
        expected = plain_token_energies(model, torch.tensor(batch["input_ids"]), mine)
        assert found.token_energies[row] == pytest.approx(expected, abs=1e-4)
        assert "".join(found.words[row]).replace(" ", "") == texts[row].replace(" ", "")


def test_variants_by_hand(pair):
    """Each variant against a loop that masks what it says it masks."""
    model, tokenizer = pair
    text = "unbelievable Donaudampfschifffahrt the cat sat"
    batch = tokenizer(text)
    ids = torch.tensor(batch["input_ids"])
    words, positions = batch.word_ids(0), scored_positions(tokenizer, ids.tolist())

    def term(masked: list[int], read: int) -> float:
        row = ids.clone()[None]
        row[0, masked] = tokenizer.mask_token_id
        with torch.no_grad():
            return -float(model.mlm(input_ids=row).logits[0, read].log_softmax(-1)[ids[read]])

    later = {p: [q for q in positions if words[q] == words[p] and q >= p] for p in positions}
    beside = {p: positions[i % 3 :: 3] for i, p in enumerate(positions)}
    expected = {
        "exact": [term([p], p) for p in positions],
        "within_word_l2r": [term(later[p], p) for p in positions],
        "stride": [term(beside[p], p) for p in positions],
        "unmasked": [term([], p) for p in positions],
    }
    for variant, values in expected.items():
        found = model.score([text, "the"], tokenizer, masking=variant, stride=3)
        assert found.token_energies[0] == pytest.approx(values, abs=1e-4)
        assert found.masking == variant
    assert expected["within_word_l2r"] != pytest.approx(expected["exact"], abs=1e-3)


def test_the_constructors_variant_holds():
    tokenizer = small_tokenizer("wordpiece")
    text = ["unbelievable Donaudampfschifffahrt"]
    chosen = small_model(tokenizer, masking="within_word_l2r").score(text, tokenizer)
    explicit = small_model(tokenizer).score(text, tokenizer, masking="within_word_l2r")
    assert chosen.masking == "within_word_l2r" and torch.equal(chosen.energy, explicit.energy)


def test_a_pad_token_added_later_changes_nothing():
    tokenizer = small_tokenizer("wordpiece")
    model = small_model(tokenizer)
    before = model.score(TEXTS, tokenizer).energy
    tokenizer.add_special_tokens({"pad_token": "[NEWPAD]"})
    assert torch.equal(model.score(TEXTS, tokenizer).energy, before)


@pytest.mark.parametrize(
    "texts,message",
    [
        (["fine", "the cat " * 80], r"row 1 has \d+ tokens, the model has positions for 129"),
        (["fine", "the [MASK] sat"], "row 1 holds the mask token"),
        (["fine", None], "row 1 must be a string, got None"),
        (["fine", b"bytes"], "row 1 must be a string"),
        (["fine", "bad \ud800 surrogate"], "row 1 holds half of a surrogate pair"),
    ],
)
def test_rows_that_cannot_be_scored_are_named_before_any_work(texts, message, rows_run):
    tokenizer = small_tokenizer("wordpiece")
    model = small_model(tokenizer)
    with pytest.raises(ValueError, match=message):
        model.score(texts, tokenizer)
    assert not rows_run


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"masking": "fast"}, "masking must be one of"),
        ({"stride": 0, "masking": "stride"}, "stride must be"),
        ({"prefixes": ["a"]}, "prefixes has 1 rows, texts has 2"),
        ({"suffixes": ["a", "b", "c"]}, "suffixes has 3 rows"),
        ({"encoder_texts": ["a", "b"]}, "has no encoder to take"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    tokenizer = small_tokenizer("wordpiece")
    with pytest.raises(ValueError, match=message):
        small_model(tokenizer).score(["the cat", "sat"], tokenizer, **arguments)


def test_ids_score_like_texts():
    tokenizer = small_tokenizer("wordpiece")
    model = small_model(tokenizer)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt", padding_side="left")
    found = model.score_ids(batch["input_ids"], batch["attention_mask"]).double().sum(1)
    torch.testing.assert_close(found, model.score(TEXTS, tokenizer).energy, rtol=1e-5, atol=1e-4)


def test_unknown_tokens_are_counted():
    tokenizer = small_tokenizer("wordpiece")
    scores = small_model(tokenizer).score(["the cat", "the ☃ sat ☃☃"], tokenizer, unknown_tokens="ignore")
    assert scores.num_unknown.tolist() == [0, sum(token == "[UNK]" for token in scores.tokens[1])]
    assert scores.num_unknown[1] >= 2


def test_reranking_combines_scores_weight_and_length():
    tokenizer = small_tokenizer("wordpiece")
    model = small_model(tokenizer)
    lists = [["the cat sat", "the", "cat the sat on"], ["the dog", "dog the"]]
    base = [[-1.0, -2.0, -3.0], [-0.5, -0.1]]
    found = model.rerank(lists, tokenizer, base_scores=base, weight=0.3, length_normalization=0.5)
    for texts, own, scores, order, best in zip(lists, base, found.scores, found.order, found.best, strict=True):
        single = [model.score(text, tokenizer) for text in texts]
        expected = [b - 0.3 * float(s.energy) / float(s.num_tokens) ** 0.5 for b, s in zip(own, single, strict=True)]
        assert scores == pytest.approx(expected, abs=1e-4)
        assert order == sorted(range(len(texts)), key=lambda i: -expected[i]) and int(best) == order[0]
    found = model.rerank([["", "the cat", "[SEP]", "cat the"], [""]], tokenizer, base_scores=[[9.0, 0, 9, 0], [1.0]])
    assert found.order[0][2:] == [0, 2] and found.order[1] == [0]  # nothing is said against a text without tokens
    assert found.scores[0][0] == found.scores[0][2] == found.scores[1][0] == -math.inf
    with pytest.raises(ValueError, match="candidates: list 1 must be a list of at least one text"):
        model.rerank([["a"], []], tokenizer)
    with pytest.raises(ValueError, match="base_scores must have one score per candidate"):
        model.rerank(lists, tokenizer, base_scores=[[0.0], [0.0, 0.0]])


def test_encoder_decoder_models_score_given_their_context():
    from tests.models.test_families import wrap

    model = wrap("bart")
    ids = torch.tensor([[1, 7, 9, 11, 2]])
    contexts = torch.tensor([[5, 6, 7]]), torch.tensor([[8, 9, 10]])
    values = [float(model.score_ids(ids, encoder_input_ids=context).sum()) for context in contexts]
    assert values[0] != pytest.approx(values[1], abs=1e-3)
    encoded = []
    model.mlm.get_encoder().register_forward_hook(lambda *arguments: encoded.append(1))
    ids, sources = ids.repeat(4, 1), torch.cat([contexts[1], contexts[0], contexts[1], contexts[1]])
    found = model.score_ids(ids, encoder_input_ids=sources).sum(1).tolist()
    assert found == pytest.approx([values[1], values[0], values[1], values[1]]) and len(encoded) == 2
    with pytest.raises(ValueError, match="is an encoder-decoder, its energy is conditional"):
        model.score_ids(ids)


@pytest.mark.parametrize(
    "text", ["a  b   c", " ", "  ", " lead", "tail  ", "你好 世界", "the dog \n\n dog", "ﬁne naïve é"]
)
def test_tokens_of_spaces_count(text):
    """Byte-level tokenizers trim spaces off their character spans; their tokens are part of the text all the same."""
    tokenizer = small_tokenizer("bytes")
    model = small_model(tokenizer)
    ids = torch.tensor(tokenizer(text)["input_ids"])
    expected = plain_token_energies(model, ids, scored_positions(tokenizer, ids.tolist()))
    assert model.score([text], tokenizer).token_energies[0] == pytest.approx(expected, abs=1e-4)
    inside = model.score([text], tokenizer, prefixes=["the"], suffixes=["end"])
    alone = len(tokenizer.tokenize(text))
    assert abs(int(inside.num_tokens) - alone) <= 1  # the join may merge one space of the text into its neighbour


def test_contexts_may_hold_masks_and_texts_may_not():
    tokenizer = small_tokenizer("wordpiece")
    model = small_model(tokenizer)
    assert model.score(["the cat"], tokenizer, prefixes=["a [MASK]"]).energy.isfinite().all()
    with pytest.raises(ValueError, match="row 0 holds the mask token"):
        model.score(["the [MASK]"], tokenizer, prefixes=["a"])
    with pytest.raises(ValueError, match="mask token at scored position 1"):
        model.score_ids(torch.tensor([[2, 4, 7, 3]]))


def test_another_models_tokenizer_is_refused():
    tokenizer = small_tokenizer("wordpiece")
    model = small_model(tokenizer)
    other = small_tokenizer("wordpiece")
    other.add_tokens(["zebra"])
    with pytest.raises(ValueError, match="row 1 has a token of id"):
        model.score(["cat", "zebra"], other)
    model.config.mask_token_id = 7
    with pytest.raises(ValueError, match="its mask token has id 4, the model's is 7"):
        model.score(["cat"], tokenizer)


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"candidates": ["abc"]}, "list 0 must be a list of at least one text"),
        ({"candidates": [["a"], [3]]}, "list 1 must be a list"),
        ({"candidates": [["a", "b"]], "base_scores": [[0.0, float("nan")]]}, "list 0 must hold finite numbers"),
        ({"candidates": [["a"], ["b"]], "base_scores": [[0.0]]}, "one score per candidate"),
        ({"candidates": [["a"]], "weight": float("nan")}, "weight must be a finite number"),
    ],
)
def test_bad_lists_are_not_reranked(arguments, message):
    tokenizer = small_tokenizer("wordpiece")
    with pytest.raises(ValueError, match=message):
        small_model(tokenizer).rerank(tokenizer=tokenizer, **arguments)


def test_bad_logits_name_the_text(monkeypatch):
    tokenizer = small_tokenizer("wordpiece")
    model = small_model(tokenizer)
    bad = tokenizer.convert_tokens_to_ids("cat")
    together = PositionLogits.together

    def spoiled(self, passes):
        bad_rows = [(one.input_ids == bad).any(1)[:, None, None] for one in passes]
        pairs = zip(together(self, passes), bad_rows, strict=True)
        return [logits.masked_fill(rows, torch.nan) for logits, rows in pairs]

    monkeypatch.setattr(PositionLogits, "together", spoiled)
    with pytest.raises(ValueError, match="NaN or infinite logits for texts: row 2, position"):
        model.score(["the dog", "dog", "the cat sat on"], tokenizer)
