"""`hf-ebm train OBJECTIVE`: train a sequence-to-sequence model with one of the objectives of `hf_ebm.trainers`.

All arguments of Transformers' `Seq2SeqTrainingArguments` are options. The folder `--output_dir` gets the model, its
tokenizer, the state of the trainer and the metrics, which are printed too, as one line of JSON.
"""

from __future__ import annotations

import contextlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import torch
from accelerate import PartialState
from datasets import DatasetDict
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from hf_ebm.cli.common import first_line, parse, to_json
from hf_ebm.cli.training_data import DataArguments, first_rows, load_pairs
from hf_ebm.cli.training_metrics import LOWER_IS_BETTER, GenerationMetrics, metric_names
from hf_ebm.data.symbols import encode_pairs, num_target_ids, symbol_tokenizer
from hf_ebm.models.energy.token_roles import own_tokenizer
from hf_ebm.models.lstm import LSTMSeq2SeqConfig, LSTMSeq2SeqForConditionalGeneration
from hf_ebm.trainers import (
    CrossEntropyTrainer,
    ScheduledSamplingConfig,
    ScheduledSamplingTrainer,
    SearchAwareConfig,
    SearchAwareTrainer,
    SelfNormalizedConfig,
    SelfNormalizedTrainer,
    SoftBeamConfig,
    SoftBeamTrainer,
)

OBJECTIVES = {
    "cross-entropy": (SearchAwareConfig, CrossEntropyTrainer, "teacher forcing, the baseline of the others"),
    "scheduled-sampling": (
        ScheduledSamplingConfig,
        ScheduledSamplingTrainer,
        "inputs of the model's own, hard or soft",
    ),
    "self-normalized": (SelfNormalizedConfig, SelfNormalizedTrainer, "cross entropy and squared local log normalizers"),
    "soft-beam": (SoftBeamConfig, SoftBeamTrainer, "what beam search finds, through its continuous relaxation"),
}
FRESH = "lstm"


