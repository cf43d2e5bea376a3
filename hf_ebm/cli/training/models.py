"""Models of `hf-ebm train`: fresh ones, and those of folders and of the Hub, with their tokenizers."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import DatasetDict
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_ebm.data.symbols import num_target_ids
from hf_ebm.loading import loading
from hf_ebm.model_facts import check_causal, max_length, num_embeddings, special_ids
from hf_ebm.models.adapters import own_tokenizer, refuse_adapter_alone
from hf_ebm.models.checkpoints import load_whole
from hf_ebm.models.lstm import LSTMSeq2SeqConfig, LSTMSeq2SeqForConditionalGeneration

FRESH = "lstm"


@dataclass
class TrainedModelArguments:
    """Which model is trained; all but the first are of a fresh recurrent model."""

    model_name_or_path: str = field(
        metadata={
            "help": f"Hub name or folder of a sequence-to-sequence model (mgs, minimum-risk and policy-gradient: or of "
            f"a causal one), or '{FRESH}' for a fresh LSTM model."
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
