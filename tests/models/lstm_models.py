"""Tiny recurrent models and their equations written out, for the tests."""

import itertools

import numpy as np
import torch

from hf_ebm import LSTMSeq2SeqConfig, LSTMSeq2SeqForConditionalGeneration

KINDS = list(itertools.product(("additive", "fixed"), ("encoder", "zero")))
LENGTHS = (6, 4, 1, 5)


def tiny_lstm(attention="additive", initial_state="encoder", dtype=torch.float64, seed=0, **settings):
    """A random model whose distributions are far from uniform: 12 source ids, 7 target ids, of which 4 are symbols."""
    torch.manual_seed(seed)
    sizes = dict(
        vocab_size=12, decoder_vocab_size=7, embedding_dim=5, decoder_embedding_dim=6, hidden_size=8,
        initializer_range=0.9, attention=attention, initial_state=initial_state,
    )  # fmt: skip
    model = LSTMSeq2SeqForConditionalGeneration(LSTMSeq2SeqConfig(**{**sizes, **settings}))
    return model.eval().to(dtype)


def tiny_batch(seed=1):
    """Sources of `LENGTHS`, padded to 6, their mask, and labels of the same lengths that end in the end token."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    source = torch.randint(3, 12, mask.shape, generator=generator) * mask
    labels = torch.randint(3, 7, mask.shape, generator=generator)
    labels[torch.arange(len(LENGTHS)), torch.tensor(LENGTHS) - 1] = 2
    return source, mask, labels.masked_fill(mask == 0, -100)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _cell(weights, name, x, h, c):
    """One LSTM step, gates in PyTorch's order: input, forget, candidate, output."""
    kinds = ("weight_ih", "bias_ih", "weight_hh", "bias_hh")
    w, b, u, d = (weights[f"{name.replace('*', kind)}"] for kind in kinds)
    i, f, g, o = np.split(w @ x + b + u @ h + d, 4)
    c = _sigmoid(f) * c + _sigmoid(i) * np.tanh(g)
    return _sigmoid(o) * np.tanh(c), c


def equations(model, source: list[int], target: list[int]) -> np.ndarray:
    """(T, V) logits of one unpadded pair, from the equations, a position at a time."""
    config, weights = model.config, {name: value.detach().numpy() for name, value in model.state_dict().items()}
    size, states = config.hidden_size, list(weights["encoder.embed_tokens.weight"][source])
    for layer in range(config.encoder_layers):
        outputs = []
        for suffix in ("", "_reverse") if config.bidirectional else ("",):
            h = c = np.zeros(size // 2 if config.bidirectional else size)
            found = []
            for x in states[::-1] if suffix else states:
                h, c = _cell(weights, f"encoder.lstm.*_l{layer}{suffix}", x, h, c)
                found.append(h)
            outputs.append(found[::-1] if suffix else found)
        states = [np.concatenate(parts) for parts in zip(*outputs, strict=True)]
    states = np.stack(states)

    layers = config.decoder_layers
    hidden, cell = np.zeros((layers, size)), np.zeros((layers, size))
    if config.initial_state == "encoder":
        half = size // 2
        last = np.concatenate([states[-1, :half], states[0, half:]]) if config.bidirectional else states[-1]
        hidden, cell = (
            np.tanh(weights[f"decoder.{name}.weight"] @ last + weights[f"decoder.{name}.bias"]).reshape(layers, size)
            for name in ("initial_hidden", "initial_cell")
        )
    logits = []
    for step, token in enumerate(target):
        context = states[step] if config.attention == "fixed" else _attend(weights, hidden[-1], states)
        x = np.concatenate([weights["decoder.embed_tokens.weight"][token], context])
        for layer in range(layers):
            hidden[layer], cell[layer] = _cell(weights, f"decoder.lstm.*_l{layer}", x, hidden[layer], cell[layer])
            x = hidden[layer]
        logits.append(weights["lm_head.weight"] @ np.concatenate([x, context]) + weights["lm_head.bias"])
    return np.stack(logits)


def _attend(weights, hidden, states):
    query, key, score = (weights[f"decoder.attention.{name}.weight"] for name in ("query", "key", "score"))
    scores = np.array([score[0] @ np.tanh(query @ hidden + key @ state) for state in states])
    attention = np.exp(scores - scores.max())
    return (attention / attention.sum()) @ states
