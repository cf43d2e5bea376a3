"""Updates of each trainer for a cost, for `distributed_runs`."""

import os
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
from datasets import Dataset
from transformers import GenerationConfig

from hf_ebm.model_modes import encoded_once
from hf_ebm.trainers import MGSTrainer, sequence_pairs
from tests.causal_families import END, PAD, collate_right, completion_rows, tiny_causal
from tests.seq2seq_families import tiny_seq2seq
from tests.trainers import test_mgs, test_prompts, test_sampled_risk, test_trainers

SAMPLING = GenerationConfig(do_sample=True, top_k=0, eos_token_id=END, pad_token_id=PAD)
REWARDS = {
    "reward_funcs": ["neg_edit_distance", "neg_repetition"],
    "reward_weights": [1.0, 0.5],
    "reward_errors": "skip",
}
KINDS = {
    "mgs": {"learning_rate": 0.3},
    "mgs, sampled, dropout, accumulated": {"generation_config": SAMPLING, "gradient_accumulation_steps": 2},
    **{kind: {} for kind in test_sampled_risk.KINDS},
    "minimum risk, mixed, encoded once": {"gradient_accumulation_steps": 2},
    "grpo, tokens": {"length_normalization": "tokens", "num_iterations": 2},  # of which each process has others
    "mgs, rewards": {"learning_rate": 0.3, **REWARDS},
    "minimum risk, rewards": {"gradient_accumulation_steps": 2, **REWARDS},
    "minimum risk, texts of a stream": {
        "reward_funcs": lambda topic, prompts, completion_ids: list(map(closeness, topic, prompts, completion_ids))
    },
}


def closeness(topic: str, prompt: str, ids: list[int]) -> float:
    """A reward that shows whether a column stands beside its own row."""
    return len(ids) * float(prompt.startswith(topic)) + len(prompt) / 10


def trainer_of(kind: str, folder: Path, processes: int):
    rows = completion_rows(
        18 if kind.startswith("mgs") else 16
    )  # a last batch that is short; any four of them have the same longest target, and so the same decoding length
    if kind.startswith("mgs"):  # every process sees every batch
        model = tiny_causal(dtype=torch.float32)
        if "dropout" in kind:
            for module in model.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.2
        return test_mgs.trainer_of(
            folder, model, rows, max_steps=6, per_device_train_batch_size=4, num_candidates=5, **KINDS[kind]
        )
    if kind.endswith("of a stream"):
        texts = Dataset.from_list([{**row, "topic": row["prompt"][:1]} for row in test_prompts.TEXTS * 4])
        trainer = test_prompts.trainer_of(
            "minimum risk", "gpt2", folder / str(processes), texts.to_iterable_dataset(), max_steps=2,
            per_device_train_batch_size=8 // processes, log_completions=True, **KINDS[kind],
        )  # fmt: skip
        trainer.candidates.sample = fixed
        return trainer
    model, collator = tiny_causal(), collate_right
    if kind.endswith("encoded once"):
        model, rows, collator = tiny_seq2seq("bart"), test_trainers.rows(16), test_trainers.collate
    trainer = test_sampled_risk.trainer_of(
        kind.removesuffix(", encoded once").removesuffix(", rewards").removesuffix(", tokens"), folder, model, rows,
        collator, max_steps=2, per_device_train_batch_size=8 // processes, **KINDS[kind],
    )  # fmt: skip
    trainer.candidates.sample = fixed
    return trainer


def fixed(pairs, count, temperature=1.0):
    """Candidates that depend on the row alone, where processes would draw their own."""
    return [
        [target.flip(0), (target + 1) % 20, target[: 1 + int(target.sum()) % 3]][:count] for target in pairs.targets
    ], None


def repeated(*arguments: object) -> nullcontext:
    return nullcontext()


def predictions(folder: Path) -> tuple:
    """Of rows that are decoded to other lengths, of which the second process sees none with labels."""
    rows = completion_rows(6)
    for row in rows[1::2]:
        row["labels"] = torch.full_like(row["labels"], -100)
    trainer = test_sampled_risk.trainer_of(
        "self-critical", folder, tiny_causal(), predict_with_generate=True, per_device_eval_batch_size=1
    )
    output = trainer.predict(rows)
    nothing = trainer.evaluate(rows[1::2] + rows[1:2])
    return output.predictions, output.label_ids, output.metrics, nothing


def run_all(folder: Path) -> None:
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    for kind in KINDS:
        trainer = trainer_of(kind, folder / "work", processes)
        decodes = []
        if isinstance(trainer, MGSTrainer):
            costs = trainer.candidates.costs
            trainer.candidates.costs = lambda *given, costs=costs, decodes=decodes: decodes.append(1) or costs(*given)
        # What two processes are compared with runs the encoder for every candidate.
        once = repeated if processes == 1 else encoded_once
        with patch.object(sequence_pairs, "encoded_once", once):
            trainer.train()
        logged = [{k: v for k, v in log.items() if k != "grad_norm"} for log in trainer.state.log_history[:2]]
        state = {name: value.clone() for name, value in trainer.model.state_dict().items()}
        name = f"{kind}-{processes}-{os.environ.get('RANK', '0')}.pt"
        torch.save((logged, state, len(decodes)), folder / name)
        trainer.accelerator.wait_for_everyone()
    torch.save(predictions(folder / "work"), folder / f"predictions-{processes}-{os.environ.get('RANK', '0')}.pt")
