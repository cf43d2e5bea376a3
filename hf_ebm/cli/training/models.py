"""Models of `hf-ebm train`, fresh ones and those of folders and of the Hub, and how what they decode is judged."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    EvalPrediction,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_ebm.data.metrics import stress_scores, transcription_scores
from hf_ebm.data.symbols import num_target_ids
from hf_ebm.loading import loading, moved
from hf_ebm.model_facts import check_causal, generation_limit, max_length, num_embeddings, num_outputs, special_ids
from hf_ebm.model_modes import without_adapters
from hf_ebm.models.adapters import own_tokenizer, refuse_adapter_alone
from hf_ebm.models.checkpoints import load_whole
from hf_ebm.models.lstm import LSTMSeq2SeqConfig, LSTMSeq2SeqForConditionalGeneration
from hf_ebm.objectives.losses import IGNORED
from hf_ebm.objectives.sequence_costs import COSTS
from hf_ebm.trainers.costs import ScorerCost
from hf_ebm.trainers.reward_functions import NEGATIVE
from hf_ebm.trainers.targets import decoding_length, new_token_limit
from hf_ebm.trainers.task_loss import TaskLossConfig

FRESH = "lstm"
TAGGING, TRANSCRIPTION = (
    ("accuracy", "macro_f1", "sequence_accuracy"),
    ("phoneme_error_rate", "word_accuracy", "bleu"),
)
# What the Trainer would take to be better when it is higher, as its name does not end in "loss".
LOWER_IS_BETTER = ("cost", "cross_entropy", "log_z_mean", "log_z_variance", "phoneme_error_rate")


@dataclass
class TrainedModelArguments:
    """Which model is trained; all but the first are of a fresh recurrent model."""

    model_name_or_path: str = field(
        metadata={
            "help": f"Hub name or folder of a sequence-to-sequence model (for objectives of a cost: or of a "
            f"causal one), or '{FRESH}' for a fresh LSTM model."
        }
    )
    hidden_size: int | None = field(default=None, metadata={"help": "lstm: size of the states; default: 256."})
    embedding_dim: int | None = field(default=None, metadata={"help": "lstm: size of embeddings; default: 256."})
    bidirectional: bool | None = field(default=None, metadata={"help": "lstm: of the encoder; default: true."})
    attention: str | None = field(
        default=None,
        metadata={"help": "lstm: additive, or fixed (output i reads source position i); default: by the task."},
    )
    initial_state: str | None = field(
        default=None, metadata={"help": "lstm: of the decoder, encoder or zero; default: by the task."}
    )
    layers: int | None = field(default=None, metadata={"help": "lstm: of encoder and decoder each; default: 1."})
    dropout: float | None = field(default=None, metadata={"help": "lstm: dropout; default: 0."})


def fresh_settings(which: TrainedModelArguments, task: str) -> dict[str, Any]:
    """Settings of a fresh model, refused before anything is read."""
    given = {name: value for name, value in vars(which).items() if value is not None}
    name = given.pop("model_name_or_path")
    if name != FRESH:
        if given:
            raise ValueError(f"{', '.join(given)}: only for --model_name_or_path {FRESH}; {name!r} has its own")
        return {}
    settings: dict[str, Any] = {"attention": "fixed", "initial_state": "zero"} if task == "cmudict-stress" else {}
    both = {"embedding_dim": ["embedding_dim", "decoder_embedding_dim"], "layers": ["encoder_layers", "decoder_layers"]}
    for name, value in given.items():
        settings |= dict.fromkeys(both.get(name, [name]), value)
    LSTMSeq2SeqConfig(**settings)
    return settings


def fresh_model(settings: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A recurrent model for the symbols of a `symbol_tokenizer`."""
    config = LSTMSeq2SeqConfig(vocab_size=len(tokenizer), decoder_vocab_size=num_target_ids(tokenizer), **settings)
    return LSTMSeq2SeqForConditionalGeneration(config)


