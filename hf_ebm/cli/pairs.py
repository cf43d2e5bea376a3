"""Minimal pairs for `hf-ebm score --pairs`: energies of both sentences, and how often the good one wins."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow

from hf_ebm.checks import as_whole
from hf_ebm.cli.common import ModelArguments, check_shared, divided, load_model
from hf_ebm.cli.json_lines import to_json
from hf_ebm.cli.tables import Output, check_writable, read_table
from hf_ebm.data.minimal_pairs import accuracies_of, accuracy_of, compared_pairs
from hf_ebm.models.energy.scoring_energy import ScoreOutput
from hf_ebm.runtime import joined

_TOKENS, _ENERGIES = pyarrow.list_(pyarrow.string()), pyarrow.list_(pyarrow.float64())
_COMPARED = {
    "energy_good": pyarrow.float64(), "energy_bad": pyarrow.float64(), "win": pyarrow.float64(),
    "tokens_good": _TOKENS, "token_energies_good": _ENERGIES, "tokens_bad": _TOKENS, "token_energies_bad": _ENERGIES,
}  # fmt: skip


@dataclass
class PairArguments:
    """Minimal pairs instead of texts."""

    pairs: str | None = field(
        default=None,
        metadata={"help": "Records with pairs of sentences, as of BLiMP: .jsonl, .parquet, .csv; in place of --input."},
    )
    good_column: str = field(default="sentence_good", metadata={"help": "Field that holds a pair's good sentence."})
    bad_column: str = field(default="sentence_bad", metadata={"help": "Field that holds a pair's bad sentence."})
    group_column: str | None = field(
        default=None, metadata={"help": "Field by whose texts accuracies are told apart, such as linguistics_term."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of the bootstrap."})
    num_resamples: int = field(default=2000, metadata={"help": "Resamples of the bootstrap."})


def score_pairs(
    given: PairArguments, output_path: str, which: ModelArguments, scored: Callable[..., ScoreOutput]
) -> None:
    """Writes a record for each pair and prints accuracies, a line of JSON for all pairs and one for each group.

    Args:
        scored: `(model, tokenizer, texts) -> ScoreOutput`.
    """
    path = str(given.pairs)
    check_writable(output_path)
    how: dict[str, Any] = {
        "seed": as_whole("seed", given.seed, 0), "num_resamples": as_whole("num_resamples", given.num_resamples, 1),
    }  # fmt: skip
    state = joined(which.device)
    check_shared(path, state.num_processes)
    records = read_table(path, given.good_column)
    good, bad = records.texts(given.good_column), records.texts(given.bad_column)
    groups = None if given.group_column is None else list(map(str, records.column(given.group_column)))
    if not good:
        raise ValueError(f"{path}: there are no pairs")
    output = Output(output_path, records, _COMPARED)
    model, tokenizer = load_model(which, state.local_process_index)

    def compared(share: slice) -> list[dict[str, Any]]:
        both = [scored(model, tokenizer, texts[share]) for texts in (good, bad)]
        return compared_pairs(*both)

    found = divided(state, len(records), compared)
    if not state.is_main_process:
        return
    output.write(found)
    wins, summary = [record["win"] for record in found], sys.stderr if output_path == "-" else sys.stdout
    print(to_json(accuracy_of(wins, **how)._asdict()), file=summary)
    for name, own in ({} if groups is None else accuracies_of(wins, groups, **how)).items():
        print(to_json({"group": name, **own._asdict()}), file=summary)
