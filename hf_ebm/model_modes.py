"""Running a model, in another mode, with other settings, its encoder once for many rows, and leaving it as it was."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from logging import Filter, LogRecord, getLogger
from operator import is_
from threading import Lock, RLock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

if TYPE_CHECKING:
    # To type checkers a field without a default is required, and so never `None`.
    from dataclasses import dataclass as model_output
else:

    def model_output(cls: type) -> type:
        """`dataclass` for a `ModelOutput`, which demands that every field has the default `None`."""
        for name in cls.__annotations__:
            setattr(cls, name, None)
        return dataclass(cls)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards every module is in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """For a pass of a model: afterwards its modules have the attributes, submodules and tensors that they had.

    Some models change themselves in `forward`: BigBird turns its block-sparse attention into full attention for good
    at the first short row, tables of dynamic rotary positions depend on the longest row so far. A value would then
    depend on what ran before. What is written into a tensor in place is left alone, and where that is a weight all is,
    as what stands beside it may say so. Of a model in training only replaced submodules are put back, with all there
    is, and modules whose weights or unsaved buffers were replaced: what modules count or remember while they are
    trained is their own business. Threads take turns, as one could else put back what another is changing.
    """
    with ModelState(model).kept():
        yield


class ModelState:
    """What the modules of a model are made of: attributes, submodules, weights and buffers, and copies of each.

    PyTorch's own layers, the most of them, are taken at their word. Who runs many passes keeps it: a walk through the
    modules takes many times as long as a look whether anything in them is another object by now.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.identities: list[int] | None = None  # others may be at work on the model now

    @contextmanager
    def kept(self) -> Iterator[None]:
        """See `state_kept`."""
        with _lock_of(self.model):
            if self.identities is None or self._identities() != self.identities or self._children() != self.children:
                self._walk()
            else:
                self.written = self._written()
            try:
                yield
            finally:
                self._put_back(in_training=self.model.training)

    def _walk(self) -> None:
        self.all = list(self.model.modules())  # what is compared by identity has to live on
        self.submodules = [vars(module)["_modules"] for module in self.all]
        self.weights = [vars(module)["_parameters"] for module in self.all]
        self.modules = [module for module in self.all if not _is_plain(type(module))]
        self.parts = [part for own in map(vars, self.modules) for part in (own, *map(own.__getitem__, _TENSORS))]
        self.copies = [part.copy() for part in self.parts]
        self.identities, self.children, self.written = self._identities(), self._children(), self._written()

    def _children(self) -> list[int]:
        return [*map(id, chain.from_iterable(own.values() for own in self.submodules))]

    def _identities(self) -> list[int]:
        return [*map(id, chain.from_iterable(part.values() for part in self.parts))]

    def _written(self) -> list[int]:
        """How often each weight was written to."""
        weights = chain.from_iterable(part.values() for part in self.weights)
        return [0 if weight is None or weight.is_inference() else weight._version for weight in weights]

    def _put_back(self, in_training: bool) -> None:
        if self._identities() == self.identities or self._written() != self.written:
            return
        size = len(_TENSORS) + 1
        own = [(self.parts[at : at + size], self.copies[at : at + size]) for at in range(0, len(self.parts), size)]
        everything = not in_training or any(_differ(now[1], before[1]) for now, before in own)
        for module, (now, before) in zip(self.modules, own, strict=True):
            unsaved = module._non_persistent_buffers_set
            tables = any(now[3].get(name, now) is not before[3].get(name) for name in unsaved)
            if everything or tables or _differ(now[2], before[2]):
                _put_back(module, now, before)


_TENSORS = "_modules", "_parameters", "_buffers"


def _is_plain(kind: type[nn.Module]) -> bool:
    """Whether a class is a layer of PyTorch, and no container."""
    return kind.__module__.startswith("torch.nn.") and kind.__module__ != nn.Sequential.__module__


def _put_back(module: nn.Module, now: list[dict], before: list[dict]) -> None:
    """All of a module but its mode, which is no pass's doing."""
    mode = module.training
    for part, copy in zip(now, before, strict=True):
        if _differ(part, copy):
            _warns_once(type(module).__module__)
            for name in part.keys() - copy.keys():
                del part[name]
            part.update(copy)
    module.training = mode


def _differ(now: dict, before: dict) -> bool:
    """Whether two dictionaries hold other objects."""
    return len(now) != len(before) or not all(map(is_, now.values(), before.values()))


