"""`hf-ebm sample`: the command, what it writes, and its summary."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, TextIO

import pyarrow
import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from hf_ebm.checks import shown
from hf_ebm.cli.commands import ModelArguments, check_shared, command, load_model, setting_options
from hf_ebm.cli.run_records import ChainRecords
from hf_ebm.cli.tables import LineRecords, Output, Records, check_writable, read_records
from hf_ebm.models.energy import EnergyModel
from hf_ebm.models.energy.chains import check_judged, longest_of
from hf_ebm.models.energy.encoding import encode_plain
from hf_ebm.models.energy.saved_runs import holds_run
from hf_ebm.models.fingerprints import model_fingerprints
from hf_ebm.runtime import joined
from hf_ebm.sampling.configuration import ChainGenerationConfig
from hf_ebm.sampling.report import PromptReport, report_of
from hf_ebm.sampling.run import ChainGenerationOutput
from hf_ebm.sampling.sampler import ChainKey, check_run_fits
from hf_ebm.texts import report_unknown

if TYPE_CHECKING:
    from hf_ebm.sampling.configuration import ResolvedChainConfig

_ADDED = {
    "prompt": pyarrow.int64(), "chain": pyarrow.int64(), "epoch": pyarrow.int64(), "text": pyarrow.string(),
    "energy": pyarrow.float64(), "acceptance_rate": pyarrow.float64(), "novel_rate": pyarrow.float64(),
    "token_ids": pyarrow.list_(pyarrow.int64()),
}  # fmt: skip
# Of the chain, in each of its records.
_OF_REPLICAS = {"round_trips": pyarrow.int64()}
logger = logging.get_logger(__name__)

# Masks of other models, and blanks.
_MASKS = re.compile(r"<mask>|\[mask\]|\{mask\}|<extra_id_\d+>|<\|mask\|>|_{3,}", re.IGNORECASE)

# Where what a setting's help says isn't so on the command line.
_OWN_HELP = {
    "lengths": "Numbers of free tokens where there is no prompt; each makes one.",
    "max_rows": "With --target_rhat: masked rows of a prompt after which its run ends with the num_epochs it is in, "
    "those counted whose logits were kept from before.",
    "seed": "Seed of the chains' own random streams: the same command gives the same chains.",
    "allowed_tokens": 'Tokens that some positions may hold, by position from 0, as JSON: {"3": ["king", "lord"]}.',
    "avoid": "Texts that no chain is ever at: a file as --input.",
    "protected_positions": "Positions that stay as they are in every prompt, from 0 and special tokens counted.",
}


@dataclass
class SampleArguments:
    """What is sampled, and where it goes."""

    input: str | None = field(
        default=None, metadata={"help": "Prompts, with masks to fill: .jsonl, .parquet, .txt, '-'; default: --lengths."}
    )
    text: str | None = field(default=None, metadata={"help": "A single prompt."})
    text_column: str = field(default="text", metadata={"help": "Field of the input that holds the text."})
    rewrite: bool = field(
        default=False,
        metadata={"help": "Prompts without a mask of this model are meant to be rewritten as wholes: no warning."},
    )
    output: str = field(default="-", metadata={"help": "Where to: .jsonl, .parquet, '-' for standard output."})
    chains_at_once: int = field(default=64, metadata={"help": "Chains run together; changes speed and memory only."})


def _options() -> list[type]:
    of_chains = setting_options(ChainGenerationConfig, "Settings of the chains.", helps=_OWN_HELP, seed=0)
    return [SampleArguments, ModelArguments, of_chains]


@command(_options)
def sample(arguments: SampleArguments, which: ModelArguments, chain_arguments: Any) -> None:
    """`hf-ebm sample`: draw sequences from a masked language model, or fill the masks of texts.

    Records are appended as chains finish, with the other fields of their prompts. The same command, given again after a
    kill, goes on where it stopped; the processes of `torchrun --nproc_per_node N -m hf_ebm sample …` divide the chains.
    """
    settings = _settings(chain_arguments, arguments.text_column)
    if arguments.chains_at_once < 1:
        raise ValueError(f"chains_at_once must be at least 1, got {arguments.chains_at_once}")
    inputs: dict[str, Any] = dict(which.inputs_by_name())
    check_writable(arguments.output)
    state = joined(which.device)
    given = _given(arguments, state)
    prompts = None if given is None else given.texts(arguments.text_column)
    # A prompt's own `text` becomes the sample; under another name it is carried along like other fields.
    filled = given.without("text") if given is not None and arguments.text_column == "text" else given
    output = Output(arguments.output, filled, _ADDED | (_OF_REPLICAS if "replica_temperatures" in settings else {}))
    if prompts is not None and "lengths" in settings:
        raise ValueError("lengths was given together with prompts; it is for sampling from nothing")
    model, tokenizer = load_model(which, state.local_process_index)
    config = ChainGenerationConfig(**_in_ids(settings, model, tokenizer)).resolved(model.generation_config, {})
    if prompts is None and config.lengths is None:
        raise ValueError("there is nothing to sample: give prompts, as --input or --text, or --lengths of sequences")
    if prompts is not None:
        config.lengths = None  # the model's own concern sampling from nothing
        encoded = encode_plain(model, tokenizer, "prompts", prompts)
        if state.is_main_process or which.unknown_tokens == "error":
            report_unknown(tokenizer, "prompts", prompts, which.unknown_tokens)
        if state.is_main_process and not arguments.rewrite:
            _warn_of_masks(prompts, encoded, tokenizer)
        inputs |= tokenizer.pad({"input_ids": encoded}, return_tensors="pt")
    if config.target_rhat is not None and config.num_chains > arguments.chains_at_once:
        raise ValueError(
            "target_rhat compares the chains of a prompt, which run together: chains_at_once must be at least "
            f"num_chains, {config.num_chains}, got {arguments.chains_at_once}"
        )
    lengths = config.lengths if isinstance(config.lengths, list) else [config.lengths]
    count = len(lengths) if prompts is None else len(prompts)
    check_run_fits(config, count * config.num_chains, longest_of(config) if prompts is None else max(map(len, encoded)))
    keys = [(prompt, chain) for prompt in range(count) for chain in range(config.num_chains)]
    # Those of a prompt are as long as each other.
    check_judged(config, [ChainKey(*key) for key in keys], torch.zeros(len(keys)))
    records = ChainRecords(output, config)
    if state.is_main_process and arguments.output != "-":
        records.open(
            {
                "command": "sample", "model": which.model, "revision": which.revision, "dtype": which.dtype,
                "energy": model.config.energy, "settings": config.settings(),
                "further_inputs": which.inputs_by_name(), "inputs": None if given is None else given.digest(),
                "checksums": model_fingerprints(model, tokenizer),
            }
        )  # fmt: skip
    state.wait_for_everyone()
    missing = records.missing(keys)
    summary = sys.stderr if arguments.output == "-" else sys.stdout
    if state.is_main_process and not missing:
        print(f"{arguments.output}: already complete; nothing was sampled", file=summary)
    state.wait_for_everyone()  # nobody appends before everybody has read what is missing
    with records.filling():
        for batch in _batches(missing, config, arguments.chains_at_once, state):
            out = _run_batch(model, inputs, config, batch, records, which.token_budget)
            records.append_batch(batch, _as_records(out, tokenizer, "round_trips" in output.names))
    state.wait_for_everyone()
    # What is in a file is everybody's; on standard output each has printed its own.
    printed = gather_object(records.read()) if arguments.output == "-" else None
    if state.is_main_process:
        records.close(keys)
        _print_summary(records.read() if printed is None else printed, config, tokenizer, summary)


def _settings(chain_arguments: object, text_column: str) -> dict[str, Any]:
    """The settings that were given; `allowed_tokens` and `avoid` as tokens and texts."""
    settings = {name: value for name, value in vars(chain_arguments).items() if value is not None}
    for name in ("lengths", "block_size"):
        if name in settings and len(settings[name]) == 1:
            settings[name] = settings[name][0]
    if len(settings.get("replica_temperatures", [])) == 1:
        (count,) = settings["replica_temperatures"]
        settings["replica_temperatures"] = int(count) if count == int(count) else count
    if "allowed_tokens" in settings:
        try:
            given = json.loads(settings["allowed_tokens"])
        except (json.JSONDecodeError, RecursionError):
            given = None
        if not isinstance(given, dict) or not all(isinstance(tokens, list) for tokens in given.values()):
            raise ValueError(
                'allowed_tokens must be lists of tokens by position, {"3": ["king", "lord"]}, got '
                f"{shown(settings['allowed_tokens'])}"
            )
        settings["allowed_tokens"] = given
    if "avoid" in settings:
        if settings["avoid"] == "-":
            raise ValueError("avoid must be a file, as several processes cannot share standard input")
        settings["avoid"] = read_records(settings["avoid"], text_column).texts(text_column)
    return settings


def _in_ids(settings: dict[str, Any], model: EnergyModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Settings with ids in the place of tokens and texts. Raises `ValueError` for those that are unknown."""
    found = dict(settings)
    if "avoid" in settings:
        found["avoid"] = encode_plain(model, tokenizer, "avoid", settings["avoid"])
    if "allowed_tokens" in settings:
        vocabulary = tokenizer.get_vocab()
        for position, tokens in settings["allowed_tokens"].items():
            unknown = [token for token in tokens if token not in vocabulary]
            if unknown:
                raise ValueError(f"allowed_tokens: position {position}: {unknown[0]!r} is no token of the tokenizer")
        found["allowed_tokens"] = {
            position: [vocabulary[token] for token in tokens] for position, tokens in settings["allowed_tokens"].items()
        }
    return found


