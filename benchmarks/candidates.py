"""Seconds and memory of a step of training on k sampled candidates of each source, beside loops written by hand.

The loops sample by `model.generate` and take minimum risk by one teacher-forced pass: `plain loop` encodes a source for
each candidate, `careful loop` once in that pass. Ours are trainers' steps: minimum risk, the policy gradient with the
leave-one-out baseline (RLOO), GRPO with `num_iterations=1`, ranking. All of them end with clipping and a step of SGD.
`--before FOLDER` adds minimum risk of another checkout.

Every program is a process of its own, as its peak memory is measured; they take turns, step by step, and CPU time of
one thread counts, which what else runs on the machine hardly changes. Weights are random: one in `ENDS` tokens ends a
sequence, so that lengths differ as samples' do.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging

from benchmarks.common import begin_timing, print_table
from benchmarks.search_training import batch_of
from hf_ebm import LSTMSeq2SeqConfig, LSTMSeq2SeqForConditionalGeneration, trainers
from hf_ebm.objectives.sequence_costs import normalized_edit_distance

ENDS = 40
SHARPNESS = 0.005


def lstm(vocab_size: int) -> torch.nn.Module:
    """A bidirectional encoder and a decoder of width 256, additive attention."""
    config = LSTMSeq2SeqConfig(vocab_size=vocab_size, embedding_dim=128, decoder_embedding_dim=128)
    return LSTMSeq2SeqForConditionalGeneration(config)


def t5_small(vocab_size: int) -> torch.nn.Module:
    """6 + 6 layers of width 512."""
    sizes = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
    special = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=vocab_size, dropout_rate=0.0, **sizes, **special))


def bart_base(vocab_size: int) -> torch.nn.Module:
    """6 + 6 layers of width 768."""
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in
             (("layers", 6), ("ffn_dim", 3072), ("attention_heads", 12))}  # fmt: skip
    return BartForConditionalGeneration(BartConfig(vocab_size=vocab_size, d_model=768, dropout=0.0, **sizes))


# name: (model, vocabulary, sources, tokens of each, most tokens decoded)
SHAPES = {
    "LSTM 256": (lstm, 8_000, 8, 64, 32),
    "T5 small": (t5_small, 8_000, 4, 64, 32),
    "BART base": (bart_base, 8_000, 4, 64, 32),
    "tiny": (lstm, 60, 2, 5, 4),
}
OURS = {
    "minimum risk": ("MinimumRisk", {"include_target": False, "sharpness": SHARPNESS}),
    "RLOO": ("PolicyGradient", {"baseline": "leave_one_out"}),
    "GRPO": ("GRPO", {}),
    "ranking": ("Ranking", {"cross_entropy_weight": 0.0}),
}
PROGRAMS = ("plain loop", "careful loop", *OURS)


def model_and_batch(shape: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A model whose generation config ends sequences by many tokens, and sources with references."""
    make, vocab_size, rows, source, length = SHAPES[shape]
    torch.manual_seed(0)
    model, batch = make(vocab_size).train(), batch_of(vocab_size, rows, source)
    settings = model.generation_config
    settings.eos_token_id, settings.max_new_tokens = list(range(3, vocab_size, ENDS)), length
    settings.pad_token_id = 0
    batch["labels"] = batch["labels"][:, :length].contiguous()
    return model, batch


def sampled(model: torch.nn.Module, batch: dict[str, torch.Tensor], count: int) -> torch.Tensor:
    """(B k, 1 + T) ids behind a start token, by `generate`."""
    model.eval()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    ids = model.generate(**inputs, do_sample=True, top_k=0, num_return_sequences=count)
    model.train()
    return ids


def risk_by_hand(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], ids: torch.Tensor, ends: list[int], once: bool
) -> torch.Tensor:
    """Mean over the sources of `Σ q c`, `q ∝ p^α` over the candidates, which count as often as they were drawn.

    Args:
        ids: as of `sampled`.
        ends: ids that end a sequence.
        once: encode each source once, and not for each candidate.
    """
    count = len(ids) // len(batch["labels"])
    labels, mask = ids[:, 1:], batch["attention_mask"].repeat_interleave(count, 0)
    ended = torch.isin(labels, torch.tensor(ends)).long()
    outside = ended.cumsum(1) > ended
    if once:
        states = model.get_encoder()(batch["input_ids"], batch["attention_mask"]).last_hidden_state
        sources = {"encoder_outputs": BaseModelOutput(states.repeat_interleave(count, 0))}
    else:
        sources = {"input_ids": batch["input_ids"].repeat_interleave(count, 0)}
    logits = model(**sources, attention_mask=mask, decoder_input_ids=ids[:, :-1], use_cache=False).logits
    labels = labels.masked_fill(outside, -100)
    nats = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    q = (-SHARPNESS * nats.view_as(labels).sum(1)).view(-1, count).softmax(1)
    references = batch["labels"].repeat_interleave(count, 0).tolist()
    candidates = [row[~skipped].tolist() for row, skipped in zip(ids[:, 1:], outside, strict=True)]
    costs = normalized_edit_distance(candidates, references)
    return (q * costs.view_as(q)).sum(1).mean()


