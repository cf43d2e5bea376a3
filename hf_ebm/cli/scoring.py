"""`hf-ebm score`, `rerank` and `variants`: energies of texts, minimal pairs, n-best lists, variants of a sequence."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow
from transformers import PreTrainedTokenizerBase

from hf_ebm.checks import as_number, as_string, as_whole, check_choice, shown
from hf_ebm.cli.commands import ModelArguments, check_shared, command, divided, load_model
from hf_ebm.cli.tables import Output, Records, check_writable, read_records, read_table, to_json
from hf_ebm.data.metrics import accuracies_of, accuracy_of, compared_pairs
from hf_ebm.loading import is_residual, load_residual_model
from hf_ebm.models.energy import EnergyModel
from hf_ebm.models.energy.scoring_energy import ScoreOutput
from hf_ebm.models.residual import ResidualEnergyModel
from hf_ebm.runtime import joined
from hf_ebm.scoring.mutations import SCHEMES

_SCORED = {
    "energy": pyarrow.float64(), "num_tokens": pyarrow.int64(), "num_unknown": pyarrow.int64(),
    "pseudo_perplexity": pyarrow.float64(),
}  # fmt: skip
_DETAILS = {
    "tokens": pyarrow.list_(pyarrow.string()), "token_energies": pyarrow.list_(pyarrow.float64()),
    "words": pyarrow.list_(pyarrow.string()), "word_energies": pyarrow.list_(pyarrow.float64()),
}  # fmt: skip
_TOKENS, _ENERGIES = pyarrow.list_(pyarrow.string()), pyarrow.list_(pyarrow.float64())
_COMPARED = {
    "energy_good": pyarrow.float64(), "energy_bad": pyarrow.float64(), "win": pyarrow.float64(),
    "tokens_good": _TOKENS, "token_energies_good": _ENERGIES, "tokens_bad": _TOKENS, "token_energies_bad": _ENERGIES,
}  # fmt: skip


@dataclass
class ScoreArguments:
    """What is scored and how."""

    input: str = field(
        default="-", metadata={"help": "Records: .jsonl, .parquet, .txt (a text a line), '-' for stdin."}
    )
    output: str = field(default="-", metadata={"help": "Where to: .jsonl, .parquet, '-' for standard output."})
    text_column: str = field(default="text", metadata={"help": "Field that holds the text."})
    prefix_column: str | None = field(default=None, metadata={"help": "Field with left context; it is not scored."})
    suffix_column: str | None = field(default=None, metadata={"help": "Field with right context; it is not scored."})
    masking: str | None = field(
        default=None,
        metadata={
            "aliases": ["--variant"],
            "help": "exact, within_word_l2r, or the approximations stride and unmasked.",
        },
    )
    stride: int = field(default=8, metadata={"help": "Masked rows per text with --masking stride."})
    details: bool = field(default=False, metadata={"help": "Also write the energies of tokens and words."})


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


@command(lambda: [ScoreArguments, PairArguments, ModelArguments])
def score(arguments: ScoreArguments, pairs: PairArguments, which: ModelArguments) -> None:
    """`hf-ebm score`: energies and pseudo-perplexities of texts, or which sentence of minimal pairs is preferred."""
    further = which.inputs_by_name()

    def scored_texts(model: EnergyModel, tokenizer: PreTrainedTokenizerBase, texts: list[str], **context: Any) -> Any:
        return model.score(
            texts,
            tokenizer,
            masking=arguments.masking,
            stride=arguments.stride,
            token_budget=which.token_budget,
            further_inputs=further,
            unknown_tokens=which.unknown_tokens,
            **context,
        )

    if pairs.pairs is not None:
        texts_alone = {"input": "-", "prefix_column": None, "suffix_column": None, "details": False}
        given = [name for name, default in texts_alone.items() if getattr(arguments, name) != default]
        if given:
            raise ValueError(f"pairs: {', '.join(given)} can't be given together with it")
        score_pairs(pairs, arguments.output, which, scored_texts)
        return
    check_writable(arguments.output)
    state = joined(which.device)
    check_shared(arguments.input, state.num_processes)
    records = read_records(arguments.input, arguments.text_column)
    columns = {"prefixes": arguments.prefix_column, "suffixes": arguments.suffix_column}
    contexts: dict[str, Any] = {name: records.texts(column) for name, column in columns.items() if column}
    texts = records.texts(arguments.text_column)
    output = Output(arguments.output, records, _SCORED | (_DETAILS if arguments.details else {}))
    model, tokenizer = load_model(which, state.local_process_index)

    def scored(share: slice) -> list[dict[str, Any]]:
        context = {name: own[share] for name, own in contexts.items()}
        result = scored_texts(model, tokenizer, texts[share], **context)
        found = []
        for row in range(len(result.energy)):
            counts = {name: int(getattr(result, name)[row]) for name in ("num_tokens", "num_unknown")}
            record: dict[str, Any] = {"energy": float(result.energy[row]), **counts}
            if result.pseudo_perplexity is not None:
                value = result.pseudo_perplexity[row]
                record["pseudo_perplexity"] = float(value) if record["num_tokens"] > 0 else None
            if arguments.details:
                record |= {"tokens": result.tokens[row], "token_energies": result.token_energies[row]}
                if result.words is not None and result.word_energies is not None:
                    record |= {"words": result.words[row], "word_energies": result.word_energies[row]}
            found.append(record)
        return found

    found = divided(state, len(records), scored)
    if state.is_main_process:
        output.write(found)


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


_RERANKED = {
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
    masking: str | None = field(
        default=None,
        metadata={
            "aliases": ["--variant"],
            "help": "Masked models: exact, within_word_l2r, or the approximations stride and unmasked.",
        },
    )


@command(lambda: [RerankArguments, ModelArguments])
def rerank(arguments: RerankArguments, which: ModelArguments) -> None:
    """`hf-ebm rerank`: rerank n-best lists by energy, of a masked language model or a residual model."""
    further = which.inputs_by_name()
    check_writable(arguments.output)
    state = joined(which.device)
    check_shared(arguments.input, state.num_processes)
    records = read_records(arguments.input, arguments.candidates_column)
    candidates = _lists(records, arguments.candidates_column, as_string)
    base = _lists(records, arguments.scores_column, as_number) if arguments.scores_column else None
    before = records.texts(arguments.prefix_column) if arguments.prefix_column else None
    output = Output(arguments.output, records, _RERANKED)
    model, tokenizer = _load(which, state.local_process_index)
    how: dict[str, Any] = {}
    if isinstance(model, EnergyModel):
        how = {"masking": arguments.masking, "token_budget": which.token_budget, "further_inputs": further}
    elif further or any(one is not None for one in (arguments.masking, which.token_budget, which.energy)):
        raise ValueError(
            "masking, token_budget, energy, further_inputs are of masked models; the model is a residual one"
        )

    def reranked(share: slice) -> list[dict[str, Any]]:
        lists, further = candidates[share], dict(how)
        if before is not None:
            further["prefixes"] = [prefix for prefix, own in zip(before[share], lists, strict=True) for _ in own]
        result = model.rerank(
            lists,
            tokenizer,
            base_scores=None if base is None else base[share],
            weight=arguments.weight,
            length_normalization=arguments.length_normalization,
            unknown_tokens=which.unknown_tokens,
            **further,
        )
        return [
            {
                "best": own[int(result.best[row])], "order": result.order[row], "rerank_scores": result.scores[row],
                "energies": result.energies[row],
            }
            for row, own in enumerate(lists)
        ]  # fmt: skip

    found = divided(state, len(records), reranked)
    if state.is_main_process:
        output.write(found)


def _load(which: ModelArguments, local_rank: int) -> tuple[EnergyModel | ResidualEnergyModel, PreTrainedTokenizerBase]:
    if not is_residual(which.model, which.revision):
        return load_model(which, local_rank)
    return load_residual_model(
        which.model, dtype=which.dtype, device=which.device, local_rank=local_rank, revision=which.revision,
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


def _schemes_help() -> str:
    told = "; ".join(f"{name}: {scheme.about} (rows: {scheme.rows})" for name, scheme in SCHEMES.items())
    return f"One or more, a column each. {told}. Default: the first.".replace("`", "")


@dataclass
class VariantsArguments:
    """Which variants of what, and how they are scored."""

    reference: str = field(metadata={"help": "FASTA file with one sequence, the wild type."})
    mutations: str = field(
        metadata={"help": "Records with the variants: .csv, .jsonl, .parquet, .txt (a variant a line), '-'."}
    )
    output: str = field(default="-", metadata={"help": "Where to: .csv, .jsonl, .parquet, '-' for standard output."})
    mutation_column: str = field(
        default="mutant", metadata={"help": "Field that holds a variant: A24G, or several changes as A24G:K30R."}
    )
    schemes: list[str] = field(default_factory=lambda: [next(iter(SCHEMES))], metadata={"help": _schemes_help})
    offset: int = field(default=1, metadata={"help": "The number of the reference's first letter."})
    letters: str | None = field(
        default=None, metadata={"help": "What may stand at a site, for log probabilities; default: all tokens."}
    )
    num_draws: int = field(
        default=256,
        metadata={"help": "Draws of each set of sites for sampled_joint_log_prob, which adds a column of its errors."},
    )
    seed: int = field(default=0, metadata={"help": "Seed of these draws."})


@command(lambda: [VariantsArguments, ModelArguments])
def variants(arguments: VariantsArguments, which: ModelArguments) -> None:
    """`hf-ebm variants`: scores of variants of a sequence of letters, in nats."""
    further = which.inputs_by_name()
    check_writable(arguments.output, ".csv")
    for scheme in arguments.schemes:
        check_choice("schemes", scheme, SCHEMES)
    reference = read_fasta(arguments.reference)
    records = read_table(arguments.mutations, arguments.mutation_column)
    texts = records.texts(arguments.mutation_column)
    errors = {scheme: f"{scheme}_error" for scheme in arguments.schemes if scheme.startswith("sampled")}
    output = Output(arguments.output, records, dict.fromkeys([*arguments.schemes, *errors.values()], pyarrow.float64()))
    model, tokenizer = load_model(which)
    found: list[dict[str, float]] = [{} for _ in texts]
    for scheme in dict.fromkeys(arguments.schemes):
        try:
            out = model.score_variants(
                reference, texts, tokenizer, scheme=scheme, offset=arguments.offset, letters=arguments.letters,
                num_draws=arguments.num_draws, seed=arguments.seed, token_budget=which.token_budget,
                further_inputs=further,
            )  # fmt: skip
        except ValueError as error:
            told = str(error).replace("variants: row", f"{arguments.mutations}: record", 1)
            raise ValueError(told.replace("reference:", f"{arguments.reference}:", 1)) from error
        columns = {scheme: out.scores} if out.errors is None else {scheme: out.scores, errors[scheme]: out.errors}
        for name, values in columns.items():
            for record, value in zip(found, values.tolist(), strict=True):
                record[name] = value
    output.write(found)


def read_fasta(path: str) -> str:
    """The sequence of a FASTA file. Raises `ValueError` for none, several, or what is no text."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = [line.strip() for line in file if line.strip() and not line.startswith(";")]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not FASTA in UTF-8: {error}") from error
    headers = [number for number, line in enumerate(lines) if line.startswith(">")]
    sequence = "".join(line for line in lines if not line.startswith(">")).removesuffix("*")
    if len(headers) > 1 or headers not in ([], [0]):
        raise ValueError(f"{path} must hold one sequence, got {len(headers)}")
    if not sequence:
        raise ValueError(f"{path} holds no sequence")
    return sequence
