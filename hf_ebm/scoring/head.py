"""Logits of a masked language model at chosen positions, without running elsewhere what is needed only there.

The head of a masked language model (hidden size times vocabulary) is often as expensive as its encoder, and an energy
reads one position per masked copy. A forward hook on the base model keeps only the hidden states at those positions,
so the model's own forward applies its own head to them. Where one position a row is read, the last feed-forward network
runs there alone, too: hooks on the linear layers that widen its input keep that position, and the model's own residual
sum, which broadcasts, is then right there and meaningless elsewhere. Of several passes (rows of different lengths), the
head runs once: in all but the last it is given no rows, in the last those of all. For few rows a head takes as long as
its weights take to read. Whether each of these equals the full forward is checked on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers.utils import ModelOutput, logging

from hf_ebm.model_modes import ModelState, evaluation_mode
from hf_ebm.scoring.passes import Pass, few_sizes, gather_positions, is_compiled, is_compiled_itself, read_in_compiled

logger = logging.get_logger(__name__)

# Rounding differs between a matrix product of many rows and one of few; this is what is allowed for it, per dtype,
# relative to the largest logit.
_RELATIVE_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


_WITHOUT = {
    "feed-forward": "its last feed-forward network runs at every position",
    "one head": "its head runs once for each length",
}


# `(values (N, T, D), positions (N, P)) -> values` of which those at the positions count.
_Narrowing = Callable[[Tensor, Tensor], Tensor]


class _Hooks(NamedTuple):
    """Where a forward is cut down to the positions that are read.

    Attributes:
        base: its output is.
        narrow: the linear layers whose input is, by their names under `base`.
    """

    base: nn.Module
    narrow: dict[str, nn.Linear]


class PositionLogits:
    """Callable `(input_ids (N, T), positions (N, P), **model inputs) -> logits (N, P, V)`.

    Args:
        model: a masked language model whose forward returns an output with `.logits` of shape (N, T, V).
        input_name: the model input that takes the ids whose positions are read.
    """

    def __init__(self, model: nn.Module, input_name: str = "input_ids"):
        self.model = model
        self.input_name = input_name
        self._verified: dict[tuple, bool] = {}
        self._modules, self._state = _Modules(model, self.base), ModelState(model)

    def __call__(self, input_ids: Tensor, positions: Tensor, **inputs: Any) -> Tensor:
        return self.together([Pass(input_ids, positions, inputs)])[0]

    def together(self, passes: Sequence[Pass]) -> list[Tensor]:
        """Logits (N, P, V) of each of several passes."""
        if self._modules.have_changed():
            self._modules = _Modules(self.model, self.base)
        compiled = any(map(is_compiled_itself, self._modules.all))
        hooks = [self._hooks_for(one, compiled) for one in passes]
        if compiled:
            return [self._compiled(one, how) for one, how in zip(passes, hooks, strict=True)]
        cut = [(one, how) for one, how in zip(passes, hooks, strict=True) if how is not None]
        if len(passes) > 1 and len(cut) == len(passes) and self._holds("one head", _Hooks(cut[0][1].base, {}), passes):
            return list(self._hooked(cut).split([len(one.input_ids) for one in passes]))
        return [
            self._full(one) if how is None else self._hooked([(one, how)])
            for one, how in zip(passes, hooks, strict=True)
        ]

    @property
    def base(self) -> nn.Module | None:
        """The encoder under the head, or `None` where the model doesn't name one."""
        base = getattr(self.model, getattr(self.model, "base_model_prefix", "") or "-", None)
        return base if isinstance(base, nn.Module) and base is not self.model else None

    def _hooks_for(self, one: Pass, compiled: bool) -> _Hooks | None:
        """How a pass is cut down, or `None` where its head runs at all positions."""
        base, width = self.base, one.positions.shape[1]
        if base is None or width >= one.input_ids.shape[1]:
            return None
        head_alone = _Hooks(base, {})
        if not self._holds("head", head_alone, [one]):
            return None
        # Gradient checkpointing runs layers again when these hooks are gone, so not where gradients are wanted.
        narrow = self._modules.expansions if width == 1 and not torch.is_grad_enabled() and not compiled else {}
        both = _Hooks(base, narrow)
        return both if narrow and self._holds("feed-forward", both, [one]) else head_alone

    def _run(self, one: Pass) -> Tensor:
        """The model's logits, wherever hooks let it compute any."""
        with self._state.kept():
            return self.model(**{self.input_name: one.input_ids, "return_dict": True, **one.inputs}).logits

    def _full(self, one: Pass) -> Tensor:
        return gather_positions(self._run(one), one.positions)

    def _compiled(self, one: Pass, hooks: _Hooks | None) -> Tensor:
        """Logits of a pass through compiled code, its head at the positions alone unless `hooks` is `None`."""
        found = []
        for first, stop in few_sizes(len(one.input_ids)):
            part = one.rows(first, stop)
            with nullcontext() if hooks is None else read_in_compiled(hooks.base, part.positions):
                logits = self._run(part)
            whole = hooks is None or logits.shape[1] != part.positions.shape[1]
            found.append(gather_positions(logits, part.positions) if whole else logits)
        return torch.cat(found)[: len(one.input_ids)]  # a copy, as the next run of a CUDA graph overwrites its output

    def _hooked(self, cut: Sequence[tuple[Pass, _Hooks]], narrowed: _Narrowing = gather_positions) -> Tensor:
        """Logits (sum of N, P, V) of passes that are cut down, the head run once, in the last of them."""
        held: list[Tensor] = []

        def hold(own: Tensor) -> Tensor:
            held.append(own)
            return own[:0]

        def join(own: Tensor) -> Tensor:
            return torch.cat([*held, own])

        for number, (one, hooks) in enumerate(cut, 1):
            handles = _attach(hooks, one, join if number == len(cut) else hold, narrowed)
            try:
                logits = self._run(one)
            finally:
                for handle in handles:
                    handle.remove()
        return logits

    def _holds(self, what: str, hooks: _Hooks, passes: Sequence[Pass]) -> bool:
        """Whether passes that are cut down equal those that are less so, found out on two rows.

        Once for each dtype, device and make of the model (adapters and hooks may come and go), narrow layers for each
        doubling of the length, and one head for passes of one length and of several.

        Args:
            what: "head", to be run at the positions read; "feed-forward", the last one, too; or "one head" for all
                passes.
        """
        ids = passes[0].input_ids
        others = [one for one in passes[1:] if one.input_ids.shape[1] != ids.shape[1]]
        size = {"head": 0, "feed-forward": ids.shape[1].bit_length(), "one head": len(others) > 0}[what]
        numbers = next(self.model.parameters()).dtype, ids.device.type, torch.is_autocast_enabled(ids.device.type)
        key = (what, *numbers, *self._modules.make, size, tuple(hooks.narrow))
        if key not in self._verified:
            few = [one.rows(0, 2) for one in (passes[0], *(others or passes[1:])[:1])]
            # Compiled code would be traced for each side of the comparison.
            eager = torch.compiler.set_stance("force_eager") if is_compiled(self.model) else nullcontext()
            with evaluation_mode(self.model), eager:
                verdict = self._verify(what, hooks, few)
            if verdict is None:
                return False
            self._verified[key] = verdict
            name = type(self.model).__name__
            if not verdict and what != "head":
                logger.info(f"{name}: {_WITHOUT[what]}.")
            elif not verdict:
                logger.warning_once(
                    f"{name}: applying the head to chosen positions does not reproduce its full forward; the head is "
                    "applied to every position instead (slower, same values)."
                )
        return self._verified[key]

    @torch.no_grad()
    def _verify(self, what: str, hooks: _Hooks, passes: Sequence[Pass]) -> bool | None:
        """Whether the two agree; `None` where logits that aren't finite leave it open."""
        checks: list[tuple[Sequence[Pass], _Narrowing]] = [(passes, gather_positions)]
        if what == "feed-forward":
            # NaN at all positions but the last (the first, in a second row) shows whether anything after the linear
            # layers mixes positions, which a comparison in half precision could overlook.
            ids, positions, inputs = passes[0]
            ends = torch.tensor([[ids.shape[1] - 1], [0]], device=positions.device)[: len(ids)]
            checks.append(([Pass(ids, ends, inputs)], _poison_others))
        less = _Hooks(hooks.base, {})
        for where, narrowed in checks:
            apart = [self._full(one) if what == "head" else self._hooked([(one, less)]) for one in where]
            expected = torch.cat(apart)
            if where is passes and not bool(expected.isfinite().all()):
                return None
            try:
                found = self._hooked([(one, hooks) for one in where], narrowed)
            except Exception as error:  # whatever the model's own code raises on fewer positions
                logger.info(f"{type(self.model).__name__}: {what} on chosen positions failed with {error!r}")
                return False
            if not _agree(found, expected):
                return False
        return True