def _warn_of_masks(prompts: list[str], encoded: list[list[int]], tokenizer: PreTrainedTokenizerBase) -> None:
    """All of a prompt without a mask is free, which someone who typed another model's mask doesn't expect.

    Nor that such a mask stays where there are masks of this model.
    """
    masks = [dict.fromkeys(_MASKS.findall(prompt.replace(tokenizer.mask_token, ""))) for prompt in prompts]
    rows = [f"row {row}" + (f" (with {', '.join(map(repr, own))})" if own else "") for row, own in enumerate(masks)]
    special = set(tokenizer.all_special_ids)  # a row of nothing else is refused
    whole = [
        row for row, ids in enumerate(encoded) if tokenizer.mask_token_id not in ids and not special.issuperset(ids)
    ]
    other = [row for row, own in enumerate(masks) if own and row not in set(whole)]
    for found, what in (
        (whole, f"hold no {tokenizer.mask_token}, this model's mask, and are rewritten as wholes"),
        (other, f"hold another mask than {tokenizer.mask_token}, this model's, which is text like any other"),
    ):
        if found:
            told = ", ".join(rows[row] for row in found[:5]) + (", …" if len(found) > 5 else "")
            logger.warning(
                f"prompts: {len(found)} of {len(prompts)} rows {what}: {told}. --rewrite says that this is meant."
            )


