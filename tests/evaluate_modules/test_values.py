"""The modules' numbers against values worked out by hand and plain loops."""

import math
import random

import pytest
import torch

from hf_ebm.assets import load_embedded
from tests.conftest import plain_token_energies, tiny_energy_model
from tests.evaluate_modules.conftest import load, scorer
from tests.models.tokenizers_for_tests import small_tokenizer


def plain_edits(source: list[str], target: list[str]) -> int:
    """Wagner and Fischer's table, row by row."""
    above = list(range(len(target) + 1))
    for i, symbol in enumerate(source, 1):
        row = [i]
        for j, other in enumerate(target, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (symbol != other)))
        above = row
    return above[-1]


def random_rows(seed: int, rows: int, longest: int, symbols: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(symbols) for _ in range(draw.randint(1, longest))] for _ in range(rows)]


def test_edit_distance_by_hand():
    found = load("edit_distance").compute(
        predictions=["k i t t e n", "", "a b"], references=["s i t t i n g", ["x y z", "x"], ["a", "a b c"]]
    )
    # Of the last row's references both are one edit away; the longer one counts.
    assert found["edit_distances"] == [3, 1, 1]
    assert found["edit_distance"] == pytest.approx(5 / 3)
    assert found["normalized_edit_distance"] == pytest.approx(5 / (7 + 1 + 3))


def test_edit_distance_against_a_table():
    predictions, first, second = (random_rows(seed, 40, 8, 4) for seed in range(3))
    texts = [[" ".join(map(str, row)) for row in rows] for rows in (predictions, first, second)]
    found = load("edit_distance").compute(
        predictions=texts[0], references=list(map(list, zip(texts[1], texts[2], strict=True)))
    )
    edits, length = [], 0
    for row, *truths in zip(predictions, first, second, strict=True):
        distances = [plain_edits(row, truth) for truth in truths]
        edits.append(min(distances))
        length += max(len(t) for t, distance in zip(truths, distances, strict=True) if distance == min(distances))
    assert found["edit_distances"] == edits
    assert found["edit_distance"] == pytest.approx(sum(edits) / 40)
    assert found["normalized_edit_distance"] == pytest.approx(sum(edits) / length)


def test_symbols_are_what_white_space_separates():
    found = load("edit_distance").compute(predictions=["ab  cd\tef"], references=["ab cd\nxf"])
    assert (found["edit_distances"], found["normalized_edit_distance"]) == ([1], pytest.approx(1 / 3))


def test_phoneme_error_rate_by_hand():
    predictions = ["K AE T", "D AO", "B", ""]
    references = [["K AH T", "K AE T S"], "D AO G", ["P", "B"], ["EY"]]
    # Edits by length: 1/4 (both are one edit away, the longer one counts), 1/3, 0/1, 1/1.
    found = load("phoneme_error_rate").compute(predictions=predictions, references=references)
    assert found == pytest.approx({"phoneme_error_rate": 3 / 9, "word_accuracy": 0.25})


def test_repetition_against_a_loop():
    rows = [*random_rows(0, 60, 20, 2), [], [1, 2, 3], [7] * 100]
    expected = []
    for row in rows:
        seen, again, grams = set(), 0, 0
        for start in range(len(row) - 3):
            gram = (row[start], row[start + 1], row[start + 2], row[start + 3])
            again += gram in seen
            seen.add(gram)
            grams += 1
        expected.append(again / grams if grams else 0.0)
    found = load("repetition").compute(predictions=rows)
    assert found["repetitions"] == pytest.approx(expected, abs=1e-7)
    assert found["repetition"] == pytest.approx(sum(expected) / len(expected), abs=1e-7)
    assert found["repetitions"][-3:] == pytest.approx([0, 0, 96 / 97])


def test_non_termination_against_a_loop():
    rows = [*random_rows(0, 50, 4, 6), []]
    for ends in ([2], [2, 3], [0, 1, 2, 3, 4, 5], [9]):
        open_ended = 0
        for row in rows:
            open_ended += all(token != end for token in row for end in ends)
        found = load("non_termination").compute(predictions=rows, end_id=ends)
        assert found == {"non_termination": pytest.approx(open_ended / 51)}
    one, listed = (load("non_termination").compute(predictions=rows, end_id=end) for end in (2, [2]))
    assert one == listed == load("non_termination").compute(predictions=rows, end_id=torch.tensor([2]))


@pytest.mark.parametrize("end_id", [None, [], "2", 2.0, [2, None], [[2]]])
def test_end_tokens_are_checked(end_id):
    with pytest.raises(ValueError, match=r"end_id must be a token id or a list .*, got "):
        load("non_termination").compute(predictions=[[2]], end_id=end_id)


