"""What the page does, without a page: inputs are checked, chains are watched, kernels compared, lines scored."""

import itertools
import threading

import pytest
import torch
from transformers import EsmTokenizer

from hf_ebm import EnergyModel
from hf_ebm.assets import load_embedded, load_embedded_pronunciation
from hf_ebm.demo.comparison import CHAINS, compare_kernels
from hf_ebm.demo.components import MAX_TOKENS, Examples, Runs, examples_for, read_prompt, token_texts
from hf_ebm.demo.filling import MAX_BLANKS, MAX_WORDS, fill_rows, fill_status, marginals_map, read_fill
from hf_ebm.demo.sampling import (
    BLANK,
    CHAIN_CURVES,
    CHANGED,
    MAX_EPOCHS,
    chain_spans,
    chains_spans,
    curve_frame,
    energy_points,
    later_r_hat,
    read_settings,
    status_line,
    watch_chains,
)
from hf_ebm.demo.scoring import (
    ENERGY_COLORS,
    HEADERS,
    MAX_LINES,
    MAX_REFERENCE,
    as_local,
    check_lines,
    energy_spans,
    read_scan,
    score_lines,
    sort_lines,
    substitutions_map,
    table_rows,
    variant_rows,
)
from hf_ebm.sampling.configuration import sampler_names
from hf_ebm.sampling.convergence import energy_diagnostics
from hf_ebm.scoring.rows import BadLogitsError
from tests.docs.hub_models import HUB_MODELS
from tests.models.tokenizers_for_tests import KINDS, LINES, small_model, small_tokenizer


def small_pair(kind="wordpiece"):
    tokenizer = small_tokenizer(kind)
    return small_model(tokenizer), tokenizer


@pytest.fixture(params=KINDS)
def any_pair(request):
    return small_pair(request.param)


@pytest.fixture(scope="module")
def pair():
    return small_pair()


@pytest.fixture(scope="module")
def raw_pair():
    tokenizer = small_tokenizer("wordpiece")
    return small_model(tokenizer, energy="raw"), tokenizer


def settings_of(prompt, kernel="metropolis_hastings", epochs=6, block_size=1, temperature=1.0, seed=3):
    return read_settings(prompt, kernel, epochs, block_size, temperature, seed)


def watched(pair, text="the ___ sat on [MASK] ___", chains=1, **settings):
    prompt = read_prompt(*pair, text, 0)
    own = settings_of(prompt, **settings) | ({"num_chains": chains} if chains > 1 else {})
    return prompt, own, list(watch_chains(pair[0], prompt, own, threading.Event()))


# --- prompts ---


def test_every_way_to_write_a_blank_is_one_mask(any_pair):
    model, tokenizer = any_pair
    written = [f"the {blank} sat" for blank in ("___", "_______", "[MASK]", "<mask>", tokenizer.mask_token)]
    prompts = [read_prompt(model, tokenizer, text, None) for text in written]
    assert all(torch.equal(prompt.ids, prompts[0].ids) for prompt in prompts)
    assert int(prompts[0].free.sum()) == 1
    assert torch.equal(prompts[0].free, prompts[0].ids == tokenizer.mask_token_id)


def test_what_the_fields_begin_with(tmp_path):
    model, tokenizer = load_embedded()
    own = examples_for(model, tokenizer)
    assert [int(read_prompt(model, tokenizer, text, 0).free.sum()) for text in own.prompts] == [3, 3, 5]
    for text, words in own.fills:
        assert read_fill(model, tokenizer, text, words, "any words", "together", 1).unknown == []
    for group in own.lines:
        lines = score_lines(model, tokenizer, check_lines(model, tokenizer, group))
        assert lines[0].energy == min(line.energy for line in lines)
    phonemes = examples_for(*load_embedded_pronunciation()[:2])
    assert phonemes.prompts[0].startswith("p h o n e") and phonemes.references == ()
    for part in HUB_MODELS["facebook/esm2_t12_35M_UR50D"]():  # of proteins: it has no tokens for words
        part.save_pretrained(tmp_path)
    model, tokenizer = EnergyModel.from_pretrained(tmp_path), EsmTokenizer.from_pretrained(tmp_path)
    own = examples_for(model, tokenizer)
    assert int(read_prompt(model, tokenizer, own.prompts[0], 0).free.sum()) == 2
    assert examples_for(*small_pair()) == Examples()  # as it has no tokens for any


