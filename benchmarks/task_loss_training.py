"""What steps of the trainers for a cost of decoded sequences take.

1. A step of parameter search (MGS) against its parts done apart. The bound is 1.15 times (one step of maximum
   likelihood + (K + 1) decodings of the batch), at K = 4.
2. A step of minimum risk and of the policy gradient, which run the encoder once for the candidates of a source, against
   the same step with the encoder run for each candidate: 8 sources of 256 tokens, targets of 32, 4 candidates.

Both sides run the same model on the same batch through the same Trainer; decoding never ends before the full length.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import patch

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.common import begin_timing, medians, print_table
from benchmarks.search_training import ENCODERS, bart, batch_of, lstm
from hf_ebm.trainers import (
    MGSConfig,
    MGSTrainer,
    MinimumRiskConfig,
    MinimumRiskTrainer,
    PolicyGradientConfig,
    PolicyGradientTrainer,
    sequence_pairs,
)

CANDIDATES = 4


def gpt2(vocab_size: int) -> torch.nn.Module:
    """The shape of the embedded causal model."""
    config = GPT2Config(
        vocab_size=vocab_size, n_positions=256, n_embd=256, n_inner=768, n_layer=6, n_head=4, eos_token_id=3,
        pad_token_id=0, bos_token_id=2,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


# name: (model, vocabulary, rows, target tokens of each): 1,024 tokens a batch, as in the paper (appendix A.4)
SHAPES = {
    "GPT-2 6 x 256, V = 4,000": (gpt2, 4_000, 32, 32),
    "BART 3 x 256, V = 8,000": (bart, 8_000, 32, 32),
    "LSTM 256, V = 43": (lstm, 43, 128, 8),
}


def programs(make: Callable, vocab_size: int, rows: int, length: int) -> dict[str, Callable[[], None]]:
    """A step of maximum likelihood, a decoding of the batch, and a step of the search."""
    torch.manual_seed(0)
    model = make(vocab_size)
    batch = batch_of(vocab_size, rows, length)
    if not model.config.is_encoder_decoder:  # prompts of ten tokens
        ids = torch.cat([batch["input_ids"][:, :10], batch["labels"]], 1)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
        batch["labels"][:, :10] = -100
    args = MGSConfig(
        tempfile.mkdtemp(), num_candidates=CANDIDATES, report_to=[], use_cpu=True, max_steps=1000, save_strategy="no",
        max_length_ratio=1.3, disable_tqdm=True, max_grad_norm=1.0,
    )  # fmt: skip
    model.generation_config.min_new_tokens = math.ceil(1.3 * length)
    trainer = MGSTrainer(model, args, train_dataset=[{}], data_collator=lambda rows: batch)
    trainer.current_gradient_accumulation_steps = 1
    trainer.create_optimizer()
    pairs = trainer.candidates.pairs(batch)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        trainer.optimizer.step()
        model.zero_grad()

    def likelihood() -> None:
        model.train()
        (-pairs.log_probs(model, range(rows), pairs.targets).sum() / (rows * length)).backward()
        update()

    def search() -> None:
        trainer.training_step(model, batch)
        update()

    def decode() -> None:
        pairs.decode(model, trainer.candidates.settings(pairs))

    return {"likelihood": likelihood, "decoding": decode, "search": search}


def time_rows(repeats: int):
    """A row for each shape."""
    for name, shape in SHAPES.items():
        found = medians(programs(*shape), repeats)
        bound = found["likelihood"] + (CANDIDATES + 1) * found["decoding"]
        yield [name, *(1e3 * found[key] for key in ("likelihood", "decoding", "search")), found["search"] / bound]


SAMPLED = {
    "minimum risk": (MinimumRiskTrainer, MinimumRiskConfig, {}),
    "policy gradient, self-critical": (PolicyGradientTrainer, PolicyGradientConfig, {}),
    "policy gradient, running mean": (PolicyGradientTrainer, PolicyGradientConfig, {"baseline": "running_mean"}),
}


def sampled_steps(
    make: Callable, vocab_size: int, kind: str, batch: dict[str, torch.Tensor], use_cpu: bool = True
) -> dict[str, Callable[[], None]]:
    """A step of a trainer on samples with the encoder run for each candidate, and once for those of a source."""
    torch.manual_seed(0)
    model = make(vocab_size)
    trainer_class, config_class, own = SAMPLED[kind]
    args = config_class(
        tempfile.mkdtemp(), num_candidates=CANDIDATES, report_to=[], use_cpu=use_cpu, max_steps=1000,
        save_strategy="no", disable_tqdm=True, **own,
    )  # fmt: skip
    trainer = trainer_class(model, args, train_dataset=[{}], data_collator=lambda rows: batch)
    trainer.current_gradient_accumulation_steps = 1
    trainer.create_optimizer()

    def once() -> None:
        trainer.training_step(model, batch)
        trainer.optimizer.step()
        model.zero_grad()

    def repeated() -> None:
        with patch.object(sequence_pairs, "encoded_once", lambda *arguments: nullcontext()):
            once()

    return {"repeated": repeated, "once": once}


def sampled_rows(repeats: int):
    """A row for each shape and trainer."""
    for name, (make, vocab_size) in ENCODERS.items():
        for kind in SAMPLED:
            batch = batch_of(vocab_size, 8, 256, 32)
            found = medians(sampled_steps(make, vocab_size, kind, batch), repeats)
            yield [name, kind, found["repeated"], found["once"], found["once"] / found["repeated"]]


def main() -> None:
    """Prints both tables."""
    repeats = begin_timing(argparse.ArgumentParser(description=__doc__)).repeats
    header = [
        "model",
        "likelihood step, ms",
        "one decoding, ms",
        "search step, ms",
        "search / (likelihood + 5 decodings)",
    ]
    print("\nParameter search:")
    print_table(header, time_rows(repeats))
    print("\nSampled candidates:")
    header = ["model", "trainer", "encoder for each candidate, s", "encoder once for a source, s", "once / each"]
    print_table(header, sampled_rows(repeats))


if __name__ == "__main__":
    main()