def test_novel_rate_by_hand():
    chains = [["a", "a", "b", "a", "a"], ["a", "b"], ["", ""]]
    found = load("novel_rate").compute(predictions=chains)
    assert found == {"novel_rate": pytest.approx(3 / 6), "novel_rates": [0.5, 1.0, 0.0]}


def test_novel_rate_is_that_of_the_trace_for_one_proposal_an_epoch():
    model, start = tiny_energy_model(), torch.tensor([[1, 5, 3, 6, 2]])
    out = model.generate(start, num_chains=3, num_epochs=40, seed=0)
    chains = [[" ".join(map(str, ids)) for ids in samples] for samples in out.samples.tolist()]
    found = load("novel_rate").compute(predictions=chains)
    expected = out.trace.novel_rate[:, 1:].mean(1)  # the first sample has none before it
    assert found["novel_rates"] == pytest.approx(expected.tolist())
    assert found["novel_rate"] == pytest.approx(float(expected.mean())) and 0 < found["novel_rate"] < 1


def test_novel_rate_counts_samples_where_the_trace_counts_proposals():
    model, start = tiny_energy_model(), torch.tensor([[1, 3, 3, 3, 3, 3, 3, 2]])
    out = model.generate(start, num_chains=2, num_epochs=40, seed=0)
    chains = [[" ".join(map(str, ids)) for ids in samples] for samples in out.samples.tolist()]
    assert load("novel_rate").compute(predictions=chains)["novel_rate"] > float(out.trace.novel_rate.mean()) + 0.1


TEXTS = ["the cat sat on the mat", "God", "unbelievable un-un ... the dog", "In the beginning"]


def plain_energies(model, tokenizer, texts: list[str]) -> tuple[list[float], list[int]]:
    """Energies of texts from one masked copy at a time, and numbers of scored tokens."""
    terms = []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        scored = [i for i, token in enumerate(ids) if token not in (tokenizer.cls_token_id, tokenizer.sep_token_id)]
        terms.append(plain_token_energies(model, torch.tensor(ids), scored))
    return [sum(own) for own in terms], [len(own) for own in terms]


def test_pseudo_perplexity_against_a_loop():
    energies, counts = plain_energies(**scorer(), texts=TEXTS)
    assert len(set(counts)) > 1
    each = [math.exp(energy / count) for energy, count in zip(energies, counts, strict=True)]
    found = load("pseudo_perplexity").compute(predictions=TEXTS, **scorer())
    assert found["pseudo_perplexities"] == pytest.approx(each, rel=1e-4)
    assert found["mean_pseudo_perplexity"] == pytest.approx(sum(each) / len(each), rel=1e-4)
    assert found["corpus_pseudo_perplexity"] == pytest.approx(math.exp(sum(energies) / sum(counts)), rel=1e-4)


@pytest.mark.parametrize("energy", ["local", "raw"])
def test_energy_gap_against_a_loop(energy):
    references = [TEXTS[1], TEXTS[2], "the log", TEXTS[0]]
    own, others = (plain_energies(**scorer(energy), texts=texts)[0] for texts in (TEXTS, references))
    expected = [mine - other for mine, other in zip(own, others, strict=True)]
    found = load("energy_gap").compute(predictions=TEXTS, references=references, **scorer(energy))
    assert found["energy_gaps"] == pytest.approx(expected, abs=1e-4)
    assert found["mean_energy_gap"] == pytest.approx(sum(expected) / 4, abs=1e-4)
    assert found["win_rate"] == sum(gap > 0 for gap in expected) / 4
    assert 0 < found["win_rate"] < 1 and abs(sum(expected)) > 0.1


def test_minimal_pairs_against_a_loop(energy):
    good = [TEXTS[1], TEXTS[2], TEXTS[2], TEXTS[0]]
    own, others = (plain_energies(**scorer(energy), texts=texts)[0] for texts in (good, TEXTS))
    wins = [float(mine < other) for mine, other in zip(own, others, strict=True)]
    wins[2] = 0.5  # the same text
    columns = dict(predictions=TEXTS, references=good, **scorer(energy))
    found = load("minimal_pairs").compute(**columns, groups=["a", "b", "a", "a"], details=True)
    assert found["accuracy"] == sum(wins) / 4 and found["groups"]["b"]["accuracy"] == wins[1]
    assert found["groups"]["a"]["accuracy"] == (wins[0] + wins[2] + wins[3]) / 3 and found["groups"]["a"]["pairs"] == 3
    assert found["accuracy_low"] <= found["accuracy"] <= found["accuracy_high"]
    assert [pair["energy_good"] for pair in found["pairs"]] == pytest.approx(own, abs=1e-4)
    with pytest.raises(ValueError, match="groups"):
        load("minimal_pairs").compute(**columns, groups=["a"])


