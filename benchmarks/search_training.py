"""What search-aware training costs: time of a step against teacher forcing, by beam size, and memory.

1. Scheduled sampling against the same stepwise pass with gold inputs: at most 1.6 times.
2. Relaxed beam search with k beams against k times one beam: at most 1.3 times.
3. Relaxed beam search with 3 beams against a step of cross entropy, 8 sources of 256 tokens, targets of 32: at most 4
   times.
4. Peak memory of a relaxed beam step at k = 3, V = 32,000, T = 30, B = 16, with and without `checkpoint_steps`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource

import torch
from transformers import BartConfig, BartForConditionalGeneration, T5Config, T5ForConditionalGeneration

from benchmarks.common import begin_timing, medians, print_table
from hf_ebm import LSTMSeq2SeqConfig, LSTMSeq2SeqForConditionalGeneration
from hf_ebm.objectives.costs import HammingCost
from hf_ebm.objectives.losses import cross_entropy_sum
from hf_ebm.relaxations.soft_beam import SoftBeamSettings, direct_loss, relaxed_beam_search
from hf_ebm.relaxations.soft_choices import INPUTS
from hf_ebm.relaxations.stepwise import StepwiseDecoder
from hf_ebm.trainers.stepwise import scheduled_sampling_logits

BEAMS = (1, 2, 3, 5)


def lstm(vocab_size: int, attention: str = "additive") -> torch.nn.Module:
    """Hidden 256, bidirectional."""
    config = LSTMSeq2SeqConfig(
        vocab_size=vocab_size, embedding_dim=128, decoder_embedding_dim=128, hidden_size=256, attention=attention
    )
    return LSTMSeq2SeqForConditionalGeneration(config).train()


def bart(vocab_size: int) -> torch.nn.Module:
    """Three layers of width 256, no dropout."""
    config = BartConfig(
        vocab_size=vocab_size, d_model=256, encoder_layers=3, decoder_layers=3, encoder_ffn_dim=1024,
        decoder_ffn_dim=1024, encoder_attention_heads=4, decoder_attention_heads=4, dropout=0.0,
    )  # fmt: skip
    return BartForConditionalGeneration(config).train()


def t5(vocab_size: int) -> torch.nn.Module:
    """Three layers of width 256, no dropout."""
    config = T5Config(
        vocab_size=vocab_size, d_model=256, d_kv=64, d_ff=1024, num_layers=3, num_heads=4, dropout_rate=0.0,
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).train()


# name: (model, vocabulary); for sources of 256 tokens and targets of 32
ENCODERS = {
    "LSTM 256, V = 8,000": (lstm, 8_000),
    "T5 3 x 256, V = 8,000": (t5, 8_000),
    "BART 3 x 256, V = 8,000": (bart, 8_000),
}
# name: (model, vocabulary, batch, steps)
SHAPES = {
    "LSTM, V = 43": (lstm, 43, 128, 10),
    "LSTM, V = 8,000": (lstm, 8_000, 32, 20),
    "BART 3 x 256, V = 8,000": (bart, 8_000, 16, 20),
}


def batch_of(vocab_size: int, rows: int, length: int, targets: int | None = None) -> dict[str, torch.Tensor]:
    """Random sources and labels without padding, of one length unless another is given for labels."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocab_size, (2, rows, length), generator=generator)
    labels = ids[1, :, :targets].contiguous()
    return {"input_ids": ids[0], "attention_mask": torch.ones_like(ids[0]), "labels": labels}