def test_a_length_is_what_generate_makes_of_it(pair):
    prompt = read_prompt(*pair, "", 5)
    settings = settings_of(prompt)
    expected = pair[0].generate(lengths=5, **settings)
    assert torch.equal(pair[0].generate(prompt.ids, **settings).sequences, expected.sequences)
    assert int(prompt.free.sum()) == 5


@pytest.mark.parametrize(
    "text,length,message",
    [
        ("", 0, "nothing to sample"),
        (None, None, "nothing to sample"),
        ("  \n", 0, "nothing to sample"),
        ("the cat", 0, "text has no blanks"),
        ("the __ cat", 0, "text has no blanks"),
        ("the ___", 3, "both given"),
        ("the ___ " + "cat " * 200, 0, "text is too long: it has 204 tokens, at most 128 fit"),
        ("the ___ \ud800", 0, "text holds half of a surrogate pair"),
        ("", -1, "length must be a whole number from 1 to 126, got -1"),
        ("", 2.5, "length must be a whole number from 1 to 126, got 2.5"),
        ("", 10**9, "length must be a whole number from 1 to 126"),
        ("", float("nan"), "length must be a whole number from 1 to 126, got nan"),
        ("", "five", "length must be a whole number from 1 to 126, got 'five'"),
        (7, 0, "text must be a text, got 7"),
        (b"the ___", 0, "text must be a text, got b'the ___'"),
    ],
)
def test_prompts_that_are_refused(pair, text, length, message):
    with pytest.raises(ValueError, match=message):
        read_prompt(*pair, text, length)


def test_a_model_with_fewer_positions_sets_the_limit():
    tokenizer = small_tokenizer("wordpiece")
    model = small_model(tokenizer, positions=12)  # of RoBERTa's kind: one is the padding's
    with pytest.raises(ValueError, match="at most 11 fit"):
        read_prompt(model, tokenizer, "the ___ " + "cat " * 20, 0)
    assert MAX_TOKENS == 128


def test_unknown_characters_are_named(pair):
    assert read_prompt(*pair, "the ___ ☃ sat on ☃ and ☂", 0).unknown == ["☃", "☂"]
    assert read_prompt(*pair, "the ___ sat", 0).unknown == []


@pytest.mark.parametrize(
    "field,value,message",
    [
        ("kernel", "hmc", "kernel must be one of 'metropolis_hastings', 'gibbs', 'mask_predict', got 'hmc'"),
        ("epochs", 0, f"epochs must be a whole number from 1 to {MAX_EPOCHS}, got 0"),
        ("epochs", None, "epochs must be .* got nothing"),
        ("epochs", 10**400, "epochs must be a whole number"),
        ("epochs", float("inf"), "epochs must be .* got inf"),
        ("block_size", 3, r"block size must be a whole number from 1 to 2 \(there are 2 blanks\), got 3"),
        ("temperature", 0, "temperature must be a number from 0.01 to 100, got 0"),
        ("temperature", float("nan"), "temperature must be .* got nan"),
        ("temperature", None, "temperature must be .* got nothing"),
        ("seed", -1, "seed must be a whole number from 0 to 4294967295, got -1"),
        ("seed", 0.5, "seed must be .* got 0.5"),
        ("kernel", ["gibbs"], "kernel must be one of .* got .'gibbs'."),
        ("epochs", "many", "epochs must be .* got 'many'"),
        ("epochs", True, "epochs must be .* got True"),
        ("block_size", [1], "block size must be .* got .1."),
        ("temperature", "hot", "temperature must be .* got 'hot'"),
    ],
)
def test_settings_that_are_refused(pair, field, value, message):
    prompt = read_prompt(*pair, "the ___ ___", 0)
    with pytest.raises(ValueError, match=message):
        settings_of(prompt, **{field: value})


