"""What a model does, found out by trying it on a few tokens: whether it is causal, and whether padding changes it.

Lists of families would have to be kept, and settings (`is_decoder`, attention kinds) change what a family does.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_ebm.model_facts import num_embeddings
from hf_ebm.model_modes import evaluation_mode, state_kept


@torch.no_grad()
def is_causal(model: PreTrainedModel) -> bool:
    """Whether what stands behind a token leaves its output the same."""
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
        raise ValueError(f"{name} must be causal; {type(model).__name__} sees the tokens behind the one it predicts")


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

    Which blocks a token sees depends on how far its row is padded, and some stand behind it.
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
