"""Samples that several updates use: what was drawn for a batch, kept in checkpoints, and batches that come again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, IterableDataset


@dataclass
class Rollout:
    """What was drawn for a batch of B rows: n tokens in all.

    Attributes:
        samples: S sequences of ids for each row.
        costs: (B, S).
        ruled_out: which tokens could not have stood in the place of the samples' tokens, numbers of these and ids,
            (m, 2): few of the n V that there are.
        num_ids: V.
        reference: log probabilities of the tokens under the reference, (n,), if it is wanted.
        old: those under the policy that drew them, (n,); None until they are known.
    """

    samples: list[list[torch.Tensor]]
    costs: torch.Tensor
    ruled_out: torch.Tensor | None = None
    num_ids: int = 0
    reference: torch.Tensor | None = None
    old: torch.Tensor | None = None

    @classmethod
    def drawn(cls, samples: list[list[torch.Tensor]], mask: torch.Tensor | None, costs: torch.Tensor) -> Rollout:
        """Samples with their costs, and what was ruled out as `CandidateDecoder.sample` returns it."""
        return cls(samples, costs) if mask is None else cls(samples, costs, mask.nonzero(), mask.shape[1])

    @property
    def mask(self) -> torch.Tensor | None:
        """What was ruled out as `token_log_probs` takes it, (n, V) bool."""
        if self.ruled_out is None:
            return None
        mask = self.ruled_out.new_zeros((int(self.lengths.sum()), self.num_ids), dtype=torch.bool)
        mask[tuple(self.ruled_out.T)] = True
        return mask

    @property
    def lengths(self) -> torch.Tensor:
        """Of the samples, (B S,)."""
        return torch.tensor([len(ids) for found in self.samples for ids in found], device=self.costs.device)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of it by name."""
        ids = torch.cat([ids for found in self.samples for ids in found])
        found = {"ids": ids, "lengths": self.lengths, "costs": self.costs, "num_ids": torch.tensor(self.num_ids)}
        some = {"ruled_out": self.ruled_out, "reference": self.reference, "old": self.old}
        found |= {name: value for name, value in some.items() if value is not None}
        return {name: value.contiguous() for name, value in found.items()}

    @classmethod
    def of(cls, tensors: dict[str, torch.Tensor]) -> Rollout:
        """What `tensors` gave."""
        ids, costs = tensors["ids"], tensors["costs"]
        flat = ids.split(tensors["lengths"].tolist())
        count = costs.shape[1]
        samples = [list(flat[start : start + count]) for start in range(0, len(flat), count)]
        others = {name: tensors.get(name) for name in ("ruled_out", "reference", "old")}
        return cls(samples, costs, num_ids=int(tensors.get("num_ids", 0)), **others)


def _file(folder: str, process: int) -> Path:
    return Path(folder) / f"rollouts_{process}.safetensors"


def save_rollouts(rollouts: Sequence[Rollout], folder: str, process: int) -> None:
    """Writes those of a process into a checkpoint."""
    Path(folder).mkdir(parents=True, exist_ok=True)  # no process waits for the first to make it
    tensors = {f"{at}.{name}": value for at, one in enumerate(rollouts) for name, value in one.tensors().items()}
    save_file(tensors, _file(folder, process))


def load_rollouts(folder: str, process: int, device: torch.device) -> list[Rollout]:
    """Those of a process.

    Raises:
        ValueError: for a checkpoint within the iterations of a batch that has none for this process.
    """
    file = _file(folder, process)
    if not file.is_file():
        raise ValueError(
            f"resume_from_checkpoint: {folder} is of a step within the num_iterations of a batch, and has no samples "
            f"of it ({file.name}); go on with the trainer and the number of processes that wrote it, or from another"
        )
    found: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in load_file(file, str(device)).items():
        at, _, name = key.partition(".")
        found.setdefault(int(at), {})[name] = value
    return [Rollout.of(found[at]) for at in sorted(found)]


class RepeatedBatches(IterableDataset):
    """The batches of a loader, so many together as an update has, each of these several times in a row.

    Those at the end of an epoch that make no whole update are left out.

    Args:
        loader: of batches.
        together: how many are of one update.
        times: how often an update's come.
        epoch: says which epoch begins, for loaders that order rows by it.
    """

    def __init__(self, loader: DataLoader, together: int, times: int, epoch: Callable[[], int]):
        self.loader, self.together, self.times, self.epoch = loader, together, times, epoch

    def __len__(self) -> int:
        return len(self.loader) // self.together * self.together * self.times

    def __iter__(self) -> Iterator[Any]:
        set_epoch = getattr(self.loader, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self.epoch())
        batches = iter(self.loader)
        while len(update := list(islice(batches, self.together))) == self.together:
            for _ in range(self.times):
                yield from update


def repeated(loader: DataLoader, together: int, times: int, epoch: Callable[[], int]) -> DataLoader:
    """A loader of `RepeatedBatches`, with the arguments of these."""
    return DataLoader(RepeatedBatches(loader, together, times, epoch), batch_size=None, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch
