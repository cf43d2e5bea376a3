"""How `hf-ebm train` judges what a model decodes: scores of an evaluation, the cost of a scorer."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import numpy as np
from datasets import Dataset, DatasetDict
from transformers import EvalPrediction, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_ebm.cli.training.models import pretrained
from hf_ebm.data.metrics import stress_scores, transcription_scores
from hf_ebm.loading import moved
from hf_ebm.model_facts import generation_limit, max_length, num_outputs
from hf_ebm.model_modes import without_adapters
from hf_ebm.objectives.losses import IGNORED
from hf_ebm.objectives.sequence_costs import COSTS
from hf_ebm.trainers.batches import decoding_length, new_token_limit
from hf_ebm.trainers.scorer_cost import ScorerCost
from hf_ebm.trainers.task_loss import TaskLossConfig

TAGGING, TRANSCRIPTION = (
    ("accuracy", "macro_f1", "sequence_accuracy"),
    ("phoneme_error_rate", "word_accuracy", "bleu"),
)
# What the Trainer would take to be better when it is higher, as its name does not end in "loss".
LOWER_IS_BETTER = ("cost", "cross_entropy", "log_z_mean", "log_z_variance", "phoneme_error_rate")


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


@dataclass
class ScorerArguments:
    """A model's score as the cost."""

    scorer_model: str | None = field(
        default=None,
        metadata={
            "help": "Hub name or folder of a model of the same kind and vocabulary, which is not trained: the cost is "
            "-log p of what is decoded under it, in nats, in place of --cost."
        },
    )


def scorer_cost(
    name: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: TaskLossConfig
) -> ScorerCost:
    """The cost of `--scorer_model`.

    Raises:
        ValueError: for a model of another kind or with another vocabulary than the model that is trained.
    """
    scorer, vocabulary = pretrained(name, "scorer_model", causal=True)
    kinds = ["sequence-to-sequence" if one.config.is_encoder_decoder else "causal" for one in (model, scorer)]
    if kinds[0] != kinds[1]:
        raise ValueError(f"scorer_model must be {kinds[0]} like the model that is trained, got {name!r}, {kinds[1]}")
    if vocabulary.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"scorer_model must have the vocabulary of the model that is trained, which has {len(tokenizer)} tokens; "
            f"got {name!r} with {len(vocabulary)}, not all the same"
        )
    sizes = [num_outputs(one) for one in (model, scorer)]
    if sizes[1] < sizes[0]:
        raise ValueError(f"scorer_model must know the {sizes[0]} ids that the model predicts, {name!r} has {sizes[1]}")
    moved(scorer, str(config.device)).requires_grad_(False)
    # Any id will do for a causal model: nothing reads what stands there.
    return ScorerCost(scorer, 0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def check_targets(config: TaskLossConfig, pairs: DatasetDict) -> None:
    """Raises `ValueError` for a target without a symbol, where the cost compares texts."""
    if COSTS[config.cost].reads != "texts":
        return
    for split, rows in pairs.items():
        for number, text in enumerate(rows["target"]):
            if not text.split():
                raise ValueError(
                    f"target of row {number} of split {split!r} must hold a symbol for the cost {config.cost!r}, got "
                    f"{text!r}"
                )


def longest_decoded(config: TaskLossConfig, decoding: GenerationConfig, encoded: DatasetDict, start: int) -> int:
    """The most tokens that are decoded behind `start` for any batch."""
    targets = [[i for i in labels if i != IGNORED] for rows in encoded.values() for labels in rows["labels"]]
    limits = decoding_length(targets, config.max_length_ratio), new_token_limit(decoding, start)
    return min(limit for limit in limits if limit is not None)


def check_lengths(
    config: TaskLossConfig,
    decoding: GenerationConfig,
    model: PreTrainedModel,
    encoded: DatasetDict,
    scorer: ScorerCost | None,
) -> None:
    """Refuses what would be found out when the longest rows come: no room to decode, or to score what is decoded."""
    causal = not model.config.is_encoder_decoder
    prompt = max(
        row["labels"].count(IGNORED) if causal else len(row["input_ids"]) for rows in encoded.values() for row in rows
    )
    if causal and config.generation_max_length is not None and config.generation_max_length <= prompt:
        raise ValueError(
            f"generation_max_length counts the prompt of a causal model and must be above {prompt}, got "
            f"{config.generation_max_length}; without it max_length_ratio limits what is decoded"
        )
    decoded = longest_decoded(config, decoding, encoded, prompt if causal else 1)
    if decoded < 1:
        raise ValueError(
            f"generation_config: max_length counts the prompt of a causal model and must be above {prompt}, got "
            f"{decoding.max_length}; max_new_tokens doesn't count it"
        )
    positions = None if scorer is None else max_length(without_adapters(scorer.model))
    if positions is None:
        return
    own = generation_limit(model) or sys.maxsize
    needed = min(prompt + decoded, own) if causal else max(prompt, min(decoded, own))
    if needed > positions:
        raise ValueError(
            f"scorer_model must have {needed} positions, for prompts of up to {prompt} tokens and up to {decoded} that "
            f"are decoded (max_length_ratio), got {positions}"
        )
