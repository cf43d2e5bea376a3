"""Encoders of encoder-decoders: one run for several targets of a source, what they read, and states in their place.

Where an encoder reads something else than token ids, trials leave it out and try its decoder on states made up.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput


@contextmanager
def encoded_once(model: nn.Module, sources: Sequence[Hashable]) -> Iterator[None]:
    """For a pass of a model over N rows, of which some have one source: inside, its encoder runs once for each source.

    The model is called as ever, with all rows, so data parallelism, autocast, adapters and whatever it does around its
    encoder are in it. Hooks cut what its encoder is given down to one row a source and repeat what it returns, whose
    gradient is the sum over the rows of a source. In training one source has one dropout mask, whatever number of rows
    it has. Where rows said to be of one source are not given alike, all are encoded, and so they are in a compiled
    forward, in which hooks of one call would stay. Decoder-only models are left alone.

    Args:
        model: a model, or a wrapper of one.
        sources: what names the source of each row, N.
    """
    firsts: dict[Hashable, int] = {}
    for row, source in enumerate(sources):
        firsts.setdefault(source, row)
    encoder = _encoder_of(model)
    if encoder is None or len(firsts) == len(sources):
        yield
        return
    numbers = {source: number for number, source in enumerate(firsts)}
    first, index = torch.tensor(list(firsts.values())), torch.tensor([numbers[source] for source in sources])
    shares = False

    def has_rows(value: Any, count: int) -> bool:
        return isinstance(value, Tensor) and value.dim() > 0 and len(value) == count

    def one_each(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        nonlocal shares
        given = [value for value in tree_leaves((args, kwargs)) if has_rows(value, len(index))]
        alike = (torch.equal(_rows(_rows(value, first), index), value) for value in given)
        shares = not torch.compiler.is_compiling() and all(alike)
        return tree_map(lambda v: _rows(v, first) if has_rows(v, len(index)) else v, (args, kwargs)) if shares else None

    def for_all(module: nn.Module, args: tuple, outputs: Any) -> Any:
        return tree_map(lambda v: _rows(v, index) if has_rows(v, len(numbers)) else v, outputs) if shares else outputs

    hooks = [encoder.register_forward_pre_hook(one_each, with_kwargs=True), encoder.register_forward_hook(for_all)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def encodes_ids(model: PreTrainedModel) -> bool:
    """Whether token ids go into a model's encoder, and not sound or images."""
    return model.main_input_name == "input_ids"


@dataclass
class MadeUpStates(BaseModelOutput):
    """States of an encoder, and the mask that some decoders (Moonshine's) look for there: none, without padding."""

    attention_mask: Tensor | None = None


def made_up_states(model: PreTrainedModel, rows: int) -> MadeUpStates:
    """What an encoder might give for sources of five positions: (rows, 5, d) normal numbers, the same each time.

    Raises:
        ValueError: for an encoder whose configuration doesn't say how large its states are.
    """
    config = model.get_encoder().config
    size = getattr(config, "output_hidden_size", None) or getattr(config, "hidden_size", None)
    if size is None:
        raise ValueError(f"model: the encoder of {type(model).__name__} must have a hidden_size in its configuration")
    states = torch.randn(rows, 5, size, generator=torch.Generator().manual_seed(0))
    return MadeUpStates(last_hidden_state=states.to(model.device, model.dtype))


def _rows(value: Tensor, rows: Tensor) -> Tensor:
    return value.index_select(0, rows.to(value.device))


def _encoder_of(model: nn.Module) -> nn.Module | None:
    """The encoder of an encoder-decoder inside whatever wraps it."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module.get_encoder() if module.config.is_encoder_decoder else None
    return None
