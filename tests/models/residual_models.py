"""Tiny residual models over a language whose continuations can all be enumerated."""

import itertools
from functools import cache

import torch
import transformers as tf

from hf_ebm.models.residual import ResidualEnergyModel

START, END, PAD = 0, 1, 2
VOCAB, LENGTH = 6, 3
PREFIX = torch.tensor([0, 3, 4])


def toy_lm(vocab_size: int = VOCAB, seed: int = 0, dtype=torch.float64, scale: float = 0.6) -> tf.GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = tf.GPT2Config(
        vocab_size=vocab_size, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=START, eos_token_id=END,
        pad_token_id=PAD, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return spread(tf.GPT2LMHeadModel(config).to(dtype), scale).eval()


def spread(model, scale: float = 0.6):
    """Weights that make outputs differ clearly."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, scale)
    return model


_BERT = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, max_position_embeddings=34,
    pad_token_id=PAD, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
_LLAMA = dict(
    hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    max_position_embeddings=32, pad_token_id=PAD,
)  # fmt: skip
BIDIRECTIONAL = {
    "bert": lambda v: tf.BertModel(tf.BertConfig(vocab_size=v, **_BERT), add_pooling_layer=False),
    "roberta": lambda v: tf.RobertaModel(tf.RobertaConfig(vocab_size=v, **_BERT), add_pooling_layer=False),
    "electra": lambda v: tf.ElectraModel(tf.ElectraConfig(vocab_size=v, embedding_size=16, **_BERT)),
    "esm": lambda v: tf.EsmModel(
        tf.EsmConfig(vocab_size=v, mask_token_id=5, position_embedding_type="rotary", **_BERT),
        add_pooling_layer=False,
    ),
    "modernbert": lambda v: tf.ModernBertModel(
        tf.ModernBertConfig(
            vocab_size=v, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=32, pad_token_id=PAD, local_attention=4, global_attn_every_n_layers=2,
        )
    ),
}  # fmt: skip
CAUSAL = {
    "gpt2": lambda v: toy_lm(v, seed=5, dtype=torch.float32).transformer,
    "llama": lambda v: tf.LlamaModel(tf.LlamaConfig(vocab_size=v, **_LLAMA)),
}
ENCODERS = {**BIDIRECTIONAL, **CAUSAL}


def toy_encoder(family: str = "bert", vocab_size: int = VOCAB, dtype=torch.float64, seed: int = 1):
    torch.manual_seed(seed)
    return spread(ENCODERS[family](vocab_size), 0.4).to(dtype).eval()


def toy_residual(family: str = "bert", dtype=torch.float64, spread_of_energies: float = 1.5) -> ResidualEnergyModel:
    """A model whose energies of the toy language have about that standard deviation."""
    model = ResidualEnergyModel(toy_lm(dtype=dtype), toy_encoder(family, dtype=dtype)).eval()
    torch.manual_seed(2)
    model.head.weight.data.normal_()
    model.head.weight.data *= spread_of_energies / _spread_of_energies(family, dtype)
    return model


@cache
def _spread_of_energies(family: str, dtype) -> float:
    """Of a model as `toy_residual` makes it at first."""
    model = ResidualEnergyModel(toy_lm(dtype=dtype), toy_encoder(family, dtype=dtype)).eval()
    torch.manual_seed(2)
    model.head.weight.data.normal_()
    return float(exact_energies(model, PREFIX).std())


def all_continuations(vocab_size: int = VOCAB, length: int = LENGTH) -> list[tuple[int, ...]]:
    """Every continuation that ends with the end token, or is stopped at `length`."""
    found = []
    for size in range(1, length + 1):
        for ids in itertools.product(range(vocab_size), repeat=size):
            if END not in ids[:-1] and (size == length or ids[-1] == END):
                found.append(ids)
    return found


def exact_log_probs(lm, prefix: torch.Tensor, continuations=None) -> torch.Tensor:
    """log P_LM of each continuation, one token at a time."""

    @cache
    def next_token(row: tuple[int, ...]) -> torch.Tensor:
        with torch.no_grad():
            return lm(input_ids=torch.tensor([row])).logits[0, -1].double().log_softmax(-1)

    start = tuple(prefix.tolist())
    found = [
        sum(float(next_token(start + ids[:place])[token]) for place, token in enumerate(ids))
        for ids in continuations or all_continuations(lm.get_input_embeddings().weight.shape[0])
    ]
    return torch.tensor(found, dtype=torch.float64)


def exact_energies(model, prefix: torch.Tensor, continuations=None) -> torch.Tensor:
    """Energy of each continuation: one row at a time, without padding, mask or cache."""
    found = []
    for ids in continuations or all_continuations(model.lm.config.vocab_size):
        row = torch.cat([prefix, torch.tensor(ids)])
        with torch.no_grad():
            hidden = model.encoder(input_ids=row[None])[0][0].double()
            found.append(float(hidden.mean(0) @ model.head.weight[0].double() + model.head.bias[0].double()))
    return torch.tensor(found, dtype=torch.float64)


def frequencies(drawn, continuations=None) -> torch.Tensor:
    """How often each continuation was drawn, as shares."""
    index = {ids: number for number, ids in enumerate(continuations or all_continuations())}
    counts = torch.zeros(len(index), dtype=torch.float64)
    for ids in drawn:
        counts[index[tuple(int(token) for token in ids)]] += 1
    return counts / counts.sum()
