"""Data sets of texts for the trainers for decoded sequences: prompts, and references where there are any."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_ebm.checks import as_string, shown
from hf_ebm.objectives.completions import pad_right
from hf_ebm.objectives.losses import IGNORED
from hf_ebm.texts import plain_ids, prompt_encoder
from hf_ebm.trainers.costs import COLUMNS


class PromptCollator:
    """Makes batches of rows with a prompt, and a reference or none, both texts; other columns are kept for rewards.

    An encoder reads the prompt as the tokenizer makes it, and labels are the reference as its `text_target`. A causal
    model goes on from the prompt, without an end, and its targets end with `end_id`. Nothing is cut.

    A reference may be a list of texts that are all right, the first of which is the target. A row without one (None, or
    no such column) has no target.

    Args:
        tokenizer: of the model.
        encodes: whether the model has an encoder.
        end_id: which ends the targets of a causal model.
        pad_id: fills up inputs, where the mask is 0.
        prompt_column, reference_column: names of the columns.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        encodes: bool,
        end_id: int,
        pad_id: int,
        prompt_column: str = "prompt",
        reference_column: str = "reference",
    ):
        self.tokenizer, self.encodes, self.end_id, self.pad_id = tokenizer, encodes, end_id, pad_id
        self.prompt_column, self.reference_column = prompt_column, reference_column

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """`input_ids`, `attention_mask` and `labels`, padded on the right, and all columns under `COLUMNS`.

        Raises:
            ValueError: naming column and row of the batch, for what isn't a text, a prompt of messages, one without a
                token for a causal model, a text with more tokens than the tokenizer's `model_max_length`.
        """
        inputs, labels = self._encoded(rows)
        if not any(labels):
            labels = [[IGNORED]] * len(rows)
        ids, mask = pad_right([torch.tensor(row) for row in inputs], self.pad_id)
        padded, _ = pad_right([torch.tensor(row, dtype=torch.long) for row in labels], IGNORED)
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: [row.get(name) for row in rows] for name in names}
        return {"input_ids": ids, "attention_mask": mask, "labels": padded, COLUMNS: columns}

    def lengths(self, rows: Iterable[Mapping[str, Any]]) -> list[int]:
        """How many tokens `input_ids` have of each row; raises what a batch of all rows would."""
        return list(map(len, self._encoded(list(rows))[0]))

    def _encoded(self, rows: Sequence[Mapping[str, Any]]) -> tuple[list[list[int]], list[list[int]]]:
        """Inputs and labels of each row."""
        prompts = [check_prompt(self.prompt_column, row.get(self.prompt_column), at) for at, row in enumerate(rows)]
        targets = [self._target(row.get(self.reference_column), at) for at, row in enumerate(rows)]
        prompt_ids, target_ids = self._ids(prompts, [text for text in targets if text is not None])
        self._check_lengths(self.prompt_column, prompt_ids, range(len(rows)))
        self._check_lengths(self.reference_column, target_ids, [at for at, t in enumerate(targets) if t is not None])
        found = iter(target_ids)
        golds = [[] if text is None else next(found) for text in targets]
        if self.encodes:
            return prompt_ids, golds
        pairs = list(zip(prompt_ids, golds, strict=True))
        return [prompt + gold for prompt, gold in pairs], [[IGNORED] * len(prompt) + gold for prompt, gold in pairs]

    def _target(self, reference: Any, row: int) -> str | None:
        """The text of the target."""
        if reference is None:
            return None
        if isinstance(reference, (list, tuple)) and reference:
            reference = reference[0]
        return as_string(f"{self.reference_column}: row {row}", reference)

    def _ids(self, prompts: list[str], targets: list[str]) -> tuple[list[list[int]], list[list[int]]]:
        if not self.encodes:
            ids = prompt_encoder(self.tokenizer, self.end_id)(prompts)
            for row, own in enumerate(ids):
                if not own:
                    raise ValueError(f"{self.prompt_column}: row {row} must have a token to go on from, got none")
            return ids, [[*own, self.end_id] for own in (plain_ids(self.tokenizer, targets) if targets else [])]
        how = {"padding": False, "truncation": False}
        target_ids = self.tokenizer(text_target=targets, **how)["input_ids"] if targets else []
        return self.tokenizer(text=prompts, **how)["input_ids"], target_ids

    def _check_lengths(self, column: str, rows: list[list[int]], places: Sequence[int]) -> None:
        most = self.tokenizer.model_max_length
        for place, ids in zip(places, rows, strict=True):
            if len(ids) > most:
                raise ValueError(f"{column}: row {place} has {len(ids)} tokens, more than the {most} allowed")


