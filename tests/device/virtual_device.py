"""`start()` makes the device `vgpu` known to PyTorch, for the rest of the process: see `virtual_device.cpp`.

It is built where there is a compiler, and kept in `build/` until its source or PyTorch changes.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import torch
from filelock import FileLock
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from transformers import TrainingArguments

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_suffix(".cpp")
CARDS = 2

# What CUDA would have refused, with the lines of the project that asked for it: an error that is caught shows, too.
refused: list[str] = []
# While counting: how often each event was, by event, operation and line of the project.
events: Counter[tuple[str, str, str]] = Counter()


def compiler() -> str | None:
    """The C++ compiler: what `CXX` names, or the system's."""
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


def library() -> Path:
    """The extension, built if it isn't there for this source and this PyTorch.

    Raises:
        subprocess.CalledProcessError: if the compiler has errors, which it prints.
    """
    torch_folder = Path(torch.__file__).parent
    include = torch_folder / "include"
    flags = [
        "-O1", "-std=c++20", "-fPIC", "-shared", "-w", "-DAT_PER_OPERATOR_HEADERS",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{include}", f"-I{include / 'torch/csrc/api/include'}",
        f"-L{torch_folder / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_folder / 'lib'}",
    ]  # fmt: skip
    made_of = [SOURCE.read_text(), torch.__version__, compiler(), *flags]
    built = ROOT / "build/virtual_device" / hashlib.sha256(repr(made_of).encode()).hexdigest()[:16] / "vgpu.so"
    built.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(built.with_suffix(".lock")):
        if not built.exists():
            part = built.with_suffix(".part")
            subprocess.run([compiler(), str(SOURCE), *flags, "-o", str(part)], check=True)
            part.rename(built)
    return built


def _project_line(frames: traceback.StackSummary) -> str:
    """The innermost line of the project, `hf_ebm/sampling/run.py:12`, or of its tests."""
    for frame in reversed(frames):
        path = Path(frame.filename)
        if path.is_relative_to(ROOT) and "site-packages" not in path.parts and path != Path(__file__):
            return f"{path.relative_to(ROOT)}:{frame.lineno}"
    return "elsewhere"


@ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
def _observe(event: bytes, operation: bytes) -> None:
    line = _project_line(traceback.StackSummary.extract(traceback.walk_stack(None), lookup_lines=False)[::-1])
    if event == b"refused":
        refused.append(f"{operation.decode()} at {line}")
    else:
        events[event.decode(), operation.decode(), line] += 1


@contextmanager
def counted() -> Iterator[Counter[tuple[str, str, str]]]:
    """Counts kernels launched and waits of the host inside, by operation and line."""
    events.clear()
    torch.ops.vgpu.count(True)
    try:
        yield events
    finally:
        torch.ops.vgpu.count(False)


def start() -> None:
    """Registers the device; a second call does nothing."""
    if hasattr(torch, "vgpu"):
        return
    built = str(library())
    torch.ops.load_library(built)
    torch.utils.rename_privateuse1_backend("vgpu")
    ctypes.CDLL(built).start(_observe)
    torch._register_device_module("vgpu", _device_module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    nn.LSTM.forward = _as_cudnn(nn.LSTM.forward)
    nn.Module._apply = _tied(nn.Module._apply)


def _index(device: torch.device | str | int | None) -> int:
    index = device if isinstance(device, int | None) else torch.device(device).index
    return torch.ops.vgpu.current_device() if index is None else index


def _device_module() -> ModuleType:
    """What PyTorch, Transformers and accelerate ask of `torch.vgpu`."""
    module, ops = ModuleType("torch.vgpu"), torch.ops.vgpu

    def manual_seed_all(seed: int) -> None:
        for card in range(CARDS):
            ops.seed(seed % 2**63, card)

    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
        device_count=lambda: CARDS,
        current_device=ops.current_device,
        set_device=lambda device: ops.set_device(_index(device)),
        synchronize=lambda device=None: None,
        empty_cache=lambda: None,
        mem_get_info=lambda device=None: (8 << 30, 16 << 30),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        get_rng_state=lambda device=None: ops.rng_state(_index(device)),
        set_rng_state=lambda state, device=None: ops.set_rng_state(state, _index(device)),
        manual_seed=lambda seed: ops.seed(seed % 2**63, _index(None)),
        manual_seed_all=manual_seed_all,
    )
    return module


class _CudnnBackward(torch.autograd.Function):
    """Refuses what cuDNN's recurrent nets refuse."""

    @staticmethod
    def forward(ctx, states: torch.Tensor, training: bool) -> torch.Tensor:
        ctx.training = training
        return states.view_as(states)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if not ctx.training:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")
        return gradient, None


def _as_cudnn(forward):
    """The forward pass of an LSTM as cuDNN runs it on a card, unless it is switched off."""

    def on_card(states: torch.Tensor, training: bool) -> torch.Tensor:
        return _CudnnBackward.apply(states, training) if states.requires_grad else states

    def run(self, inputs, state=None):
        outputs, last = forward(self, inputs, state)
        packed = isinstance(outputs, PackedSequence)
        data = outputs.data if packed else outputs
        if data.device.type != "vgpu" or not torch.backends.cudnn.enabled:
            return outputs, last
        data = on_card(data, self.training)
        return outputs._replace(data=data) if packed else data, tuple(on_card(part, self.training) for part in last)

    return run


def _tied(apply):
    """`Module._apply` whose tied weights stay tied, as between other devices: to this one parameters are made anew."""

    def run(self, function, recurse=True):
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in self.modules() if recurse else ():
            for name, parameter in module._parameters.items():
                places.setdefault(id(parameter), []).append((module, name))
        apply(self, function, recurse)
        for (first, own), *others in places.values():
            for module, name in others:
                module._parameters[name] = first._parameters[own]
        return self

    return run


@contextmanager
def numbers_of_the_cpu() -> Iterator[None]:
    """Inside, cards draw the numbers that a run on the CPU would, so that the two can be compared."""
    torch.ops.vgpu.cpu_numbers(True)
    try:
        yield
    finally:
        torch.ops.vgpu.cpu_numbers(False)


@contextmanager
def trainers_on(device: str) -> Iterator[None]:
    """Inside, trainers take this device for the machine's, whatever `use_cpu` says."""
    found = property(lambda arguments: (arguments._setup_devices, torch.device(device))[1])
    with (
        patch.dict(os.environ, {"ACCELERATE_TORCH_DEVICE": device}),
        patch.object(TrainingArguments, "device", found),
    ):
        yield
