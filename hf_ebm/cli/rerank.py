"""`hf-ebm rerank`: rerank n-best lists by energy, of a masked language model or a residual model."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow

from hf_ebm.cli.common import ModelArguments, load_model
from hf_ebm.cli.options import parse
from hf_ebm.cli.tables import Output, check_writable, read_records
from hf_ebm.models.energy import EnergyModel
from hf_ebm.models.energy.encoding import as_texts

_ADDED = {
    "best": pyarrow.string(), "order": pyarrow.list_(pyarrow.int64()),
    "rerank_scores": pyarrow.list_(pyarrow.float64()), "energies": pyarrow.list_(pyarrow.float64()),
}  # fmt: skip


@dataclass
class RerankArguments:
    """What is reranked and how."""

    input: str = field(default="-", metadata={"help": "Records with a list of candidates: .jsonl, .parquet, '-'."})
    output: str = field(default="-", metadata={"help": "Where to: .jsonl, .parquet, '-' for standard output."})
    candidates_column: str = field(default="candidates", metadata={"help": "Field with the list of candidate texts."})
    scores_column: str | None = field(
        default=None, metadata={"help": "Field with the candidates' scores by another model, higher is better."}
    )
    weight: float = field(default=1.0, metadata={"help": "Weight of the energy against those scores."})
    length_normalization: float = field(default=0.0, metadata={"help": "0 compares energies, 1 energies per token."})
    prefix_column: str | None = field(
        default=None, metadata={"help": "Field with the text that all candidates continue; it is not scored."}
    )
    variant: str | None = field(
        default=None,
        metadata={"help": "Masked models: exact, within_word_l2r, or the approximations stride and unmasked."},
    )


def run(argv: list[str]) -> None:
    """Writes every record back with `best`, `order`, `rerank_scores` and `energies` added."""
    arguments, which = parse([RerankArguments, ModelArguments], argv, "rerank", __doc__)
    further = which.inputs_by_name()
    check_writable(arguments.output)
    records = read_records(arguments.input, arguments.candidates_column)
    for column, kind in ((arguments.candidates_column, str), (arguments.scores_column, (int, float))):
        for number, value in enumerate(records.column(column) if column else []):
            if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
                what = "texts" if kind is str else "numbers"
                raise ValueError(f"{arguments.input}: {column!r} of record {number} must be a list of {what}")
    candidates = records.column(arguments.candidates_column)
    base = records.column(arguments.scores_column) if arguments.scores_column else None
    before = records.column(arguments.prefix_column) if arguments.prefix_column else None
    output = Output(arguments.output, records, _ADDED)
    model, tokenizer = load_model(which, residual=True)
    how = {}
    if before is not None:
        prefixes = as_texts(str(arguments.prefix_column), before)
        how["prefixes"] = [prefix for prefix, own in zip(prefixes, candidates, strict=True) for _ in own]
    if isinstance(model, EnergyModel):
        how |= {"variant": arguments.variant, "token_budget": which.token_budget, "further_inputs": further}
    elif further or any(one is not None for one in (arguments.variant, which.token_budget, which.energy)):
        raise ValueError(
            "variant, token_budget, energy, further_inputs are of masked models; the model is a residual one"
        )
    result = model.rerank(
        candidates,
        tokenizer,
        base_scores=base,
        weight=arguments.weight,
        length_normalization=arguments.length_normalization,
        unknown_tokens=which.unknown_tokens,
        **how,
    )
    output.write(
        [
            {
                "best": own[int(result.best[row])], "order": result.order[row], "rerank_scores": result.scores[row],
                "energies": result.energies[row],
            }
            for row, own in enumerate(candidates)
        ]
    )  # fmt: skip