def text_collator(
    tokenizer: Any, model: PreTrainedModel, end_ids: Sequence[int], pad_id: int, columns: Sequence[str]
) -> PromptCollator:
    """The collator of a model's texts.

    Raises:
        ValueError: for no tokenizer.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError(
            f"processing_class must be a tokenizer, for the texts of the data set's column {columns[0]!r}, got "
            f"{shown(tokenizer)}"
        )
    end_id = tokenizer.eos_token_id if tokenizer.eos_token_id in end_ids else end_ids[0]
    return PromptCollator(tokenizer, model.config.is_encoder_decoder, end_id, pad_id, *columns)


def check_prompt(column: str, prompt: Any, row: int) -> str:
    """A prompt itself. Raises `ValueError` for what isn't a text, such as a conversation."""
    if isinstance(prompt, (list, tuple)) and any(isinstance(message, Mapping) for message in prompt):
        raise ValueError(
            f"{column}: row {row} must be a text, got a conversational prompt, {shown(prompt)}; make a text of it with "
            "the tokenizer's apply_chat_template"
        )
    return as_string(f"{column}: row {row}", prompt)


def has_texts(data: Any, column: str) -> bool:
    """Whether a data set, or the first of several by name, has prompts and no tokens.

    Raises:
        ValueError: for a first prompt that isn't a text.
    """
    row = first_row(data)
    if row is None or column not in row or "input_ids" in row:
        return False
    check_prompt(column, row[column], 0)
    return True


def data_sets(train: Any, evaluated: Any) -> dict[str, Any]:
    """The data sets of a trainer by what errors call them; those to evaluate on may be several by name."""
    several = evaluated.items() if isinstance(evaluated, Mapping) else ()
    sets = {f"eval_dataset[{name!r}]": one for name, one in several} or {"eval_dataset": evaluated}
    return {"train_dataset": train, **sets}


def check_data_sets(train: Any, evaluated: Any) -> None:
    """Raises `ValueError` for several data sets to train on, and for what doesn't give rows by number or in turn.

    Such are tables of pandas and polars, names, and columns in a dictionary.
    """
    if isinstance(train, Mapping) and 0 not in train:
        raise ValueError(f"train_dataset must be one data set, got several by name: {', '.join(map(str, train))}")
    for name, data in data_sets(train, evaluated).items():
        if data is None or (isinstance(data, Mapping) and 0 in data):
            continue
        table = hasattr(data, "columns") and hasattr(data, "dtypes")  # polars gives a row by number, as a table
        if table or isinstance(data, (str, bytes, Path, Mapping)):
            given = type(data).__name__ if table else shown(data)
            raise ValueError(
                f"{name} must be a data set (of datasets, of torch, a list of rows), got {given}; "
                "datasets.Dataset.from_pandas, from_polars, from_dict and datasets.load_dataset make one"
            )


def first_row(data: Any) -> Mapping[str, Any] | None:
    """Of a data set, or of the first of several by name; None where it isn't known.

    A stream is read up to its first row, unless it is one that can't be read twice for all that is known.
    """
    if isinstance(data, Mapping) and not hasattr(data, "column_names"):
        data = next(iter(data.values()), None)
    row: Any = None
    if isinstance(data, IterableDataset):
        row = next(iter(data), None)
    elif isinstance(data, (list, tuple, Dataset, torch.utils.data.Dataset)) and hasattr(data, "__len__") and len(data):
        row = data[0]
    return row if isinstance(row, Mapping) else None
