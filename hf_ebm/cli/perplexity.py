"""`hf-ebm perplexity`: of causal and residual models on continuations, of masked ones on whole texts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pyarrow
import torch
from accelerate import PartialState
from transformers import PreTrainedModel

from hf_ebm.cli.commands import (
    AnyModelArguments,
    MaskedModelArguments,
    check_positive,
    check_shared,
    command,
    divided,
    energy_help,
    load_model,
)
from hf_ebm.cli.continuations import (
    CONTINUATION_FIELDS,
    ContinuationArguments,
    carried,
    continuations,
    load_language_model,
    read_texts,
    special_tokens,
)
from hf_ebm.cli.tables import Output, Records, check_not_input, check_writable, to_json
from hf_ebm.loading import is_masked
from hf_ebm.models.energy.encoding import encode_texts
from hf_ebm.models.energy.partition_energy import METHODS
from hf_ebm.models.energy.perplexity_energy import ROW_LIMIT, PerplexityOutput, frame_of
from hf_ebm.models.residual import ResidualEnergyModel
from hf_ebm.models.residual.scoring_residual import ResidualPerplexity, lm_log_probs, residual_perplexity
from hf_ebm.runtime import joined

_PERPLEXITY_FIELDS = CONTINUATION_FIELDS | dict.fromkeys(
    ("lm_log_prob", "energy", "log_partition_lower", "log_partition_upper"), pyarrow.float64()
)


_MASKED_FIELDS = {"energy": pyarrow.float64(), "num_tokens": pyarrow.int64()} | dict.fromkeys(
    ("log_partition_lower", "log_partition_upper"), pyarrow.float64()
)


_SUMS = ("lower", "error", "upper", "upper_error")


@dataclass
class PerplexityArguments:
    """How the perplexity is estimated."""

    output: str | None = field(default=None, metadata={"help": "Also write a record for each text: .jsonl, .parquet."})
    num_samples: list[int] = field(
        default_factory=lambda: [1000], metadata={"help": "Samples of the language model for each prefix."}
    )
    candidates_at_once: int = field(default=256, metadata={"help": "Rows run together; draws depend on it."})
    seed: int = field(default=0, metadata={"help": "Of the samples."})


@dataclass
class MaskedPerplexityArguments:
    """Of a masked language model, whose texts are whole: no prefix is given."""

    energy: str | None = field(
        default=None, metadata={"help": lambda: f"{energy_help()} With it the embedded model is the masked one."}
    )
    temperature: float | None = field(
        default=None, metadata={"help": "τ of exp(-E/τ); the field energy of records is E/τ; default: 1."}
    )
    method: str | None = field(
        default=None, metadata={"help": f"How log Z of a length is found: {' or '.join(METHODS)}; default: smc."}
    )
    num_particles: int | None = field(default=None, metadata={"help": "Particles of each run; default: 64."})
    num_runs: int | None = field(default=None, metadata={"help": "Runs of each length; default: 4."})
    num_moves: int | None = field(default=None, metadata={"help": "Epochs of chains at each level; default: 1."})
    num_chains: int | None = field(
        default=None, metadata={"help": "Chains of each run that the estimate from above starts at; default: 8."}
    )
    num_epochs: int | None = field(default=None, metadata={"help": "Their epochs, half as burn-in; default: 64."})
    skip_unusable_rows: bool | None = field(
        default=None, metadata={"help": "Leave out texts of probability 0, as they hold [UNK], in place of an error."}
    )
    row_limit: int | None = field(
        default=None, metadata={"help": f"Masked rows at most, as estimated beforehand; default: {ROW_LIMIT}."}
    )
    token_budget: int | None = field(default=None, metadata={"help": "Tokens per forward pass; default: from memory."})
    trust_remote_code: bool | None = field(
        default=None, metadata={"help": "Run the code that a checkpoint brings along; default: no."}
    )

    def given(self) -> dict[str, Any]:
        """Those that were given, by name."""
        named = ((own.name, getattr(self, own.name)) for own in fields(self))
        return {name: value for name, value in named if value is not None}


@command(lambda: [PerplexityArguments, ContinuationArguments, MaskedPerplexityArguments, AnyModelArguments])
def perplexity(
    arguments: PerplexityArguments,
    data: ContinuationArguments,
    masked: MaskedPerplexityArguments,
    which: AnyModelArguments,
) -> None:
    """`hf-ebm perplexity`: perplexity of a causal, a residual or a masked model.

    That of a causal model is exact; those of a residual and of a masked model lie between a lower and an upper
    estimate. A masked model is read as the distribution exp(-E) / Z over all texts of as many tokens; a model is a
    masked one if its checkpoint says so, or where --energy is given.

    Prints a line of JSON. With several --num_samples there is a range for each, to see whether estimates have settled.
    """
    check_positive(candidates_at_once=arguments.candidates_at_once, max_rows=data.max_rows)
    if min(arguments.num_samples) < 2:
        raise ValueError(f"num_samples must be 2 or more: the bounds need two samples, got {arguments.num_samples}")
    if arguments.seed < 0:
        raise ValueError(f"seed must be 0 or more, got {arguments.seed}")
    if arguments.output is not None:
        check_writable(arguments.output)
    state = joined(which.device)
    check_shared(data.input, state.num_processes)
    texts = read_texts(data)
    if arguments.output is not None:
        check_not_input(arguments.output, texts)
    is_of_masked = masked.energy is not None or is_masked(which.model, which.revision)
    _check_kind(is_of_masked, arguments, data, masked)
    records, added = (texts, _MASKED_FIELDS) if is_of_masked else (carried(texts, data), _PERPLEXITY_FIELDS)
    output = None if arguments.output is None else Output(arguments.output, records, added)
    if is_of_masked:
        summary, rows, numbers = _masked_perplexity(state, texts, arguments, data, masked, which)
    else:
        model, tokenizer = load_language_model(which, state.local_process_index)
        rows, numbers = continuations(data, texts, tokenizer, model)
        if isinstance(model, ResidualEnergyModel):
            summary, more = _residual_perplexity(state, model, rows, arguments, data)
        else:
            summary, more = _causal_perplexity(state, model, rows, arguments)
        rows = [{**row, **own} for row, own in zip(rows, more, strict=True)]
    if not state.is_main_process:
        return
    if output is not None:
        output.write(rows, numbers)
    print(to_json({"model": which.model, "texts": len(texts), "rows": len(rows), **summary}))


def _check_kind(
    is_of_masked: bool, arguments: PerplexityArguments, data: ContinuationArguments, masked: MaskedPerplexityArguments
) -> None:
    """Raises `ValueError` for options of another kind of model."""
    if not is_of_masked:
        if masked.given():
            raise ValueError(
                f"{', '.join(masked.given())}: of masked language models, which this isn't; --energy says that it is"
            )
        return
    plain = ContinuationArguments(data.input)
    given = [name for name in ("prefix_tokens", "max_new_tokens", "fragments")
             if getattr(data, name) != getattr(plain, name)]  # fmt: skip
    given += [name for name in ("num_samples", "candidates_at_once")
              if getattr(arguments, name) != getattr(PerplexityArguments(), name)]  # fmt: skip
    if given:
        raise ValueError(f"{', '.join(given)}: of causal and residual models; texts of a masked one are whole")


def _masked_perplexity(
    state: PartialState,
    records: Records,
    arguments: PerplexityArguments,
    data: ContinuationArguments,
    masked: MaskedPerplexityArguments,
    which: AnyModelArguments,
) -> tuple[dict, list[dict], list[int]]:
    """What is printed, a record for each text that isn't left out, and these texts' numbers."""
    how = masked.given()
    own = {name: how.pop(name) for name in ("energy", "trust_remote_code") if name in how}
    model, tokenizer = load_model(MaskedModelArguments(**vars(which), **own), state.local_process_index)
    texts = records.texts(data.text_column)
    with _records_named(data.input, range(len(texts))):
        encoded = encode_texts(model, tokenizer, texts, None, None, " ")
    # Processes divide the texts by what they share log Z by, the shorter first.
    frames = [frame_of(own) for own in encoded]
    order = sorted(range(len(texts)), key=lambda row: (frames[row].count(-1), frames[row]))

    def measured(share: slice) -> list[tuple]:
        own = order[share]
        with _records_named(data.input, own):
            found = model.perplexity(
                [texts[row] for row in own], tokenizer, seed=arguments.seed, unknown_tokens=data.unknown_tokens, **how
            )
        kept = [row for number, row in enumerate(own) if number not in found.left_out]
        columns = [found.energy, found.num_tokens]
        columns += [values[found.frame] for values in (found.log_partition, found.error, found.log_partition_upper,
                                                       found.upper_error)]  # fmt: skip
        return list(zip(kept, *(column.tolist() for column in columns), strict=True))

    rows = sorted(divided(state, len(order), measured))
    numbers, energy, num_tokens, *sums = zip(*rows, strict=True)
    first = {frames[number]: row for row, number in reversed(list(enumerate(numbers)))}
    at = sorted(first.values(), key=lambda row: order.index(numbers[row]))
    place = {frames[numbers[row]]: number for number, row in enumerate(at)}
    frame = [place[frames[number]] for number in numbers]
    below, below_error, above, above_error = (
        torch.tensor([values[row] for row in at], dtype=torch.float64) for values in sums
    )
    found = PerplexityOutput(
        energy=torch.tensor(energy, dtype=torch.float64), num_tokens=torch.tensor(num_tokens),
        frame=torch.tensor(frame), log_partition=below, error=below_error,
        log_partition_upper=above, upper_error=above_error, num_masked_rows=0, left_out=[],
    )  # fmt: skip
    summary = {
        "tokens": sum(num_tokens),
        "perplexity": {"lower": found.lower, "upper": found.upper},
        "sampling_error": {"lower": found.lower_sampling_error, "upper": found.upper_sampling_error},
        "log_partition": [
            {
                "num_tokens": num_tokens[row],
                "texts": frame.count(number),
                **{name: own[row] for name, own in zip(_SUMS, sums, strict=True)},
            }
            for number, row in enumerate(at)
        ],
    }
    of_rows = [dict(zip(_MASKED_FIELDS, (own[1], own[2], own[3], own[5]), strict=True)) for own in rows]
    return summary, of_rows, list(numbers)


@contextmanager
def _records_named(source: str, numbers: Sequence[int]) -> Iterator[None]:
    """Errors of rows of texts name the records that they are of."""
    try:
        yield
    except ValueError as error:
        told = re.sub(r"texts: row (\d+)", lambda at: f"{source}: record {numbers[int(at[1])]}", str(error))
        raise ValueError(told) from error


def _causal_perplexity(
    state: PartialState, model: PreTrainedModel, rows: list[dict], arguments: PerplexityArguments
) -> tuple[dict, list[dict]]:
    device = model.device
    prefixes, continuations = ([torch.tensor(row[name], device=device) for row in rows]
                               for name in ("prefix_ids", "continuation_ids"))  # fmt: skip
    pad_id, batch_size = special_tokens(model)[1], arguments.candidates_at_once

    def measured(share: slice) -> list[float]:
        return lm_log_probs(model, prefixes[share], continuations[share], pad_id, batch_size).nansum(1).tolist()

    log_probs = divided(state, len(rows), measured)
    tokens = sum(map(len, continuations))
    perplexity = float((-torch.tensor(log_probs, dtype=torch.float64).sum() / tokens).exp())
    return {"tokens": tokens, "perplexity": perplexity}, [{"lm_log_prob": value} for value in log_probs]


def _residual_perplexity(
    state: PartialState,
    model: ResidualEnergyModel,
    rows: list[dict],
    arguments: PerplexityArguments,
    data: ContinuationArguments,
) -> tuple[dict, list[dict]]:
    prefixes, continuations = ([row[name] for row in rows] for name in ("prefix_ids", "continuation_ids"))

    def measured(share: slice) -> list[tuple]:
        found = residual_perplexity(
            model,
            prefixes[share],
            continuations[share],
            max_new_tokens=data.max_new_tokens,
            num_samples=arguments.num_samples,
            candidates_at_once=arguments.candidates_at_once,
            seed=arguments.seed,
            first_row=share.start,
        )
        return list(zip(*(values.tolist() for name, values in found.items() if name != "num_samples"), strict=True))

    columns = zip(*divided(state, len(rows), measured), strict=True)
    sizes = sorted(set(arguments.num_samples))
    found = ResidualPerplexity(torch.tensor(sizes), *(torch.from_numpy(np.array(column)) for column in columns))
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
