"""Running a model, in another mode or with other generation settings, and leaving it as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import Filter, LogRecord, getLogger
from operator import is_
from threading import Lock, RLock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import GenerationConfig


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
    """For a pass of a model: afterwards its modules have the attributes, buffers and submodules that they had.

    Some models change themselves in `forward`: BigBird turns its block-sparse attention into full attention for good
    at the first short row, tables of dynamic rotary positions depend on the longest row so far. A value would then
    depend on what ran before. What is written into a tensor in place, as weights are, is left alone; of a model in
    training all is, unless submodules were replaced: what modules count or remember while they are trained is their own
    business. Threads take turns, as one could else put back what another is changing.
    """
    with _lock_of(model):
        before = [_ModuleState.of(module) for module in model.modules()]
        try:
            yield
        finally:
            if not model.training or any(_differ(*state.submodules) for state in before):
                for state in before:
                    state.put_back()


class _ModuleState(NamedTuple):
    """A module's attributes, submodules and buffers, each with a copy."""

    module: nn.Module
    attributes: tuple[dict, dict]
    submodules: tuple[dict, dict]
    buffers: tuple[dict, dict]

    @classmethod
    def of(cls, module: nn.Module) -> _ModuleState:
        own = vars(module)
        return cls(module, *((part, part.copy()) for part in (own, own["_modules"], own["_buffers"])))

    def put_back(self) -> None:
        """All but the mode, which is no pass's doing."""
        mode = self.module.training
        for now, before in self[1:]:
            if _differ(now, before):
                _warns_once(type(self.module).__module__)
                for name in now.keys() - before.keys():
                    del now[name]
                now.update(before)
        self.module.training = mode


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


def decoded(model: nn.Module, **inputs: Any) -> Tensor:
    """The ids that a model's `generate` returns. Raises `ValueError` for a model that has none."""
    generate: Callable[..., Tensor] | None = getattr(model, "generate", None)
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
