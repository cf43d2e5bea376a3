"""What the recipes of CONTRIBUTING.md add, used: run by `test_recipes` with a copy of the package."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForMaskedLM

from hf_ebm import EnergyModel, enumerate_distribution
from hf_ebm.objectives.sequence_costs import as_cost
from tests.conftest import SPECIAL, plain_token_energies, tiny_energy_model
from tests.sampling.oracle import total_variation_limit
from tests.seq2seq_families import tiny_seq2seq
from tests.trainers.test_trainers import ONE_STEP, collate, rows


def test_energy():
    model, ids = tiny_energy_model("gap"), torch.tensor([1, 5, 6, 7, 2])
    expected = 0.0
    for position in (1, 2, 3):
        masked = ids.index_fill(0, torch.tensor([position]), SPECIAL["mask"])
        logits = model.mlm(input_ids=masked[None]).logits[0, position]
        expected += float(logits.max() - logits[ids[position]])
    assert float(model(ids[None]).energy) == pytest.approx(expected, abs=1e-5) and expected > 0


def test_objective(tmp_path):
    from hf_ebm.trainers.seq2seq import FocalTrainer

    model = tiny_seq2seq("t5").eval()
    trainer = FocalTrainer(
        model, FocalTrainer.config_class(tmp_path, **ONE_STEP), train_dataset=rows(), data_collator=collate
    )
    batch = collate(rows())
    probabilities = model(**batch).logits.softmax(-1)
    own = [
        probabilities[row, place, label] for row, of_row in enumerate(batch["labels"])
        for place, label in enumerate(of_row) if label != -100
    ]  # fmt: skip
    expected = sum(float(-((1 - p) ** 2) * p.log()) for p in own) / len(own)
    assert trainer.evaluate(rows())["eval_loss"] == pytest.approx(expected, rel=1e-5)
    assert trainer.train().training_loss == pytest.approx(expected, rel=0.2)  # with dropout


def test_cost():
    cost = as_cost("length_difference")
    assert cost([[5, 6], [5, 6, 7]], [[5, 6, 7, 8], [5, 6]]).tolist() == [0.5, 0.5]


def test_model_family():
    torch.manual_seed(0)
    config = AutoConfig.for_model("hf_ebm_context_mean", vocab_size=8)
    mlm = AutoModelForMaskedLM.from_config(config).eval()
    for weight in mlm.parameters():
        weight.data.normal_(0, 0.5)
    model = EnergyModel(
        mlm, energy="local", mask_token_id=SPECIAL["mask"], special_token_ids=[0, 1, 2], excluded_token_ids=[4],
        prefix_token_ids=[1], suffix_token_ids=[2],
    )  # fmt: skip
    framed = lambda words: torch.tensor([[1, *row, 2] for row in words.tolist()])  # noqa: E731
    plain = lambda words: torch.tensor([sum(plain_token_energies(model, ids, [1, 2])) for ids in framed(words)])  # noqa: E731
    exact = enumerate_distribution(plain, [5, 6, 7], 2)
    out = model.generate(lengths=2, num_chains=1000, num_epochs=10, seed=0)
    assert out.energies[:5, -1].tolist() == pytest.approx(plain(out.sequences[:5, 1:-1]).tolist(), abs=1e-5)
    limit = total_variation_limit(exact.log_probabilities.exp(), 1000)
    assert exact.total_variation(out.sequences[:, 1:-1]) < limit
