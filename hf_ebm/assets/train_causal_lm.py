"""Trains the embedded causal language model on verses of the King James Bible.

    python -m hf_ebm.assets.train_causal_lm --output_dir hf_ebm/assets/kjv_causal_lm --work_dir work

Vocabulary, tokenizer and held-out verses are those of the embedded masked language model; a verse stands between
[CLS] and [SEP], its end token. The weights of the epoch with the lowest loss on every other held-out verse are kept.
An interrupted run goes on from its last checkpoint when the same command is given again. Writes the model (fp16
safetensors), the tokenizer, the held-out verses and `training_results.json`; `python -m hf_ebm.assets.write_card
causal` makes the model card from these.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
)

from hf_ebm.assets import KJV_MASKED_LM
from hf_ebm.assets.embedding import (
    describe_phase,
    mean_loss,
    minutes_of_training,
    save_embedded,
    script_arguments,
    training_arguments,
)
from hf_ebm.data.bibles import load_kjv_verses, split_held_out

MAX_POSITIONS = 256


@dataclass
class ScriptArguments:
    output_dir: str = field(metadata={"help": "Folder the finished model is written to."})
    work_dir: str = field(metadata={"help": "Folder for checkpoints and for the unpacked text."})
    hidden_size: int = field(default=256)
    intermediate_size: int = field(default=768)
    num_hidden_layers: int = field(default=6)
    num_attention_heads: int = field(default=4)
    dropout: float = field(default=0.1)
    shifted_share: float = field(
        default=0.1, metadata={"help": "Share of rows at random later positions, so that all positions are trained."}
    )
    epochs: float = field(default=12)
    batch_size: int = field(default=48)
    learning_rate: float = field(default=2e-3)
    weight_decay: float = field(default=0.1)
    warmup_steps: int = field(default=300)
    threads: int = field(default=1)
    seed: int = field(default=0)


class VerseCollator:
    """Pads verses on the right; in training some rows start at a later position, up to the last."""

    def __init__(self, pad_id: int, shifted_share: float, generator: torch.Generator):
        self.pad_id, self.shifted_share, self.generator = pad_id, shifted_share, generator

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        batch = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=self.pad_id)
        room = MAX_POSITIONS - batch.shape[1]
        shift = torch.randint(0, room + 1, (len(ids), 1), generator=self.generator)
        shift *= torch.rand(len(ids), 1, generator=self.generator) < self.shifted_share
        return {
            "input_ids": batch,
            "attention_mask": (batch != self.pad_id).long(),
            "position_ids": torch.arange(batch.shape[1]) + shift,
            "labels": batch.masked_fill(batch == self.pad_id, -100),
        }


def held_out_loss(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, verses: list[str], batch_size: int = 64
) -> float:
    """Mean negative log likelihood in nats of a token, the end token among them, in float32."""
    collate = VerseCollator(tokenizer.pad_token_id, 0.0, torch.Generator())
    return mean_loss(model, tokenizer(verses)["input_ids"], collate, batch_size)


def fresh_model(arguments: ScriptArguments, tokenizer: PreTrainedTokenizerBase) -> GPT2LMHeadModel:
    """A small GPT-2."""
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=MAX_POSITIONS,
            n_embd=arguments.hidden_size,
            n_inner=arguments.intermediate_size,
            n_layer=arguments.num_hidden_layers,
            n_head=arguments.num_attention_heads,
            resid_pdrop=arguments.dropout,
            embd_pdrop=arguments.dropout,
            attn_pdrop=arguments.dropout,
            bos_token_id=tokenizer.cls_token_id,
            eos_token_id=tokenizer.sep_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def main(arguments: ScriptArguments) -> None:
    """Trains, evaluates and writes the model."""
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    train, held_out = load_kjv_verses(arguments.work_dir)
    validation, test = split_held_out(held_out)
    tokenizer = AutoTokenizer.from_pretrained(KJV_MASKED_LM, model_max_length=MAX_POSITIONS)
    model = fresh_model(arguments, tokenizer)
    rows = {name: [{"input_ids": ids} for ids in tokenizer(verses)["input_ids"]]
            for name, verses in (("train", train), ("validation", validation))}  # fmt: skip
    trainer = Trainer(
        model=model,
        args=training_arguments(
            arguments,
            lr_scheduler_type="cosine",
            eval_strategy="epoch",
            load_best_model_at_end=True,
            metric_for_best_model="loss",
        ),
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        data_collator=VerseCollator(
            tokenizer.pad_token_id, arguments.shifted_share, torch.Generator().manual_seed(arguments.seed)
        ),
        processing_class=tokenizer,
    )
    minutes = minutes_of_training(trainer)
    model.float()
    model.config.use_cache = True  # which the Trainer turned off
    results = {
        "phases": [describe_phase("hf_ebm.assets.train_causal_lm", arguments, minutes, trainer.args.world_size)],
        "train_verses": len(train),
        "held_out_verses": len(held_out),
        "parameters": model.num_parameters(),
        "loss": {
            "validation": held_out_loss(model, tokenizer, validation),
            "test": held_out_loss(model, tokenizer, test),
            "train": held_out_loss(model, tokenizer, train[:: len(train) // 1500]),
        },
    }
    save_embedded(Path(arguments.output_dir), model, tokenizer, held_out, results)


if __name__ == "__main__":
    main(script_arguments(ScriptArguments))
