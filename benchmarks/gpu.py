"""Rows per second of `EnergyModel` on a CUDA card, and the share of the card's measured matrix rate.

    python -m benchmarks.gpu

bert-base shape, 256 chains of 32 free positions, bfloat16 and float32. Checks on the way that chains are the same for
another token budget. Then joint sampling of the embedded residual model, with the largest difference between energies
there and on the CPU. Prints a line and stops where there is no card.
"""

from __future__ import annotations

import time

import torch
from transformers.utils import logging

from benchmarks import joint_sampling
from benchmarks.common import bert_base, describe_machine, print_table
from hf_ebm import EnergyModel
from hf_ebm.models.residual.candidates import candidate_energies

CHAINS, LENGTH = 256, 32


def matrix_rate(dtype: torch.dtype) -> float:
    """Measured rate of large matrix products, FLOP/s."""
    a = torch.randn(8192, 8192, dtype=dtype, device="cuda")
    for _ in range(3):
        a @ a
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(20):
        a @ a
    torch.cuda.synchronize()
    return 20 * 2 * 8192**3 / (time.perf_counter() - began)


def row_flops(model: EnergyModel) -> float:
    """Matrix FLOP of one masked row: the encoder at all positions, last feed-forward network and head at one."""
    layers = model.mlm.bert.encoder.layer
    once = _weights(layers[-1].intermediate) + _weights(layers[-1].output)
    head = _weights(model.mlm.cls.predictions.transform) + model.mlm.get_output_embeddings().weight.numel()
    return 2.0 * ((_weights(layers) - once) * (LENGTH + 2) + once + head)


def _weights(part: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in part.parameters() if parameter.dim() == 2)


def measure(dtype: torch.dtype) -> list:
    """A row of the table."""
    roles = dict(mask_token_id=103, pad_token_id=0, special_token_ids=[0, 101, 102], excluded_token_ids=[100])
    ends = dict(prefix_token_ids=[101], suffix_token_ids=[102])
    model = EnergyModel(bert_base(), **roles, **ends).to("cuda", dtype)
    settings = dict(lengths=LENGTH, num_chains=CHAINS, seed=0, exclude_current=True)
    model.generate(num_epochs=1, **settings)
    torch.cuda.synchronize()
    began = time.perf_counter()
    out = model.generate(num_epochs=2, **settings)
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    other = model.generate(num_epochs=2, token_budget=20_000, **settings)
    same = float((out.sequences == other.sequences).all(1).double().mean())
    rate = out.num_masked_rows / took
    peak = matrix_rate(dtype)
    budget = model.masked_batch_runner().token_budget(model.device)
    return [str(dtype), budget, rate, peak / 1e12, rate * row_flops(model) / peak, same]


def joint_rows():
    """Joint sampling for each kind of encoder: tokens a second, those of the parts apart, and how energies differ."""
    for name, model in joint_sampling.models().items():
        rows = model.generate(num_candidates=64, max_new_tokens=32, seed=0, return_candidates=True)
        on_cpu = rows.candidate_energies[0]
        model.to("cuda")
        found = joint_sampling.row_of(model, repeats=5)
        prefix = torch.tensor([model.config.start_token_id], device="cuda")
        there = candidate_energies(model, prefix, rows.candidates[0], 64)
        yield [name, *found, float((there - on_cpu).abs().max())]


def main() -> None:
    """Prints the table."""
    if not torch.cuda.is_available():
        print("There is no CUDA card here.")
        return
    logging.disable_progress_bar()
    print(describe_machine())
    header = ["dtype", "token budget", "rows/s", "matrix TFLOP/s", "share of it", "chains equal at another budget"]
    print_table(header, [measure(torch.bfloat16), measure(torch.float32)])
    print_table([*joint_sampling.HEADER, "largest difference of energies to the CPU"], joint_rows())


if __name__ == "__main__":
    main()