def test_settings_without_effect_are_left_alone(pair):
    prompt = read_prompt(*pair, "the ___ ___", 0)
    assert settings_of(prompt, "mask_predict", block_size=9, temperature=None).keys() == {
        "decoder",
        "num_epochs",
        "seed",
    }
    assert "energy_temperature" not in settings_of(prompt, "gibbs", temperature=-1)


# --- tokens ---


@pytest.mark.parametrize("line", LINES[:5])
def test_the_tokens_texts_make_the_text(any_pair, line):
    _, tokenizer = any_pair
    ids = tokenizer(line, add_special_tokens=False)["input_ids"]
    texts = token_texts(tokenizer, ids)
    assert len(texts) == len(ids) and all(texts)
    if "�" not in "".join(tokenizer.batch_decode([ids[: end + 1] for end in range(len(ids))])):
        assert "".join(text for text in texts if text != "▁") == tokenizer.decode(ids)  # a space that adds nothing


def test_spans_of_a_chain(pair):
    model, tokenizer = pair
    ids = tokenizer("the cat sat")["input_ids"]
    free, changed = [False, False, True, True, False], [False, False, True, False, False]
    spans = chain_spans(model, tokenizer, ids, free, changed)
    assert spans == [("the", None), (" ", None), ("cat", CHANGED), (" ", None), ("sat", BLANK)]
    ids[2] = tokenizer.mask_token_id
    assert ("[MASK]", CHANGED) in chain_spans(model, tokenizer, ids, free, changed)


def test_spans_of_energies(pair):
    ids = pair[1]("the cat sat on", add_special_tokens=False)["input_ids"]
    labels = [label for text, label in energy_spans(pair[1], ids, [0.5, 1.0, 5.9, 60.0]) if text != " "]
    assert labels == list(ENERGY_COLORS)


# --- a chain, watched ---


