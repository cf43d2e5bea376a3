"""What the training scripts of the embedded models share: how a run is described, and what is written of it."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

Arguments = TypeVar("Arguments")


def script_arguments(dataclass: type[Arguments]) -> Arguments:
    """A script's command line."""
    # Annotated as a type of its own that nothing is of.
    return HfArgumentParser(dataclass).parse_args_into_dataclasses()[0]  # type: ignore[arg-type]


def training_arguments(arguments: Any, **own: Any) -> TrainingArguments:
    """What both scripts train with, from their command lines, and what is one script's own."""
    shared: dict[str, Any] = dict(
        output_dir=str(Path(arguments.work_dir) / "checkpoints"),
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=arguments.batch_size,
        train_sampling_strategy="group_by_length",
        learning_rate=arguments.learning_rate,
        weight_decay=arguments.weight_decay,
        adam_beta2=0.98,
        warmup_steps=arguments.warmup_steps,
        bf16=True,
        use_cpu=True,
        logging_steps=100,
        save_strategy="epoch",
        save_total_limit=1,
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=arguments.seed,
    )
    return TrainingArguments(**{**shared, **own})


def minutes_of_training(trainer: Trainer) -> float:
    """Trains, from the last checkpoint if there is one."""
    started = time.time()
    folder = Path(trainer.args.output_dir or ".")
    folder.mkdir(parents=True, exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(folder))
    return (time.time() - started) / 60


@torch.no_grad()
def mean_loss(
    model: PreTrainedModel,
    rows: list[list[int]],
    collate: Callable[[list[dict]], dict],
    batch_size: int,
    draws: int = 1,
) -> float:
    """Mean loss in nats of a token with a label, in float32; a row's first token is never one.

    Args:
        rows: ids; those of like length run together.
        collate: makes a batch with `labels`.
        draws: how often all rows are read, each time with what `collate` draws then.
    """
    model.eval()
    rows = sorted(rows, key=len)
    total, count = 0.0, 0
    for start in draws * list(range(0, len(rows), batch_size)):
        batch = collate([{"input_ids": ids} for ids in rows[start : start + batch_size]])
        tokens = int((batch["labels"][:, 1:] >= 0).sum())
        total += float(model(**batch).loss) * tokens
        count += tokens
    return total / count


def describe_phase(module: str, arguments: Any, minutes: float, processes: int) -> dict:
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
    output: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, held_out: list[str] | None, results: dict
) -> None:
    """Writes the model in half precision, its tokenizer, held-out texts if any, and `training_results.json`."""
    output.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(output)
    tokenizer.save_pretrained(output)
    if held_out is not None:
        (output / "held_out.txt").write_text("\n".join(held_out) + "\n", encoding="utf-8")
    (output / "training_results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=2))
