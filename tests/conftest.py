"""Shared by all tests: no network, one thread, tiny random models."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import gc
from typing import TYPE_CHECKING

import pytest
import torch
from transformers.utils import logging

if TYPE_CHECKING:  # models are imported by the tests that have any
    from transformers import BertForMaskedLM

    from hf_ebm import EnergyModel

torch.set_num_threads(1)
# A fork has lost PyTorch's pool of threads, and several threads that ask for it at once, as Transformers loads weights,
# may find none: "Invalid thread pool!". The fork's only thread makes it again.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
logging.disable_progress_bar()
if not torch.cuda.is_available():  # each seed would be kept for a card to come, with the stack that asked for it
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = lambda seed: None


# A device that is registered stays for the rest of the process: `make test-device` names the folder.
collect_ignore = ["device"]

# Long files whose tests share no fixture: with `--dist loadgroup` they are dealt out one by one, behind whole files.
TESTS_APART = ("test_examples", "test_exactness", "test_residual_nce", "test_joint_sampling")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items) -> None:
    """Keeps a file's tests in one process, as they share its fixtures."""
    for item in items:
        if item.path.stem not in TESTS_APART:
            item.add_marker(pytest.mark.xdist_group(str(item.path.relative_to(item.config.rootpath))))


def pytest_collection(session) -> None:
    """While tests are imported garbage collection finds nothing, and takes a fifth of the time."""
    gc.disable()


def pytest_collection_finish(session) -> None:
    """Leaves what is imported by now out of garbage collection, which every training begins with."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def same_numbers_for_fixtures() -> None:
    """Random numbers that nothing seeds don't depend on which files ran before in the same process."""
    torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def what_is_old_is_not_collected() -> None:
    """Nor does what earlier files left slow down the collection that every training begins with."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def same_numbers(same_numbers_for_fixtures) -> None:
    """Nor on which tests."""
    torch.default_generator.manual_seed(0)


def tiny_mlm(vocab_size: int = 9, seed: int = 0, scale: float = 0.35, layers: int = 1, **overrides) -> BertForMaskedLM:
    """A random BERT whose conditionals are far from uniform and from each other."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(seed)
    settings = dict(
        vocab_size=vocab_size, hidden_size=16, num_hidden_layers=layers, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=0,
    )  # fmt: skip
    model = BertForMaskedLM(BertConfig(**{**settings, **overrides}))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, scale)
    return model.eval()


# Tokens of the tiny models: 0 pad, 1 cls, 2 sep, 3 mask, 4 unk, the rest words.
SPECIAL = {"pad": 0, "cls": 1, "sep": 2, "mask": 3, "unk": 4}


def tiny_energy_model(energy: str = "local", vocab_size: int = 9, dtype=torch.float32, **model_settings) -> EnergyModel:
    from hf_ebm import EnergyModel

    mlm = tiny_mlm(vocab_size, **model_settings).to(dtype)
    return EnergyModel(
        mlm, energy=energy, mask_token_id=3, pad_token_id=0, special_token_ids=[0, 1, 2], excluded_token_ids=[4],
        prefix_token_ids=[1], suffix_token_ids=[2],
    )  # fmt: skip


def plain_token_energies(model: EnergyModel, ids: torch.Tensor, scored: list[int]) -> list[float]:
    """Energy terms of one sequence by masking one position at a time: nothing of the library but the inner model."""
    values = []
    for position in scored:
        masked = ids.clone()[None]
        masked[0, position] = model.config.mask_token_id
        with torch.no_grad():
            logits = model.mlm(input_ids=masked).logits[0, position].float()
        scores = logits if model.config.energy == "raw" else logits - logits.exp().sum().log()
        values.append(-float(scores[ids[position]]))
    return values


@pytest.fixture(params=["raw", "local"])
def energy(request) -> str:
    return request.param


@pytest.fixture
def rows_run(monkeypatch) -> list[int]:
    """How many masked rows each pool had that a model ran, in order."""
    from hf_ebm.scoring.masked_batches import MaskedBatchRunner

    found: list[int] = []
    run = MaskedBatchRunner.parts
    monkeypatch.setattr(
        MaskedBatchRunner,
        "parts",
        lambda self, sequences, rows, reduce: found.append(len(rows.source)) or run(self, sequences, rows, reduce),
    )
    return found