def _given(arguments: SampleArguments, state: PartialState) -> Records | None:
    """The prompts: records of the input, or the single one; `None` where there are none."""
    check_shared(arguments.input, state.num_processes)
    if arguments.input is not None and arguments.text is not None:
        raise ValueError("input and text were both given; give one of them")
    if arguments.text is not None:
        return LineRecords("text", [{arguments.text_column: arguments.text}])
    if arguments.input is None:
        return None
    records = read_records(arguments.input, arguments.text_column)
    if not len(records):
        raise ValueError(f"{arguments.input}: there are no prompts")
    return records


def _batches(
    missing: list[tuple[int, int]], config: ResolvedChainConfig, at_once: int, state: PartialState
) -> list[list[tuple[int, int]]]:
    """The chains that this process runs, those together that are run together: with `target_rhat` a prompt's."""
    if config.target_rhat is not None:
        prompts = [list(own) for _, own in groupby(missing, key=lambda key: key[0])]
        return prompts[state.process_index :: state.num_processes]
    own = missing[state.process_index :: state.num_processes]
    return [own[first : first + at_once] for first in range(0, len(own), at_once)]


def _run_batch(
    model: EnergyModel,
    inputs: dict[str, Any],
    config: ResolvedChainConfig,
    batch: list[tuple[int, int]],
    records: ChainRecords,
    token_budget: int | None,
) -> ChainGenerationOutput:
    """Runs the chains of a batch, from their saved state if a killed run left one."""
    folder = records.state_folder(batch)
    common: dict[str, Any] = {"generation_config": config, "token_budget": token_budget}
    if folder is not None and holds_run(folder):
        out = model.generate(resume_from=folder, save_state_to=folder, **common)
    else:
        out = model.generate(**inputs, chain_keys=batch, save_state_to=folder, **common)
    return out


def _as_records(out: ChainGenerationOutput, tokenizer: PreTrainedTokenizerBase, with_round_trips: bool) -> list[dict]:
    records = []
    for row, length in enumerate(out.attention_mask.sum(1).tolist()):
        texts = tokenizer.batch_decode(out.samples[row], skip_special_tokens=True)
        for number, epoch in enumerate(out.kept_epochs):
            place = {"prompt": int(out.prompt_indices[row]), "chain": int(out.chain_indices[row]), "epoch": epoch}
            record: dict[str, Any] = {**place, "text": texts[number], "energy": float(out.energies[row, number])}
            for name in ("acceptance_rate", "novel_rate"):
                value = float(getattr(out.trace, name)[row, epoch])
                record[name] = value if value == value else None
            record["token_ids"] = out.samples[row, number, :length].tolist()
            if with_round_trips and out.replicas is not None:
                record["round_trips"] = int(out.replicas.round_trips[row])
            records.append(record)
    return records


def _print_summary(
    records: list[dict], config: ResolvedChainConfig, tokenizer: PreTrainedTokenizerBase, stream: TextIO
) -> None:
    by_chain: dict[tuple[int, int], list[dict]] = {}
    for record in sorted(records, key=lambda r: r["epoch"]):
        by_chain.setdefault((record["prompt"], record["chain"]), []).append(record)
    for prompt in sorted({prompt for prompt, _ in by_chain}):
        chains = [own for key, own in sorted(by_chain.items()) if key[0] == prompt]
        print(f"\nprompt {prompt}: last sample of each chain (energy in nats)", file=stream)
        for own in chains:
            print(f"  {own[-1]['energy']:8.2f}  {own[-1]['text']}", file=stream)
        report = _report(prompt, chains, config, tokenizer)
        print(*[f"  {report.counts}", *report.lines()], sep="\n", file=stream)


def _report(
    prompt: int, chains: list[list[dict]], config: ResolvedChainConfig, tokenizer: PreTrainedTokenizerBase
) -> PromptReport:
    """The report of a prompt from the records of its chains, by epoch."""
    records = [record for own in chains for record in own]
    ids = [record.get("token_ids") for record in records]
    if None in ids:  # records of earlier versions have none, so tokens are those that texts are read as
        ids = tokenizer([record["text"] for record in records], add_special_tokens=False).input_ids
    # Behind the end of a sample stands what is no token.
    tokens = pad_sequence([torch.tensor(own, dtype=torch.long) for own in ids], batch_first=True, padding_value=-1)

    def of_records(name: str) -> Tensor:
        values = [[math.nan if record[name] is None else record[name] for record in own] for own in chains]
        return torch.tensor(values, dtype=torch.float64)

    return report_of(
        prompt,
        tokens.unflatten(0, (len(chains), -1)),
        of_records("energy"),
        of_records("acceptance_rate"),
        of_records("novel_rate"),
        config.settings(),
        one_length=not isinstance(config.lengths, dict),
        round_trips=sum(own[0]["round_trips"] for own in chains) if "round_trips" in chains[0][0] else None,
    )
