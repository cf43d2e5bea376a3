"""Checksums that tell a model from others: of its weights, and of all else that decides its values."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.accelerate import load_offloaded_parameter

from hf_ebm.models.adapters import adapters_in_use

# Fields of configurations that change no value, or that the weights say.
_ASIDE = {
    "_name_or_path", "architectures", "auto_map", "dtype", "lm_revision", "masking", "max_sequence_length",
    "scoring_variant", "transformers_version", "use_cache",
}  # fmt: skip
# Classes of a checkpoint's own code are in modules under this name.
_OWN_CODE = "transformers_modules."


def checksum(tensors: Iterable[tuple[str, Tensor]]) -> hashlib._Hash:
    """The SHA-256, so far, of tensors in the order given, with their names and types: the same on every device."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest


def fingerprint(model: nn.Module) -> str:
    """SHA-256 of a model's weights as they are loaded."""

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in sorted(model.state_dict().items()):
            # On the meta device it lies in the processor's memory or on the disk while it isn't used.
            if tensor.is_meta and isinstance(model, PreTrainedModel):
                tensor = load_offloaded_parameter(model, name)
            yield name, tensor

    return checksum(weights()).hexdigest()


def model_fingerprints(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> dict[str, str]:
    """What decides a model's values, part by part, so that a difference can be named.

    Returns:
        Checksums of `weights`, `configuration` (names, paths and versions left out), `adapters` (which are there, in
        use and merged, at what scale), `code` (the files that came with a checkpoint; of installed code nothing) and,
        if it is given, `tokenizer`.
    """
    found = {
        "weights": fingerprint(model),
        "configuration": _digest(_plain(model.config.to_diff_dict())),
        "adapters": _digest(adapters_in_use(model)),
        "code": _digest(_own_code(model)),
    }
    return found if tokenizer is None else {**found, "tokenizer": _digest(_contents(tokenizer))}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if key not in _ASIDE}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _own_code(model: nn.Module) -> list[str]:
    """The classes of a model that came with its checkpoint, and checksums of the files of the same folders."""
    own = {type(module) for module in model.modules() if type(module).__module__.startswith(_OWN_CODE)}
    packages = tuple({f"{one.__module__.rpartition('.')[0]}." for one in own})
    files = [getattr(module, "__file__", None) for name, module in sys.modules.items() if name.startswith(packages)]
    sums = (hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files if file)
    return [*sorted(one.__qualname__ for one in own), *sorted(sums)] if own else []


def _contents(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What a tokenizer makes of a text depends on this; how it pads and cuts is left out."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    if backend is not None:
        return {**json.loads(backend.to_str()), "padding": None, "truncation": None, "special": special}
    added = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    with TemporaryDirectory() as folder:  # vocabularies of other kinds are files that not all of them keep in memory
        files = {Path(file).name: Path(file) for file in tokenizer.save_vocabulary(folder)}
        sums = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()}
    return {"class": type(tokenizer).__name__, "added": added, "files": sums, "special": special}
