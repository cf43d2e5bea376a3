"""What the commands share: the model's arguments, and reading and writing records."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd
import torch
from transformers import AutoTokenizer, HfArgumentParser

from hf_ebm.assets import load_embedded
from hf_ebm.models.energy import EnergyModel

EMBEDDED = "embedded"


@dataclass
class ModelArguments:
    """Which model, and where it runs."""

    model: str = field(default=EMBEDDED, metadata={"help": "Hub name, folder, or 'embedded' (the model shipped here)."})
    energy: str | None = field(default=None, metadata={"help": "'local' or 'raw'; default: the model's own, or local."})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit of a Hub model."})
    device: str | None = field(default=None, metadata={"help": "cpu, cuda, cuda:1, …; default: cuda if there is one."})
    dtype: str = field(default="float32", metadata={"help": "float32, bfloat16, float16 or float64."})
    token_budget: int | None = field(default=None, metadata={"help": "Tokens per forward pass; default: from memory."})


def parse(dataclasses: list, argv: list[str], command: str, description: str) -> tuple:
    """Arguments of a command as instances of its dataclasses."""
    parser = HfArgumentParser(dataclasses, prog=f"hf-ebm {command}", description=description)
    return parser.parse_args_into_dataclasses(argv)


def load_model(arguments: ModelArguments, local_rank: int = 0):
    """`(model, tokenizer)` on its device, in evaluation mode."""
    dtype = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if arguments.dtype not in dtype:
        raise ValueError(f"dtype must be one of {', '.join(dtype)}, got {arguments.dtype!r}")
    if arguments.model == EMBEDDED:
        model, tokenizer = load_embedded(arguments.energy or "local", dtype=dtype[arguments.dtype])
    else:
        where = {"revision": arguments.revision} if arguments.revision else {}
        model = EnergyModel.from_pretrained(
            arguments.model, energy=arguments.energy, dtype=dtype[arguments.dtype], **where
        )
        tokenizer = AutoTokenizer.from_pretrained(arguments.model, **where)
    device = arguments.device or (f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    try:
        return model.to(device).eval(), tokenizer
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {device!r} cannot be used: {error}") from error


def read_records(path: str, column: str) -> list[dict]:
    """Records from JSON Lines (`.jsonl`, `.json`, `-` for standard input), Parquet, or text (one `column` a line)."""
    if path.endswith(".parquet"):
        records = pd.read_parquet(path).to_dict("records")
    elif path.endswith((".jsonl", ".json")) or path == "-":
        stream = sys.stdin if path == "-" else open(path, encoding="utf-8")  # noqa: SIM115
        with stream:
            records = [_json_record(path, number, line) for number, line in enumerate(stream, 1) if line.strip()]
    else:
        with open(path, encoding="utf-8") as file:
            records = [{column: line.rstrip("\r\n")} for line in file]
    if not records:
        raise ValueError(f"{path}: there are no records")
    for number, record in enumerate(records):
        if column not in record:
            raise ValueError(f"{path}: record {number} has no {column!r}; it has {', '.join(map(str, record))}")
    return records


def _json_record(path: str, number: int, line: str) -> dict:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: line {number} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path}: line {number} must be a JSON object, got {type(record).__name__}")
    return record


def check_writable(path: str) -> None:
    """Raises `ValueError` unless a file can be made at `path` (or it is `-`)."""
    folder = Path(path).resolve().parent
    if path != "-" and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise ValueError(f"output: {path} cannot be written; its folder does not exist or is not writable")


def write_records(path: str, records: Iterable[dict]) -> None:
    """Writes all records at once: JSON Lines to standard output (`-`) or a file, or Parquet. Replaces atomically."""
    if path == "-":
        for record in records:
            print(to_json(record))
        return
    temporary = f"{path}.{os.getpid()}.tmp"
    if path.endswith(".parquet"):
        pd.DataFrame(list(records)).to_parquet(temporary, index=False)
    else:
        Path(temporary).write_text("".join(f"{to_json(record)}\n" for record in records), encoding="utf-8")
    os.replace(temporary, path)


def to_json(record: dict) -> str:
    """One line of JSON; arrays that Parquet brought become lists."""
    return json.dumps(record, ensure_ascii=False, default=lambda value: value.tolist())
