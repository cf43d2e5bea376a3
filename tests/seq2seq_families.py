"""Tiny random sequence-to-sequence models of many families, shared by the tests of search-aware training."""

import torch
import transformers as tf

from hf_ebm import LSTMSeq2SeqConfig, LSTMSeq2SeqForConditionalGeneration

V = 41
_BART = dict(
    vocab_size=V, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=24, decoder_ffn_dim=24, max_position_embeddings=64, pad_token_id=1, bos_token_id=0, eos_token_id=2,
    decoder_start_token_id=2, scale_embedding=True, dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
)  # fmt: skip
_T5 = dict(
    vocab_size=V, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_decoder_layers=2, num_heads=2, pad_token_id=0,
    eos_token_id=1, decoder_start_token_id=0, dropout_rate=0.0, relative_attention_num_buckets=8,
)  # fmt: skip
_MARIAN = {**_BART, "pad_token_id": V - 1, "decoder_start_token_id": V - 1, "eos_token_id": 0, "bos_token_id": None}
_BERT = dict(
    vocab_size=V, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
    hidden_dropout_prob=0, attention_probs_dropout_prob=0,
)  # fmt: skip


def _lstm(**settings):
    sizes = dict(vocab_size=V, decoder_vocab_size=V - 4, embedding_dim=8, decoder_embedding_dim=6, hidden_size=12)
    return LSTMSeq2SeqForConditionalGeneration(LSTMSeq2SeqConfig(**sizes, **settings))


def _encoder_decoder():
    config = tf.EncoderDecoderConfig.from_encoder_decoder_configs(
        tf.BertConfig(**_BERT),
        tf.BertConfig(**_BERT, is_decoder=True, add_cross_attention=True),
        decoder_start_token_id=3,
        pad_token_id=0,
    )
    return tf.EncoderDecoderModel(config=config)


def _t5gemma():
    part = dict(
        vocab_size=V, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, layer_types=["full_attention"],
    )  # fmt: skip
    config = tf.T5GemmaConfig(
        encoder=dict(part), decoder=dict(part), vocab_size=V, pad_token_id=0, bos_token_id=2, eos_token_id=1,
        dropout_rate=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return tf.T5GemmaForConditionalGeneration(config)


def _bart(name, **changes):
    model, config = getattr(tf, f"{name}ForConditionalGeneration"), getattr(tf, f"{name}Config")
    return lambda: model(config(**{**_BART, **changes}))


_LED = {key: value for key, value in _BART.items() if key not in ("max_position_embeddings", "scale_embedding")}

FAMILIES = {
    "lstm additive": lambda: _lstm(decoder_layers=2),
    "lstm fixed": lambda: _lstm(attention="fixed", initial_state="zero"),
    "bart": _bart("Bart"),
    "mbart": _bart("MBart"),
    "plbart": _bart("PLBart"),
    "mvp": _bart("Mvp"),
    "pegasus": _bart("Pegasus"),
    "pegasus_x": _bart("PegasusX", num_global_tokens=4, block_size=8),
    "bigbird_pegasus": _bart("BigBirdPegasus", block_size=4),  # block-sparse for sources of more than 44 tokens
    "m2m_100": _bart("M2M100", decoder_layerdrop=0.0),
    "blenderbot": _bart("Blenderbot"),
    "blenderbot_small": _bart("BlenderbotSmall"),
    "marian": lambda: tf.MarianMTModel(tf.MarianConfig(**_MARIAN, decoder_vocab_size=V)),
    "marian, two vocabularies": lambda: tf.MarianMTModel(
        tf.MarianConfig(
            **{**_MARIAN, "pad_token_id": 30, "decoder_start_token_id": 30},
            decoder_vocab_size=31,
            share_encoder_decoder_embeddings=False,
            tie_word_embeddings=False,
        )
    ),
    "led": lambda: tf.LEDForConditionalGeneration(
        tf.LEDConfig(**_LED, max_encoder_position_embeddings=64, max_decoder_position_embeddings=64, attention_window=8)
    ),
    "t5": lambda: tf.T5ForConditionalGeneration(tf.T5Config(**_T5)),
    "t5 v1.1": lambda: tf.T5ForConditionalGeneration(
        tf.T5Config(**_T5, tie_word_embeddings=False, feed_forward_proj="gated-gelu")
    ),
    "mt5": lambda: tf.MT5ForConditionalGeneration(tf.MT5Config(**_T5)),
    "umt5": lambda: tf.UMT5ForConditionalGeneration(tf.UMT5Config(**_T5)),
    "longt5": lambda: tf.LongT5ForConditionalGeneration(
        tf.LongT5Config(**_T5, local_radius=5, encoder_attention_type="local")
    ),
    "t5gemma": _t5gemma,
    "bert2bert": _encoder_decoder,
}
# LED has no gradient in float64 with padding.
SINGLE_PRECISION = ("led",)


def tiny_seq2seq(family: str, seed: int = 0):
    """A model whose distributions are far from uniform, in evaluation mode, in float64 where it can be."""
    torch.manual_seed(seed)
    model = FAMILIES[family]()
    model = model if family in SINGLE_PRECISION else model.double()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.9 if family.startswith("lstm") else 0.3)
    return model.eval()


def seq2seq_batch(family: str, seed: int = 0, source_lengths: tuple[int, int, int] = (8, 5, 7)):
    """Three sources, with labels of 8, 5 and 7 tokens, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(source_lengths)
    source_mask = (torch.arange(longest) < torch.tensor(source_lengths)[:, None]).long()
    mask = (torch.arange(8) < torch.tensor([8, 5, 7])[:, None]).long()
    source = torch.randint(4, 28, (3, longest), generator=generator)
    labels = torch.randint(4, 28, (3, 8), generator=generator)
    return {
        "input_ids": source.masked_fill(source_mask == 0, 0),
        "attention_mask": source_mask,
        "labels": labels.masked_fill(mask == 0, -100),
    }
