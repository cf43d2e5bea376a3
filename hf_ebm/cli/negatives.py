"""`hf-ebm negatives`: continuations of prefixes, sampled from a causal language model.

Writes a record for each text: `row`, `text`, `prefix_ids`, `continuation_ids` and `negatives`, as
`hf_ebm.trainers.ResidualNCETrainer` reads them, and the text's other fields. A killed run goes on when the same command
is given again; the processes of `torchrun --nproc_per_node N -m hf_ebm negatives …` divide the texts. Beside the output
lies what the records were made with.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import pyarrow
import torch

from hf_ebm.cli.common import (
    CONTINUATION_FIELDS,
    AnyModelArguments,
    ContinuationArguments,
    carried,
    check_positive,
    check_shared,
    continuations,
    load_language_model,
    parse,
    read_texts,
    setting_options,
    special_tokens,
)
from hf_ebm.cli.run_records import RunRecords
from hf_ebm.cli.tables import Output, check_writable
from hf_ebm.models.fingerprints import model_fingerprints
from hf_ebm.models.residual import JointGenerationConfig, ResidualEnergyModel
from hf_ebm.models.residual.candidates import (
    SamplingParameters,
    check_batch_fits,
    check_continuations_fit,
    sample_continuations,
)
from hf_ebm.random_state import stream_seed
from hf_ebm.runtime import joined

_ADDED = {
    "row": pyarrow.int64(), **CONTINUATION_FIELDS, "negatives": pyarrow.list_(pyarrow.list_(pyarrow.int64())),
}  # fmt: skip
_CHANGE_NOTHING = ("output", "device", "unknown_tokens", "input")


@dataclass
class NegativesArguments:
    """What is sampled, and where it goes."""

    output: str = field(metadata={"help": "Where to: .jsonl, .parquet."})
    num_negatives: int = field(default=1, metadata={"help": "Continuations of each prefix."})
    texts_at_once: int = field(default=64, metadata={"help": "Texts sampled for together; draws depend on it."})


_SAMPLING = setting_options(
    JointGenerationConfig, "How continuations are sampled.", ("temperature", "top_k", "top_p", "seed"),
    {"temperature": "Other than 1 the noise isn't the language model.", "seed": "Of the samples."},
    temperature=1.0, seed=0,
)  # fmt: skip


def options() -> list[type]:
    """What the command's options are declared in."""
    return [NegativesArguments, _SAMPLING, ContinuationArguments, AnyModelArguments]


def run(argv: list[str]) -> None:
    """Samples for the texts that the output doesn't hold yet."""
    arguments, sampling, data, which = parse(options(), argv, "negatives", __doc__)
    _check(arguments, data)
    JointGenerationConfig(**vars(sampling))  # which refuses what they may not be
    state = joined(which.device)
    check_shared(data.input, state.num_processes)
    texts = read_texts(data)
    output = Output(arguments.output, carried(texts, data), _ADDED)
    taken = [name for name, own in output.names.items() if own != name]
    if taken:
        raise ValueError(f"{data.input}: {', '.join(taken)}: trainers read fields of these names; rename the input's")
    lm, tokenizer = load_language_model(which, state.local_process_index)
    if isinstance(lm, ResidualEnergyModel):
        raise ValueError(f"model {which.model!r} is a residual model; negatives are of its language model")
    end_ids, _ = special_tokens(lm)
    rows, numbers = continuations(data, texts, tokenizer, lm)
    together = min(arguments.texts_at_once, len(rows)) * arguments.num_negatives
    check_continuations_fit("num_negatives, texts_at_once", together, data.max_new_tokens)
    check_batch_fits("num_negatives, texts_at_once", together, lm)
    records = RunRecords(output, ("row",), numbers)
    if state.is_main_process:
        given = {**asdict(arguments), **asdict(sampling), **asdict(data), **asdict(which)}
        settings = {name: value for name, value in given.items() if name not in _CHANGE_NOTHING}
        checksums = model_fingerprints(lm, tokenizer)
        records.open({"command": "negatives", **settings, "inputs": texts.digest(), "checksums": checksums})
    state.wait_for_everyone()
    known = {record["row"] for record in records.read()}
    state.wait_for_everyone()  # nobody appends before everybody has read what is missing
    parameters = SamplingParameters(
        data.max_new_tokens, tuple(end_ids), sampling.temperature, sampling.top_k, sampling.top_p
    )
    blocks = range(0, len(rows), arguments.texts_at_once)
    missing = [at for at in blocks if not known.issuperset(range(at, min(at + arguments.texts_at_once, len(rows))))]
    with records.filling():
        for at in missing[state.process_index :: state.num_processes]:
            block = rows[at : at + arguments.texts_at_once]
            prefixes = [torch.tensor(row["prefix_ids"]) for row in block]
            seed, together = stream_seed(sampling.seed, at), len(block) * arguments.num_negatives
            drawn = sample_continuations(lm, prefixes, arguments.num_negatives, parameters, seed, together)
            records.append(
                [
                    {"row": at + number, **row, "negatives": [ids.tolist() for ids in own]}
                    for number, (row, own) in enumerate(zip(block, drawn, strict=True))
                ]
            )
    state.wait_for_everyone()
    if state.is_main_process:
        records.finish()
        done = "" if missing else "already complete: "
        print(f"{done}{len(rows)} of {len(texts)} texts have a continuation; {arguments.output}")


def _check(arguments: NegativesArguments, data: ContinuationArguments) -> None:
    if arguments.output == "-":
        raise ValueError("output must be a file: a run on standard output could not go on after a kill")
    check_writable(arguments.output)
    check_positive(num_negatives=arguments.num_negatives, texts_at_once=arguments.texts_at_once, max_rows=data.max_rows)
