"""Tiny random models of every masked-LM family of Transformers, by model type."""

import torch
from transformers import CONFIG_MAPPING, AutoModelForMaskedLM

VOCAB = 101
_COMMON = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
    max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2, hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)  # fmt: skip
_BART = dict(
    vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=128, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, decoder_start_token_id=2,
)  # fmt: skip
_XLM = dict(
    vocab_size=VOCAB, emb_dim=32, n_layers=2, n_heads=4, max_position_embeddings=128, n_langs=3, pad_index=0,
    pad_token_id=0,
)  # fmt: skip
_DISENTANGLED = dict(relative_attention=True, position_biased_input=False, pos_att_type=["c2p", "p2c"])
# Settings on top of the common ones; a set under the key None replaces the common ones.
_SETTINGS = {
    "albert": dict(embedding_size=16),
    "big_bird": dict(block_size=4),  # full attention for rows of up to 44 tokens, block-sparse for longer ones
    "convbert": dict(embedding_size=32, conv_kernel_size=3, num_groups=1, head_ratio=2),
    "deberta": _DISENTANGLED,
    "deberta-v2": dict(**_DISENTANGLED, position_buckets=8),
    "electra": dict(embedding_size=16),
    "ernie": dict(use_task_id=True),
    "esm": dict(mask_token_id=4, position_embedding_type="rotary", token_dropout=True),
    "longformer": dict(attention_window=8),
    "luke": dict(entity_vocab_size=10, entity_emb_size=16),
    "mobilebert": dict(embedding_size=32, trigram_input=True, intra_bottleneck_size=32, true_hidden_size=32),
    "modernbert": dict(global_attn_every_n_layers=2, local_attention=16),
    "mra": dict(block_per_row=2),
    "rembert": dict(input_embedding_size=16, output_embedding_size=16),
    "roc_bert": dict(enable_pronunciation=False, enable_shape=False),  # as they give the masked token away
    "roformer": dict(embedding_size=16),
    "squeezebert": dict(
        embedding_size=32, q_groups=1, k_groups=1, v_groups=1, post_attention_groups=1, intermediate_groups=1,
        output_groups=1,
    ),
    "xmod": dict(languages=["en_XX", "de_DE"]),
}  # fmt: skip
_REPLACED = {
    "bart": _BART,
    "mbart": _BART,
    "mvp": _BART,
    "distilbert": dict(
        vocab_size=VOCAB, dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=128, pad_token_id=0
    ),
    "flaubert": _XLM,
    "xlm": _XLM,
    "funnel": dict(
        vocab_size=VOCAB, block_sizes=[1, 1], d_model=32, n_head=4, d_head=8, d_inner=64, num_decoder_layers=1,
        hidden_dropout=0.0, attention_dropout=0.0, pad_token_id=0,
    ),
    "perceiver": dict(
        vocab_size=VOCAB, num_latents=8, d_latents=32, d_model=32, num_blocks=1, num_self_attends_per_block=2,
        num_self_attention_heads=4, num_cross_attention_heads=4, max_position_embeddings=16, qk_channels=32,
        v_channels=32,
    ),
}  # fmt: skip


# What a model reads beside its tokens and cannot do without, one number for all.
NEEDED_INPUTS = {"flaubert": {"langs": 2}, "layoutlm": {"bbox": 3}, "xlm": {"langs": 2}, "xmod": {"lang_ids": 1}}


def tiny_family_model(model_type: str, **overrides):
    """A random model in evaluation mode whose logits are far from uniform."""
    settings = (_REPLACED.get(model_type) or {**_COMMON, **_SETTINGS.get(model_type, {})}) | overrides
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(CONFIG_MAPPING[model_type](**settings))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.15)
    return model.eval()
