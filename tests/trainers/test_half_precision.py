"""With `bf16=True` every trainer's products are in half precision, in training and evaluation; updates stay close."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_ebm.trainers import EnergyTrainer, ResidualNCETrainer
from tests.causal_families import tiny_causal
from tests.models.residual_models import toy_residual
from tests.seq2seq_families import tiny_seq2seq
from tests.trainers import test_energy, test_mgs, test_residual_nce, test_sampled_risk, test_trainers

pytestmark = [pytest.mark.half_precision, pytest.mark.slow]

ENERGIES = {
    f"{family}, {objective}, {way}": (family, objective, {} if way == "enumerated" else {"enumeration_limit": 1})
    for family in ("bert", "bilstm")
    for objective in ("mle", "pll", "mlm", "kl+pll")
    for way in (("enumerated", "packed") if "pll" in objective else ("enumerated",))
    if family == "bert" or (objective, way) not in (("pll", "packed"), ("kl+pll", "enumerated"))
}
SAMPLED = [*test_sampled_risk.KINDS, "mgs"]  # whose samples may differ with the last bits


class Products(TorchDispatchMode):
    """Counts products of matrices by data type."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function) in ("aten.mm.default", "aten.addmm.default"):
            self.counts[args[-1].dtype] = self.counts.get(args[-1].dtype, 0) + 1
        return function(*args, **(kwargs or {}))


def trainer_of(kind, tmp_path, **changes):
    if kind in ENERGIES:
        family, objective, settings = ENERGIES[kind]
        teacher = test_energy.make(family, "raw", seed=3).float() if "kl" in objective else None
        args = test_energy.arguments(tmp_path, objective, **settings, **changes)
        rows = [{"input_ids": row} for row in test_energy.ROWS]
        model = test_energy.make(family, "raw").float()
        return EnergyTrainer(model, args, teacher=teacher, train_dataset=rows, eval_dataset=rows)
    if kind == "residual":
        args, rows = test_residual_nce.arguments(tmp_path, **changes), test_residual_nce.ROWS
        return ResidualNCETrainer(toy_residual().float(), args, train_dataset=rows, eval_dataset=rows)
    if kind in test_trainers.KINDS:
        return test_trainers.trainer_of(kind, tmp_path, tiny_seq2seq("bart").float(), **changes)
    model = tiny_causal(dtype=torch.float32)
    if kind == "mgs":
        return test_mgs.trainer_of(tmp_path, model, **changes)
    return test_sampled_risk.trainer_of(kind, tmp_path, model, **changes)


def trained(kind, tmp_path, **changes):
    """Evaluated loss, update of all weights as one vector, and products of both."""
    trainer = trainer_of(kind, tmp_path, **changes)
    before = copy.deepcopy(trainer.model)
    with Products() as evaluation:
        loss = trainer.evaluate()["eval_loss"]
    with Products() as training:
        trainer.train()
    pairs = zip(trainer.model.parameters(), before.parameters(), strict=True)
    update = torch.cat([(after - start).detach().flatten() for after, start in pairs])
    return loss, update, evaluation.counts, training.counts


@pytest.mark.parametrize("kind", [*ENERGIES, "residual", *test_trainers.KINDS, *SAMPLED])
def test_products_are_in_half_precision_and_updates_close(kind, tmp_path):
    single, expected, *counts = trained(kind, tmp_path)
    assert all(set(found) == {torch.float32} for found in counts)
    loss, update, *counts = trained(kind, tmp_path, bf16=True)
    halves, singles = ([found.get(dtype, 0) for found in counts] for dtype in (torch.bfloat16, torch.float32))
    assert all(half > other for half, other in zip(halves, singles, strict=True)), counts  # a teacher's, embeddings
    assert loss != single and loss == pytest.approx(single, rel=0.02)
    assert bool(torch.isfinite(update).all()) and bool(update.any())
    if kind not in SAMPLED:
        assert float(torch.cosine_similarity(update, expected, 0)) > 0.95


@pytest.mark.parametrize("objective", ["mle", "pll"])
@pytest.mark.parametrize("family", ["bert", "bilstm"])
def test_energies_of_half_precision_weights_are_added_up_in_single(family, objective, tmp_path):
    """`bf16_full_eval` makes the weights bfloat16; a sum in that type would be a multiple of 1/64 here."""
    trainer = trainer_of(f"{family}, {objective}, enumerated", tmp_path, bf16_full_eval=True)
    loss = torch.tensor(trainer.evaluate()["eval_loss"] * len(test_energy.ROWS))
    assert loss != loss.bfloat16()
