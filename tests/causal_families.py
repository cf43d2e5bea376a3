"""Tiny random causal language models, and batches of prompts and continuations for them."""

import torch
import transformers as tf

from hf_ebm.objectives.completions import pad_left, pad_right

V, PAD, END = 23, 2, 1
_COMMON = dict(vocab_size=V, bos_token_id=0, eos_token_id=END, pad_token_id=PAD)
_LLAMA = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    max_position_embeddings=64,
)  # fmt: skip
CAUSAL = {
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(
            **_COMMON, n_positions=64, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        )
    ),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_COMMON, **_LLAMA)),
    "opt": lambda: tf.OPTForCausalLM(
        tf.OPTConfig(
            **_COMMON,
            hidden_size=16,
            ffn_dim=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            dropout=0.0,
            max_position_embeddings=64,
            word_embed_proj_dim=16,
        )
    ),
    "gpt_neox": lambda: tf.GPTNeoXForCausalLM(
        tf.GPTNeoXConfig(
            **_COMMON,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=64,
        )
    ),
}


def tiny_causal(family: str = "gpt2", seed: int = 0, dtype=torch.float64):
    """A model whose distributions are far from uniform."""
    torch.manual_seed(seed)
    model = CAUSAL[family]().to(dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.4)
    return model.eval()


def completion_rows(count: int = 8, seed: int = 0) -> list[dict]:
    """Prompts of 2 to 4 tokens with continuations of 3 to 6, their end included."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for row in range(count):
        prompt = torch.randint(3, V, (2 + row % 3,), generator=generator)
        target = torch.cat([torch.randint(3, V, (2 + row % 4,), generator=generator), torch.tensor([END])])
        ids = torch.cat([prompt, target])
        labels = torch.cat([torch.full_like(prompt, -100), target])
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return rows


def collate_right(batch: list[dict]) -> dict:
    """Pads on the right."""
    return _collate(batch, pad_right)


def collate_left(batch: list[dict]) -> dict:
    """Pads on the left."""
    return _collate(batch, pad_left)


def _collate(batch, pad):
    values = {"input_ids": PAD, "attention_mask": 0, "labels": -100}
    return {name: pad([row[name] for row in batch], value)[0] for name, value in values.items()}
