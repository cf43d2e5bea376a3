"""Runs of chains in files, from which they go on."""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_ebm.checks import as_path
from hf_ebm.models.fingerprints import checksum, model_fingerprints
from hf_ebm.runtime import put_in_place
from hf_ebm.sampling.configuration import ChainGenerationConfig
from hf_ebm.sampling.run import ChainRun
from hf_ebm.sampling.sampler import check_run_fits
from hf_ebm.sampling.target import ExtraEnergy, Target

if TYPE_CHECKING:
    from hf_ebm.models.energy.modeling_energy import EnergyModel
    from hf_ebm.sampling.configuration import ResolvedChainConfig

logger = logging.get_logger(__name__)

# A state is saved after a step if so many seconds have passed since the last time, and saving has taken up no more than
# this share of them; and always at the end.
SECONDS_BETWEEN_SAVES = 1.0
MOST_TIME_SAVING = 0.05
# Settings that may change when a run goes on: they say how long it runs, not what it computes.
_EXTENSIBLE = ("num_epochs", "target_rhat", "max_rows")
_FORMAT = 3
_FILE = "run.safetensors"
# What earlier versions wrote: a header, which names a file of tensors.
_HEADER_OF_BEFORE, _FORMAT_OF_BEFORE, _TENSORS_OF_BEFORE = "state.json", 2, "chains-*.safetensors"


