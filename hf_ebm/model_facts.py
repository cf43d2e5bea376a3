"""What a model is: what it says of itself, and what trying it on a few tokens shows.

It says which ids it knows and predicts, its special tokens, inputs it needs and the longest sequence. Whether it is
causal, and whether padding changes it, is tried: lists of families would have to be kept, and settings (`is_decoder`,
attention kinds) change what a family does.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from hf_ebm.checks import as_whole, whole
from hf_ebm.model_modes import evaluation_mode, state_kept

_NAME = "max_sequence_length"  # the field of configurations that overrides
# Where configurations say how long a decoder's sequence may be: nearly all, LED, those of speech.
_LENGTHS = ("max_position_embeddings", "max_decoder_position_embeddings", "max_target_positions")


def num_embeddings(model: PreTrainedModel) -> int:
    """Rows of a model's input embeddings.

    Raises:
        ValueError: for a model whose input embeddings have no weight.
    """
    weight = model.get_input_embeddings().weight
    if not isinstance(weight, Tensor):
        raise ValueError(f"model: {type(model).__name__} has no matrix of input embeddings")
    return weight.shape[0]


def vocabulary_size(model: PreTrainedModel) -> int:
    """`num_embeddings`, or what the configuration says of a model that embeds something else (Perceiver: latents)."""
    weight = getattr(model.get_input_embeddings(), "weight", None)
    return model.config.vocab_size if weight is None else weight.shape[0]


def num_outputs(model: PreTrainedModel) -> int:
    """How many ids a model predicts."""
    head = model.get_output_embeddings()
    return model.config.get_text_config(decoder=True).vocab_size if head is None else head.weight.shape[0]


def needed_inputs(config: PreTrainedConfig) -> dict[str, str]:
    """Inputs that a model cannot do without, by its configuration, with the reason."""
    needed = {}
    if getattr(config, "use_lang_emb", False) and getattr(config, "n_langs", 1) > 1:
        known = getattr(config, "lang2id", None) or f"numbers from 0 to {config.n_langs - 1}"
        needed["langs"] = f"it adds an embedding of each token's language; its languages are {known}"
    if hasattr(config, "languages") and getattr(config, "default_language", None) is None:
        needed["lang_ids"] = f"its languages are {config.languages}, and none is the default (set_default_language)"
    if hasattr(config, "max_2d_position_embeddings"):
        needed["bbox"] = "it adds embeddings of each token's box; bbox=0 says that there is no layout"
    return needed


def refuse_needed_inputs(name: str, model: PreTrainedModel) -> None:
    """Raises `ValueError`, naming the argument, for a model that needs more than tokens where there is nothing else."""
    for needed, reason in needed_inputs(model.config).items():
        raise ValueError(f"{name}: {type(model).__name__} needs {needed}, which can't be given here: {reason}")


def special_ids(name: str, *owners: Any) -> list[int]:
    """A special token's ids (`"eos_token_id"`, …), by the first of its owners that has one; [] where none has.

    Args:
        owners: settings, configurations, tokenizers; a model stands for its generation settings and its configuration.
    """
    for owner in owners:
        own = [owner]
        if hasattr(owner, "config"):
            own = [getattr(owner, "generation_config", None), owner.config.get_text_config(decoder=True)]
        for found in (getattr(one, name, None) for one in own):
            if found is not None:
                return list(found) if whole(found) is None else [found]
    return []


class Limit(NamedTuple):
    """The longest sequence in tokens, special ones included, and what says so."""

    tokens: int
    reason: str

    def check(self, tokens: int, place: str) -> None:
        """Raises `ValueError` for a sequence, called `place`, of more tokens."""
        if tokens > self.tokens:
            raise ValueError(f"{place} has {tokens} tokens, {self.reason}; nothing is cut, so split or shorten it")


def limit_of(
    model: PreTrainedModel,
    override: int | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    name: str = "model",
) -> Limit | None:
    """How long a sequence may be, `None` where nothing states a limit.

    Args:
        override: `max_sequence_length` of a configuration. It takes the place of the number in the model's
            configuration and of the tokenizer's; a table of positions it can't exceed.
        tokenizer: its `model_max_length` counts where it is the shorter one.
        name: what an error calls the model.

    Raises:
        ValueError: for an override that is no whole number from 1 up, or more than the model has a table for, as a
            forward pass of one token more than its configuration says shows (once for a model).
    """
    stated = _stated(model, name)
    if override is not None:
        return _overridden(model, stated, as_whole(_NAME, override, 1))
    own = getattr(tokenizer, "model_max_length", None) or VERY_LARGE_INTEGER
    if own < VERY_LARGE_INTEGER // 2 and (stated is None or own < stated.tokens):
        return Limit(int(own), f"the tokenizer allows {int(own)} (model_max_length), which {_NAME} lifts")
    return stated


def max_length(model: PreTrainedModel, override: int | None = None) -> int | None:
    """The longest sequence of `limit_of`."""
    limit = limit_of(model, override)
    return None if limit is None else limit.tokens


def cached_length(config: PreTrainedConfig) -> int | None:
    """How long a sequence can grow token by token, `None` where the configuration states no limit.

    Rotary frequencies of the kind "longrope" are others beyond the length of pretraining, and cached keys would have
    the old ones; of the kind "dynamic" they are beyond `max_position_embeddings`. Of an encoder-decoder the limit is
    the decoder's. XLNet says -1 for none.
    """
    own = getattr(config, "rope_parameters", None) or {}
    kinds = [own, *(kind for kind in own.values() if isinstance(kind, dict))]  # some have one for each type of layer
    limits = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
    stated = [getattr(config, name, None) or 0 for name in _LENGTHS]
    return min([*limits, *(length for length in stated if length > 0)], default=None)


def generation_limit(model: PreTrainedModel) -> int | None:
    """`cached_length` of a model, or its decoder's table of positions, where that is shorter."""
    decoder = model.get_decoder() if model.config.is_encoder_decoder else model
    lengths = cached_length(model.config.get_text_config(decoder=True)), _table_length(decoder)
    return min((length for length in lengths if length is not None), default=None)