@dataclass
class ModelArguments:
    """Which model is trained; all but the first are of a fresh recurrent model."""

    model_name_or_path: str = field(
        metadata={"help": f"Hub name or folder of a sequence-to-sequence model, or '{FRESH}' for a fresh LSTM model."}
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


def run(argv: list[str]) -> None:
    """Trains, evaluates if asked to, and saves."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: hf-ebm train OBJECTIVE [options]   (hf-ebm train OBJECTIVE --help lists them)\n")
        print("\n".join(f"  {name:18} {description}" for name, (_, _, description) in OBJECTIVES.items()))
        return
    if argv[0] not in OBJECTIVES:
        raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}, and come first, got {argv[0]!r}")
    config_class, trainer_class, description = OBJECTIVES[argv[0]]
    about = f"{description}. Evaluation generates up to the length of the longest target, if not told another length."
    which, data, config = parse([ModelArguments, DataArguments, config_class], argv[1:], f"train {argv[0]}", about)
    with contextlib.redirect_stdout(sys.stderr):  # the Trainer prints its logs; standard output is for the result
        metrics = _train(which, data, config, trainer_class)
    if config.process_index == 0:
        print(to_json(metrics))


def _train(
    which: ModelArguments, data: DataArguments, config: SearchAwareConfig, trainer_class: type[SearchAwareTrainer]
) -> dict[str, float]:
    evaluate = config.do_eval  # the Trainer sets it with eval_strategy
    _check(config, data.task, evaluate)
    checkpoint = _checkpoint(config)
    fresh_settings = _fresh_settings(which, data.task)
    if config.process_index != 0 or not sys.stderr.isatty():  # bars are for people
        config.disable_tqdm = True
        datasets.disable_progress_bars()
    datasets.disable_caching()  # encoded rows would be left beside the data
    PartialState().wait_for_everyone()  # nobody fills the folder before everybody has looked into it
    set_seed(config.seed)
    if which.model_name_or_path == FRESH:
        pairs = load_pairs(data, evaluate)
        # From all rows, so that the symbols don't depend on how many are used.
        tokenizer = symbol_tokenizer(pairs["train"]["target"], pairs["train"]["source"])
        model = _fresh_model(fresh_settings, tokenizer)
        _check_fresh_checkpoint(checkpoint, model, tokenizer)
    else:
        model, tokenizer = _pretrained(which.model_name_or_path)
        pairs = load_pairs(data, evaluate)
    pairs = first_rows(pairs, data)
    encoded = encode_pairs(pairs, tokenizer, data.max_source_length, data.max_target_length)
    _check_aligned(model, encoded)
    # One more than the longest target, for the start token, where Transformers would stop after 20 tokens.
    longest = 1 + max(len(labels) for split in encoded.values() for labels in split["labels"])
    config.generation_max_length = config.generation_max_length or longest
    if which.model_name_or_path == FRESH and model.config.attention != "fixed":  # which ends with the source
        model.generation_config.max_length = longest
    compute_metrics = None
    if config.predict_with_generate:
        compute_metrics = GenerationMetrics(data.task, tokenizer, pairs["evaluation"], encoded["evaluation"])
        config.include_for_metrics = ["inputs"]
    trainer = trainer_class(
        model, config, train_dataset=encoded["train"], eval_dataset=encoded.get("evaluation"),
        data_collator=DataCollatorForSeq2Seq(tokenizer), processing_class=tokenizer, compute_metrics=compute_metrics,
    )  # fmt: skip
    metrics = trainer.train(resume_from_checkpoint=checkpoint).metrics
    trainer.save_model()
    trainer.save_metrics("train", metrics)
    if evaluate:
        found = trainer.evaluate()
        trainer.save_metrics("eval", found)
        metrics = {**metrics, **found}
    trainer.save_state()
    return metrics


def _check(config: SearchAwareConfig, task: str, evaluate: bool) -> None:
    """Refuses what the Trainer would find out after training, or never."""
    if config.do_predict:
        raise ValueError("do_predict is no option here; evaluate on another split with eval_split or eval_file")
    if config.predict_with_generate and not evaluate:
        raise ValueError(
            "predict_with_generate was given without an evaluation; add --do_eval (at the end) or --eval_strategy"
        )
    if config.metric_for_best_model is None:
        return
    generated, name = metric_names(task), config.metric_for_best_model.removeprefix("eval_")
    logged = ("cross_entropy", "log_z_variance") if isinstance(config, SelfNormalizedConfig) else ()
    if name not in ("loss", *logged, *generated):
        raise ValueError(
            f"metric_for_best_model must be one of {', '.join(('loss', *logged, *generated))}, got "
            f"{config.metric_for_best_model!r}"
        )
    if name in generated and not config.predict_with_generate:
        raise ValueError(f"metric_for_best_model {name!r} is of generated outputs; add --predict_with_generate")
    if name in LOWER_IS_BETTER:
        config.greater_is_better = False


def _checkpoint(config: SearchAwareConfig) -> str | None:
    """The checkpoint to go on from. Raises `ValueError` if there is none, or the output has to be empty and isn't."""
    output, given = Path(config.output_dir), config.resume_from_checkpoint
    there = next(parent for parent in (output, *output.resolve().parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"output_dir: {output} cannot be written; {there} is not a folder or not writable")
    if given is None or given.lower() == "false":
        if output.exists() and any(output.iterdir()):
            raise ValueError(
                f"output_dir: {output} is not empty; choose another folder, or go on from its last checkpoint with "
                "--resume_from_checkpoint last"
            )
        return None
    if given.lower() in ("true", "last"):
        checkpoint = get_last_checkpoint(output) if output.exists() else None
        if checkpoint is None:
            raise ValueError(f"resume_from_checkpoint: there is no checkpoint in {output}")
        return checkpoint
    if not (Path(given) / "trainer_state.json").exists():
        raise ValueError(f"resume_from_checkpoint must be 'last' or the folder of a checkpoint, got {given!r}")
    return given


def _fresh_settings(which: ModelArguments, task: str) -> dict:
    """Settings of a fresh model, refused before anything is read."""
    given = {name: value for name, value in vars(which).items() if value is not None}
    name = given.pop("model_name_or_path")
    if name != FRESH:
        if given:
            raise ValueError(f"{', '.join(given)}: only for --model_name_or_path {FRESH}; {name!r} has its own")
        return {}
    settings = {"attention": "fixed", "initial_state": "zero"} if task == "cmudict-stress" else {}
    both = {"embedding_dim": ["embedding_dim", "decoder_embedding_dim"], "layers": ["encoder_layers", "decoder_layers"]}
    for name, value in given.items():
        settings |= dict.fromkeys(both.get(name, [name]), value)
    LSTMSeq2SeqConfig(**settings)
    return settings


def _fresh_model(settings: dict, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    vocabularies = {"vocab_size": len(tokenizer), "decoder_vocab_size": num_target_ids(tokenizer)}
    return LSTMSeq2SeqForConditionalGeneration(LSTMSeq2SeqConfig(**vocabularies, **settings))


def _pretrained(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    code = {"trust_remote_code": False}  # said, so that Transformers does not ask on standard input
    try:
        model_config = AutoConfig.from_pretrained(name, **code)
        if type(model_config) not in AutoModelForSeq2SeqLM._model_mapping:
            raise ValueError(
                "model_name_or_path must be a sequence-to-sequence model (AutoModelForSeq2SeqLM), got "
                f"{name!r} of the type {model_config.model_type!r}"
            )
        # In float32, whatever it was saved in: bf16=True casts as it computes.
        model = AutoModelForSeq2SeqLM.from_pretrained(name, dtype=torch.float32, **code)
        tokenizer = own_tokenizer(name, **code)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"model_name_or_path: {name!r} cannot be loaded: {first_line(error)}") from error
    if tokenizer is None:
        raise ValueError(f"model_name_or_path: {name!r} has no tokenizer beside its weights")
    return model, tokenizer


def _check_fresh_checkpoint(checkpoint: str | None, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
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


def _check_aligned(model: PreTrainedModel, encoded: DatasetDict) -> None:
    """With fixed attention the model writes one symbol a source position, and says no more than a batch's row."""
    if getattr(model.config, "attention", None) != "fixed":
        return
    for split, rows in encoded.items():
        for number, row in enumerate(rows):
            sizes = len(row["input_ids"]), len(row["labels"])
            if sizes[0] != sizes[1]:
                raise ValueError(
                    f"row {number} of split {split!r} has {sizes[0] - 1} source and {sizes[1] - 1} target symbols; "
                    "attention 'fixed' needs equally many"
                )