def _attach(
    hooks: _Hooks, one: Pass, for_head: Callable[[Tensor], Tensor], narrowed: _Narrowing
) -> list[RemovableHandle]:
    """Hooks for one pass. `for_head` turns its states (N, P, D) at the positions into what the head is given."""
    rows, length = one.input_ids.shape
    owner = get_ident()  # other threads may be running the model while the hooks are there

    def keep_output(module: nn.Module, args: tuple, output: ModelOutput) -> ModelOutput:
        if get_ident() != owner:
            return output
        first = next(iter(output.keys()))
        if output[first].shape[1] < length:  # on a GPU an index out of range would end the process
            raise ValueError(f"{type(module).__name__} returned {output[first].shape[1]} positions of {length}")
        output[first] = for_head(gather_positions(output[first], one.positions))
        return output

    def keep_input(module: nn.Module, args: tuple) -> tuple | None:
        # Layers that get chunks, experts' shares or other layouts than (N, T, D) run on all they get.
        whole = args[0].dim() == 3 and args[0].shape[0] == rows and args[0].shape[1] >= length
        return (narrowed(args[0], one.positions), *args[1:]) if whole and get_ident() == owner else None

    handles = [hooks.base.register_forward_hook(keep_output)]
    return handles + [linear.register_forward_pre_hook(keep_input) for linear in hooks.narrow.values()]