def target_length(model: PreTrainedModel) -> int | None:
    """How long a row the decoder of a model has a table of positions for, `None` where it computes them."""
    decoder = model.get_decoder() if model.config.is_encoder_decoder else model
    return generation_limit(model) if _looks_positions_up(decoder) else None


def source_length(model: PreTrainedModel) -> int | None:
    """How long a row the encoder of an encoder-decoder has a table of positions for, `None` where it computes them."""
    encoder = model.get_encoder()
    if not _looks_positions_up(encoder):
        return None
    config = encoder.config
    stated = (getattr(config, name, None) for name in ("max_encoder_position_embeddings", "max_position_embeddings"))
    lengths = next((length for length in stated if length), None), _table_length(encoder)
    return min((length for length in lengths if length is not None), default=None)


def _looks_positions_up(model: nn.Module) -> bool:
    tables = (name for name, module in model.named_modules() if isinstance(module, nn.Embedding))
    return any(name.endswith(("embed_positions", "position_embeddings", "wpe")) for name in tables)


def _stated(model: PreTrainedModel, name: str) -> Limit | None:
    """What the configuration says, or a table of positions that is shorter."""
    configured, table = _configured(model), _table_length(model)
    if table is not None and (configured is None or table <= configured):
        return Limit(table, f"the {name} has positions for {table}")
    if configured is None:
        return None
    lifted = f"(by its configuration: {_NAME} lifts that where its forward runs beyond)"
    return Limit(configured, f"the {name} has positions for {configured} {lifted}")


