"""What the library does on a CUDA card, in under four minutes: a part after the other, each in a process of its own.

    python -m benchmarks.gpu --out gpu.jsonl

Every figure is a line of JSON, written and printed as it is measured. A part that fails, or takes longer than it may,
leaves a line that says so, and the next begins. Parts stand in the order of what is to be known first; those that no
time is left for are named.

- `rows, …`: masked rows a second of `generate` in bert-base's shape, 16 and 256 chains, and which share of the card's
  measured rate of matrix products that is (of the products that are needed: the encoder at all positions, its last
  feed-forward network and the head at one). Compiled and not; with CUDA graphs.
- `equality`: energies, gradients and chains on the card against the CPU's, and chains with another token budget.
- `effective samples`: of the energy, a second, by the recommended pairs on the embedded model.
- `training`: steps of relaxed beam search, of minimum risk and the policy gradient.
- `joint sampling`: of the embedded residual models, and how far energies are from the CPU's.
- `scoring`: against minicons.

`--quick --device cpu` runs all of it in tiny sizes, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForMaskedLM
from transformers.utils import logging

from benchmarks import joint_sampling
from benchmarks.common import bert_base, describe_machine, medians, seconds
from benchmarks.search_training import bart, batch_of, beam_step, lstm
from benchmarks.task_loss_training import SAMPLED, sampled_steps
from hf_ebm import EnergyModel
from hf_ebm.assets import held_out_clauses, load_embedded
from hf_ebm.models.residual.candidates import candidate_energies
from hf_ebm.objectives.losses import cross_entropy_sum
from hf_ebm.relaxations.soft_beam import SoftBeamSettings
from hf_ebm.relaxations.stepwise import StepwiseDecoder
from hf_ebm.sampling.convergence import energy_diagnostics

PAIRS = {"block_size": 2, "block_fill": "sequential", "block_layout": "contiguous", "delayed_acceptance": 1}
LEAST = 5  # seconds that a part is begun with
ROLES = {"mask_token_id": 103, "pad_token_id": 0, "special_token_ids": [0, 101, 102], "excluded_token_ids": [100]}
ROLES |= {"prefix_token_ids": [101], "suffix_token_ids": [102]}


def matrix_rate(device: str, dtype: torch.dtype, size: int) -> float:
    """Measured rate of large matrix products, FLOP/s."""
    a = torch.randn(size, size, dtype=dtype, device=device)

    def products(count: int) -> None:
        for _ in range(count):
            a @ a

    seconds(lambda: products(3))
    return 20 * 2 * size**3 / seconds(lambda: products(20))


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What a call returns, and the seconds it took."""
    out: list[Any] = []
    took = seconds(lambda: out.append(work()))
    return out[0], took


def row_flops(model: EnergyModel, tokens: int) -> float:
    """Matrix FLOP of one masked row: the encoder at all positions, last feed-forward network and head at one."""
    layers = model.mlm.bert.encoder.layer
    once = _weights(layers[-1].intermediate) + _weights(layers[-1].output)
    head = _weights(model.mlm.cls.predictions.transform) + model.mlm.get_output_embeddings().weight.numel()
    return 2.0 * ((_weights(layers) - once) * tokens + once + head)


def _weights(part: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in part.parameters() if parameter.dim() == 2)


