"""What `hf-ebm train` reads: built-in tasks, local files and folders, and data sets of the Hub, as sequence pairs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import datasets
from datasets import Dataset, DatasetDict
from huggingface_hub import HfApi, constants

from hf_ebm.checks import as_string
from hf_ebm.cli.tables import read_csv, read_records
from hf_ebm.data.cmudict_tasks import load_g2p, load_stress
from hf_ebm.loading import first_line

BUILT_IN = {"cmudict-stress": load_stress, "cmudict-g2p": load_g2p}
ENDINGS = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")


@dataclass
class DataArguments:
    """What the model is trained on and evaluated on."""

    task: str = field(
        metadata={
            "help": f"{', '.join(BUILT_IN)}; a file ({', '.join(ENDINGS)}); a folder with a file for each split "
            "(train.jsonl, validation.jsonl) or written by datasets' save_to_disk; or the name of a data set of the "
            "Hub."
        }
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a data set of the Hub."})
    eval_file: str | None = field(default=None, metadata={"help": "What to evaluate on, where the task is a file."})
    source_column: str = field(default="source", metadata={"help": "Column with the sources."})
    target_column: str = field(default="target", metadata={"help": "Column with the targets."})
    train_split: str | None = field(default=None, metadata={"help": "Split to train on; default: train."})
    eval_split: str | None = field(default=None, metadata={"help": "Split to evaluate on; default: validation."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first so many rows alone."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first so many rows alone."})
    max_source_length: int | None = field(
        default=None,
        metadata={"help": "Most tokens of a source; a longer one is an error. Default: the tokenizer's limit."},
    )
    max_target_length: int | None = field(
        default=None,
        metadata={"help": "Most tokens of a target; a longer one is an error. Default: the tokenizer's limit."},
    )

    def __post_init__(self) -> None:
        for name in ("max_train_samples", "max_eval_samples", "max_source_length", "max_target_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.source_column == self.target_column:
            raise ValueError(f"source_column and target_column must differ, got {self.source_column!r} for both")


def load_pairs(arguments: DataArguments, evaluate: bool, sources_alone: bool = False) -> DatasetDict:
    """The splits `train` and, if `evaluate`, `evaluation`, with the text columns `source` and `target`.

    `cmudict-g2p` has the column `references` too. With `sources_alone`, splits that lack targets have `source` alone.

    Raises:
        ValueError: for a task, split or column that isn't there, options that don't go with the task, splits without
            rows, and rows without a text; naming them.
    """
    is_file, on_hub = _kind(arguments)
    _check_options(arguments, evaluate, is_file, on_hub)
    splits = [arguments.train_split or "train", *([arguments.eval_split or "validation"] if evaluate else [])]
    places = [f"{arguments.task}, split {split!r}" for split in splits]
    if is_file:
        places = [arguments.task, arguments.eval_file or ""][: len(splits)]
        found = [_read_file(place, arguments, sources_alone) for place in places]
    elif on_hub:
        found = _from_hub(arguments.task, arguments.dataset_config, splits)
    elif arguments.task in BUILT_IN:
        found = _named(arguments.task, BUILT_IN[arguments.task](), splits)
    else:
        found = _from_folder(arguments, splits, sources_alone)
    pairs = [_pairs(rows, arguments, place, sources_alone) for rows, place in zip(found, places, strict=True)]
    for rows, place in zip(pairs, places, strict=True):
        if rows.column_names != pairs[0].column_names:
            raise ValueError(
                f"all splits must have a column {arguments.target_column!r} or none of them; of {places[0]} and "
                f"{place} one has"
            )
    return DatasetDict(zip(("train", "evaluation"), pairs, strict=False))


def first_rows(pairs: DatasetDict, arguments: DataArguments) -> DatasetDict:
    """The first `max_train_samples` and `max_eval_samples` rows of the splits, or all there are."""
    most = {"train": arguments.max_train_samples, "evaluation": arguments.max_eval_samples}
    return DatasetDict(
        {name: rows.select(range(min(len(rows), most[name] or len(rows)))) for name, rows in pairs.items()}
    )


def _kind(arguments: DataArguments) -> tuple[bool, bool]:
    """Whether the task is a file, and whether it is a data set of the Hub."""
    if arguments.task in BUILT_IN:
        return False, False
    path = Path(arguments.task)
    is_file = path.is_file() or (path.suffix.lower() in ENDINGS and not path.is_dir())
    return is_file, not is_file and not path.is_dir()


def _check_options(arguments: DataArguments, evaluate: bool, is_file: bool, on_hub: bool) -> None:
    for name in ("eval_file", "eval_split", "max_eval_samples"):
        if getattr(arguments, name) is not None and not evaluate:
            raise ValueError(f"{name} was given without an evaluation; add --do_eval (at the end) or --eval_strategy")
    for name in ("train_split", "eval_split"):
        if getattr(arguments, name) is not None and is_file:
            raise ValueError(f"{name} was given, but the task {arguments.task} is a file, which has no splits")
    if arguments.eval_file is not None and not is_file:
        raise ValueError(f"eval_file goes with a file as task, got the task {arguments.task!r}; see eval_split")
    if is_file and evaluate and arguments.eval_file is None:
        raise ValueError(f"eval_file must be given for an evaluation, as the task {arguments.task} is a file")
    if arguments.dataset_config is not None and not on_hub:
        raise ValueError(f"dataset_config goes with a data set of the Hub, got the task {arguments.task!r}")


def _from_folder(arguments: DataArguments, splits: list[str], sources_alone: bool) -> list[Dataset]:
    folder = Path(arguments.task)
    if (folder / "dataset_dict.json").exists():
        return _named(arguments.task, datasets.load_from_disk(folder), splits)
    if (folder / "dataset_info.json").exists():
        return _named(arguments.task, DatasetDict(train=datasets.load_from_disk(folder)), splits)
    files = []
    for split in splits:
        there = [path for ending in ENDINGS if (path := folder / f"{split}{ending}").is_file()]
        if len(there) != 1:
            raise ValueError(
                f"{folder} must hold one file {split!r} that ends in {', '.join(ENDINGS)}, or be a folder of datasets' "
                f"save_to_disk; it holds {', '.join(sorted(path.name for path in folder.iterdir())) or 'nothing'}"
            )
        files += there
    return [_read_file(str(path), arguments, sources_alone) for path in files]


def _from_hub(name: str, configuration: str | None, splits: list[str]) -> list[Dataset]:
    missing = f"task {name!r} is neither built in ({', '.join(BUILT_IN)}) nor a file or folder here; on the Hub it "
    if not constants.HF_HUB_OFFLINE:  # asks once, where load_dataset would try again for half a minute
        try:
            HfApi().dataset_info(name, timeout=10)
        except Exception as error:  # whatever the HTTP library in use calls it
            hint = "HF_HUB_OFFLINE=1 takes what the cache holds"
            raise ValueError(f"{missing}cannot be reached: {first_line(error)} ({hint})") from error
    try:
        return [datasets.load_dataset(name, configuration, split=split) for split in splits]
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{missing}cannot be loaded: {first_line(error)}") from error


def _named(task: str, found: DatasetDict, splits: list[str]) -> list[Dataset]:
    for split in splits:
        if split not in found:
            raise ValueError(f"{task} has no split {split!r}; it has {', '.join(found)}")
    return [found[split] for split in splits]


def _read_file(path: str, arguments: DataArguments, sources_alone: bool) -> Dataset:
    columns = [arguments.source_column, arguments.target_column]
    ending = Path(path).suffix.lower()
    if ending not in ENDINGS:
        raise ValueError(f"{path} must end in {', '.join(ENDINGS)}")
    records = read_csv(path).rows() if ending == ".csv" else read_records(path, columns[0]).rows()
    if sources_alone and not any(arguments.target_column in record for record in records):
        columns = columns[:1]
    for number, record in enumerate(records):
        for column in columns:
            if column not in record:
                raise ValueError(
                    f"{path}: row {number} has no {column!r}; its columns are {', '.join(map(str, record))}"
                )
            as_string(f"{path}: {column!r} of row {number}", record[column])
    return Dataset.from_dict({column: [record[column] for record in records] for column in columns})


def _pairs(rows: Dataset, arguments: DataArguments, place: str, sources_alone: bool) -> Dataset:
    """The rows with their columns called `source` and `target`."""
    columns = {arguments.source_column: "source", arguments.target_column: "target"}
    if sources_alone and arguments.target_column not in rows.column_names:
        del columns[arguments.target_column]
    if not len(rows):
        raise ValueError(f"{place}: there are no rows")
    for column in columns:
        if column not in rows.column_names:
            raise ValueError(f"{place} has no column {column!r}; it has {', '.join(rows.column_names)}")
    kept = ["references"] if arguments.task == "cmudict-g2p" else []
    rows = rows.select_columns([*columns, *kept]).rename_columns(columns)
    for column, name in columns.items():
        for number, text in enumerate(rows[name][:]):  # one by one takes ten times as long
            if not isinstance(text, str):
                raise ValueError(f"{place}: row {number} must have a text as {column!r}, got {text!r}")
    return rows