def _overridden(model: PreTrainedModel, stated: Limit | None, tokens: int) -> Limit:
    if stated is not None and tokens > stated.tokens:
        table = _table_length(model)
        if (table is not None and tokens > table) or not _runs_with(model, stated.tokens + 1):
            raise ValueError(
                f"{_NAME} must be at most {stated.tokens} with {type(model).__name__}, which has a table of positions "
                f"for no more, got {tokens}"
            )
    return Limit(tokens, f"{_NAME} is {tokens}")


def _configured(model: PreTrainedModel) -> int | None:
    config = model.config.get_text_config(decoder=True) if hasattr(model.config, "get_text_config") else model.config
    found = getattr(config, "max_position_embeddings", None)
    return found if found and found > 0 else None


def _table_length(model: PreTrainedModel) -> int | None:
    # Positions of RoBERTa's kind start after the padding index.
    lengths = [
        len(weight) - (0 if (p := _padding(table)) is None else p + 1) for table, weight in _position_tables(model)
    ]
    return min((length for length in lengths if length > 0), default=None)


_TRIALS: WeakKeyDictionary[nn.Module, dict[int, bool]] = WeakKeyDictionary()


def _runs_with(model: PreTrainedModel, tokens: int) -> bool:
    """Whether the model's own forward gives finite states for so many tokens; tried once."""
    tried = _TRIALS.setdefault(model, {})
    if tokens not in tried:
        base: Any = model.base_model
        pad = getattr(model.config, "pad_token_id", None)
        ids = torch.full((1, tokens), 1 if pad == 0 else 0, device=base.device)
        decoder = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        try:
            with torch.no_grad(), evaluation_mode(base), state_kept(base), _BoundsChecked():
                tried[tokens] = bool(base(ids, **decoder)[0].isfinite().all())
        except torch.OutOfMemoryError:
            raise
        except (IndexError, RuntimeError, ValueError):
            tried[tokens] = False
    return tried[tokens]


class _BoundsChecked(TorchDispatchMode):
    """Raises `IndexError` for rows that a table doesn't have, as a CPU does; a GPU would be of no use from then on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.ops.aten.embedding.default and args[1].is_cuda and int(args[1].max()) >= len(args[0]):
            raise IndexError("index out of range")
        return func(*args, **(kwargs or {}))


def counts_padding(model: PreTrainedModel) -> bool:
    """Whether positions of the model are of RoBERTa's kind: it counts them itself, from the ids, after padding."""
    return any(_padding(table) is not None for table, _ in _position_tables(model))


def _position_tables(model: nn.Module) -> list[tuple[nn.Module, Tensor]]:
    """Tables of position embeddings with their weights."""
    named = (module for name, module in model.named_modules() if name.endswith("embeddings.position_embeddings"))
    found = ((module, getattr(module, "weight", None)) for module in named)
    return [(module, weight) for module, weight in found if isinstance(weight, Tensor) and weight.ndim == 2]


def _padding(table: nn.Module) -> int | None:
    return getattr(table, "padding_idx", None)


@torch.no_grad()
def is_causal(model: PreTrainedModel) -> bool:
    """Whether what stands after a token leaves its output the same."""
    row = five_tokens(model)
    takes_mask = "attention_mask" in inspect.signature(model.forward).parameters
    inputs = {"attention_mask": torch.ones_like(row)} if takes_mask else {}
    other = row.clone()
    other[0, -1] = (other[0, -1] + 1) % num_embeddings(model)
    with evaluation_mode(model), state_kept(model):
        first, second = (model(input_ids=ids, **inputs)[0][:, :-1] for ids in (row, other))
    # A bidirectional model before training differs by little, so no more is allowed than the order of a sum can make;
    # half precision would hide as much, but there two passes of one shape are equal.
    allowed = 16 * torch.finfo(first.dtype).eps * float(first.abs().max())
    half = first.dtype in (torch.float16, torch.bfloat16)
    return torch.equal(first, second) if half else float((first - second).abs().max()) <= allowed


