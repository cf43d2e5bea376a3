"""What a reproduction gives: a table of means over seeds, the raw runs, and where and how they were run."""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.common import describe_machine

RESULTS = Path(__file__).parents[1] / "results"


@dataclass
class Report:
    """A table that grows row by row.

    `runs` of a row maps a column to one value for each seed; a cell shows their mean and, in brackets, their standard
    deviation.
    """

    name: str
    title: str
    columns: list[str]
    seeds: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rows: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    raw: dict = field(default_factory=dict)  # what else goes to the JSON: curves, trials
    machines: set[str] = field(default_factory=set)  # of runs that may be of other days; none stands for today's

    def add(self, row: str, runs: dict[str, list[float]]) -> None:
        """Adds a row, or columns to a row."""
        self.rows.setdefault(row, {}).update(runs)

    def finding(self, claim: str, better: tuple[str, str], worse: tuple[str, str]) -> None:
        """Records whether a claim of the paper, that one cell is larger than another, was seen.

        Compared seed by seed: the runs of one seed share their data and, where they have one, their start. A mean
        gain of less than two of its standard errors, either way, is not clear. The sign test's p is two-sided: the
        probability that fair coins part as unevenly; seeds without a difference are left out of it.
        """
        first, second = (self.rows[row][column] for row, column in (better, worse))
        gains = [a - b for a, b in zip(first, second, strict=True)]
        mean, wins = statistics.fmean(gains), sum(gain > 0 for gain in gains)
        spread = statistics.stdev(gains) / len(gains) ** 0.5 if len(gains) > 1 else float("nan")
        if len(gains) < 3:
            verdict = "too few seeds to say"
        else:
            verdict = "not clear" if abs(mean) < 2 * spread else "seen" if mean > 0 else "not seen"
        self.findings.append(
            f"{claim}: {verdict} ({mean:+.2f} ± {spread:.2f} standard error, better in {wins} of {len(gains)} seeds, "
            f"sign test {sign_test(gains):.2g})"
        )

    def markdown(self, command: str, seconds: float) -> str:
        """The table with its notes, findings and origin."""
        lines = [f"# {self.name}: {self.title}", "", "| |" + "|".join(self.columns) + "|"]
        lines.append("|---" * (len(self.columns) + 1) + "|")
        for row, runs in self.rows.items():
            cells = [_cell(runs[column]) if column in runs else "" for column in self.columns]
            lines.append(f"| {row} | " + " | ".join(cells) + " |")
        lines += ["", *(f"{note}\n" for note in self.notes)]
        if self.findings:
            lines += ["What the paper says, and what was seen here:", "", *(f"- {f}" for f in self.findings), ""]
        seeds, took = ", ".join(map(str, self.seeds)), f"{seconds / 60:.0f} minutes"
        lines += [f"Seeds {seeds}. Run by `{command}`, {self.where()}, {took}.", ""]
        return "\n".join(lines)

    def where(self) -> str:
        """Days and machines of the runs."""
        return ", and ".join(sorted(self.machines)) or describe_machine()

    def save(self, folder: Path, seconds: float) -> str:
        """Writes `NAME.md` and `NAME.json`, if anything is new; returns the Markdown.

        Args:
            seconds: what its models took to train.
        """
        folder.mkdir(parents=True, exist_ok=True)
        page, data = (folder / f"{self.name}.{kind}" for kind in ("md", "json"))
        found = {
            "name": self.name, "title": self.title, "seeds": self.seeds, "rows": self.rows, "findings": self.findings,
            "notes": self.notes, **self.raw,
        }  # fmt: skip
        found = json.loads(json.dumps(found))  # as it will be read
        if page.exists() and data.exists() and found.items() <= json.loads(data.read_text(encoding="utf-8")).items():
            return page.read_text(encoding="utf-8")
        text = self.markdown(command(self.name), seconds)
        page.write_text(text, encoding="utf-8")
        origin = {
            "command": command(self.name), "machine": self.where(), "date": time.strftime("%Y-%m-%d"),
            "seconds": round(seconds),
        }  # fmt: skip
        data.write_text(json.dumps(found | origin, indent=1) + "\n", encoding="utf-8")
        return text


def sign_test(differences: list[float]) -> float:
    """Two-sided p of the signs of paired differences, those of 0 left out.

    >>> sign_test([0.3, 0.1, 0.2, 0.4, 0.1])
    0.0625
    """
    positive, negative = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    tail = sum(math.comb(positive + negative, k) for k in range(min(positive, negative) + 1))
    return min(1.0, 2 * tail / 2 ** (positive + negative))


def command(name: str) -> str:
    """The command that makes a table or figure, also where it was one of several."""
    quick = " --quick" if "--quick" in sys.argv else ""
    return f"python benchmarks/reproduce.py {name}{quick} --threads {torch.get_num_threads()}"


def pyplot_without_display():
    """Matplotlib's pyplot, drawing to files alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_figure(folder: Path, name: str, figure, raw: dict) -> Path:
    """Writes `NAME.png` and, with where and how it was run, `NAME.json`; returns the image's path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot_without_display().close(figure)
    text = json.dumps({"command": command(name), "machine": describe_machine(), **raw}, indent=1)
    (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    return path


def _cell(values: list[float]) -> str:
    spread = f" ({statistics.stdev(values):.2f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{spread}"
