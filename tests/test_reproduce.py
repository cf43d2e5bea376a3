"""The reproduction scripts: what they list, what a report says, and a table run at a tiny size."""

import itertools
import json
import math
import re
import runpy
import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, EarlyStoppingCallback

from benchmarks.reproduce import TABLES
from benchmarks.reproduction import (
    chapter_6,
    completion,
    conditional,
    conditional_figures,
    diagnostics,
    experiment_cache,
    figure_3_1,
    long_outputs,
    parameter_search,
    phonemes,
    residual,
    residual_models,
    residual_runs,
    storage,
    tasks,
)
from benchmarks.reproduction.chapter_6 import EnergyCache, EnergyScale
from benchmarks.reproduction.completion import CompletionCache, CompletionScale
from benchmarks.reproduction.conditional import ConditionalCache, ConditionalScale
from benchmarks.reproduction.experiment_cache import TRIAL_SEED, Decoding, ExperimentCache, RunConfig, Scale
from benchmarks.reproduction.report import Report, sign_test
from benchmarks.reproduction.residual_runs import ResidualCache, ResidualScale
from benchmarks.reproduction.tasks import TASKS, Task, detokenized, in_pieces
from hf_ebm.assets import KJV_MASKED_LM, held_out_verses, load_embedded_causal
from hf_ebm.data.cmudict_tasks import join_words
from hf_ebm.data.conditional import encode_conditional
from hf_ebm.data.metrics import transcription_scores
from hf_ebm.objectives.completions import completion_log_probs
from tests.seq2seq_families import tiny_seq2seq

pytestmark = pytest.mark.slow

TINY = Scale(32, 40, 1, 1, 1, 1, 1, (1, 2))


def test_everything_is_listed(monkeypatch, capsys):
    script = Path(__file__).parents[1] / "benchmarks" / "reproduce.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--list"])
    monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])  # as of a script
    runpy.run_path(str(script), run_name="__main__")
    listed = capsys.readouterr().out
    wanted = ["3.1", "3.2", "4.1", "4.2", "5.1", "5.2", "5.3", "5.4", "5.5", "5.6"]
    wanted += ["6.1", "6.2", "6.3", "6.4", "6.5", "6.6", "figure-3.1", "figure-6.1", "figures-6.2-6.3-6.4"]
    assert re.findall(r"^thesis-(\S+)", listed, re.M) == wanted
    wanted = ["1", "4", "6", "7", "figure-4", "figures-1-2-3"]
    assert re.findall(r"^mgs-(\S+)", listed, re.M) == wanted

    assert re.findall(r"^residual-(\S+)", listed, re.M) == ["1", "scale", "figure-scale", "figures-1-2-3"]


def test_a_report_compares_seed_by_seed(tmp_path):
    report = Report("name", "title", ["column"], [1, 2, 3])
    report.add("a", {"column": [3.0, 5.0, 4.0]})
    report.add("b", {"column": [2.0, 4.5, 3.0]})
    report.add("c", {"column": [1.0, 9.0, 4.0]})
    report.finding("a above b", ("a", "column"), ("b", "column"))
    report.finding("b above a", ("b", "column"), ("a", "column"))
    report.finding("c above a", ("c", "column"), ("a", "column"))
    seen, not_seen, unclear = report.findings
    assert seen.startswith("a above b: seen (+0.83")
    assert not_seen.startswith("b above a: not seen (-0.83")
    assert unclear.startswith("c above a: not clear (+0.67")
    text = report.save(tmp_path, 0.0)
    assert "| a | 4.00 (1.00) |" in text
    raw = json.loads((tmp_path / "name.json").read_text())
    assert raw["rows"]["c"]["column"] == [1.0, 9.0, 4.0] and raw["seeds"] == [1, 2, 3]
    # It keeps its date until something is new.
    (tmp_path / "name.json").write_text(json.dumps(raw | {"date": "1999-01-01"}))
    assert report.save(tmp_path, 5.0) == text and "1999-01-01" in (tmp_path / "name.json").read_text()
    report.add("d", {"column": [1.0, 2.0, 3.0]})
    assert "| d |" in report.save(tmp_path, 5.0) and "1999-01-01" not in (tmp_path / "name.json").read_text()
    assert raw["command"].startswith("python benchmarks/reproduce.py name")


