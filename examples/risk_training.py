"""Trains a language model for a cost of what it writes, by MGS or minimum risk: `python examples/risk_training.py`."""

from argparse import ArgumentParser
from tempfile import TemporaryDirectory

from transformers import DataCollatorForSeq2Seq

from hf_ebm.assets import held_out_verses, load_embedded_causal
from hf_ebm.data.bibles import completion_rows
from hf_ebm.trainers import MGSConfig, MGSTrainer, MinimumRiskConfig, MinimumRiskTrainer

parser = ArgumentParser(description=__doc__)
parser.add_argument("--method", default="mgs", choices=["mgs", "minimum-risk"])
parser.add_argument("--num_train", type=int, default=120, help="verses to complete in training")
parser.add_argument("--num_test", type=int, default=20)
parser.add_argument("--longest", type=int, default=40, help="tokens of the longest verse")
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--max_steps", type=int, default=15)
parser.add_argument("--num_candidates", type=int, default=4)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()


def repeated(predictions: list[str], references: list[str]) -> list[float]:
    """The cost of each text: the share of its words that it said already. Lower is better."""
    return [1 - len(set(text.split())) / max(len(text.split()), 1) for text in predictions]


model, tokenizer = load_embedded_causal()
train, test = (
    [row for row in completion_rows(verses, tokenizer, prompt_length=10) if len(row["labels"]) <= args.longest][:count]
    for verses, count in zip(held_out_verses(), (args.num_train, args.num_test), strict=True)
)
shared = dict(
    num_candidates=args.num_candidates,
    max_steps=args.max_steps,
    learning_rate=3e-4,
    lr_scheduler_type="constant",
    per_device_train_batch_size=args.batch_size,
    save_strategy="no",
    report_to=[],
    seed=args.seed,
)
with TemporaryDirectory() as folder:
    if args.method == "mgs":  # alpha weighs candidates by their cost: the smaller the cost, the larger alpha has to be
        trainer_class, config = MGSTrainer, MGSConfig(folder, alpha=100.0, **shared)
    else:
        trainer_class, config = MinimumRiskTrainer, MinimumRiskConfig(folder, sharpness=0.05, **shared)
    trainer = trainer_class(
        model,
        config,
        cost=repeated,
        train_dataset=train,
        eval_dataset=test,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
        processing_class=tokenizer,
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
for name, found in (("before", before), ("after", after)):
    print(f"{name:6}  cost {found['eval_cost']:.3f}  cross entropy {found['eval_loss']:.3f} nats a token")
