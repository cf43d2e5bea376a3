"""What the benchmarks share: models of stated shapes, timing, tables."""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import transformers
from transformers import BertConfig, BertForMaskedLM, PreTrainedModel, XLMRobertaConfig, XLMRobertaForMaskedLM
from transformers.utils import logging


def bert_base() -> PreTrainedModel:
    """Random weights in the shape of bert-base-uncased (12 layers, 768 wide, V = 30,522)."""
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig()).eval()


def xlm_r_base() -> PreTrainedModel:
    """Random weights in the shape of xlm-roberta-base (12 layers, 768 wide, V = 250,002)."""
    torch.manual_seed(0)
    # The embedded tokenizer's ids are used; its pad id is 0.
    config = XLMRobertaConfig(vocab_size=250_002, max_position_embeddings=514, type_vocab_size=1, pad_token_id=0)
    return XLMRobertaForMaskedLM(config).eval()


def seconds(work: Callable[[], object]) -> float:
    """Wall-clock time of one call."""
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def medians(works: dict[str, Callable[[], None]], repeats: int) -> dict[str, float]:
    """Median seconds of each, taken in turns so that a busy moment of the machine meets all of them."""
    for work in works.values():
        work()
    times = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            times[name].append(seconds(work))
    return {name: statistics.median(values) for name, values in times.items()}


def begin_timing(parser: argparse.ArgumentParser, repeats: int = 5) -> argparse.Namespace:
    """Reads the command line of a timing (with --repeats and --threads), sets the threads and prints the machine."""
    parser.add_argument(
        "--repeats", type=int, default=repeats, help="timings of each program, of which the median counts"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print(describe_machine())
    return arguments


def describe_machine() -> str:
    """One line on where the figures come from."""
    card = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    cpu = next((line.split(": ")[1] for line in _cpu_info() if line.startswith("model name")), platform.machine())
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{time.strftime('%Y-%m-%d')}: {cpu.strip()}, {torch.get_num_threads()} threads{card}; {versions}"


def _cpu_info() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def print_table(header: list[str], rows: Iterable[list]) -> None:
    """A Markdown table, each row as soon as it is measured."""
    for row in (header, ["---"] * len(header)):
        print("| " + " | ".join(row) + " |", flush=True)
    for row in rows:
        print("| " + " | ".join(map(_cell, row)) + " |", flush=True)


def _cell(value) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
