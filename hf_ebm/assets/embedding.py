"""What the training scripts of the embedded models share: how a run is described, and what is written of it."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def describe_phase(module: str, arguments, minutes: float, processes: int) -> dict:
    """Command, duration, date and arguments of one training run of `python -m module`."""
    launcher = "python" if processes == 1 else f"torchrun --nproc_per_node {os.environ['WORLD_SIZE']}"
    return {
        "command": f"{launcher} -m {module} {shlex.join(sys.argv[1:])}",
        "minutes": round(minutes, 1),
        "processes": processes,
        "date": time.strftime("%Y-%m-%d"),
        "arguments": {k: v for k, v in asdict(arguments).items() if k not in ("output_dir", "work_dir")},
    }


def save_embedded(
    output: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, held_out: list[str], results: dict
) -> None:
    """Writes the model in half precision, its tokenizer, the held-out texts and `training_results.json`."""
    output.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(output)
    tokenizer.save_pretrained(output)
    (output / "held_out.txt").write_text("\n".join(held_out) + "\n", encoding="utf-8")
    (output / "training_results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=2))
