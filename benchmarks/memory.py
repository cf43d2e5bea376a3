"""Peak memory of every command at its defaults on small input: the embedded models, 60 lines of six words.

A fresh recurrent model has one symbol for each of some 4,000 words. Training runs for two steps, for after that memory
doesn't grow. Each command is a process of its own, of which the largest resident set counts; torch alone takes some of
it, as `import` says.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ASSETS = Path(__file__).parents[1] / "hf_ebm" / "assets"
NO_REPORT = ["--report_to", "none", "--use_cpu", "--max_steps", "2"]


def commands(folder: Path) -> dict[str, list[str]]:
    """Arguments of `hf-ebm` by a name for each, in an order in which each finds what it reads."""
    texts, pairs, nbest, rows = (
        str(folder / name) for name in ("texts.txt", "pairs.jsonl", "nbest.jsonl", "rows.jsonl")
    )
    found = {
        "sample": ["sample", "--lengths", "6", "--output", str(folder / "samples.jsonl")],
        "sample --input": ["sample", "--input", str(folder / "masked.txt")],
        "score": ["score", "--input", texts],
        "rerank": ["rerank", "--input", nbest],
        "negatives": ["negatives", "--input", texts, "--prefix_tokens", "3", "--output", rows],
        "perplexity": ["perplexity", "--input", texts, "--prefix_tokens", "3"],
        "train energy": ["train", "energy", "--train_file", texts],
        "train energy --objective pll, two words": [
            "train", "energy", "--objective", "pll", "--train_file", str(folder / "two_words.txt"), "--max_steps", "1",
        ],
        "train residual-nce": ["train", "residual-nce", "--train_file", rows],
        "perplexity, residual": [
            "perplexity", "--model", str(folder / "train residual-nce"), "--input", texts, "--prefix_tokens", "3",
            "--max_rows", "4",
        ],
    }  # fmt: skip
    of_pairs = ["--task", pairs, "--max_train_samples", "60"]
    for objective in ("cross-entropy", "scheduled-sampling", "self-normalized", "soft-beam", "mgs", "minimum-risk",
                      "policy-gradient"):  # fmt: skip
        found[f"train {objective}, lstm"] = ["train", objective, *of_pairs, "--model_name_or_path", "lstm"]
    for objective in ("mgs", "minimum-risk", "policy-gradient"):
        model = ["--model_name_or_path", str(ASSETS / "kjv_causal_lm")]
        found[f"train {objective}, embedded causal"] = ["train", objective, *of_pairs, *model]
    for name, arguments in found.items():
        if arguments[0] == "train":
            more = [] if "--max_steps" in arguments else NO_REPORT[-2:]
            arguments += [*NO_REPORT[:-2], *more, "--output_dir", str(folder / name)]
    return found


def write_inputs(folder: Path) -> None:
    """The files that the commands read."""
    clauses = (ASSETS / "kjv_masked_lm" / "held_out.txt").read_text(encoding="utf-8").splitlines()
    verses = (ASSETS / "kjv_causal_lm" / "held_out.txt").read_text(encoding="utf-8").splitlines()
    six = [words[:6] for words in map(str.split, clauses) if len(words) >= 6]
    many = [words[at : at + 6] for words in map(str.split, verses) for at in range(0, len(words) - 5, 6)]
    lines = [" ".join(words) for words in six[:60]]
    (folder / "texts.txt").write_text("\n".join(lines) + "\n")
    (folder / "two_words.txt").write_text("the lord\n")
    (folder / "masked.txt").write_text("\n".join(re.sub(r"\S+ \S+$", "[MASK] [MASK]", line) for line in lines) + "\n")
    records = [{"candidates": lines[at : at + 4]} for at in range(0, 60, 4)]
    (folder / "nbest.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    records = [{"source": " ".join(words[:3]), "target": " ".join(words[3:])} for words in many]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def measure(arguments: list[str]) -> tuple[float, float, int]:
    """`(peak in GiB, seconds, exit code)` of a Python process."""
    started = time.perf_counter()
    with open(os.devnull, "w") as nowhere, tempfile.TemporaryFile("w+") as errors:
        files = [(os.POSIX_SPAWN_DUP2, nowhere.fileno(), 1), (os.POSIX_SPAWN_DUP2, errors.fileno(), 2)]
        pid = os.posix_spawn(sys.executable, [sys.executable, *arguments], os.environ, file_actions=files)
        _, status, usage = os.wait4(pid, 0)
        if status:
            errors.seek(0)
            print("".join(errors.readlines()[-3:]), file=sys.stderr)
    return usage.ru_maxrss / 2**20, time.perf_counter() - started, os.waitstatus_to_exitcode(status)


def table(only: str) -> Iterator[list]:
    """A row for each command whose name has `only` in it."""
    with tempfile.TemporaryDirectory() as name:
        write_inputs(Path(name))
        yield ["import", *measure(["-c", "import hf_ebm, hf_ebm.trainers"])]
        for command, arguments in commands(Path(name)).items():
            if only in command:
                yield [command, *measure(["-m", "hf_ebm", *arguments])]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of the names of the commands to run; default: all")
    rows = []
    for row in table(parser.parse_args().only):
        print(row[0], f"{row[1]:.2f} GiB", file=sys.stderr, flush=True)
        rows.append(row)
    # Imported now: what this process holds when it starts another would count as the other's.
    from benchmarks.common import describe_machine, print_table

    print(describe_machine())
    print_table(["hf-ebm", "peak GiB", "s", "exit code"], rows)


if __name__ == "__main__":
    main()
