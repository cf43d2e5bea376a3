"""Trains the embedded models of English pronunciation on the CMU Pronouncing Dictionary (extra `hf_ebm[data]`).

    python -m hf_ebm.assets.train_pronunciation --kind masked --epochs 9 \\
        --output_dir hf_ebm/assets/cmudict_masked_lm --work_dir work
    python -m hf_ebm.assets.train_pronunciation --kind encoder_decoder --epochs 9 --learning_rate 1e-3 \\
        --warmup_steps 800 --output_dir hf_ebm/assets/cmudict_encoder_decoder --work_dir work2
    python -m hf_ebm.assets.train_pronunciation --kind length --num_hidden_layers 2 --epochs 5 --learning_rate 2e-3 \\
        --output_dir hf_ebm/assets/cmudict_length --work_dir work3

are the runs of the embedded models: 44, 48 and 12 minutes on one busy core. `masked` fills in phonemes in the row
"letters </s> phonemes </s>"; `encoder_decoder`, of BART's shape, reads the letters in its encoder; `length` gives the
log probabilities of the number of phonemes, from which lengths are drawn. Words with several pronunciations are as many
rows. The weights of the epoch with the lowest validation loss are kept; writes fp16 safetensors, the tokenizer and
`training_results.json`. An interrupted run goes on when the command is given again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2ForSequenceClassification,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
)
from transformers.data.data_collator import DataCollator

from hf_ebm.assets.embedding import (
    describe_phase,
    minutes_of_training,
    save_embedded,
    script_arguments,
    training_arguments,
)
from hf_ebm.data.cmudict_tasks import load_g2p
from hf_ebm.data.conditional import MaskedTargetCollator, encode_conditional
from hf_ebm.data.symbols import symbol_tokenizer
from hf_ebm.texts import plain_ids

MAX_POSITIONS = 48


@dataclass
class ScriptArguments:
    output_dir: str = field(metadata={"help": "Folder the finished model is written to."})
    work_dir: str = field(metadata={"help": "Folder for checkpoints."})
    kind: str = field(default="masked", metadata={"help": "masked, encoder_decoder or length."})
    hidden_size: int = field(default=128)
    intermediate_size: int = field(default=256)
    num_hidden_layers: int = field(default=4, metadata={"help": "Of an encoder-decoder: half of them on each side."})
    num_attention_heads: int = field(default=4)
    dropout: float = field(default=0.0)
    epochs: float = field(default=12)
    batch_size: int = field(default=128)
    learning_rate: float = field(default=3e-3)
    weight_decay: float = field(default=0.05)
    warmup_steps: int = field(default=300)
    max_train: int | None = field(default=None, metadata={"help": "Rows of train; by default all."})
    threads: int = field(default=1)
    seed: int = field(default=0)


def fresh_model(arguments: ScriptArguments, tokenizer: PreTrainedTokenizerBase, num_lengths: int) -> PreTrainedModel:
    """A small ModernBERT, a small BART, or, to count, a small GPT-2: its positions are absolute."""
    size, layers = arguments.hidden_size, arguments.num_hidden_layers
    ends: dict[str, Any] = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    if arguments.kind == "encoder_decoder":
        return BartForConditionalGeneration(
            BartConfig(
                vocab_size=len(tokenizer), d_model=size, max_position_embeddings=MAX_POSITIONS,
                encoder_layers=layers // 2, decoder_layers=layers // 2,
                encoder_ffn_dim=arguments.intermediate_size, decoder_ffn_dim=arguments.intermediate_size,
                encoder_attention_heads=arguments.num_attention_heads,
                decoder_attention_heads=arguments.num_attention_heads,
                dropout=arguments.dropout, decoder_start_token_id=tokenizer.eos_token_id,
                forced_eos_token_id=None, **ends,
            )
        )  # fmt: skip
    if arguments.kind == "length":
        return GPT2ForSequenceClassification(
            GPT2Config(
                vocab_size=len(tokenizer), n_positions=MAX_POSITIONS, n_embd=size, n_layer=layers,
                n_inner=arguments.intermediate_size, n_head=arguments.num_attention_heads,
                resid_pdrop=arguments.dropout, embd_pdrop=arguments.dropout, attn_pdrop=arguments.dropout,
                problem_type="single_label_classification", **{**ends, "num_labels": num_lengths},
            )
        )  # fmt: skip
    return ModernBertForMaskedLM(
        ModernBertConfig(
            vocab_size=len(tokenizer), hidden_size=size, intermediate_size=arguments.intermediate_size,
            num_hidden_layers=layers, num_attention_heads=arguments.num_attention_heads,
            mlp_dropout=arguments.dropout, max_position_embeddings=MAX_POSITIONS,
            cls_token_id=tokenizer.bos_token_id, sep_token_id=tokenizer.eos_token_id,
            **{**ends, "global_attn_every_n_layers": 1},
        )
    )  # fmt: skip


def load_rows(arguments: ScriptArguments) -> tuple[dict[str, Dataset], PreTrainedTokenizerBase, int]:
    """Encoded rows of each split, the tokenizer, and one more than the longest target."""
    splits = load_g2p(arguments.max_train)
    tokenizer = symbol_tokenizer(splits["train"]["target"], splits["train"]["source"], MAX_POSITIONS, masks=True)
    pairs = {
        split: Dataset.from_list(
            [{"source": row["source"], "target": target} for row in rows for target in row["references"]]
        )
        for split, rows in splits.items()
    }
    num_lengths = 1 + max(len(target.split()) for rows in pairs.values() for target in rows["target"])
    if arguments.kind == "length":
        rows = {
            split: Dataset.from_dict(
                {
                    "input_ids": tokenizer(list(part["source"]))["input_ids"],
                    "label": [len(ids) for ids in plain_ids(tokenizer, list(part["target"]))],
                }
            )
            for split, part in pairs.items()
        }
    else:
        rows = {
            split: encode_conditional(part, tokenizer, arguments.kind == "encoder_decoder")
            for split, part in pairs.items()
        }
    return rows, tokenizer, num_lengths


def main(arguments: ScriptArguments) -> None:
    """Trains, evaluates and writes the model."""
    if arguments.kind not in ("masked", "encoder_decoder", "length"):
        raise ValueError(f"kind must be masked, encoder_decoder or length, got {arguments.kind!r}")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    rows, tokenizer, num_lengths = load_rows(arguments)
    model = fresh_model(arguments, tokenizer, num_lengths)
    if arguments.kind == "length":
        collator: DataCollator = DataCollatorWithPadding(tokenizer)
    else:
        collator = MaskedTargetCollator(tokenizer, model if arguments.kind == "encoder_decoder" else None)
    trainer = Trainer(
        model=model,
        args=training_arguments(
            # Batches of one source length would hold few lengths of targets, and the length model would chase them.
            arguments, train_sampling_strategy="random" if arguments.kind == "length" else "group_by_length",
            lr_scheduler_type="cosine", eval_strategy="epoch", load_best_model_at_end=True,
            metric_for_best_model="loss", per_device_eval_batch_size=256,
        ),
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        data_collator=collator,
        processing_class=tokenizer,
    )  # fmt: skip
    minutes = minutes_of_training(trainer)
    model.float()
    results = {
        "phases": [describe_phase("hf_ebm.assets.train_pronunciation", arguments, minutes, trainer.args.world_size)],
        "rows": {split: len(part) for split, part in rows.items()},
        "parameters": model.num_parameters(),
        "loss": {split: trainer.evaluate(rows[split])["eval_loss"] for split in ("validation", "test")},
    }
    save_embedded(Path(arguments.output_dir), model, tokenizer, None, results)


if __name__ == "__main__":
    main(script_arguments(ScriptArguments))