def check_fresh_checkpoint(checkpoint: str | None, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses to go on with other symbols or another shape, which loading weights might not notice."""
    if checkpoint is None:
        return
    theirs, vocabulary = AutoConfig.from_pretrained(checkpoint), own_tokenizer(checkpoint)
    shape = {name for name in LSTMSeq2SeqConfig.__annotations__ if name not in ("use_cache", "dropout")}
    differing = sorted(name for name in shape if getattr(theirs, name, None) != getattr(model.config, name))
    if differing or vocabulary is None or vocabulary.get_vocab() != tokenizer.get_vocab():
        raise ValueError(
            f"resume_from_checkpoint: {checkpoint} is of another model or other training data; differing: "
            f"{', '.join(differing) or 'the symbols'}"
        )


def pretrained(name: str, argument: str, causal: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A sequence-to-sequence model, or a causal one if there may be one, and its tokenizer.

    Raises:
        ValueError: naming the argument, for a model of another kind, one that can't be loaded, lacks weights or has no
            tokenizer, and a causal one that sees what is behind a token.
    """
    code = {"trust_remote_code": False}  # said, so that Transformers does not ask on standard input
    with loading(f"{argument}: {name!r}"):
        refuse_adapter_alone(argument, name)
        model_config = AutoConfig.from_pretrained(name, **code)
        auto_class = _auto_class(model_config, causal)
        if auto_class is None:
            also = " or a causal model (AutoModelForCausalLM)" if causal else ""
            raise ValueError(
                f"{argument} must be a sequence-to-sequence model (AutoModelForSeq2SeqLM){also}, got {name!r} of the "
                f"type {model_config.model_type!r}"
            )
        # In float32, whatever it was saved in: bf16=True casts as it computes.
        model, _ = load_whole(auto_class.from_pretrained, name, dtype=torch.float32, **code)
        tokenizer = own_tokenizer(name, **code)
    if tokenizer is None:
        raise ValueError(f"{argument}: {name!r} has no tokenizer beside its weights")
    if auto_class is AutoModelForCausalLM:
        check_causal(f"{argument}: {name!r} of the type {model_config.model_type!r}", model)
    return model, tokenizer


def _auto_class(
    model_config: PreTrainedConfig, causal: bool
) -> type[AutoModelForSeq2SeqLM | AutoModelForCausalLM] | None:
    """What loads the model; some families (BART) have both kinds."""
    if getattr(model_config, "is_encoder_decoder", False):
        return AutoModelForSeq2SeqLM if type(model_config) in AutoModelForSeq2SeqLM._model_mapping else None
    return AutoModelForCausalLM if causal and type(model_config) in AutoModelForCausalLM._model_mapping else None


def max_positions(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """The most tokens a causal model reads."""
    return min(max_length(model) or tokenizer.model_max_length, tokenizer.model_max_length)


def end_token(decoding: GenerationConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends targets, which decoding ends at from now on if `decoding` names none.

    Raises:
        ValueError: where there is none.
    """
    own = model.config.get_text_config(decoder=True), model.generation_config
    ends = special_ids("eos_token_id", decoding, *own, tokenizer)
    if not ends:
        raise ValueError(
            "model_name_or_path: neither the model nor its tokenizer has an eos_token, got none: decoding could not end"
        )
    decoding.eos_token_id = ends if len(ends) > 1 else ends[0]
    return tokenizer.eos_token_id if tokenizer.eos_token_id in ends else ends[0]


def padding_tokenizer(tokenizer: PreTrainedTokenizerBase, end_id: int) -> PreTrainedTokenizerBase:
    """The tokenizer, or one like it that pads with the end token if it has no padding; itself it is saved as it was."""
    if tokenizer.pad_token_id is not None:
        return tokenizer
    padding = copy.deepcopy(tokenizer)
    padding.pad_token_id = end_id
    return padding


def check_ids(model: PreTrainedModel, encoded: DatasetDict, padding: PreTrainedTokenizerBase) -> None:
    """Raises `ValueError` for ids the model has no embedding for: its tokenizer got tokens and it wasn't resized."""
    size = num_embeddings(model)
    largest = max(max(ids, default=0) for rows in encoded.values() for ids in rows["input_ids"])
    if max(largest, padding.pad_token_id or 0) >= size:
        raise ValueError(
            f"model_name_or_path: the tokenizer uses the id {max(largest, padding.pad_token_id or 0)}, the model has "
            f"{size} embeddings; resize it with resize_token_embeddings"
        )


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
    """Raises `ValueError` for a target without a symbol, where a cost compares texts."""
    names = [config.cost] if config.reward_funcs is None else config.reward_funcs
    costs = [COSTS.get(name.removeprefix(NEGATIVE)) for name in names]
    compared = next((cost.name for cost in costs if cost is not None and cost.reads == "texts"), None)
    if compared is None:
        return
    for split, rows in pairs.items():
        for number, text in enumerate(rows["target"]):
            if not text.split():
                raise ValueError(
                    f"target of row {number} of split {split!r} must hold a symbol for the cost {compared!r}, got "
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
