"""Scores of what a model generates for the evaluation rows of `hf-ebm train`."""

from __future__ import annotations

import numpy as np
from datasets import Dataset
from transformers import EvalPrediction, PreTrainedTokenizerBase

from hf_ebm.data.metrics import stress_scores, transcription_scores
from hf_ebm.objectives.token_losses import IGNORED

TAGGING, TRANSCRIPTION = (
    ("accuracy", "macro_f1", "sequence_accuracy"),
    ("phoneme_error_rate", "word_accuracy", "bleu"),
)
# What the Trainer would take to be better when it is higher, as its name does not end in "loss".
LOWER_IS_BETTER = ("cost", "cross_entropy", "log_z_variance", "phoneme_error_rate")


def metric_names(task: str) -> tuple[str, ...]:
    """What `GenerationMetrics` gives for a task."""
    return TAGGING if task == "cmudict-stress" else TRANSCRIPTION


class GenerationMetrics:
    """`compute_metrics` of a Trainer: texts are decoded and scored, as shares (BLEU in per cent).

    Stress is scored by `stress_scores`, at vowels alone; all else by `transcription_scores`, on all references of a
    source where the task has several.

    Args:
        task: the task's name.
        tokenizer: decodes, and says what padding is.
        texts: evaluation rows with `source`, `target` and perhaps `references`.
        encoded: the same rows as inputs.

    Raises:
        ValueError: for a reference without a symbol.
        ImportError: without the packages that the scores need.
    """

    def __init__(self, task: str, tokenizer: PreTrainedTokenizerBase, texts: Dataset, encoded: Dataset):
        self.task, self.tokenizer, self.num_rows = task, tokenizer, len(texts)
        # Rows may be evaluated in another order: several references are found by their source.
        self.references: dict[tuple[int, ...], list[str]] = {}
        if "references" in texts.column_names:
            sources = [tuple(self._kept(ids)) for ids in encoded["input_ids"]]
            self.references = dict(zip(sources, texts["references"], strict=True))
        targets = list(texts["target"])
        self._score(targets, targets)  # what cannot be scored is refused here, not after an epoch

    def __call__(self, prediction: EvalPrediction) -> dict[str, float]:
        # Several processes share out equally many rows, with rows from the beginning again at the end.
        predictions = self._texts(_only(prediction.predictions)[: self.num_rows])
        if not self.references:
            return self._score(predictions, self._texts(_only(prediction.label_ids)[: self.num_rows]))
        sources = [self._kept(row) for row in _only(prediction.inputs)[: self.num_rows]]
        return self._score(predictions, [self.references[tuple(source)] for source in sources])

    def _score(self, predictions: list[str], references: list) -> dict[str, float]:
        if self.task != "cmudict-stress":
            return transcription_scores(predictions, references)
        return stress_scores(predictions, references)

    def _texts(self, ids: np.ndarray) -> list[str]:
        return list(self.tokenizer.batch_decode([self._kept(row) for row in ids], skip_special_tokens=True))

    def _kept(self, row: np.ndarray | list[int]) -> list[int]:
        row = np.asarray(row)
        return row[(row != IGNORED) & (row != self.tokenizer.pad_token_id)].tolist()


def _only(arrays: np.ndarray | tuple[np.ndarray, ...] | None) -> np.ndarray:
    """The array of ids; the trainers of this package return one each."""
    if not isinstance(arrays, np.ndarray):
        raise ValueError(f"predictions, labels and inputs must be an array each, got {type(arrays).__name__}")
    return arrays
