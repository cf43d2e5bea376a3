"""Trains the embedded masked language model on the King James Bible.

    python -m hf_ebm.assets.train_masked_lm --output_dir phase1 --work_dir work
    torchrun --nproc_per_node 2 -m hf_ebm.assets.train_masked_lm --output_dir hf_ebm/assets/kjv_masked_lm \\
        --work_dir work2 --init_from phase1 --min_masking_rate 0.05 --max_masking_rate 0.25 --epochs 9 \\
        --batch_size 64 --learning_rate 1.2e-3 --warmup_steps 100 --seed 1

are the two phases of the embedded model: 80 minutes on one core that has bfloat16 instructions, then 35 minutes on two
at low masking rates, where energies read. An interrupted run goes on from its last checkpoint when the same command is
given again. Writes the model (fp16 safetensors), its tokenizer, the held-out clauses and `training_results.json`;
`python -m hf_ebm.assets.write_card masked` makes the model card from these.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import WordPieceTrainer
from transformers import (
    AutoTokenizer,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Trainer,
)

from hf_ebm.assets.embedding import (
    describe_phase,
    mean_loss,
    minutes_of_training,
    save_embedded,
    script_arguments,
    training_arguments,
)
from hf_ebm.data.bibles import load_kjv_clauses

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
MAX_POSITIONS = 128
REPORTED_MASKING_RATES = (0.05, 0.15, 0.30, 0.50)


@dataclass
class ScriptArguments:
    output_dir: str = field(metadata={"help": "Folder the finished model is written to."})
    work_dir: str = field(metadata={"help": "Folder for checkpoints and for the unpacked text."})
    vocab_size: int = field(default=4000)
    hidden_size: int = field(default=256)
    intermediate_size: int = field(default=512)
    num_hidden_layers: int = field(default=6)
    num_attention_heads: int = field(default=4)
    mlp_dropout: float = field(default=0.0)
    min_masking_rate: float = field(default=0.05)
    max_masking_rate: float = field(default=0.50)
    epochs: float = field(default=12)
    batch_size: int = field(default=80)
    learning_rate: float = field(default=3e-3)
    weight_decay: float = field(default=0.05)
    threads: int = field(default=1)
    warmup_steps: int = field(default=200)
    seed: int = field(default=0)
    init_from: str | None = field(default=None, metadata={"help": "Go on from this folder instead of from nothing."})


def train_tokenizer(clauses: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """An uncased WordPiece tokenizer of BERT's kind."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    tokenizer.train_from_iterator(clauses, WordPieceTrainer(vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS))
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=ends
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=MAX_POSITIONS,
    )


class RandomRateMasking:
    """Pads a batch and masks, in each row, a share of tokens drawn uniformly between two rates (at least one token).

    Every chosen token becomes the mask token, with no random or kept ones: an energy only ever reads masked positions.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, low: float, high: float, generator: torch.Generator):
        self.tokenizer, self.low, self.high, self.generator = tokenizer, low, high, generator

    def __call__(self, features: list[dict]) -> dict[str, torch.Tensor]:
        batch = self.tokenizer.pad([{"input_ids": row["input_ids"]} for row in features], return_tensors="pt")
        ids = batch["input_ids"]
        words = (ids != self.tokenizer.pad_token_id) & (ids != self.tokenizer.cls_token_id)
        words &= ids != self.tokenizer.sep_token_id
        rate = self.low + (self.high - self.low) * torch.rand(len(ids), 1, generator=self.generator)
        count = (rate * words.sum(1, keepdim=True)).round().clamp(min=1)
        lottery = torch.rand(ids.shape, generator=self.generator).masked_fill(~words, 2.0)
        masked = lottery.argsort(1).argsort(1) < count
        batch["labels"] = ids.masked_fill(~masked, -100)
        batch["input_ids"] = ids.masked_fill(masked, self.tokenizer.mask_token_id)
        return dict(batch)


def held_out_loss(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    clauses: list[str],
    rate: float,
    draws: int = 4,
    batch_size: int = 128,
) -> float:
    """Mean cross entropy in nats of the masked tokens at one masking rate, in float32, over fixed draws of masks."""
    collate = RandomRateMasking(tokenizer, rate, rate, torch.Generator().manual_seed(1))
    return mean_loss(model, tokenizer(clauses)["input_ids"], collate, batch_size, draws)


def model_config(arguments: ScriptArguments, tokenizer: PreTrainedTokenizerFast) -> ModernBertConfig:
    """A small ModernBERT in which every layer attends to everything."""
    every_layer: dict[str, Any] = {"global_attn_every_n_layers": 1}  # an argument, but no field
    return ModernBertConfig(
        vocab_size=len(tokenizer),
        hidden_size=arguments.hidden_size,
        intermediate_size=arguments.intermediate_size,
        num_hidden_layers=arguments.num_hidden_layers,
        num_attention_heads=arguments.num_attention_heads,
        mlp_dropout=arguments.mlp_dropout,
        max_position_embeddings=MAX_POSITIONS,
        **every_layer,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
        cls_token_id=tokenizer.cls_token_id,
        sep_token_id=tokenizer.sep_token_id,
    )


def main(arguments: ScriptArguments) -> None:
    """Trains, evaluates and writes the model."""
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    train, held_out = load_kjv_clauses(arguments.work_dir)
    if arguments.init_from is None:
        fresh = train_tokenizer(train, arguments.vocab_size)
        tokenizer: PreTrainedTokenizerBase = fresh
        model, before = ModernBertForMaskedLM(model_config(arguments, fresh)), []
    else:
        tokenizer = AutoTokenizer.from_pretrained(arguments.init_from)
        model = ModernBertForMaskedLM.from_pretrained(
            arguments.init_from, dtype=torch.float32, mlp_dropout=arguments.mlp_dropout
        )
        results = json.loads((Path(arguments.init_from) / "training_results.json").read_text(encoding="utf-8"))
        before = results["phases"]
    # The head is computed for masked positions only while training; a published model returns logits everywhere.
    model.sparse_prediction = True
    masks = torch.Generator().manual_seed(1000 * arguments.seed + int(os.environ.get("RANK", 0)))
    trainer = Trainer(
        model=model,
        args=training_arguments(arguments, ddp_find_unused_parameters=False),
        train_dataset=[{"input_ids": ids} for ids in tokenizer(train)["input_ids"]],
        data_collator=RandomRateMasking(tokenizer, arguments.min_masking_rate, arguments.max_masking_rate, masks),
        processing_class=tokenizer,
    )
    minutes = minutes_of_training(trainer)
    if not trainer.is_world_process_zero():
        return

    model.float()
    seen = set(train)
    unseen = [clause for clause in held_out if clause not in seen]
    phase = describe_phase("hf_ebm.assets.train_masked_lm", arguments, minutes, trainer.args.world_size)
    results = {
        "phases": [*before, phase],
        "train_clauses": len(train),
        "held_out_clauses": len(held_out),
        "parameters": model.num_parameters(),
        "held_out_loss": {f"{r:.0%}": held_out_loss(model, tokenizer, held_out, r) for r in REPORTED_MASKING_RATES},
        "held_out_loss_unseen_clauses": {
            f"{r:.0%}": held_out_loss(model, tokenizer, unseen, r) for r in REPORTED_MASKING_RATES
        },
        "train_loss_15%": held_out_loss(model, tokenizer, train[:: len(train) // 3000], 0.15),
    }
    save_embedded(Path(arguments.output_dir), model, tokenizer, held_out, results)


if __name__ == "__main__":
    main(script_arguments(ScriptArguments))