def test_an_empty_text_has_energy_0():
    found = load("energy_gap").compute(predictions=["", ""], references=["the cat", ""], **scorer())
    energy = plain_energies(**scorer(), texts=["the cat"])[0][0]
    assert found["energy_gaps"] == [pytest.approx(-energy, abs=1e-4), 0]
    assert found["win_rate"] == 0.25


def test_the_same_tokens_tie_whatever_the_rounding(monkeypatch):
    model, tokenizer = scorer().values()
    score, calls = model.score, []

    def rounded(texts, *arguments, **how):
        calls.append(texts)
        out = score(texts, *arguments, **how)
        out.energy += len(calls) * 1e-6
        return out

    monkeypatch.setattr(model, "score", rounded)
    pairs = dict(predictions=["the cat", "the dog", "God"], references=["The Cat", "the cat", "the dog"])
    found = load("energy_gap").compute(**pairs, model=model, tokenizer=tokenizer)
    assert calls == list(pairs.values())
    first, second, third = found["energy_gaps"]
    assert first == 0 and second and third
    assert found["win_rate"] == (0.5 + (second > 0) + (third > 0)) / 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("model")
    for part in scorer().values():
        part.save_pretrained(where)
    return where


PAIR = dict(predictions=["the cat"], references=["the dog"])
SCORERS = [("pseudo_perplexity", dict(predictions=["the cat"])), ("energy_gap", PAIR)]


@pytest.mark.parametrize(("name", "columns"), SCORERS)
def test_models_by_path_and_by_default(name, columns, folder):
    module, (embedded, tokenizer) = load(name), load_embedded()
    expected = module.compute(**columns, **scorer())
    for model_id in (folder, str(folder)):
        assert module.compute(**columns, model_id=model_id) == expected
    default = module.compute(**columns)
    assert default == module.compute(**columns, model_id="embedded")
    assert default == module.compute(**columns, model=embedded, tokenizer=tokenizer)
    assert default != expected


@pytest.mark.parametrize(("name", "columns"), SCORERS)
def test_refused_models(name, columns):
    model, tokenizer = scorer().values()
    other = small_tokenizer("wordpiece")
    other.mask_token = other.pad_token
    module = load(name, keep_in_memory=True)  # no file is locked while the errors are looked at
    for arguments, message in [
        (dict(model_id="x", model=model, tokenizer=tokenizer), "got model_id and model and tokenizer"),
        (dict(model_id="x", tokenizer=tokenizer), "got model_id and tokenizer"),
        (dict(model=model), "give model_id, or model and tokenizer, or none of these; got model$"),
        (dict(tokenizer=tokenizer), "model must be an EnergyModel, got NoneType"),
        (dict(model=model.mlm, tokenizer=tokenizer), "model must be an EnergyModel, got RobertaForMaskedLM"),
        (dict(model_id=model), "model_id must be a Hub name, a folder or 'embedded', got EnergyModel"),
        (dict(model_id="no-such-model"), "model_id must be .*, got 'no-such-model': .* cannot be loaded"),
        (dict(model=model, tokenizer=load_embedded()[1]), "^predictions: row 0 has a token of id 499"),
        (dict(model=model, tokenizer=other), "^tokenizer: its mask token has id 0, the model's is 4"),
    ]:
        with pytest.raises(ValueError, match=message):
            module.compute(**columns, **arguments)


def test_raw_energies_have_no_pseudo_perplexity():
    with pytest.raises(ValueError, match=r"model must have an energy of log probabilities \('local'\), got 'raw'"):
        load("pseudo_perplexity").compute(predictions=["the cat"], **scorer("raw"))


@pytest.mark.parametrize("text", ["", " "])
def test_a_text_without_tokens_has_no_pseudo_perplexity(text):
    with pytest.raises(ValueError, match=f"predictions must hold a token each, got '{text}' in row 1"):
        load("pseudo_perplexity").compute(predictions=["the cat", text], **scorer())


@pytest.mark.parametrize(("bad", "message"), [("the " * 50, "has 52 tokens"), ("the [MASK]", "holds the mask token")])
@pytest.mark.parametrize("name", ["predictions", "references"])
def test_texts_that_cannot_be_scored_are_named(name, bad, message):
    columns = dict(predictions=["the", "cat"], references=["the", "dog"])
    columns[name] = ["the", bad]
    with pytest.raises(ValueError, match=f"^{name}: row 1 {message}"):
        load("energy_gap").compute(**columns, **scorer())
    if name == "predictions":
        with pytest.raises(ValueError, match=f"^predictions: row 1 {message}"):
            load("pseudo_perplexity").compute(predictions=columns["predictions"], **scorer())


def test_broken_models_are_named():
    model, tokenizer = load_embedded()
    next(model.parameters()).data.fill_(math.nan)
    with pytest.raises(ValueError, match="NaN or infinite logits for predictions: row 0"):
        load("energy_gap").compute(**PAIR, model=model, tokenizer=tokenizer)