def trainer_of(
    program: str, model: torch.nn.Module, batch: dict[str, torch.Tensor], count: int
) -> trainers.TaskLossTrainer:
    """The trainer of one of `OURS`, ready for a step."""
    kind, settings = OURS[program]
    args = getattr(trainers, f"{kind}Config")(
        tempfile.mkdtemp(), num_candidates=count, report_to=[], use_cpu=True, max_steps=1000, save_strategy="no",
        disable_tqdm=True, cost="edit_distance", max_length_ratio=1.0, **settings,
    )  # fmt: skip
    trainer = getattr(trainers, f"{kind}Trainer")(model, args, train_dataset=[{}], data_collator=lambda rows: batch)
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def step_of(program: str, shape: str, count: int) -> Callable[[], None]:
    """One update of a program's model."""
    model, batch = model_and_batch(shape)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    if program in OURS:
        trainer = trainer_of(program, model, batch, count)

        def gradient() -> None:
            (inputs,), items = trainer.get_batch_samples(iter([batch]), 1, torch.device("cpu"))
            trainer.training_step(model, inputs, items)
    else:

        def gradient() -> None:
            ids = sampled(model, batch, count)
            ends = model.generation_config.eos_token_id
            risk_by_hand(model, batch, ids, ends, once=program == "careful loop").backward()

    def step() -> None:
        gradient()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def work(program: str, shape: str, count: int) -> None:
    """A process of one program: a line for each step that is asked for, its CPU time in s and the peak so far in GiB.

    The peak is above what the process held when its model was made.
    """
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    step = step_of(program, shape, count)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in sys.stdin:
        torch.manual_seed(0)  # the loops' samples
        started = time.process_time()
        step()
        took, peak = time.process_time() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held
        print(json.dumps([took, peak / 2**20]), flush=True)


def measured(programs: dict[str, Path], shape: str, count: int, repeats: int) -> dict[str, list[float]]:
    """Median seconds and the peak of each program, each of a checkout; the first turn isn't counted."""
    workers = {}
    for name, folder in programs.items():
        command = [sys.executable, __file__, "--worker", name.removesuffix(", before"), shape, str(count)]
        environment = {**os.environ, "PYTHONPATH": str(folder)}
        workers[name] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
    lines: dict[str, list[list[float]]] = {name: [] for name in workers}
    for _ in range(1 + repeats):
        for name, worker in workers.items():
            print(file=worker.stdin, flush=True)
            lines[name].append(json.loads(worker.stdout.readline()))
    for worker in workers.values():
        worker.communicate()
    return {name: [statistics.median(s for s, _ in own[1:]), own[-1][1]] for name, own in lines.items()}


def rows(shapes: list[str], counts: list[int], programs: dict[str, Path], repeats: int) -> Iterator[list]:
    """A row for each shape, number of candidates and program; ratios are to the first program."""
    for shape in shapes:
        for count in counts:
            found = measured(programs, shape, count, repeats)
            first, held = next(iter(found.values()))
            for name, (took, peak) in found.items():
                yield [shape, count, name, took, took / first, peak, peak / held]


def main() -> None:
    """Prints the table; or is one of its processes."""
    if sys.argv[1:2] == ["--worker"]:
        return work(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES)[:-1], choices=SHAPES)
    parser.add_argument("--candidates", nargs="+", type=int, default=[4, 16])
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=PROGRAMS)
    parser.add_argument("--before", type=Path, help="folder of another checkout, for minimum risk as it is there")
    arguments = begin_timing(parser, repeats=3)
    here = Path(__file__).parents[1]
    programs = dict.fromkeys(arguments.programs, here)
    if arguments.before is not None:
        programs["minimum risk, before"] = arguments.before
    header = ["model", "k", "program", "s a step", "times the first", "peak above the model, GiB", "times the first"]
    print_table(header, rows(arguments.shapes, arguments.candidates, programs, arguments.repeats))


if __name__ == "__main__":
    main()