@pytest.fixture(scope="module")
def experiments(tmp_path_factory):
    """Keeps what it trained, so tables with the same runs in them share these; other tables below are of two seeds."""
    return ExperimentCache(replace(TINY, seeds=(1,)), tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize(
    "name", ["thesis-3.2", "thesis-4.1", "thesis-5.1", "thesis-5.4", "mgs-4", "room", "rewards-g2p-t5"]
)
def test_a_table_runs(name, experiments):
    report = Report(name, TABLES[name].title, TABLES[name].columns)
    TABLES[name].fill(experiments, report)
    assert all(set(runs) <= set(report.columns) for runs in report.rows.values())
    assert all(len(values) == 1 for runs in report.rows.values() for values in runs.values())
    filled = {column for runs in report.rows.values() for column in runs}
    assert filled == set(report.columns)


@pytest.fixture(scope="module")
def completion_folder(tmp_path_factory):
    """The table and the figures share what they train."""
    return tmp_path_factory.mktemp("completions")


@pytest.fixture
def tiny_completions(monkeypatch) -> CompletionScale:
    """Trains on held-out verses: the text itself comes from a Debian package."""
    monkeypatch.setattr(completion, "load_kjv_verses", lambda folder: held_out_verses())
    monkeypatch.setattr(parameter_search, "ALPHAS", (0.1, 1.0))
    scale = CompletionScale(4, 4, 1, 8, (1,))
    monkeypatch.setattr(parameter_search, "QUICK_COMPLETION", scale)
    return scale


def test_a_table_of_completions_runs(tiny_completions, completion_folder):
    experiments = CompletionCache(tiny_completions, completion_folder)
    report = Report("mgs-1", TABLES["mgs-1"].title, TABLES["mgs-1"].columns, [1])
    TABLES["mgs-1"].fill(experiments, report)
    rows = {row: runs for row, runs in report.rows.items() if row != "Human"}
    assert all(set(runs) == set(report.columns) for runs in rows.values())
    assert all(len(values) == 1 for runs in rows.values() for values in runs.values())
    mean = report.rows["Human"]["Avg. len"][0]
    verses = [row["labels"] for row in experiments.rows("test")]
    assert mean == pytest.approx(sum(sum(label != -100 for label in row) for row in verses) / 4)
    assert report.rows["Human"]["Nonterm"] == [0.0] and report.rows["Human"]["Edit"] == [0.0]


def test_figures_of_the_search_in_training(tmp_path, tiny_completions, completion_folder):
    parameter_search.draw_training(tmp_path, True, completion_folder)
    assert (tmp_path / "mgs-figures-1-2-3.png").stat().st_size > 10_000
    curves = json.loads((tmp_path / "mgs-figures-1-2-3.json").read_text())["curves"]
    assert all(len(run) == 1 for lines in curves.values() for runs in lines.values() for run in runs)


@pytest.mark.filterwarnings("ignore:std")  # of one seed
def test_the_table_and_figure_of_energies_run(tmp_path, monkeypatch):
    tiny = EnergyScale((40,), 60, (40,), 2, 2, (1, 2), chapter_6.FEW_PHONEMES)
    monkeypatch.setattr(chapter_6, "QUICK_ENERGY", replace(tiny, seeds=(1,)))
    monkeypatch.setattr(phonemes, "load_phonemes", cache(phonemes.load_phonemes))
    report = Report("thesis-6.1", "title", TABLES["thesis-6.1"].columns, [1, 2])
    TABLES["thesis-6.1"].fill(EnergyCache(tiny, tmp_path), report)
    pronunciations = report.rows.pop("phoneme")
    assert {len(values) for values in pronunciations.values()} == {1} and len(pronunciations) == 6
    assert list(report.rows) == ["p-40", "h-40", "h-40+"]
    for runs in report.rows.values():
        assert set(runs) == set(report.columns)
        for objective in ("LL", "PLL", "MLM"):  # nothing falls below the entropy
            assert all(a > b for a, b in zip(runs[f"NLL {objective}"], runs["true"], strict=True))
    chapter_6.draw_projection(tmp_path / "figures", True, tmp_path)
    assert (tmp_path / "figures" / "thesis-figure-6.1.png").stat().st_size > 10_000
    raw = json.loads((tmp_path / "figures" / "thesis-figure-6.1.json").read_text())
    assert set(raw["palindromes"]["KL"]) == {"40"}


def test_tables_and_figures_of_conditional_generation_run(tmp_path, monkeypatch):
    tiny = ConditionalScale(2, 2, 2, 1, (1, 2))
    monkeypatch.setattr(conditional_figures, "QUICK_CONDITIONAL", tiny)
    experiments = ConditionalCache(tiny, tmp_path)
    for name in ("thesis-6.2", "thesis-6.5", "thesis-6.6", "blocks", "annealing"):
        report = Report(name, "title", TABLES[name].columns, [1, 2])
        TABLES[name].fill(experiments, report)
        assert {column for runs in report.rows.values() for column in runs} == set(report.columns)
        assert all(len(values) == 2 for runs in report.rows.values() for values in runs.values())
    run = experiments.run(conditional.Sampling())
    assert all(torch.tensor(run[name]).shape == (2, 2) for name in conditional.BY_EPOCH)
    raw = experiments.run(conditional.Sampling("raw", conditional.annealed("raw", 0.02).options))
    assert 0 < torch.tensor(raw["energy"]).mean() < 50  # local energies, also of chains that sample the raw one
    drawings = (conditional_figures.draw_epochs, conditional_figures.draw_correlation)
    figures = [draw(tmp_path / "f", True, tmp_path) for draw in drawings]
    assert all(path.stat().st_size > 10_000 for path in figures)
    found = json.loads((tmp_path / "f" / "energy-and-metric.json").read_text())
    assert found["degenerate Gibbs"]["samples"] == len(experiments.run(conditional.gibbs())["samples"]["word"])


def test_reported_energies_and_errors_are_those_of_the_samples(tmp_path):
    """The last epoch's numbers again, from the texts; for raw chains, whose local energies come from elsewhere."""
    experiments = ConditionalCache(ConditionalScale(3, 2, 2, 1, (1, 2)), tmp_path)
    for kind in ("masked", "encoder_decoder"):
        sampling = conditional.Sampling("raw", (), "validation", kind)
        run, words = experiments.run(sampling), experiments.words("validation")
        model, tokenizer, _ = conditional.embedded(kind, "raw")
        lengths = [len(target.split()) for target in words["target"]]
        out = model.generate_from_sources(
            words["source"], tokenizer, lengths=lengths, num_chains=2, num_epochs=2, seed=conditional.RANDOM_SEED
        )
        local, _, _ = conditional.embedded(kind, "local")
        for chain in range(2):
            texts = [own[chain] for own in out.texts]
            pairs = Dataset.from_dict({"source": words["source"], "target": texts})
            rows = encode_conditional(pairs, tokenizer, kind == "encoder_decoder")
            found = [
                float(local.score_ids(**{name: torch.tensor([values]) for name, values in row.items()}).sum())
                for row in rows
            ]
            assert run["energy"][chain][-1] == pytest.approx(sum(found) / 3, rel=1e-4)
            error = transcription_scores(texts, words["references"])["phoneme_error_rate"]
            assert run["PER"][chain][-1] == pytest.approx(100 * error) == pytest.approx(run["final"]["PER"][chain])


def test_losses_of_a_known_energy_are_exact():
    """For the energy -log p of the language itself, the likelihood is the entropy."""
    language = chapter_6.palindromes(chapter_6.SYMBOLS, chapter_6.LENGTH)
    sequences = torch.tensor(language.sequences)
    energies = -torch.tensor(language.log_probs).view((chapter_6.SYMBOLS,) * chapter_6.LENGTH)
    nats = chapter_6.exact.negative_log_likelihoods(energies, sequences)
    weights = torch.tensor(language.log_probs).exp()
    assert float((weights * nats).sum()) == pytest.approx(language.entropy, rel=1e-12)


@pytest.fixture
def residual_experiments(tmp_path, monkeypatch):
    """Trains on held-out verses, as above, from small models in place of the embedded ones."""
    embedded, tokenizer = load_embedded_causal()
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_inner": 16}
    small = AutoModelForCausalLM.from_config(type(embedded.config)(**{**embedded.config.to_dict(), **sizes}))
    monkeypatch.setattr(residual_runs, "load_embedded_causal", lambda: (small.eval(), tokenizer))
    config = AutoConfig.from_pretrained(KJV_MASKED_LM, hidden_size=16, intermediate_size=16, num_attention_heads=2)
    config.num_hidden_layers, config.layer_types = 1, config.layer_types[:1]
    AutoModelForMaskedLM.from_config(config).save_pretrained(tmp_path / "masked")
    monkeypatch.setattr(residual_runs, "KJV_MASKED_LM", tmp_path / "masked")
    tiny = ResidualScale(32, 16, 1, 6, 8, 1, 8, 4, 1, (1,))
    monkeypatch.setattr(residual, "SCALED_EPOCHS", 1)
    monkeypatch.setattr(residual, "TIMES", (1, 2))
    monkeypatch.setattr(residual_runs, "load_kjv_verses", lambda folder: held_out_verses())
    monkeypatch.setattr(residual, "QUICK_RESIDUAL", tiny)
    for module in (residual, residual_runs):
        monkeypatch.setattr(module, "MAX_NEW_TOKENS", 6)
    return ResidualCache(tiny, tmp_path)


def test_the_table_and_figures_of_residual_models_run(residual_experiments, tmp_path):
    report = Report("residual-1", "title", TABLES["residual-1"].columns, [1])
    TABLES["residual-1"].fill(residual_experiments, report)
    assert list(report.rows) == list(residual.KINDS)
    for name, runs in report.rows.items():
        assert set(runs) == set(report.columns) - (set() if "joint" in name else {"ESS, %"})
        for split in ("validation", "test"):
            assert len(runs[f"{split} lower"]) == 1
            for low, high in zip(runs[f"{split} lower"], runs[f"{split} upper"], strict=True):
                assert low <= high and (low < high) == ("joint" in name)
    assert report.rows[residual.BASE]["gain, nats a verse"] == [0.0]
    # The harness agrees with the library's own evaluation of the base model.
    rows = residual_experiments.rows("test")
    pairs = [[torch.tensor(row[name]) for row in rows] for name in ("prefix_ids", "continuation_ids")]
    nats = -completion_log_probs(residual_experiments.base, *pairs, 0).sum() / sum(map(len, pairs[1]))
    assert report.rows[residual.BASE]["test lower"][0] == pytest.approx(math.exp(nats), rel=1e-4)
    residual.draw(tmp_path / "figures", True, tmp_path)
    assert (tmp_path / "figures" / "residual-figures-1-2-3.png").stat().st_size > 10_000
    raw = json.loads((tmp_path / "figures" / "residual-figures-1-2-3.json").read_text())
    assert len(raw["positions (figure 1)"]["gain"]["low"]) <= 20
    assert set(raw["log probabilities (figure 3)"]) == {"base LM", "joint BIT"}
    scaled = Report("residual-scale", "title", residual.SCALE_COLUMNS)
    TABLES["residual-scale"].fill(residual_experiments, scaled)
    assert len(scaled.rows) == 6 and scaled.seeds == [1]
    residual.draw_scale(tmp_path / "figures", True, tmp_path)
    starts = Report("starts-verses", "title", TABLES["starts-verses"].columns)
    TABLES["starts-verses"].fill(residual_experiments, starts)
    for name, runs in starts.rows.items():
        assert runs["gain"][0] == pytest.approx(runs["loss"][0] - runs["trained on"][0]) and 1 < runs["loss"][0] < 9, (
            name
        )


def test_a_deepened_model_starts_as_the_model(residual_experiments):
    ids = torch.tensor([residual_experiments.rows("test")[0]["prefix_ids"]])
    deep = residual_models.deepened(residual_experiments.embedded, 8).eval()
    assert len(deep.transformer.h) == 9
    expected = residual_experiments.embedded(input_ids=ids).logits
    torch.testing.assert_close(deep(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_the_hard_objective_jumps_where_the_soft_one_is_smooth():
    """Twice as many points halve the steps of a mildly soft curve, and leave those of the hard one."""
    model = tiny_seq2seq("lstm fixed").eval()
    ids = torch.tensor([[5, 6, 7, 4, 2], [7, 7, 4, 6, 2]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    generator = torch.Generator().manual_seed(0)
    direction = [
        torch.randn(p.shape, generator=generator, dtype=p.dtype) * p.std().detach() for p in model.parameters()
    ]
    before = [parameter.clone() for parameter in model.parameters()]
    curves = figure_3_1.objective_along_line(model, batch, direction, torch.linspace(-0.5, 0.5, 61))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    (hard, hard_apart), (soft, soft_apart) = (
        [max(abs(a - b) for a, b in pairwise(curves[name][::step])) for step in (1, 2)]
        for name in ("hard argmax", "soft, α = 1")
    )
    assert hard > 0.9 * hard_apart and soft < 0.6 * soft_apart and hard > 10 * soft


def test_the_figure_of_the_objectives_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(figure_3_1, "QUICK", Scale(120, 20))
    monkeypatch.setattr(figure_3_1, "QUICK_POINTS", 5)
    figure_3_1.draw(tmp_path, True, tmp_path)
    assert (tmp_path / "thesis-figure-3.1.png").stat().st_size > 10_000
    raw = json.loads((tmp_path / "thesis-figure-3.1.json").read_text())
    assert len(raw["largest_jump"]) == 4 and {len(curve) for curve in raw["curves"].values()} == {5}


def test_runs_are_kept_and_told_apart(tmp_path):
    experiments = ExperimentCache(TINY, tmp_path)
    run = RunConfig("stress", "cross-entropy", 1, 1e-3)
    first = experiments.model(run, 1)
    stamp = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("model.safetensors")}
    again = ExperimentCache(TINY, tmp_path).model(run, 1)
    assert stamp == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("model.safetensors")}
    assert all((a == b).all() for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert any((a != b).any() for a, b in zip(first.parameters(), experiments.model(run, 2).parameters(), strict=True))


def test_a_stopped_training_goes_on_to_the_same_model(tmp_path, monkeypatch):
    """Stopped in its third epoch: the others are not trained again, and model and curve are those of a whole run."""
    scale = Scale(32, 40, 4, 4, seeds=(1,))
    run = RunConfig("stress", "self-normalized", 4, 1e-2, patience=4, options=(("log_z_weight", 0.0),))
    whole = ExperimentCache(scale, tmp_path / "whole")
    calls = []

    class Stopped(EarlyStoppingCallback):
        def on_evaluate(self, args, state, control, **kwargs):
            calls.append(state.epoch)
            if len(calls) == 3:
                raise KeyboardInterrupt
            super().on_evaluate(args, state, control, **kwargs)

    whole.model(run, 1)
    monkeypatch.setattr(experiment_cache, "EarlyStoppingCallback", Stopped)
    parts = ExperimentCache(scale, tmp_path / "parts")
    with pytest.raises(KeyboardInterrupt):
        parts.model(run, 1)
    (folder,) = (tmp_path / "parts").glob("*.unfinished")
    (folder / "checkpoint-999").mkdir()  # as one that was being written
    parts.model(run, 1)
    assert calls == [1, 2, 3, 3, 4, 4]  # two epochs; the third twice, the fourth, and the best at last
    curves = [
        [log["eval_loss"] for log in experiments.training_logs(run, 1) if "eval_loss" in log]
        for experiments in (whole, parts)
    ]
    assert curves[0] == curves[1] and len(curves[0]) == 5 and curves[0][-1] == min(curves[0])
    pairs = zip(whole.model(run, 1).parameters(), parts.model(run, 1).parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not list((tmp_path / "parts").rglob("checkpoint-*"))


def test_settings_are_chosen_on_validation_data_alone(tmp_path, monkeypatch):
    experiments = ExperimentCache(replace(TINY, trials=3), tmp_path)
    runs = RunConfig("stress", "cross-entropy", 1, 1e-3).varied(learning_rate=(1e-3, 2e-3), weight_decay=(0.0, 0.1))
    assert [(run.learning_rate, dict(run.options)["weight_decay"]) for run in runs[1:3]] == [(1e-3, 0.1), (2e-3, 0.0)]
    asked, accuracies = [], dict(zip(runs, (1.0, 3.0, 2.0, 4.0), strict=True))

    def scores(run, seed, split, decoding):
        asked.append((seed, split))
        return {"accuracy": accuracies[run]}

    monkeypatch.setattr(experiments, "scores", scores)
    assert experiments.chosen(runs, Decoding(), "accuracy") == runs[1]  # the fourth is one trial too many
    assert asked == [(TRIAL_SEED, "validation")] * 3 and TRIAL_SEED not in Scale().seeds
    assert experiments.trials[0]["validation"] == [1.0, 3.0, 2.0] and experiments.trials[0]["chosen"] == 1
    # What trains on from a start has shorter trials; the run itself is as long as it is.
    searches = runs[0].then("soft-beam", 7, 1e-3).varied(learning_rate=(1e-3, 2e-3))
    accuracies = {replace(run, epochs=1): accuracy for run, accuracy in zip(searches, (2.0, 5.0), strict=True)}
    assert experiments.chosen(searches, Decoding(), "accuracy") == searches[1]


def test_what_cannot_be_gone_on_with_is_told(tmp_path, monkeypatch):
    storage.check_folder(tmp_path)
    storage.check_folder(tmp_path)  # this version's own
    assert storage.kept(tmp_path / "a.json", lambda: 3) == 3
    monkeypatch.setattr(storage.Deadline, "at", 0.0)
    assert storage.kept(tmp_path / "a.json", lambda: 4) == 3
    for compute in (storage.kept, lambda path, _: storage.kept_run(path, "run", lambda work: 1 / 0)):
        with pytest.raises(storage.OutOfTime):
            compute(tmp_path / "b.json", lambda: 1 / 0)
    (tmp_path / "a.json").write_text('{"half')
    with pytest.raises(ValueError, match=r"a\.json is not whole .*delete it"):
        storage.kept(tmp_path / "a.json", lambda: 4)
    monkeypatch.setattr(storage.Deadline, "at", math.inf)
    tensors = storage.kept(tmp_path / "a.pt", lambda: {"a": torch.arange(300)})
    assert tensors["a"].tolist() == list(range(300))
    (tmp_path / "a.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:900])
    with pytest.raises(ValueError, match=r"a\.pt is not whole .*delete it"):
        storage.kept(tmp_path / "a.pt", lambda: 4)
    (tmp_path / "version.json").write_text("1")
    with pytest.raises(ValueError, match=r"work_dir must hold runs of version .*got version 1"):
        storage.check_folder(tmp_path)
    (tmp_path / "version.json").unlink()  # as the first version left it
    with pytest.raises(ValueError, match="got version 1"):
        storage.check_folder(tmp_path)


def test_errors_after_an_error_and_by_vowel():
    """A plain loop over positions; a label that is missing is wrong, consonants have none."""
    gold = ["- 1 0 - 0", "1 - 0", "0 1 0 2"]
    forced = ["- 1 0 - 1", "1 - 0", "0 1 0 2"]
    own = ["- 0 0 - 1", "1 - 0", "1 1 1"]
    rows = [[text.split() for text in texts] for texts in (gold, forced, own)]
    wrong: dict[str, list[bool]] = {name: [] for name in diagnostics.EXPOSURE_COLUMNS[:4]}
    right: dict[str, list[bool]] = {place: [] for place in diagnostics.VOWELS}
    for truths, with_gold, with_own in zip(*rows, strict=True):
        with_own = [*with_own, "missing"][: len(truths)]
        vowels, seen = [at for at, label in enumerate(truths) if label != "-"], False
        for number, at in enumerate(vowels):
            errors = with_gold[at] != truths[at], with_own[at] != truths[at]
            for place in (0, 2) if seen else (0,):
                for name, error in zip(diagnostics.EXPOSURE_COLUMNS[place : place + 2], errors, strict=True):
                    wrong[name].append(error)
            place = 0 if number == 0 else 2 if number == len(vowels) - 1 else 1
            right[diagnostics.VOWELS[place]].append(not errors[1])
            seen = seen or errors[1]
    found = diagnostics.exposure(*rows)
    expected = {name: 100 * sum(errors) / len(errors) for name, errors in wrong.items()}
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert found["exposure"] == found[diagnostics.OWN_AFTER] - found[diagnostics.FORCED_AFTER] > 0
    places = diagnostics.accuracy_by_vowel(rows[0], rows[2])
    assert places == pytest.approx({place: 100 * sum(flags) / len(flags) for place, flags in right.items()})


def test_forced_outputs_are_those_of_one_symbol_at_a_time(experiments):
    """A model's symbol after a gold prefix, from its logits for that prefix alone."""
    run = RunConfig("stress", "cross-entropy", 1, 1e-3)
    found = experiments.forced_outputs(run, 1, "validation")
    model, task = experiments.model(run, 1), experiments.task("stress")
    for row in (0, 7):
        encoded, expected = task.encoded["validation"][row], []
        for at in range(len(encoded["labels"]) - 1):
            decoder_ids = torch.tensor([[model.config.decoder_start_token_id, *encoded["labels"][:at]]])
            logits = model(input_ids=torch.tensor([encoded["input_ids"]]), decoder_input_ids=decoder_ids).logits
            expected.append(int(logits[0, -1].argmax()))
        assert found[row].split() == task.tokenizer.convert_ids_to_tokens(expected)


def test_the_sign_test_counts_coins():
    coins = list(itertools.product((-1.0, 1.0), repeat=5))
    for differences in ([0.2, 0.1, 0.3, -0.1, 0.4], [0.1, 0.2, 0.1, 0.1, 0.1], [-0.1, -0.2, 0.3, 0.1, -0.4]):
        uneven = abs(sum(math.copysign(1, d) for d in differences))
        expected = sum(abs(sum(coin)) >= uneven for coin in coins) / len(coins)
        assert sign_test(differences) == sign_test([*differences, 0.0]) == expected


def test_a_table_of_long_outputs_runs(tmp_path, monkeypatch):
    rows = [(f"uno {i % 7}.", f"one {i % 7}.") for i in range(40)]
    verses = Dataset.from_list([{"source": source, "target": target} for source, target in rows])
    splits = {"train": verses, "validation": verses.select(range(8)), "test": verses.select(range(8))}
    monkeypatch.setattr(tasks, "load_verse_pairs", lambda max_words: DatasetDict(splits))
    monkeypatch.setattr(tasks, "PIECES", 40)
    report = Report("long", "title", TABLES["long-translation"].columns, [1])
    experiments = ExperimentCache(replace(TINY, held_out=8, seeds=(1,)), tmp_path)
    TABLES["long-translation"].fill(experiments, report)
    assert all(set(runs) == {*long_outputs.COLUMNS, long_outputs.NGRAMS} for runs in report.rows.values())
    assert {"MGS", "minimum risk", long_outputs.GLOBAL_NORMALIZED} <= set(report.rows)


def test_words_that_train_lacks_are_made_of_its_pieces(monkeypatch):
    texts = {"train": ["abc abc", "abc"], "validation": ["ab"], "test": ["abc"]}
    splits = {name: Dataset.from_dict({"source": own, "target": own[::-1]}) for name, own in texts.items()}
    monkeypatch.setattr(tasks, "load_verse_pairs", lambda max_words: DatasetDict(splits))
    monkeypatch.setattr(tasks, "PIECES", 7)
    task = Task("translation", 2, 1)
    assert task.texts["train"]["target"][:] == ["▁abc", "▁abc ▁abc"] and task.texts["validation"]["target"] == ["▁ab"]
    ids = task.encoded["validation"][0]["labels"]
    assert detokenized(task.tokenizer.decode(ids, skip_special_tokens=True)) == "ab"


def test_pieces_give_their_text_back():
    texts = ["uno dos, tres.", "¿quién es? “sí”"]
    splits = DatasetDict(train=Dataset.from_dict({"source": texts, "target": texts[::-1]}))
    pieces = in_pieces(splits, 60)["train"]
    assert [detokenized(text) for text in pieces["source"]] == texts


def test_phrases_are_the_next_words():
    words = TASKS["g2p"].load()["validation"].select(range(40))
    phrases = join_words(DatasetDict(validation=words), 9, 12)["validation"]
    left, at = list(words), 0
    for phrase in phrases:  # a plain loop: drop words until the phrase begins, then take its own
        while not phrase["source"].startswith(left[at]["source"]):
            at += 1
        taken = 1
        while len(" ".join(word["target"] for word in left[at : at + taken]).split()) < 9:
            taken += 1
        own = left[at : at + taken]
        assert phrase["source"] == " ".join(word["source"] for word in own)
        assert phrase["target"] == " ".join(word["target"] for word in own) == phrase["references"][0]
        assert len(phrase["references"]) == math.prod(len(word["references"]) for word in own)
        assert 9 <= len(phrase["target"].split()) <= 12
        at += taken
    assert len(phrases) > 10
