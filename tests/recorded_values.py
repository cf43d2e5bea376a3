"""Values of everything there is, recorded before a change that should keep them, and compared after it.

    python -m tests.recorded_values record before.safetensors
    python -m tests.recorded_values compare before.safetensors

Values of one machine at one revision: energies of every family, chains of every kernel and setting, an update of every
trainer, joint samples, perplexities, and what the commands write. `compare` prints what is new, gone or different, and
by how much relative to the largest value.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import logging

from hf_ebm.models.residual import ResidualEnergyModel
from tests.cli.conftest import run
from tests.cli.test_negatives_and_perplexity import SIZES, TEXTS, language_model
from tests.conftest import tiny_energy_model
from tests.models import test_families as families
from tests.models.residual_models import ENCODERS, PREFIX, toy_encoder, toy_residual
from tests.models.tokenizers_for_tests import small_model, small_tokenizer
from tests.trainers import distributed_runs

Values = Iterator[tuple[str, Tensor]]

# Settings of chains, each beside the defaults.
CHAINS = {
    "defaults": {}, "burn-in": {"burn_in": 2, "thinning": 2}, "blocks": {"block_size": 2},
    "cycle": {"block_size": [1, 3]},
    "growing blocks": {"block_size": 1, "final_block_size": 4},
    "sequential fill": {"block_size": 2, "block_fill": "sequential"},
    "contiguous": {"block_size": 2, "block_layout": "contiguous"}, "in order": {"order": "sequential"},
    "pairs": {"block_size": 2, "block_fill": "sequential", "block_layout": "contiguous", "delayed_acceptance": 1},
    "delayed": {"delayed_acceptance": 0}, "annealed": {"energy_temperature": 2.0, "energy_temperature_decay": 0.5},
    "warped": {"proposal_temperature": 1.5, "proposal_top_k": 3},
    "nucleus": {"proposal_top_p": 0.8, "proposal_epsilon": 0.1},
    "never the same": {"exclude_current": True}, "greedy start": {"warm_start": "greedy"},
    "decoded start": {"warm_start": "mask_predict"}, "all accepted": {"accept_all_epochs": 2, "burn_in": 2},
    "suppressed": {"suppress_tokens": [5, 6]}, "gibbs": {"kernel": "gibbs"},
    "gibbs of blocks": {"kernel": "gibbs", "block_size": 2, "block_fill": "sequential", "proposal_top_k": 4},
    "mask-predict": {"decoder": "mask_predict"}, "drawn lengths": {"lengths": {3: 0.5, 6: 0.5}},
}  # fmt: skip


def energies(device: str) -> Values:
    ids, mask = (part.to(device) for part in families.ragged_batch())
    for family in families.FAMILIES:
        for energy in families.ENERGIES:
            model = families.wrap(family, energy).eval().to(device)
            with torch.no_grad():
                yield f"energies/{family}/{energy}", model(ids, mask, **families.context_for(model)).energy


def chains(device: str) -> Values:
    for name, settings in CHAINS.items():
        for energy in families.ENERGIES:
            given = {"lengths": [4, 7], "num_chains": 3, "num_epochs": 5, "seed": 3, **settings}
            out = tiny_energy_model(energy, 12).to(device).generate(**given)
            yield f"chains/{name}/{energy}/samples", out.samples
            yield f"chains/{name}/{energy}/energies", out.energies
            for trace in ("energy", "acceptance_rate", "novel_rate"):
                yield f"chains/{name}/{energy}/{trace}", getattr(out.trace, trace)


def trainers(folder: Path) -> Values:
    distributed_runs.run_all(folder)
    for file in sorted(folder.rglob("*-1-0.pt")):
        if "predictions" in file.name:
            continue
        logged, state, *_ = torch.load(file, map_location="cpu")
        kind = file.name.removesuffix("-1-0.pt")
        for log in logged if isinstance(logged, list) else [logged]:
            numbers = [float(value) for name, value in sorted(log.items()) if name not in ("epoch", "step")]
            yield f"trainers/{kind}/logged at {log.get('epoch')}", torch.tensor(numbers, dtype=torch.float64)
        for name, value in state.items():
            yield f"trainers/{kind}/{name}", value


def joint_samples(device: str) -> Values:
    for family in ENCODERS:
        model = toy_residual(family).to(device)
        out = model.generate([PREFIX.tolist()] * 4, num_candidates=30, num_samples=2, max_new_tokens=3, seed=1)
        yield f"joint samples/{family}/sequences", out.sequences
        yield f"joint samples/{family}/energies", out.energies


def commands(folder: Path, device: str) -> Values:
    tokenizer = small_tokenizer("wordpiece")
    small_model(tokenizer).mlm.save_pretrained(folder / "mlm")
    lm, encoder = language_model(tokenizer), toy_encoder("bert", len(tokenizer), torch.float32)
    lm.save_pretrained(folder / "lm")
    residual = ResidualEnergyModel(lm, encoder, lm_tokenizer=tokenizer, encoder_tokenizer=tokenizer)
    torch.manual_seed(0)
    residual.head.weight.data.normal_()
    residual.save_pretrained(folder / "residual")
    for name in ("mlm", "lm"):
        tokenizer.save_pretrained(folder / name)
    (folder / "texts.txt").write_text("\n".join(TEXTS) + "\n", encoding="utf-8")
    (folder / "lists.jsonl").write_text('{"candidates": ["the cat sat", "cat the", ""]}\n', encoding="utf-8")
    given = {
        "score": ["score", "--model", "mlm", "--input", "texts.txt", "--details", "true"],
        "rerank": ["rerank", "--model", "mlm", "--input", "lists.jsonl", "--length_normalization", "1"],
        "sample": ["sample", "--model", "mlm", "--lengths", "3", "5", "--num_chains", "2", "--num_epochs", "4"],
        "negatives": ["negatives", "--model", "lm", "--input", "texts.txt", *SIZES],
        "perplexity of lm": ["perplexity", "--model", "lm", "--input", "texts.txt", *SIZES],
        "perplexity": ["perplexity", "--model", "residual", "--input", "texts.txt", *SIZES, "--num_samples", "50"],
    }
    for name, arguments in given.items():
        places = [folder / part if (folder / part).exists() else part for part in arguments]
        run(*places, "--output", folder / f"{name}.jsonl", "--device", device)
        yield f"commands/{name}", torch.tensor(list((folder / f"{name}.jsonl").read_bytes()), dtype=torch.uint8)


def everything(device: str = "cpu") -> dict[str, Tensor]:
    """All values by name, of models on this device, where trainers find theirs themselves."""
    logging.set_verbosity_error()
    found: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("trainers", "commands"):
            (Path(folder) / name).mkdir()
        updates, written = trainers(Path(folder, "trainers")), commands(Path(folder, "commands"), device)
        for part in (energies(device), chains(device), joint_samples(device), updates, written):
            for name, value in part:
                if name in found:
                    raise ValueError(f"{name} is recorded twice")
                found[name] = value.detach().cpu().clone().contiguous()
    return found


def differences(before: dict[str, Tensor], after: dict[str, Tensor], tolerance: float) -> list[str]:
    """A line for each value that is new, gone, or differs by more than the tolerance."""
    told = [f"gone: {name}" for name in before.keys() - after.keys()]
    told += [f"new: {name}" for name in after.keys() - before.keys()]
    for name in before.keys() & after.keys():
        old, new = before[name], after[name]
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            told.append(f"{name}: {tuple(old.shape)} {old.dtype} -> {tuple(new.shape)} {new.dtype}")
            continue
        same = (old == new) | ((old != old) & (new != new))
        if not bool(same.all()):
            gap = float((old.double() - new.double())[~same].abs().max())
            size = max(float(old.double().nan_to_num(0, 0, 0).abs().max()), 1e-30)
            if not gap <= tolerance * size:
                told.append(f"{name}: differs by {gap / size:.2g} of its largest value")
    return sorted(told)


def main(command: str, file: str, tolerance: str = "0") -> None:
    torch.set_num_threads(1)
    if command == "record":
        save_file(everything(), file)
        return
    if command != "compare":
        raise SystemExit(__doc__)
    before, after = load_file(file), everything()
    told = differences(before, after, float(tolerance))
    print("\n".join([*told, f"{len(before)} values recorded, {len(after)} now, {len(told)} different"]))
    raise SystemExit(bool(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
