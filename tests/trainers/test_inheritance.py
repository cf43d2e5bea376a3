"""What a reader of a trainer has to read: few classes of ours lie between it and Transformers' own."""

import pytest
from transformers import Trainer

from hf_ebm import trainers

TRAINERS = [one for one in map(trainers.__dict__.get, trainers.__all__) if issubclass(one, Trainer)]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_at_most_two_classes_lie_between_a_trainer_and_the_stock_one(trainer):
    own = [one for one in trainer.__mro__ if one.__module__.startswith("hf_ebm.")]
    assert own[0] is trainer and len(own) <= 3
    assert all(issubclass(one, Trainer) for one in own)  # so none is mixed in


def test_renamed_trainers_warn():
    for old, new in {
        "SearchAwareConfig": "CrossEntropyConfig",
        "SearchAwareTrainer": "Seq2SeqObjectiveTrainer",
    }.items():
        with pytest.warns(FutureWarning, match=f"hf_ebm.trainers.{old} is called hf_ebm.trainers.{new} now"):
            assert getattr(trainers, old) is getattr(trainers, new)