def last_expansions(base: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers that widen their input, in the last module to have some, by name.

    In a transformer they lead into its last feed-forward network; a gated one has two. None where anything in `base`
    has hooks, which may look at positions that nothing else does.
    """
    found: dict[str, nn.Linear] = {}
    for name, module in base.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return {}
        inner = {f"{name}.{part}": child for part, child in module.named_children() if isinstance(child, nn.Linear)}
        found = {part: child for part, child in inner.items() if child.out_features > child.in_features} or found
    return found


def _poison_others(values: Tensor, positions: Tensor) -> Tensor:
    """`values` (N, T, D), NaN but at `positions` (N, P)."""
    others = torch.ones(values.shape[:2], dtype=torch.bool, device=values.device)
    return values.masked_fill(others.scatter(1, positions.to(values.device), False)[..., None], torch.nan)


def _agree(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    scale = expected.abs().amax().clamp(min=1.0)
    return bool(((found - expected).abs().amax() / scale) <= _RELATIVE_TOLERANCE.get(expected.dtype, 1e-4))


class _Modules:
    """The modules of a model as they were when they were walked through, which takes longer than to look for changes.

    Attributes:
        make: what tells whether another model was made of it: the size of its base, the modules of its head with their
            hooks, and which adapters are on.
        expansions: the `last_expansions` of its base.
    """

    def __init__(self, model: nn.Module, base: nn.Module | None):
        self.all = list(model.modules())
        self.children = [module._modules for module in self.all]
        self.hooks = [hooks for module in self.all for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self.adapters = [module for module in self.all if hasattr(module, "_disable_adapters")]  # PEFT's
        self.found = self._looked_at()
        inside = set() if base is None else set(base.modules())
        head = (module for module in self.all if module not in inside)
        parts = tuple((type(part), len(part._forward_hooks), len(part._forward_pre_hooks)) for part in head)
        self.make = len(inside), parts, self.found[2]
        self.expansions = {} if base is None else last_expansions(base)

    def have_changed(self) -> bool:
        """Whether a module, a hook or an adapter has come or gone."""
        return self._looked_at() != self.found

    def _looked_at(self) -> tuple[list[int], list[int], str]:
        children = [*map(id, chain.from_iterable(own.values() for own in self.children))]
        adapters = [
            (one._disable_adapters, one.active_adapters, getattr(one, "merged_adapters", ())) for one in self.adapters
        ]
        return children, [*map(len, self.hooks)], repr(adapters)
