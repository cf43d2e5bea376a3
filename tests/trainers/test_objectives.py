"""What every objective keeps that `hf-ebm train` knows: an entry in `OBJECTIVES` is held against this."""

import pandas
import pytest
import torch

from hf_ebm.cli.train import OBJECTIVES
from hf_ebm.trainers import EnergyTrainer, EnergyTrainingConfig, ResidualNCEConfig, ResidualNCETrainer
from hf_ebm.trainers.task_loss import TaskLossConfig
from tests.seq2seq_families import tiny_seq2seq
from tests.trainers.test_trainers import ONE_STEP, collate, rows

OTHERS = {
    "energy": (EnergyTrainingConfig, EnergyTrainer),
    "residual-nce": (ResidualNCEConfig, ResidualNCETrainer),
}


def trainer_of(name: str, tmp_path, **settings):
    config_class, trainer_class, _ = OBJECTIVES[name]
    torch.manual_seed(0)
    model = tiny_seq2seq("lstm additive")
    model.generation_config.max_new_tokens = 6
    own = (
        {"max_length_ratio": 10.0} if issubclass(config_class, TaskLossConfig) else {}
    )  # else the batch's targets count
    args = config_class(str(tmp_path), **{**ONE_STEP, **own, **settings})
    return trainer_class(model, args, train_dataset=rows(), eval_dataset=rows(6, 9), data_collator=collate)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_evaluation_is_of_all_rows_whatever_the_batches(name, tmp_path):
    """Changes no weights, logs what the class says, and gives the same for other batches."""
    found = []
    for size in (1, 4, 6):
        trainer = trainer_of(name, tmp_path, per_device_eval_batch_size=size)
        before = [weight.clone() for weight in trainer.model.parameters()]
        found.append(trainer.evaluate())
        assert all(map(torch.equal, trainer.model.parameters(), before))
    said = trainer.derived_logs(dict.fromkeys(trainer.evaluated_terms, 0.0))
    wanted = ["eval_loss", *(f"eval_{term}" for term in said)]
    for other in found[1:]:
        assert [other[name] for name in wanted] == pytest.approx([found[0][name] for name in wanted], rel=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_step_is_the_seed_s(name, tmp_path):
    """It changes the weights, and the same seed changes them to the same."""
    runs = []
    for _ in range(2):
        trainer = trainer_of(name, tmp_path, max_steps=2, seed=3)
        before = [weight.clone() for weight in trainer.model.parameters()]
        assert torch.isfinite(torch.tensor(trainer.train().training_loss))
        runs.append([weight.clone() for weight in trainer.model.parameters()])
        assert not all(map(torch.equal, runs[-1], before))
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("name", [*OBJECTIVES, "energy", "residual-nce"])
def test_tables_and_names_are_no_data_sets(name, tmp_path):
    """Whose rows the Trainer would look for by number, and find columns, letters or nothing."""
    config_class, trainer_class = OBJECTIVES[name][:2] if name in OBJECTIVES else OTHERS[name]
    args = config_class(str(tmp_path), **ONE_STEP)
    table = pandas.DataFrame({"prompt": ["a"], "input_ids": [[3]]})
    for wrong, shown in ((table, "DataFrame"), ("imdb", "'imdb'"), (tmp_path, "PosixPath")):
        with pytest.raises(ValueError, match=f"train_dataset must be a data set .*, got .*{shown}"):
            trainer_class(None, args, train_dataset=wrong)
        with pytest.raises(ValueError, match=rf"eval_dataset\['b'\] must be a data set .*, got .*{shown}"):
            trainer_class(None, args, train_dataset=[{}], eval_dataset={"a": [{}], "b": wrong})
    with pytest.raises(ValueError, match="train_dataset must be one data set, got several by name: prompt, input_ids"):
        trainer_class(None, args, train_dataset=dict(table))