class _Once(Filter):
    """Lets the first record of each line of code pass."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, int]] = set()

    def filter(self, record: LogRecord) -> bool:
        line = record.pathname, record.lineno
        new = line not in self.seen
        self.seen.add(line)
        return new


def _warns_once(code: str) -> None:
    """A model that says that it changes itself would say so at every pass, as it is put back each time."""
    logger = getLogger(code)
    if not any(isinstance(one, _Once) for one in logger.filters):
        logger.addFilter(_Once())


_LOCKS: WeakKeyDictionary[nn.Module, RLock] = WeakKeyDictionary()
_LOCK_OF_LOCKS = Lock()


def _lock_of(model: nn.Module) -> RLock:
    with _LOCK_OF_LOCKS:
        return _LOCKS.setdefault(model, RLock())


def compiled_in_place(model: Any) -> Any:
    """Of what `torch.compile` returns the model, compiled in place: its class and its weights keep their names.

    Other objects are returned as they are.
    """
    if "_orig_mod" not in getattr(model, "_modules", ()):
        return model
    inner = model._orig_mod
    inner._compiled_call_impl = model.dynamo_ctx(inner._call_impl)
    return inner


def without_adapters(model: Any) -> Any:
    """The model that adapters of PEFT are on, which are layers of it; any other model itself."""
    return getattr(model, "get_base_model", lambda: model)()


def generated_ids(model: nn.Module, **inputs: Any) -> Tensor:
    """The ids that a model's `generate` returns. Raises `ValueError` for a model that has none.

    Of encoders of something else than ids it is the stock one: Whisper's own cuts sound into segments, asks for a
    language and tries temperatures.
    """
    generate: Callable[..., Tensor] | None = getattr(model, "generate", None)
    base = without_adapters(model)
    if isinstance(base, GenerationMixin) and getattr(base, "main_input_name", "input_ids") != "input_ids":
        generate = functools.partial(GenerationMixin.generate, base)
    if generate is None:
        raise ValueError(f"model: {type(model).__name__} cannot generate")
    return generate(**inputs)


@contextmanager
def own_generation_config(model: nn.Module, config: GenerationConfig) -> Iterator[None]:
    """`config` in place of the model's own inside, which `generate` would take what `config` leaves open from."""
    owners = [vars(module) for module in model.modules() if "generation_config" in vars(module)]
    before = [attributes["generation_config"] for attributes in owners]
    for attributes in owners:
        attributes["generation_config"] = config
    try:
        yield
    finally:
        for attributes, own in zip(owners, before, strict=True):
            attributes["generation_config"] = own


@contextmanager
def encoded_once(model: nn.Module, sources: Sequence[Hashable]) -> Iterator[None]:
    """For a pass of a model over N rows, of which some have one source: inside, its encoder runs once for each source.

    The model is called as ever, with all rows, so data parallelism, autocast, adapters and whatever it does around its
    encoder are in it. Hooks cut what its encoder is given down to one row a source and repeat what it returns, whose
    gradient is the sum over the rows of a source; linear layers that read just that (of keys and values of attention to
    the source) run once for each source, too, unless activations are recomputed. In training one source has one dropout
    mask, whatever number of rows it has. Where rows said to be of one source are not given alike, all are encoded, and
    so they are in a compiled forward, in which hooks of one call would stay. Decoder-only models are left alone.

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
    recomputes = any(map(_recomputes, model.modules()))
    shares, hooks = False, []
    shared: list[tuple[Tensor, Tensor]] = []  # what the encoder returned for all rows, and for one a source

    def has_rows(value: Any, count: int) -> bool:
        return isinstance(value, Tensor) and value.dim() > 0 and len(value) == count

    def given_alike(arguments: Any) -> bool:
        given = (value for value in tree_leaves(arguments) if has_rows(value, len(index)))
        return all(torch.equal(_rows(_rows(value, first), index), value) for value in given)

    def one_each(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        nonlocal shares
        shares = not torch.compiler.is_compiling() and given_alike((args, kwargs))
        return tree_map(lambda v: _rows(v, first) if has_rows(v, len(index)) else v, (args, kwargs)) if shares else None

    def repeat(value: Any) -> Any:
        if not has_rows(value, len(numbers)):
            return value
        shared.append((_rows(value, index), value))
        return shared[-1][0]

    def for_all(module: nn.Module, args: tuple, outputs: Any) -> Any:
        if not shares:
            return outputs
        if not recomputes:  # in the backward pass, when these hooks are gone
            for linear in (module for module in model.modules() if isinstance(module, nn.Linear)):
                hooks.append(linear.register_forward_pre_hook(states_of_one))
                hooks.append(linear.register_forward_hook(projected_for_all))
        return tree_map(repeat, outputs)

    def states_of_one(module: nn.Module, args: tuple) -> tuple | None:
        if torch.compiler.is_compiling() or not args:
            return None
        return next(((one, *args[1:]) for every, one in shared if args[0] is every), None)

    def projected_for_all(module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        if torch.compiler.is_compiling() or not args:
            return None
        return _rows(output, index) if any(args[0] is one for _, one in shared) else None

    hooks += [encoder.register_forward_pre_hook(one_each, with_kwargs=True), encoder.register_forward_hook(for_all)]
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


def _recomputes(module: nn.Module) -> bool:
    """Whether activations below are computed anew in the backward pass: by Transformers' layers or FSDP's."""
    return getattr(module, "gradient_checkpointing", False) or type(module).__name__ == "CheckpointWrapper"


def _encoder_of(model: nn.Module) -> nn.Module | None:
    """The encoder of an encoder-decoder inside whatever wraps it."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module.get_encoder() if module.config.is_encoder_decoder else None
    return None
