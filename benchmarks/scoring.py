"""Pseudo-log-likelihoods of the same texts by the same model object: `EnergyModel.score` against minicons.

minicons runs at its best batch size of several; its constructor is not counted. Times are medians of runs taken in
turns. Both values and times are compared.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from minicons.scorer import MaskedLMScorer

from benchmarks.common import begin_timing, bert_base, medians, print_table, xlm_r_base
from hf_ebm import EnergyModel
from hf_ebm.assets import held_out_clauses, load_embedded

BATCH_SIZES = (1, 4, 16)
HEADER = ["model", "texts", "masked rows", "minicons' best batch", "minicons s", "hf_ebm s", "ratio", "max |Δ| nats"]


def compare(name: str, model: EnergyModel, tokenizer, texts: list[str], repeats: int) -> list:
    """One row of the table."""
    if not hasattr(tokenizer, "batch_encode_plus"):  # gone from Transformers 5; minicons 0.3.39 still calls it
        tokenizer.batch_encode_plus = tokenizer.__call__
    scorer = MaskedLMScorer(model.mlm, str(model.device), tokenizer=tokenizer)
    model.score(texts[:1], tokenizer)  # the run-time check of the head is not part of either time
    values: list[float] = []
    result = []

    def run_minicons(size: int) -> None:
        values.clear()
        for first in range(0, len(texts), size):
            values.extend(scorer.sequence_score(texts[first : first + size], reduction=lambda x: x.sum().item()))

    works = {str(size): partial(run_minicons, size) for size in BATCH_SIZES}
    theirs = medians({**works, "hf_ebm": lambda: result.append(model.score(texts, tokenizer))}, repeats)
    ours = theirs.pop("hf_ebm")
    difference = (result[0].energy.cpu() + torch.tensor(values, dtype=torch.float64)).abs().max()
    best = min(theirs, key=lambda size: theirs[size])
    rows = int(result[0].num_tokens.sum())
    return [name, len(texts), rows, best, theirs[best], ours, theirs[best] / ours, f"{float(difference):.1e}"]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=12, help="texts for the base-sized models (embedded: 16 times)")
    arguments = begin_timing(parser, repeats=3)
    embedded, tokenizer = load_embedded()
    clauses = held_out_clauses()
    roles = {
        name: getattr(embedded.config, name)
        for name in ("mask_token_id", "pad_token_id", "special_token_ids", "excluded_token_ids")
    }
    texts = clauses[:: len(clauses) // arguments.texts][: arguments.texts]
    many = clauses[:: len(clauses) // (16 * arguments.texts)][: 16 * arguments.texts]
    models = (
        ("bert-base shape, V 30,522", lambda: EnergyModel(bert_base(), **roles), texts),
        ("xlm-r-base shape, V 250,002", lambda: EnergyModel(xlm_r_base(), **roles), texts),
        ("embedded model, V 4,000", lambda: embedded, many),
    )
    rows = (compare(name, make(), tokenizer, rows, arguments.repeats) for name, make, rows in models)
    print_table(HEADER, rows)


if __name__ == "__main__":
    main()