def check_causal(name: str, model: PreTrainedModel) -> None:
    """Raises `ValueError` for a model that sees the tokens it predicts: masked ones can be loaded as causal ones."""
    try:
        causal = is_causal(model)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, AttributeError, LookupError, RuntimeError) as error:  # of the model's own code
        raise ValueError(f"{name}: {type(model).__name__} doesn't run on a few tokens: {error}") from error
    if not causal:
        raise ValueError(f"{name} must be causal; {type(model).__name__} sees the tokens after the one it predicts")


@torch.no_grad()
def has_token_logits(model: PreTrainedModel) -> bool:
    """Whether a model gives, from ids alone, a logit for each id at every position."""
    row = five_tokens(model)
    try:
        with evaluation_mode(model), state_kept(model):
            logits = model(input_ids=row, return_dict=True).logits
    except Exception:  # whatever a model's own code raises on inputs it isn't made for
        return False
    return isinstance(logits, Tensor) and tuple(logits.shape) == (*row.shape, num_embeddings(model))


@torch.no_grad()
def hidden_size_if_padding_is_ignored(encoder: PreTrainedModel, pad_id: int) -> int | None:
    """The size of an encoder's hidden states, `None` if those of a row depend on how far it is padded."""
    row = five_tokens(encoder)
    padded = torch.cat([row, torch.full_like(row, pad_id)], 1)
    mask = torch.ones_like(padded)
    mask[:, row.shape[1] :] = 0
    with evaluation_mode(encoder), state_kept(encoder):
        alone = encoder(input_ids=row, attention_mask=torch.ones_like(row))[0]
        among = encoder(input_ids=padded, attention_mask=mask)[0]
    if alone.dim() != 3 or among.shape[:2] != padded.shape:
        return None
    return alone.shape[-1] if close(among[:, : row.shape[1]], alone) else None


def close(first: Tensor, second: Tensor) -> bool:
    """Whether two outputs differ by rounding at most, by their data type."""
    error = torch.finfo(second.dtype).eps ** 0.6 * float(second.abs().max().clamp(min=1e-3))
    return first.shape == second.shape and float((first - second).abs().max()) <= error


def check_not_block_sparse(name: str, model: PreTrainedModel) -> None:
    """Raises `ValueError` for attention by blocks, which no short trial shows.

    Which blocks a token sees depends on how far its row is padded, and some stand after it.
    """
    if getattr(model.config, "attention_type", None) == "block_sparse":
        raise ValueError(
            f"{name}: the block-sparse attention of {type(model).__name__} depends on padding and isn't causal; load "
            "it with attention_type='original_full'"
        )


def check_weights_stay(name: str, model: PreTrainedModel) -> None:
    """Raises `ValueError` for weights that are divided in evaluation: saved then, they are so twice when loaded."""
    every, config = getattr(model.config, "rescale_every", 0), model.config
    if every and every < getattr(config, "num_hidden_layers", 0):
        raise ValueError(
            f"{name}: {type(model).__name__} rewrites its weights in evaluation (rescale_every={every}); load it with "
            "rescale_every=0"
        )


def check_recomputes(name: str, model: PreTrainedModel) -> None:
    """Raises `ValueError`, naming the argument, for a model whose activations can't be recomputed layer by layer."""
    layers = any(hasattr(module, "gradient_checkpointing") for module in model.modules())
    if not model.supports_gradient_checkpointing or not layers:
        raise ValueError(
            f"activation_checkpointing (gradient_checkpointing) must be off: {name}, {type(model).__name__}, has no "
            "layers that can be recomputed"
        )


def share_parameters(first: nn.Module, second: nn.Module) -> bool:
    """Whether two models have a parameter in common."""
    own = {id(parameter) for parameter in first.parameters()}
    return any(id(parameter) in own for parameter in second.parameters())


def five_tokens(model: PreTrainedModel) -> Tensor:
    """A row of ids (1, 5) to try a model on."""
    return torch.arange(1, 6, device=model.device)[None] % num_embeddings(model)