class SavedRun(ChainRun):
    """A run that can be saved in a folder: one safetensors file, with what is no tensor as JSON in its metadata."""

    def save(self, path: str | os.PathLike) -> None:
        """Writes the run to folder `path`; a kill at any time leaves the last complete state.

        Raises:
            ValueError: for a folder that can't be written.
        """
        folder = as_path("save_state_to", path)
        tensors, values = self.parts()
        text = json.dumps({"format": _FORMAT, **values})
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with put_in_place(folder / _FILE) as file:
                save_file(tensors, file, {"run": text, "sha256": _digest(tensors, text)})
            for old in (folder / _HEADER_OF_BEFORE, *folder.glob(_TENSORS_OF_BEFORE)):
                old.unlink(missing_ok=True)
        except (OSError, UnicodeError, SafetensorError) as error:
            raise ValueError(f"save_state_to: cannot write the chains' state to {folder}: {error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Reads a run that `save` wrote, or that of an earlier version.

        Raises:
            ValueError: for a missing, unreadable or half-written state.
        """
        folder = as_path("resume_from", path)
        try:
            return cls.of_parts(*(_read(folder / _FILE) if (folder / _FILE).exists() else _read_of_before(folder)))
        except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
            raise ValueError(f"resume_from: {folder} holds no complete state of chains: {error!r}") from error


def resumed(
    path: str | os.PathLike,
    asked: ChainGenerationConfig,
    overrides: dict[str, Any],
    extra: tuple[ExtraEnergy, ...],
    model: EnergyModel | None,
) -> tuple[SavedRun, ResolvedChainConfig]:
    """A saved run on the model's device and the settings it goes on with.

    Args:
        asked, overrides: settings, which must agree with the run's, but for what says how long it runs.
        model: what the chains sample, `None` if `extra` is all.

    Raises:
        ValueError: for settings, a model or extra energies that are not the run's.
    """
    given = asked.settings() | {name: value for name, value in overrides.items() if value is not None}
    asked, run = ChainGenerationConfig(**given), SavedRun.load(path)
    saved = ChainGenerationConfig(**run.run_config["settings"])
    for name, value in saved.layered(saved.settings(), asked.settings()).items():
        if name not in _EXTENSIBLE and value != getattr(saved, name):
            raise ValueError(f"resume_from: the saved run has {name}={getattr(saved, name)!r}, not {value!r}")
    config = saved.resolved(saved, {name: getattr(asked, name) for name in _EXTENSIBLE})
    if config.num_epochs != saved.num_epochs and saved.final_block_size is not None:
        raise ValueError("resume_from: the run's block sizes depend on num_epochs, which must stay the same")
    if config.target_rhat is None and config.num_epochs < run.epoch + (run.step > 0):
        raise ValueError(f"resume_from: {run.epoch} epochs are done, num_epochs={config.num_epochs} is less")
    check_run_fits(config, len(run.samples), run.state.ids.shape[1])
    energy = None if model is None else model.config.energy
    if run.run_config["energy"] != energy:
        raise ValueError(f"resume_from: the saved run samples {run.run_config['energy']!r}, this model {energy!r}")
    weights = run.run_config.get("extra_energies")  # earlier versions noted none
    if weights not in (None, weights_of(extra)):
        raise ValueError(
            f"resume_from: the saved run has extra_energies of the weights {weights}, got {weights_of(extra)}; give "
            "the same again"
        )
    run = replace(run, run_config=run.run_config | {"settings": config.settings()})
    if model is None:
        return run, config
    noted = run.run_config.get("model", {})
    others = [name for name, found in (model_fingerprints(model) if noted else {}).items() if found != noted[name]]
    if others:
        raise ValueError(
            f"resume_from: the saved run is of a model with other {' and '.join(others)}; load the model it was "
            "started with, or start anew"
        )
    return run.to(model.input_device), config


def check_same_target(run: SavedRun, target: Target) -> None:
    """The chains' terms and extra energies must be what they were.

    Other extra energies would go unnoticed otherwise, and the carried energies would be wrong; so would another model
    where the state has no fingerprints, as those that `SavedRun.save` writes of a run that was not saved as it went.
    """
    some = target.free.clone()
    if "model" in run.run_config:
        some[1:] = False
    terms = target.terms(run.state.ids, some)
    # Half-precision logits of another batch shape differ in the second digit after the point.
    tolerance = 1e-3 if target.runner.dtype in (torch.float32, torch.float64) else 0.1
    pairs = {
        "energy": ((run.state.token_energies * some).sum(1), terms.sum(1)),
        "extra energies": (run.state.extra_energy, target.extra_energy(run.state.ids)),
    }
    for name, (saved, found) in pairs.items():
        if not torch.allclose(saved, found, rtol=tolerance, atol=10 * tolerance):
            raise ValueError(
                f"resume_from: the {name} of the saved chains are not what this model with these extra_energies gives; "
                "it is not the run's model, or not its extra energies"
            )


def with_fingerprints(run: SavedRun, model: PreTrainedModel) -> SavedRun:
    """A run that is to be saved knows its model."""
    noted = run.run_config
    return run if "model" in noted else replace(run, run_config=noted | {"model": model_fingerprints(model)})


def weights_of(extra: tuple[ExtraEnergy, ...]) -> list[float]:
    """Weights of the extra energies that count, in order: what a saved run knows of them."""
    return [weight for weight, _ in extra if weight]


class Saver:
    """Saves a run to a folder as it goes, if there is one; how often is said by `SECONDS_BETWEEN_SAVES`."""

    def __init__(self, folder: str | os.PathLike | None):
        self.folder, self.saved, self.cost = folder, 0.0, 0.0

    def save(self, run: SavedRun) -> None:
        if self.folder is not None:
            began = time.monotonic()
            run.save(self.folder)
            self.saved = time.monotonic()
            self.cost = self.saved - began

    def save_if_due(self, run: SavedRun) -> None:
        if time.monotonic() - self.saved >= max(SECONDS_BETWEEN_SAVES, self.cost / MOST_TIME_SAVING):
            self.save(run)

    def save_or_warn(self, run: SavedRun) -> None:
        """Saves while another error is on its way, which must not be hidden."""
        try:
            self.save(run)
        except ValueError as error:
            logger.warning(str(error))


def holds_run(folder: Path) -> bool:
    """Whether there is a run in a folder."""
    return any((folder / name).exists() for name in (_FILE, _HEADER_OF_BEFORE))


def _digest(tensors: dict[str, Tensor], text: str) -> str:
    digest = checksum(sorted(tensors.items()))
    digest.update(text.encode())
    return digest.hexdigest()


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118  it is no dictionary
    if metadata["sha256"] != _digest(tensors, metadata["run"]):
        raise ValueError(f"{path.name} is not what was written")
    return tensors, _checked(json.loads(metadata["run"]), _FORMAT)


def _read_of_before(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    values = json.loads((folder / _HEADER_OF_BEFORE).read_text(encoding="utf-8"))
    written = values.pop("header_sha256")
    if hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest() != written:
        raise ValueError(f"{_HEADER_OF_BEFORE} is not what was written")
    path = folder / values["tensors"]
    if hashlib.sha256(path.read_bytes()).hexdigest() != values["sha256"]:
        raise ValueError(f"{path.name} is not what was written")
    return load_file(path), _checked(values, _FORMAT_OF_BEFORE)


def _checked(values: dict[str, Any], readable: int) -> dict[str, Any]:
    if values["format"] != readable:
        raise ValueError(f"format {values['format']}, this version reads {readable}")
    if "recipe" in values:  # as earlier versions called it
        values["run_config"] = values.pop("recipe")
    return values