def gold_step(decoder: StepwiseDecoder, batch: dict) -> None:
    """Forward and backward, step by step on gold inputs."""
    gold = decoder.embed(decoder.gold_ids(batch["labels"]))
    logits, state = decoder.begin(gold[:, 0], input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    every = [logits]
    for step in range(1, gold.shape[1]):
        logits, state = decoder.step(gold[:, step], state)
        every.append(logits)
    cross_entropy_sum(torch.stack(every, 1), batch["labels"]).backward()


def scheduled_step(decoder: StepwiseDecoder, batch: dict, inputs: str) -> None:
    """Forward and backward of scheduled sampling with every input the model's."""
    use_gold = torch.zeros_like(batch["labels"], dtype=torch.bool)
    logits = scheduled_sampling_logits(decoder, batch, use_gold, inputs, 1.0)
    cross_entropy_sum(logits, batch["labels"]).backward()


def beam_step(decoder: StepwiseDecoder, batch: dict, settings: SoftBeamSettings) -> None:
    """Forward and backward of the direct loss."""
    start = decoder.embed(decoder.gold_ids(batch["labels"])[:, 0])
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    result = relaxed_beam_search(decoder, start, inputs, batch["labels"], HammingCost(), settings)
    direct_loss(result, settings.alpha).sum().backward()


def time_rows(repeats: int):
    """A row for each shape and program: milliseconds, and the ratio that is bounded."""
    for name, (make, vocab_size, rows, length) in SHAPES.items():
        torch.manual_seed(0)
        decoder, batch = StepwiseDecoder(make(vocab_size)), batch_of(vocab_size, rows, length)
        works = {"gold": lambda d=decoder, b=batch: gold_step(d, b)}
        works |= {i: (lambda d=decoder, b=batch, i=i: scheduled_step(d, b, i)) for i in INPUTS}
        settings = {k: SoftBeamSettings(k, 1.0) for k in BEAMS}
        works |= {f"k = {k}": (lambda d=decoder, b=batch, s=s: beam_step(d, b, s)) for k, s in settings.items()}
        found = medians(works, repeats)
        for program, took in found.items():
            ratio = took / found["gold"]
            if program.startswith("k"):
                k = int(program.split()[-1])
                yield [
                    name,
                    f"relaxed beam, {program}",
                    1e3 * took,
                    f"{took / (k * found['k = 1']):.2f} of k x one beam",
                ]
            else:
                yield [name, f"stepwise, {program}", 1e3 * took, f"{ratio:.2f} of gold inputs"]


def cross_entropy_rows(repeats: int):
    """A row for each shape: a step of cross entropy, of relaxed beam search, and their ratio."""
    for name, (make, vocab_size) in ENCODERS.items():
        torch.manual_seed(0)
        model, batch = make(vocab_size), batch_of(vocab_size, 8, 256, 32)
        decoder, settings = StepwiseDecoder(model), SoftBeamSettings(3, 1.0)
        works = {
            "cross entropy": lambda m=model, b=batch: cross_entropy_sum(m(**b).logits, b["labels"]).backward(),
            "beam": lambda d=decoder, b=batch, s=settings: beam_step(d, b, s),
        }
        found = medians(works, repeats)
        yield [name, *(1e3 * took for took in found.values()), found["beam"] / found["cross entropy"]]


def peak_memory(kind: str, checkpoint_steps: bool, queue) -> None:
    """Runs one relaxed beam step in this process; puts the growth of its peak resident memory in bytes."""
    torch.set_num_threads(1)
    decoder = StepwiseDecoder({"LSTM 256": lstm, "BART 3 x 256": bart}[kind](32_000))
    batch = batch_of(32_000, 16, 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    beam_step(decoder, batch, SoftBeamSettings(3, 1.0, checkpoint_steps=checkpoint_steps))
    queue.put((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)


def memory_rows():
    """A row for each model, with and without checkpointing, each in a fresh process."""
    context = multiprocessing.get_context("spawn")
    for kind in ("LSTM 256", "BART 3 x 256"):
        for checkpoint_steps in (False, True):
            queue = context.Queue()
            process = context.Process(target=peak_memory, args=(kind, checkpoint_steps, queue))
            process.start()
            yield [kind, str(checkpoint_steps), queue.get() / 2**30]
            process.join()


def main() -> None:
    """Prints the tables."""
    repeats = begin_timing(argparse.ArgumentParser(description=__doc__)).repeats
    print("\nForward and backward of one batch:")
    print_table(["model", "program", "ms", "ratio"], time_rows(repeats))
    print("\nRelaxed beam search with 3 beams against cross entropy, 8 sources of 256 tokens, targets of 32:")
    print_table(["model", "cross entropy, ms", "relaxed beam, ms", "beam / cross entropy"], cross_entropy_rows(repeats))
    print("\nPeak memory above the model's, k = 3, V = 32,000, T = 30, B = 16:")
    print_table(["model", "checkpoint_steps", "GiB"], memory_rows())


if __name__ == "__main__":
    main()
