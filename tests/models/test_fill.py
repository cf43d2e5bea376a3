"""`EnergyModel.fill` against energies of every fill, computed one masked position at a time by the inner model."""

import itertools

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hf_ebm import EnergyModel
from hf_ebm.models.energy.configuration_energy import token_roles
from hf_ebm.sampling.configuration import ChainGenerationConfig
from tests.conftest import tiny_mlm
from tests.models.families import VOCAB, tiny_family_model
from tests.models.tokenizers_for_tests import small_model, small_tokenizer

SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
TEXT = "w7 [MASK] w9 w20 [MASK] w8"


def word_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Words w5, w6, … are tokens of these ids."""
    vocabulary = {token: n for n, token in enumerate([*SPECIAL, *(f"w{n}" for n in range(5, size))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    pad, cls, sep, unk, mask = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, cls_token=cls, sep_token=sep, unk_token=unk, mask_token=mask
    )


def model_of(mlm, tokenizer, energy="local") -> EnergyModel:
    return EnergyModel(mlm, energy=energy, **token_roles(tokenizer, mlm.config.vocab_size)).eval()


@torch.no_grad()
def plain_energies(model, rows: torch.Tensor, free: list[int], source=None) -> torch.Tensor:
    """Of rows (N, T), by nothing but the inner model."""
    total = torch.zeros(len(rows), dtype=torch.float64)
    for position in free:
        masked = rows.clone()
        masked[:, position] = model.config.mask_token_id
        if source is None:
            logits = model.mlm(input_ids=masked).logits
        else:
            shifted = model.mlm.prepare_decoder_input_ids_from_labels(masked)
            logits = model.mlm(input_ids=source.expand(len(rows), -1), decoder_input_ids=shifted).logits
        scores = logits[:, position].double()
        scores = scores.log_softmax(-1) if model.config.energy == "local" else scores
        total -= scores.gather(1, rows[:, position, None])[:, 0]
    return total


def distribution(out, row=0) -> dict[tuple, float]:
    return {tuple(map(tuple, fill.tokens)): fill.probability for fill in out.fills[row]}


def total_variation(one: dict, other: dict) -> float:
    return sum(abs(one.get(key, 0) - other.get(key, 0)) for key in one.keys() | other.keys()) / 2


def marginals_of(joint: dict, blanks: int) -> list[dict]:
    found = [{} for _ in range(blanks)]
    for fill, probability in joint.items():
        for own, word in zip(found, fill, strict=True):
            own[word] = own.get(word, 0) + probability
    return found


def assert_is(out, expected: dict[tuple, float], row=0, within=1e-5) -> None:
    """All fills and marginals of an output are those of a distribution."""
    assert total_variation(distribution(out, row), expected) < within
    assert [fill.probability for fill in out.fills[row]] == sorted(distribution(out, row).values(), reverse=True)
    for words, own in zip(out.marginals[row], marginals_of(expected, len(out.marginals[row])), strict=True):
        assert total_variation({tuple(word.tokens): word.probability for word in words}, own) < within


def normalized(fills: list[tuple], energies: torch.Tensor, temperature=1.0) -> dict[tuple, float]:
    return dict(zip(fills, (-energies / temperature).softmax(0).tolist(), strict=True))


@pytest.mark.parametrize("family", ["bert", "roberta", "esm", "albert", "bart"])
def test_families_with_context_constraints_and_further_energies(family, energy):
    tokenizer = word_tokenizer(VOCAB)
    model = model_of(tiny_family_model(family), tokenizer, energy)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    source = tokenizer("w30 w31 w32", return_tensors="pt").input_ids if family == "bart" else None
    fills = [((a,), (b,)) for a, b in itertools.product((5, 40, 77), (40, 6, 77, 90)) if a != b]
    rows = ids.repeat(len(fills), 1)
    rows[:, [2, 5]] = torch.tensor([[a[0], b[0]] for a, b in fills])
    liking = lambda ids: (ids[:, 2] - ids[:, 5]).double() / 50  # noqa: E731
    energies = plain_energies(model, rows, [2, 5], source) + 2 * liking(rows)
    out = model.fill(
        TEXT, tokenizer, 100, words=[["w5", "w40", "w77"], ["w40", "w6", "w77", "w90"]], different=[0, 1],
        extra_energies=(2, liking), temperature=0.7, encoder_texts=None if source is None else ["w30 w31 w32"],
    )  # fmt: skip
    assert_is(out, normalized(fills, energies, 0.7))
    assert out.method == ["exact"] and out.num_masked_rows == 3 + 4
    assert float(out.log_partition[0]) == pytest.approx(float((-energies / 0.7).logsumexp(0)), abs=1e-4)
    assert [fill.energy for fill in out.fills[0]] == pytest.approx(energies.sort().values.tolist(), abs=1e-4)
    best = out.fills[0][0]
    assert best.sequence == f"w7 {best.token_strs[0]} w9 w20 {best.token_strs[1]} w8"


@pytest.fixture
def small():
    """A model of eleven words, and all fills of two blanks with their energies."""
    tokenizer = word_tokenizer(16)
    model = model_of(tiny_mlm(16, scale=0.2), tokenizer)
    ids = tokenizer("w7 [MASK] w9 [MASK]", return_tensors="pt").input_ids
    fills = [((a,), (b,)) for a, b in itertools.product(range(5, 16), repeat=2)]
    rows = ids.repeat(len(fills), 1)
    rows[:, [2, 4]] = torch.tensor(fills)[..., 0]
    return model, tokenizer, ids, fills, plain_energies(model, rows, [2, 4])


def test_the_whole_support_of_texts_and_of_ids(small):
    model, tokenizer, ids, fills, energies = small
    out = model.fill(["w7 [MASK] w9 [MASK]", "[MASK] w5"], tokenizer, 200)
    assert_is(out, normalized(fills, energies))
    assert out.num_masked_rows == 2 * 11 + 1 and out.left_out.tolist() == [0, 0]
    padded = torch.cat([torch.zeros_like(ids[:, :2]), ids], 1)
    again = model.fill(padded, tokenizer, 200, attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]]))
    assert again.fills == out.fills[:1]


def test_equal_blanks_and_a_pattern(small):
    model, tokenizer, _, fills, energies = small
    which = [n for n, (a, b) in enumerate(fills) if a == b]
    out = model.fill("w7 [MASK] w9 [MASK]", tokenizer, 200, equal=[0, 1])
    assert_is(out, normalized([fills[n] for n in which], energies[which]))
    which = [n for n, (a, b) in enumerate(fills) if b[0] in (10, 11)]
    out = model.fill("w7 [MASK] w9 [MASK]", tokenizer, 200, pattern=r"w9 w1[01]$")
    assert_is(out, normalized([fills[n] for n in which], energies[which]))


def test_one_blank_is_the_masked_conditional_by_every_reading(small):
    model, tokenizer, ids, _, _ = small
    ids[0, 4] = 9
    with torch.no_grad():
        logits = model.mlm(input_ids=ids).logits[0, 2].double()
    expected = dict(zip([((n,),) for n in range(5, 16)], logits[5:].softmax(0).tolist(), strict=True))
    for reading in ("joint", "independent", "sequential"):
        out = model.fill("w7 [MASK] w9 w9", tokenizer, 11, reading=reading)
        assert_is(out, expected) and out.num_masked_rows == 1


def test_readings_that_are_cut_to_candidates_know_what_they_leave_out(small):
    model, tokenizer, _, _, _ = small
    for reading in ("independent", "sequential"):
        whole = distribution(model.fill("w7 [MASK] w9 [MASK]", tokenizer, 200, reading=reading))
        out = model.fill("w7 [MASK] w9 [MASK]", tokenizer, 200, reading=reading, method="candidates", row_limit=6)
        cut = distribution(out)
        assert sum(whole.values()) == pytest.approx(1) and all(abs(whole[key] - cut[key]) < 1e-5 for key in cut)
        assert float(out.left_out[0]) == pytest.approx(1 - sum(cut.values()), abs=1e-6)


def test_candidate_sets_estimate_what_they_leave_out(small):
    model, tokenizer, _, fills, energies = small
    whole = normalized(fills, energies)
    out = model.fill("w7 [MASK] w9 [MASK]", tokenizer, 200, method="candidates", row_limit=12)
    assert out.method == ["candidates"] and len(out.fills[0]) == 36
    missing = 1 - sum(whole[key] for key in distribution(out))
    assert 0.02 < missing < 0.5
    assert abs(float(out.left_out[0]) - missing) < 3 * float(out.left_out_error[0]) < 0.5
    # Relative to each other their probabilities are exact; of all fills they have their share.
    shown = {key: probability / sum(distribution(out).values()) for key, probability in distribution(out).items()}
    assert total_variation(shown, {key: whole[key] / (1 - missing) for key in shown}) < 1e-5
    assert sum(distribution(out).values()) == pytest.approx(1 - float(out.left_out[0]), abs=1e-6)


def test_chains_have_the_marginals_with_an_error(small):
    model, tokenizer, _, fills, energies = small
    words = [[f"w{n}" for n in range(5, 15)], [f"w{n}" for n in range(6, 16)]]
    which = [n for n, (a, b) in enumerate(fills) if a[0] < 15 and b[0] > 5 and a != b]
    expected = normalized([fills[n] for n in which], energies[which], 0.5)
    settings = dict(words=words, different=[0, 1], temperature=0.5, row_limit=3_000, seed=2)
    out = model.fill("w7 [MASK] w9 [MASK]", tokenizer, 200, method="chains", **settings)
    assert out.method == ["chains"] and out.r_hat[0] < 1.2
    assert distribution(out).keys() <= expected.keys()
    for words, own in zip(out.marginals[0], marginals_of(expected, 2), strict=True):
        assert sum(word.probability for word in words) == pytest.approx(1)
        for word in words:
            assert abs(word.probability - own[tuple(word.tokens)]) < 3 * word.error + 1e-4
            assert word.error < 0.1
    assert total_variation(distribution(out), expected) < 0.15


def test_chains_of_one_blank_have_its_distribution(small):
    model, tokenizer, *_ = small
    found, expected = (
        distribution(model.fill("w7 [MASK]", tokenizer, 5, method=method, row_limit=300, seed=1))
        for method in ("chains", "exact")
    )
    assert all(found[fill] == pytest.approx(expected[fill], abs=0.05) for fill in expected.keys() & found.keys())
    assert len(expected.keys() & found.keys()) > 2


def test_generation_settings_of_the_model_say_nothing_of_fills(small, monkeypatch):
    """Neither of those that are listed nor of chains."""
    model, tokenizer, *_ = small
    given = dict(row_limit=300, seed=1)
    before = [model.fill("w7 [MASK]", tokenizer, 5, method=method, **given) for method in ("chains", "exact")]
    own = dict(replica_temperatures=[1.0, 3.0], target_rhat=1.001, max_rows=9_999, num_epochs=400, burn_in=300)
    own |= dict(suppress_tokens=[tokenizer.convert_tokens_to_ids("w9")], protected_positions=[0], proposal_top_k=2)
    monkeypatch.setattr(model, "generation_config", ChainGenerationConfig(**own))
    after = [model.fill("w7 [MASK]", tokenizer, 5, method=method, **given) for method in ("chains", "exact")]
    assert [distribution(out) for out in after] == [distribution(out) for out in before]
    assert after[0].num_masked_rows == before[0].num_masked_rows


def test_a_method_is_chosen_by_rows_and_by_what_is_left_out(small):
    model, tokenizer, _, _, _ = small
    sharp = (1.0, lambda ids: 9.0 * (ids[:, [2, 4]] > 6).sum(1))
    chosen = [
        model.fill("w7 [MASK] w9 [MASK]", tokenizer, row_limit=limit, extra_energies=extra).method[0]
        for limit, extra in ((22, None), (12, sharp), (12, None))
    ]
    assert chosen == ["exact", "candidates", "chains"]


def substituted(model, tokenizer, text: str, words: list[tuple[str, ...]], temperature=1.0) -> dict[tuple, float]:
    """Of texts with words in place of their masks, energies of the tokens that the words are."""
    parts, found, energies = text.split(tokenizer.mask_token), [], []
    for own in words:
        ids, spans = list(tokenizer(parts[0])["input_ids"][:-1]), []
        for word, part in zip(own, parts[1:], strict=True):
            pieces = tokenizer(word, add_special_tokens=False)["input_ids"]
            spans.append(list(range(len(ids), len(ids) + len(pieces))))
            ids += pieces + tokenizer(part, add_special_tokens=False)["input_ids"]
        ids.append(tokenizer.sep_token_id)
        found.append(tuple(tuple(ids[at] for at in span) for span in spans))
        energies.append(plain_energies(model, torch.tensor([ids]), [at for span in spans for at in span]))
    return normalized(found, torch.cat(energies), temperature)


WORDS = ["cat", "heaven", "unbelievable", "dog", "mat"]


@pytest.mark.parametrize("rules", [{}, {"equal": [0, 1]}, {"different": [0, 1]}, {"pieces": (1, 2)}])
def test_words_of_several_pieces(rules):
    tokenizer = small_tokenizer("wordpiece")
    model, text = small_model(tokenizer), "the [MASK] sat on the [MASK]."
    counts = {word: len(tokenizer(word, add_special_tokens=False)["input_ids"]) for word in WORDS}
    assert len(set(counts.values())) > 2
    words = [
        (one, other)
        for one, other in itertools.product(WORDS, repeat=2)
        if ("equal" not in rules or one == other)
        and ("different" not in rules or one != other)
        and ("pieces" not in rules or max(counts[one], counts[other]) <= 2)
    ]
    out = model.fill(text, tokenizer, 100, words=WORDS, **rules)
    assert_is(out, substituted(model, tokenizer, text, words))
    assert out.fills[0][0].sequence.startswith("the ") and " sat on the " in out.fills[0][0].sequence


def test_words_have_the_space_that_their_place_gives_them():
    """Masks of RoBERTa's tokenizers take up the space to their left, so it is part of what fills them."""
    tokenizer = small_tokenizer("bytes")
    tokenizer.add_special_tokens({"mask_token": AddedToken("<mask>", lstrip=True, special=True)})
    model = small_model(tokenizer)
    for text in ("the <mask> sat on the <mask>", "un<mask> sat on the <mask>"):
        out = model.fill(text, tokenizer, words=["cat", "dog", "able"])
        expected = [text.replace("<mask>", "{}").format(*fill.token_strs) for fill in out.fills[0]]
        assert [fill.sequence for fill in out.fills[0]] == expected and len(set(expected)) == 9
    # A token may also be named with its mark.
    assert model.fill("the <mask> sat", tokenizer, words=["Ġthe"]).fills[0][0].sequence == "the the sat"
    assert (
        small_model(small_tokenizer("wordpiece"))
        .fill("the [MASK] sat", small_tokenizer("wordpiece"), words=["##t"])
        .fills[0][0]
        .sequence
        == "thet sat"
    )


