"""`hf-ebm rerank`: rerank n-best lists by energy, of a masked language model or a residual model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow
from transformers import PreTrainedTokenizerBase

from hf_ebm.checks import as_number, as_string, shown
from hf_ebm.cli.common import ModelArguments, load_model, parse
from hf_ebm.cli.tables import Output, Records, check_writable, read_records
from hf_ebm.loading import is_residual, load_residual_model
from hf_ebm.models.energy import EnergyModel
from hf_ebm.models.residual import ResidualEnergyModel

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


def options() -> list[type]:
    """What the command's options are declared in."""
    return [RerankArguments, ModelArguments]


def run(argv: list[str]) -> None:
    """Writes every record back with `best`, `order`, `rerank_scores` and `energies` added."""
    arguments, which = parse(options(), argv, "rerank", __doc__)
    further = which.inputs_by_name()
    check_writable(arguments.output)
    records = read_records(arguments.input, arguments.candidates_column)
    candidates = _lists(records, arguments.candidates_column, as_string)
    base = _lists(records, arguments.scores_column, as_number) if arguments.scores_column else None
    before = records.texts(arguments.prefix_column) if arguments.prefix_column else None
    output = Output(arguments.output, records, _ADDED)
    model, tokenizer = _load(which)
    how = {}
    if before is not None:
        how["prefixes"] = [prefix for prefix, own in zip(before, candidates, strict=True) for _ in own]
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


def _load(which: ModelArguments) -> tuple[EnergyModel | ResidualEnergyModel, PreTrainedTokenizerBase]:
    if not is_residual(which.model, which.revision):
        return load_model(which)
    return load_residual_model(
        which.model, dtype=which.dtype, device=which.device, revision=which.revision,
        max_sequence_length=which.max_sequence_length,
    )  # fmt: skip


def _lists(records: Records, column: str, checked: Callable[[str, object], Any]) -> list[list]:
    """Every record's list in a field, none empty, of entries that are `checked`."""
    lists = []
    for row, entries in enumerate(records.column(column)):
        place = f"{records.path}: {column!r} of record {row}"
        if not isinstance(entries, list) or not entries:
            raise ValueError(f"{place} must be a list that isn't empty, got {shown(entries)}")
        lists.append([checked(f"{place}, entry {number}", entry) for number, entry in enumerate(entries)])
    return lists
