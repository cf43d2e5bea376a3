"""`hf-ebm perplexity`: perplexity of a residual model, between a lower and an upper estimate, or of a causal model.

Prints a line of JSON. With several --num_samples there is a range for each, to see whether estimates have settled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow
import torch
from transformers import PreTrainedModel

from hf_ebm.cli.common import (
    CONTINUATION_FIELDS,
    AnyModelArguments,
    ContinuationArguments,
    carried,
    check_positive,
    continuations,
    load_language_model,
    parse,
    read_texts,
    special_tokens,
)
from hf_ebm.cli.json_lines import to_json
from hf_ebm.cli.tables import Output, check_writable
from hf_ebm.models.residual import ResidualEnergyModel
from hf_ebm.models.residual.scoring_residual import ResidualPerplexity, lm_log_probs, residual_perplexity

_ADDED = CONTINUATION_FIELDS | dict.fromkeys(
    ("lm_log_prob", "energy", "log_partition_lower", "log_partition_upper"), pyarrow.float64()
)


@dataclass
class PerplexityArguments:
    """How the perplexity is estimated."""

    output: str | None = field(default=None, metadata={"help": "Also write a record for each text: .jsonl, .parquet."})
    num_samples: list[int] = field(
        default_factory=lambda: [1000], metadata={"help": "Samples of the language model for each prefix."}
    )
    candidates_at_once: int = field(default=256, metadata={"help": "Rows run together; draws depend on it."})
    seed: int = field(default=0, metadata={"help": "Of the samples."})


def options() -> list[type]:
    """What the command's options are declared in."""
    return [PerplexityArguments, ContinuationArguments, AnyModelArguments]


def run(argv: list[str]) -> None:
    """Evaluates, and prints."""
    arguments, data, which = parse(options(), argv, "perplexity", __doc__)
    check_positive(candidates_at_once=arguments.candidates_at_once, max_rows=data.max_rows)
    if min(arguments.num_samples) < 2:
        raise ValueError(f"num_samples must be 2 or more: the bounds need two samples, got {arguments.num_samples}")
    if arguments.seed < 0:
        raise ValueError(f"seed must be 0 or more, got {arguments.seed}")
    if arguments.output is not None:
        check_writable(arguments.output)
    texts = read_texts(data)
    output = None if arguments.output is None else Output(arguments.output, carried(texts, data), _ADDED)
    model, tokenizer = load_language_model(which)
    rows, numbers = continuations(data, texts, tokenizer, model)
    summary = {"model": which.model, "texts": len(texts), "rows": len(rows)}
    if isinstance(model, ResidualEnergyModel):
        found, records = _residual(model, rows, arguments, data)
    else:
        found, records = _causal(model, rows, arguments)
    if output is not None:
        output.write([{**row, **record} for row, record in zip(rows, records, strict=True)], numbers)
    print(to_json({**summary, **found}))


def _causal(model: PreTrainedModel, rows: list[dict], arguments: PerplexityArguments) -> tuple[dict, list[dict]]:
    device = model.device
    prefixes, continuations = ([torch.tensor(row[name], device=device) for row in rows]
                               for name in ("prefix_ids", "continuation_ids"))  # fmt: skip
    pad_id = special_tokens(model)[1]
    log_probs = lm_log_probs(model, prefixes, continuations, pad_id, arguments.candidates_at_once).nansum(1)
    tokens = sum(map(len, continuations))
    records = [{"lm_log_prob": value} for value in log_probs.tolist()]
    return {"tokens": tokens, "perplexity": float((-log_probs.sum() / tokens).exp())}, records


def _residual(
    model: ResidualEnergyModel, rows: list[dict], arguments: PerplexityArguments, data: ContinuationArguments
) -> tuple[dict, list[dict]]:
    found: ResidualPerplexity = residual_perplexity(
        model,
        [row["prefix_ids"] for row in rows],
        [row["continuation_ids"] for row in rows],
        max_new_tokens=data.max_new_tokens,
        num_samples=arguments.num_samples,
        candidates_at_once=arguments.candidates_at_once,
        seed=arguments.seed,
    )
    ranges = [
        {"num_samples": number, "lower": low, "upper": high}
        for number, low, high in zip(
            found.num_samples.tolist(), found.lower.tolist(), found.upper.tolist(), strict=True
        )
    ]
    summary = {
        "tokens": int(found.num_tokens.sum()),
        "base_perplexity": found.base_perplexity,
        "perplexity": ranges,
        "sampling_error": found.sampling_error,
        "mean_effective_sample_size": float(found.effective_sample_size.mean()),
    }
    records = [
        {"lm_log_prob": log_prob, "energy": energy, "log_partition_lower": low, "log_partition_upper": high}
        for log_prob, energy, low, high in zip(
            found.lm_log_prob.tolist(),
            found.energy.tolist(),
            found.log_partition_lower[:, -1].tolist(),
            found.log_partition_upper[:, -1].tolist(),
            strict=True,
        )
    ]
    return summary, records
