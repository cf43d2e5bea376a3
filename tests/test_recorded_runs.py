"""What reproductions showed outlasts the folder that they were made in."""

import json

import pytest

from benchmarks.reproduction import storage
from benchmarks.reproduction.experiment_cache import Decoding, ExperimentCache, RunConfig, Scale
from benchmarks.reproduction.report import Report

pytestmark = pytest.mark.slow

TINY = Scale(32, 40, 1, 1, 1, 1, 1, (1,))
START = RunConfig("stress", "cross-entropy", 1, 1e-3)
RUN = START.then("cross-entropy", 1, 1e-3)


@pytest.fixture
def record(tmp_path, monkeypatch):
    monkeypatch.setattr(storage.Record, "path", tmp_path / "runs.jsonl")
    return tmp_path / "runs.jsonl"


def _scores(experiments, run=RUN):
    return experiments.scores(run, 1, "validation", Decoding())


def test_a_recorded_run_is_not_made_again(tmp_path, record, monkeypatch):
    first, later = (ExperimentCache(TINY, tmp_path / name) for name in ("first", "lost"))
    monkeypatch.setattr(storage, "describe_machine", lambda: "2026-01-01: another")
    found = _scores(first)
    (line,) = record.read_text().splitlines()
    assert json.loads(line)["found"] == found
    assert _scores(later) == found == _scores(first)
    assert not (tmp_path / "lost").exists() and record.read_text().splitlines() == [line]
    # Both trainings count, and where they were made is told.
    assert later.used == first.used and len(later.used) == 2 and min(later.used.values()) > 0
    assert later.machines == {"2026-01-01: another"}
    monkeypatch.setattr(storage, "describe_machine", lambda: "2026-01-02: this")
    _scores(later, START)
    report = Report("name", "title", ["column"], [1], machines=later.machines)
    assert "`, 2026-01-01: another, and 2026-01-02: this, 0 minutes" in report.save(tmp_path, 1.0)
    assert json.loads((tmp_path / "name.json").read_text())["machine"] == "2026-01-01: another, and 2026-01-02: this"


def test_a_model_that_was_lost_is_trained_again_where_it_is_needed(tmp_path, record):
    found = _scores(ExperimentCache(TINY, tmp_path / "first"))
    later = ExperimentCache(TINY, tmp_path / "lost")
    assert len(later.outputs(RUN, 1, "validation", Decoding())) == 40
    record.unlink()
    assert _scores(later) == found


def test_runs_of_another_version_do_not_count_and_half_a_line_is_told(tmp_path, record, monkeypatch):
    experiments = ExperimentCache(TINY, tmp_path / "first")
    _scores(experiments)
    monkeypatch.setattr(storage, "VERSION", storage.VERSION + 1)
    assert storage.Record.get(json.loads(record.read_text())["name"]) is None
    _scores(experiments)
    assert len(record.read_text().splitlines()) == 2
    record.write_text(record.read_text()[:-9])
    with pytest.raises(ValueError, match=r"line 2 of .*runs\.jsonl is not whole .*delete that line"):
        _scores(experiments)


def test_nothing_is_recorded_without_a_file(tmp_path):
    assert storage.Record.path is None
    _scores(ExperimentCache(TINY, tmp_path / "first"))
    assert not list(tmp_path.glob("*.jsonl"))