def rows(device: str, quick: bool, dtype: torch.dtype, length: int, **compiled) -> Iterator[dict]:
    """Masked rows a second, single sites; `compiled` are arguments of `torch.compile`, if any."""
    tiny = BertConfig(vocab_size=150, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    mlm = BertForMaskedLM(tiny).eval() if quick else bert_base()
    model = EnergyModel(mlm, **ROLES).to(device, dtype)
    peak = matrix_rate(device, dtype, 64 if quick else 8192)
    settings = {"lengths": 3 if quick else length, "seed": 0, "exclude_current": True, "num_epochs": 1}
    if compiled:
        model.compile(**({"backend": "eager"} if quick else compiled))
    for chains in (2, 4) if quick else (16, 256):
        work = partial(model.generate, num_chains=chains, **settings)
        # What 256 chains need is warm after 16, but for compiled code.
        _, warming = timed(work) if chains < 256 or compiled else (None, 0.0)
        out, took = timed(work)
        rate = out.num_masked_rows / took
        yield {
            "chains": chains, "free positions": settings["lengths"], "warm-up, s": warming, "s": took, "rows/s": rate,
            "matrix TFLOP/s": peak / 1e12, "share of it": rate * row_flops(model, settings["lengths"] + 2) / peak,
            "token budget": model.masked_batch_runner().token_budget(model.device),
        }  # fmt: skip


def equality(device: str, quick: bool) -> Iterator[dict]:
    """The embedded model on the CPU and there."""
    model, tokenizer = load_embedded()
    texts = held_out_clauses()[: 2 if quick else 32]
    ids = tokenizer(texts[0], return_tensors="pt")["input_ids"]
    settings = {"lengths": 3 if quick else 12, "num_chains": 2 if quick else 8, "num_epochs": 2, "seed": 0, **PAIRS}
    found = []
    for where in ("cpu", device):
        model.to(where, torch.float32).zero_grad()
        model(ids.to(where)).energy.sum().backward()
        gradient = torch.cat([p.grad.flatten().cpu() for p in model.parameters() if p.grad is not None])
        scores = model.score(texts, tokenizer).energy.cpu()
        chains = [model.double().generate(**settings, **more).sequences.cpu() for more in ({}, {"token_budget": 100})]
        found.append((gradient, scores, *chains))
    (gradient, scores, chains, _), (gradient_there, scores_there, chains_there, others) = found
    yield {
        "energies, float32, largest difference in nats": float((scores - scores_there).abs().max()),
        "gradient, float32, relative": float((gradient - gradient_there).norm() / gradient.norm()),
        "chains, float64, share that is the same": float((chains == chains_there).all(1).double().mean()),
        "of another token budget": float((others == chains_there).all(1).double().mean()),
    }


class Until:
    """Stops chains after some seconds, and no fewer than eight epochs."""

    def __init__(self, limit: float):
        self.end, self.epochs = time.perf_counter() + limit, 0

    def __call__(self, ids: torch.Tensor, scores: object) -> torch.Tensor:
        self.epochs += 1
        over = self.epochs >= 8 and time.perf_counter() > self.end
        return torch.full((len(ids),), over, dtype=torch.bool, device=ids.device)


def effective_samples(device: str, quick: bool) -> Iterator[dict]:
    """Pairs on 12 positions of the embedded model, for a while; the first quarter is left out."""
    model = load_embedded()[0].to(device)
    for chains, limit in ((2, 0.5),) if quick else ((256, 12.0), (16, 8.0)):
        settings = {"lengths": 4 if quick else 12, "num_chains": chains, "seed": 0, **PAIRS}
        model.generate(num_epochs=1, **settings)
        work = partial(model.generate, num_epochs=100_000, stopping_criteria=[Until(limit)], **settings)
        out, took = timed(work)
        energies = out.trace.energy
        kept = energies[:, energies.shape[1] // 4 :]
        sizes, share = energy_diagnostics(kept), kept.shape[1] / energies.shape[1]
        yield {
            "chains": chains, "epochs": energies.shape[1], "s": took, "rows/s": out.num_masked_rows / took,
            "split R-hat": sizes.r_hat, "ESS/s": sizes.ess_bulk / (took * share),
        }  # fmt: skip


def training(device: str, quick: bool) -> Iterator[dict]:
    """A step of relaxed beam search with 3 beams beside one of cross entropy; of trainers on samples."""
    vocab_size, count, source, target = (50, 2, 5, 4) if quick else (8_000, 8, 256, 32)
    batch = batch_of(vocab_size, count, source, target)
    there = {name: value.to(device) for name, value in batch.items()}
    for name, make in (("LSTM 256", lstm), ("BART 3 x 256", bart)):
        torch.manual_seed(0)
        model = make(vocab_size).to(device)
        decoder, settings = StepwiseDecoder(model), SoftBeamSettings(3, 1.0)
        works = {
            "cross entropy": lambda m=model: cross_entropy_sum(m(**there).logits, there["labels"]).backward(),
            "relaxed beam": lambda d=decoder, s=settings: beam_step(d, there, s),
        }
        for kind in SAMPLED:
            works[kind] = sampled_steps(make, vocab_size, kind, batch, use_cpu=device == "cpu")["once"]
        yield {"model": name} | {f"{kind}, s": took for kind, took in medians(works, 1 if quick else 3).items()}


def joint(device: str, quick: bool) -> Iterator[dict]:
    """Tokens a second, those of the parts apart, and how energies differ from the CPU's."""
    for name, model in joint_sampling.models().items():
        count = 4 if quick else 64
        model.to("cpu")  # the language model is shared
        drawn = model.generate(num_candidates=count, max_new_tokens=4, seed=0, return_candidates=True)
        model.to(device)
        found = joint_sampling.row_of(model, 1, 4, 4) if quick else joint_sampling.row_of(model, repeats=3)
        prefix = torch.tensor([model.config.start_token_id], device=device)
        energies = candidate_energies(model, prefix, drawn.candidates[0], count)
        difference = float((energies.cpu() - drawn.candidate_energies[0].cpu()).abs().max())
        yield dict(zip(joint_sampling.HEADER, [name, *found], strict=True)) | {
            "energies, largest difference": difference
        }


def scoring(device: str, quick: bool) -> Iterator[dict]:
    """Texts of held-out clauses by `score` and by minicons, on the same model."""
    from benchmarks import scoring  # needs minicons

    embedded, tokenizer = load_embedded()
    clauses, roles = held_out_clauses(), {name: getattr(embedded.config, name) for name in list(ROLES)[:4]}
    models = (
        {"embedded": embedded}
        if quick
        else {"bert-base shape": EnergyModel(bert_base(), **roles), "embedded": embedded}
    )
    for name, model in models.items():
        texts = clauses[: 2 if quick else 48]
        yield dict(
            zip(
                scoring.HEADER,
                scoring.compare(name, model.to(device), tokenizer, texts, 1 if quick else 3),
                strict=True,
            )
        )


# name: (function of device and whether sizes are tiny, most seconds)
PARTS: dict[str, tuple[Callable[[str, bool], Iterator[dict]], float]] = {
    "rows, bfloat16": (partial(rows, dtype=torch.bfloat16, length=32), 40),
    "equality": (equality, 30),
    "rows, bfloat16, compiled": (partial(rows, dtype=torch.bfloat16, length=32, mode="default"), 80),
    "effective samples": (effective_samples, 40),
    "rows, float32": (partial(rows, dtype=torch.float32, length=12), 30),
    "training": (training, 30),
    "joint sampling": (joint, 30),
    "scoring": (scoring, 30),
    "rows, bfloat16, CUDA graphs": (partial(rows, dtype=torch.bfloat16, length=32, mode="reduce-overhead"), 80),
    "rows, float32, compiled": (partial(rows, dtype=torch.float32, length=12, mode="default"), 80),
}


def run_part(name: str, device: str, quick: bool, out: Path) -> None:
    """In a process of its own: the lines of one part."""
    torch.set_num_threads(torch.get_num_threads())  # a fork's pool of threads, before several load weights at once
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        write(out, {"part": name, "machine": describe_machine()})
        for figures in PARTS[name][0](device, quick):
            write(out, {"part": name, **figures})
    except Exception as error:
        traceback.print_exc()
        write(out, {"part": name, "failed": f"{type(error).__name__}: {error}"})


def write(out: Path, line: dict) -> None:
    """Appends a line of JSON, and prints it."""
    text = json.dumps(line)
    print(text, flush=True)
    with out.open("a", encoding="utf-8") as file:
        file.write(text + "\n")


def main() -> None:
    """Runs the parts, as far as there is time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="where models run")
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"), help="file that lines are added to")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--seconds", type=float, default=220.0, help="time for all parts")
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    arguments = parser.parse_args()
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # doesn't touch the card
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA card here.")
        return
    # Forked from here, where nothing has touched the card, parts needn't import anything again.
    context = multiprocessing.get_context("fork")
    end = time.monotonic() + arguments.seconds
    for name in arguments.parts:
        began, limit = time.monotonic(), min(PARTS[name][1], end - time.monotonic())
        if end - began < LEAST:
            write(arguments.out, {"part": name, "failed": "no time was left"})
            continue
        process = context.Process(target=run_part, args=(name, arguments.device, arguments.quick, arguments.out))
        process.start()
        process.join(limit)
        took, code = time.monotonic() - began, process.exitcode
        if code is None:
            process.kill()
            process.join()
        failed = (
            {} if code == 0 else {"failed": f"stopped after {limit:.0f} s" if code is None else f"exit code {code}"}
        )
        write(arguments.out, {"part": name, "all of it, s": took, **failed})


if __name__ == "__main__":
    main()