def test_a_word_of_one_or_two_pieces():
    """Whose first piece begins a word and whose second goes on, out of the whole vocabulary."""
    tokenizer = small_tokenizer("wordpiece")
    model, support = small_model(tokenizer), set(range(len(tokenizer)))
    support -= {*tokenizer.all_special_ids}
    later = {n for n in support if tokenizer.convert_ids_to_tokens(n).startswith("##")}
    ids = tokenizer("the [MASK] sat", return_tensors="pt").input_ids
    place = int((ids[0] == tokenizer.mask_token_id).nonzero())
    fills, energies = [], []
    for own in (list(itertools.product(support - later)), list(itertools.product(support - later, later))):
        rows = torch.cat(
            [ids[:, :place].repeat(len(own), 1), torch.tensor(own), ids[:, place + 1 :].repeat(len(own), 1)], 1
        )
        fills += [(one,) for one in own]
        energies.append(plain_energies(model, rows, list(range(place, place + len(own[0])))))
    assert_is(model.fill("the [MASK] sat", tokenizer, 10_000, pieces=(1, 2)), normalized(fills, torch.cat(energies)))


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"texts": ["w7 [MASK]", "w7 w8"]}, "row 1 holds no mask token"),
        ({"texts": torch.tensor([[1, 7, 2]])}, "row 0 holds no mask token"),
        ({"words": []}, "words must be a list"),
        ({"words": [["w7"], []]}, "words: blank 1 must have a list"),
        ({"words": [["w7"], None, None]}, "entries for 3 blanks, row 0 has 2"),
        ({"words": [["w7"], ["w8", "queen"]]}, "'queen' of row 0, blank 1 has no tokens"),
        ({"words": ["[SEP]"]}, r"'\[SEP\]' of row 0, blank 0"),
        ({"words": ["w7"], "pieces": 2}, "none of row 0, blank 0 has 2 to 2 pieces"),
        ({"pieces": (2, 1)}, "pieces must be a number, a pair"),
        ({"pieces": [1, 0]}, "pieces: blank 1 must have a number"),
        ({"pieces": (1, 20)}, "pieces: row 0 could be laid out in 400 ways"),
        ({"pieces": 20}, "row 0 has 44 tokens"),
        ({"equal": [0, 2]}, "equal names blank 2, row 0 has 2"),
        ({"different": [0, 0]}, "different must be a list of two different numbers"),
        ({"equal": [0, 1], "words": [["w7"], ["w8"]]}, "equal: row 0 has blanks that no word"),
        ({"equal": [0, 1], "different": [0, 1]}, "no fill of row 0 is allowed"),
        ({"equal": [0, 1], "method": "chains"}, "row 0 doesn't let them"),
        ({"pieces": [6, 8], "method": "exact"}, "which is more than this machine's"),
        ({"pattern": "("}, "pattern is no regular expression"),
        ({"pattern": "queen"}, "no fill of row 0 is allowed"),
        ({"reading": "best"}, "reading must be one of"),
        ({"method": "best"}, "method must be one of"),
        ({"reading": "independent", "temperature": 0.5}, "have no effect with reading='independent'"),
        ({"temperature": 0}, "temperature must be a number above 0"),
        ({"top_k": 0}, "top_k must be a whole number from 1 up"),
        ({"encoder_texts": ["w7"]}, "has no encoder"),
        ({"attention_mask": torch.ones(1, 3)}, "attention_mask was given with texts"),
    ],
)
def test_what_cannot_be_filled_is_refused(small, settings, message):
    model, tokenizer, _, _, _ = small
    with pytest.raises(ValueError, match=message):
        model.fill(**{"texts": "w7 [MASK] w9 [MASK]", "tokenizer": tokenizer, **settings})
