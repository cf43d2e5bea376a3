"""Tiny encoder-decoders whose encoders read sound, images or embeddings, with rows and batches for them."""

import torch
import transformers as tf

from tests.seq2seq_families import V, tiny_seq2seq

IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3)
_PARTS = dict(
    d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
    encoder_ffn_dim=16, decoder_ffn_dim=16, dropout=0.0, vocab_size=V, **IDS,
)  # fmt: skip
_SIZES = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)


def _whisper():
    return tf.WhisperForConditionalGeneration(
        tf.WhisperConfig(**_PARTS, num_mel_bins=8, max_source_positions=12, max_target_positions=32)
    )


def _speech_to_text():
    return tf.Speech2TextForConditionalGeneration(
        tf.Speech2TextConfig(
            **_PARTS, input_feat_per_channel=8, conv_channels=16, num_conv_layers=1, conv_kernel_sizes=(3,)
        )
    )


def _images():
    encoder = tf.ViTConfig(**_SIZES, image_size=8, patch_size=4, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
    decoder = tf.GPT2Config(
        vocab_size=V, n_embd=12, n_layer=1, n_head=2, n_positions=32, add_cross_attention=True, is_decoder=True,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    config = tf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder, **IDS)
    return tf.VisionEncoderDecoderModel(config=config)


def _speech():
    encoder = tf.Wav2Vec2Config(
        **_SIZES, conv_dim=(8, 8), conv_stride=(2, 2), conv_kernel=(3, 3), num_feat_extract_layers=2, vocab_size=9,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_prob=0.0, layerdrop=0.0,
        hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0,
    )  # fmt: skip
    decoder = tf.BertConfig(
        **_SIZES, vocab_size=V, is_decoder=True, add_cross_attention=True, hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )  # fmt: skip
    config = tf.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder, **IDS)
    return tf.SpeechEncoderDecoderModel(config=config)


def _moonshine():
    return tf.MoonshineForConditionalGeneration(
        tf.MoonshineConfig(
            vocab_size=V, hidden_size=16, intermediate_size=16, encoder_num_hidden_layers=1, max_position_embeddings=32,
            decoder_num_hidden_layers=1, encoder_num_attention_heads=2, decoder_num_attention_heads=2,
            encoder_num_key_value_heads=2, decoder_num_key_value_heads=2, **IDS,
        )
    )  # fmt: skip


def _masked(name, *shape, padded=0):
    """One row of numbers, with a mask that leaves the last ones out."""

    def draw(generator, row):
        mask = torch.ones(shape[0], dtype=torch.long)
        mask[shape[0] - padded * (row % 2) :] = 0
        return {name: torch.randn(*shape, generator=generator, dtype=torch.float64), "attention_mask": mask}

    return draw


def _only(name, *shape):
    return lambda generator, row: {name: torch.randn(*shape, generator=generator, dtype=torch.float64)}


MAKERS = {
    "whisper": (_whisper, _only("input_features", 8, 24)),
    "speech to text": (_speech_to_text, _masked("input_features", 16, 8, padded=4)),
    "images": (_images, _only("pixel_values", 3, 8, 8)),
    "speech": (_speech, _masked("input_values", 64, padded=24)),
    "moonshine": (_moonshine, _only("input_values", 2000)),
    "embeddings, bart": (lambda: tiny_seq2seq("bart"), _masked("inputs_embeds", 6, 16, padded=2)),
    "embeddings, lstm": (lambda: tiny_seq2seq("lstm additive"), _masked("inputs_embeds", 6, 8, padded=2)),
}


def tiny_other(name):
    """A model whose distributions are far from uniform, in float64, in evaluation mode."""
    torch.manual_seed(0)
    model = MAKERS[name][0]().double()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
    return model.eval()


def other_rows(name, count=8, seed=0):
    """Rows with labels of unequal length."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            **MAKERS[name][1](generator, row),
            "labels": torch.randint(4, 28, (3 + row % 4,), generator=generator),
        }
        for row in range(count)
    ]


def collate_other(batch):
    labels = torch.nn.utils.rnn.pad_sequence([row["labels"] for row in batch], batch_first=True, padding_value=-100)
    found = {name: torch.stack([row[name] for row in batch]) for name in batch[0] if name != "labels"}
    return {**found, "labels": labels}