@pytest.mark.parametrize("kernel,chains", [("metropolis_hastings", 3), ("gibbs", 1)])
def test_what_is_watched_is_what_generate_does(pair, kernel, chains):
    prompt, settings, views = watched(pair, kernel=kernel, chains=chains, epochs=8)
    expected = pair[0].generate(prompt.ids, **settings)
    assert views[0].ids == prompt.ids.tolist() * chains and not any(map(any, views[0].changed))
    assert views[-1].ids == expected.sequences.tolist()
    torch.testing.assert_close(
        torch.tensor(views[-1].energies[1:]).T.double(), expected.trace.energy, atol=1e-4, rtol=0
    )
    assert len(views[-1].energies) == 9  # the start, and eight epochs
    assert torch.equal(views[-1].output.trace.novel_rate, expected.trace.novel_rate)
    for before, after in itertools.pairwise(views):
        differs = torch.tensor(before.ids) != torch.tensor(after.ids)
        assert bool((torch.tensor(after.changed) | ~differs).all())
    assert all(view.output is None for view in views[:-1])
    spans = chains_spans(*pair, views[-1], prompt.free[0].tolist())
    assert "".join(text for text, _ in spans).count("\n") == chains - 1
    frame = curve_frame(kernel, views[-1].energies, 8)
    assert frame.chain[: 9 * chains].tolist() == [str(1 + number // 9) for number in range(9 * chains)]
    assert frame.energy[9 * chains - 1] == views[-1].energies[-1][-1] and frame.energy.notna().sum() == 9 * chains
    assert sorted(set(frame.chain)) == list(CHAIN_CURVES)  # or the plot would keep too few colours
    told = status_line(views[-1], settings)
    assert told.startswith(f"done: epoch 8 of 8 · {'mean ' * (chains > 1)}energy **") and ("R-hat" in told) == (
        chains > 1
    )


def test_r_hat_is_of_the_later_half():
    energies = torch.randn(3, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    energies[:, :10] += torch.arange(3)[:, None] * 50
    assert later_r_hat(energies) == energy_diagnostics(energies[:, 10:]).r_hat < 1.5
    assert later_r_hat(energies[:1]) is None and later_r_hat(energies[:, :7]) is not None
    assert later_r_hat(energies[:, :6]) is None and later_r_hat(energies * 0) is None


def test_a_decoder_has_one_view_and_one_energy(pair):
    prompt, _, views = watched(pair, kernel="mask_predict")
    expected = pair[0].generate(prompt.ids, decoder="mask_predict", num_epochs=6)
    assert views[-1].ids == expected.sequences.tolist()
    assert views[-1].energies == [pytest.approx(expected.energies[0].tolist(), abs=1e-4)]
    assert curve_frame("mask_predict", views[-1].energies, 6).dropna().epoch.tolist() == [0, 6]


def test_a_stopped_chain_has_the_output_so_far(pair):
    prompt = read_prompt(*pair, "the ___ sat on [MASK] ___", 0)
    stop = threading.Event()
    for view in watch_chains(pair[0], prompt, settings_of(prompt, epochs=MAX_EPOCHS), stop):
        if len(view.energies) > 2:
            stop.set()
    done = view.output.trace.energy.shape[1]
    assert 2 <= done < MAX_EPOCHS and len(view.energies) == done + 1


def test_a_chain_that_nobody_watches_ends(pair):
    prompt = read_prompt(*pair, "the ___ sat", 0)
    before = set(threading.enumerate())
    views = watch_chains(pair[0], prompt, settings_of(prompt, epochs=MAX_EPOCHS), stop := threading.Event())
    next(views)
    views.close()
    assert stop.is_set()
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=20)
        assert not thread.is_alive()


def test_errors_of_the_run_arrive(pair):
    tokenizer = pair[1]
    model = small_model(tokenizer)
    model.mlm.lm_head.bias.data.fill_(torch.nan)
    prompt = read_prompt(model, tokenizer, "the ___ sat", 0)
    with pytest.raises(BadLogitsError):
        list(watch_chains(model, prompt, settings_of(prompt), threading.Event()))


def test_a_session_stops_its_own_run():
    runs = Runs()
    with runs.running("mine") as mine, runs.running("yours") as yours:
        runs.stop("mine")
        runs.stop("nobody's")
        assert mine.is_set() and not yours.is_set()
    assert yours.is_set() and not runs._stops


# --- kernels ---


def compared(pair, stop=None, epochs=5, text="the ___ sat on ___"):
    prompt = read_prompt(*pair, text, 0)
    settings = {kernel: settings_of(prompt, kernel, epochs) for kernel in sampler_names()}
    return prompt, settings, list(compare_kernels(pair[0], prompt, settings, stop or threading.Event()))


def test_kernels_side_by_side(pair):
    model = pair[0]
    prompt, settings, results = compared(pair)
    assert [result.kernel for result in results] == list(sampler_names())
    for result, own in zip(results[:2], list(settings.values())[:2], strict=True):
        expected = model.generate(prompt.ids, num_chains=CHAINS, **own)
        assert result.ids == expected.sequences[0].tolist()
        assert result.energy == pytest.approx(float(expected.trace.energy[0, -1]))
        assert result.energies[1:] == pytest.approx(expected.trace.energy.mean(0).tolist())
        assert result.mean_energy == pytest.approx(float(expected.trace.energy[:, 2:].mean()))
        assert result.acceptance_rate == pytest.approx(float(expected.trace.acceptance_rate.mean()))
        assert result.novel_rate == pytest.approx(float(expected.trace.novel_rate.mean()))
    assert results[1].acceptance_rate == 1
    decoded = results[2]
    assert decoded.acceptance_rate is None and decoded.energies == [decoded.energy] == [decoded.mean_energy]
    assert energy_points("mask_predict", decoded.energies, 5) == [(0, decoded.energy), (5, decoded.energy)]
    assert [epoch for epoch, _ in energy_points("gibbs", results[1].energies, 5)] == list(range(6))


def test_energies_are_local_whatever_the_model_samples(raw_pair):
    model = raw_pair[0]
    prompt, _, results = compared(raw_pair)
    local = as_local(model)
    assert model.config.energy == "raw" and local.config.energy == "local" and local.mlm is model.mlm
    for result in results:
        ids = torch.tensor([result.ids])
        with torch.no_grad():
            found = float(local(ids, free_mask=prompt.free).energy)
            assert float(model(ids, free_mask=prompt.free).energy) != pytest.approx(found, abs=0.1)
        assert result.energy == pytest.approx(found, abs=1e-4)


def test_a_stopped_comparison_leaves_the_other_kernels_out(pair):
    stop = threading.Event()
    prompt = read_prompt(*pair, "the ___ sat on ___", 0)
    settings = {kernel: settings_of(prompt, kernel, MAX_EPOCHS) for kernel in sampler_names()}
    timer = threading.Timer(0.3, stop.set)
    timer.start()
    results = list(compare_kernels(pair[0], prompt, settings, stop))
    timer.join()
    assert 1 <= len(results) < 3 and len(results[-1].energies) < MAX_EPOCHS + 1


# --- scores ---


def test_lines_are_scored_and_sorted(pair):
    model, tokenizer = pair
    text = "the cat sat on the mat\n\n  the dog \ncat the ☃ on"
    lines = score_lines(model, tokenizer, check_lines(model, tokenizer, text))
    expected = model.score(["the cat sat on the mat", "the dog", "cat the ☃ on"], tokenizer)
    assert [line.energy for line in lines] == pytest.approx(expected.energy.tolist())
    assert [line.pseudo_perplexity for line in lines] == pytest.approx(expected.pseudo_perplexity.tolist())
    assert [len(line.ids) for line in lines] == expected.num_tokens.tolist()
    assert [line.unknown for line in lines] == [[], [], ["☃"]]
    by_energy, by_token = sort_lines(lines, "energy"), sort_lines(lines, "energy per token")
    order = [lines.index(line) for line in by_energy]
    assert order == model.rerank([[line.text for line in lines]], tokenizer).order[0]
    order = [lines.index(line) for line in by_token]
    assert order == model.rerank([[line.text for line in lines]], tokenizer, length_normalization=1.0).order[0]
    rows = table_rows(by_energy)
    assert [row[0] for row in rows] == [1, 2, 3] and all(len(row) == len(HEADERS) for row in rows)
    assert rows[0][2] == round(by_energy[0].energy, 2)


def test_raw_energies_have_the_local_pseudo_perplexity(raw_pair, pair):
    (raw,), (local,) = (score_lines(*each, ["the cat sat"]) for each in (raw_pair, pair))
    assert raw.energy != pytest.approx(local.energy, abs=0.1)
    assert raw.pseudo_perplexity == pytest.approx(local.pseudo_perplexity, rel=1e-4)


@pytest.mark.parametrize(
    "text,message",
    [
        ("", "nothing to score"),
        (None, "nothing to score"),
        (" \n\t\n", "nothing to score"),
        ("the cat\n" * (MAX_LINES + 1), f"{MAX_LINES + 1} lines were given; this page scores at most {MAX_LINES}"),
        ("the cat\n" + "cat " * 200, "line 2 is too long: it has 202 tokens, at most 128 fit"),
        ("the [MASK]", "line 1 has a blank"),
        ("the cat\n[SEP]", "line 2 has no token that could be scored"),
    ],
)
def test_lines_that_are_refused(pair, text, message):
    with pytest.raises(ValueError, match=message):
        check_lines(*pair, text)


# --- fills ---


def test_fills_of_the_tab_are_those_of_fill(pair):
    model, tokenizer = pair
    order = read_fill(*pair, "the ___ sat on <mask>", " cat, dog,mat,", "different words", "together", 0.5)
    assert order.settings == {
        "reading": "joint", "words": ["cat", "dog", "mat"], "temperature": 0.5, "different": [0, 1]
    }  # fmt: skip
    found = model.fill(order.text, tokenizer, 3, **order.settings)
    rows, best = fill_rows(found), found.fills[0][0]
    assert rows[0] == [" · ".join(best.token_strs), f"{best.probability:.4f}", f"{best.energy:.2f}"] and len(rows) == 3
    cells = marginals_map(found).split("</td>")
    assert len(cells) == 7 and all(f"{word.probability:.2f}" in "".join(cells) for word in found.marginals[0][1])
    assert "exact" in fill_status(found)
    alone = read_fill(*pair, "the ___ ☃", "", "the same word", "each by itself", None)
    assert alone.settings == {"reading": "independent", "words": None} and alone.unknown == ["☃"]
    found = model.fill("the [MASK] sat on [MASK]", tokenizer, 3, method="chains", row_limit=64)
    assert " ± " in fill_rows(found)[0][1] and "R-hat" in fill_status(found)
    found = model.fill("the [MASK] sat on [MASK]", tokenizer, 3, method="candidates", row_limit=8)
    assert f"**{float(found.left_out):.3f}**" in fill_status(found)


@pytest.mark.parametrize(
    "given,message",
    [
        (("the cat", "", "any words", "together", 1), "text must have 1 to"),
        (("___ " * (MAX_BLANKS + 1), "", "any words", "together", 1), f"got {MAX_BLANKS + 1}; more fit under Sample"),
        (("the ___", "a," * (MAX_WORDS + 1), "any words", "together", 1), f"{MAX_WORDS + 1} words were given"),
        (("the ___", 3, "any words", "together", 1), "words must be a text, got 3"),
        (("the ___", "", "none", "together", 1), "the blanks hold must be one of"),
        (("the ___", "", "any words", "joint", 1), "filled must be one of"),
        (("the ___", "", "any words", "together", 0), "temperature must be a number from 0.01 to 100, got 0"),
    ],
)
def test_fills_that_are_refused(pair, given, message):
    with pytest.raises(ValueError, match=message):
        read_fill(*pair, *given)


# --- variants ---


def test_the_heat_map_is_of_all_substitutions():
    model, tokenizer = load_embedded()
    assert read_scan("a1b", "ab:2", "", "joint").variants == ["a1b", "b3a"]  # a digit keeps its place
    scan = read_scan("a b", "abca", "", "masked_marginals")
    assert scan.variants == ["a1b", "a1c", "b2a", "b2c"] and scan.letters == "abc"
    scores = model.score_variants(scan.reference, scan.variants, tokenizer).scores.tolist()
    cells = [part.split(">")[-1] for part in substitutions_map(scan, scores).split("</td>")[:-1]]
    shown = [f"{score:.1f}" for score in scores]
    assert 1.5 < max(map(abs, scores)) < 10  # so that a digit is shown
    assert cells == ["", shown[2], shown[0], "", shown[1], shown[3]]
    best = max(range(4), key=scores.__getitem__)
    assert variant_rows(scan, scores)[0] == [scan.variants[best], f"{scores[best]:+.2f}"]
    listed = read_scan("ab", "ab", "a1b:b2a\n", "joint_log_prob")
    assert listed.variants == ["a1b", "b2a", "a1b:b2a"] and listed.allowed == "ab"
    assert read_scan("ab", "ab", "", "sampled_joint_log_prob").allowed == "ab"
    assert variant_rows(listed, [1.0, 2.0, -3.0]) == [["a1b:b2a", "-3.00"]]


@pytest.mark.parametrize(
    "given,message",
    [
        (("", "ab", "", "joint"), "reference must have 1 to 64 letters, got 0"),
        (("a" * (MAX_REFERENCE + 1), "ab", "", "joint"), "got 65"),
        (("abc", "", "", "joint"), "letters one or more"),
        (("aa", "a1:", "", "joint"), "there is nothing to score"),
        (("a" * 64, "abcdefghij", "", "pseudo_likelihood_ratio"), "would take up to 36,864 masked rows"),
        (("abcd", "abcdefghijk", "a1b:b2a:c3d:d4a", "joint_log_prob"), "would take up to 5,328 masked rows"),
        (("abcd", "ab", "a1b:b2a:c3d:d4a\n" * 2, "sampled_joint_log_prob"), "would take up to 4,108 masked rows"),
        (("abc", "ab", "", "best"), "scheme must be one of"),
        (("abc", "ab", "a1b\n" * 40, "joint"), "40 lines were given"),
    ],
)
def test_scans_that_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        read_scan(*given)


# --- scores, refused ---


def test_sorting_by_something_else_is_refused(pair):
    with pytest.raises(ValueError, match="sort by must be one of 'energy', 'energy per token', got 'length'"):
        sort_lines([], "length")


def test_the_embedded_model_prefers_the_scripture():
    model, tokenizer = load_embedded()
    lines = score_lines(model, tokenizer, ["and light said god let there be", "and god said, let there be light"])
    assert sort_lines(lines, "energy")[0].text == "and god said, let there be light"
