"""Encoding once gives the values and gradients of a loop over rows, each with a run of the encoder of its own."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_ebm.model_modes import encoded_once
from tests.seq2seq_families import FAMILIES, SINGLE_PRECISION, seq2seq_batch, tiny_seq2seq

ROWS = [0, 0, 1, 2, 2, 2, 1]
LONG = ("bigbird_pegasus", "led")  # whose attention is sparse for sources of more than 44 tokens, or padded to windows


def candidates(family: str) -> tuple[dict, torch.Tensor]:
    """Inputs and labels of seven rows of three sources."""
    source_lengths = (60, 41, 50) if family in LONG else (8, 5, 7)
    batch = {name: value[ROWS] for name, value in seq2seq_batch(family, source_lengths=source_lengths).items()}
    labels = torch.randint(4, 28, (7, 8), generator=torch.Generator().manual_seed(1))
    return {name: batch[name] for name in ("input_ids", "attention_mask")}, labels.where(batch["labels"] != -100, -100)


def log_probs(model: nn.Module, inputs: dict, labels: torch.Tensor) -> torch.Tensor:
    logs = model(**inputs, labels=labels).logits.log_softmax(-1)
    return logs.gather(2, labels.clamp_min(0)[..., None])[..., 0].masked_fill(labels == -100, 0).sum(1)


def gradient(model: nn.Module, values: torch.Tensor) -> torch.Tensor:
    """Of a weighted sum."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad((values * torch.arange(1, len(values) + 1)).sum(), trained, allow_unused=True)
    return torch.cat([grad.flatten() for grad in found if grad is not None])


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def encoded_rows(encoder: nn.Module) -> set[int]:
    """Where the numbers of rows that an encoder's embedding meets are noted."""
    runs: set[int] = set()
    embedding = next(module for module in encoder.modules() if isinstance(module, nn.Embedding))
    embedding.register_forward_pre_hook(lambda module, args: runs.add(len(args[0])))
    return runs


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_a_loop(family):
    model = tiny_seq2seq(family)
    inputs, labels = candidates(family)
    alone = [
        log_probs(model, {name: value[[row]] for name, value in inputs.items()}, labels[[row]]) for row in range(7)
    ]
    expected = torch.cat(alone)
    runs = encoded_rows(model.get_encoder())
    with encoded_once(model, ROWS):
        found = log_probs(model, inputs, labels)
    assert runs == {3}
    single = family in SINGLE_PRECISION
    torch.testing.assert_close(found, expected, rtol=1e-4 if single else 1e-6, atol=0)
    # Those of T5's kind take square roots and positions in float32.
    bound = {"bart": 5e-15, "lstm additive": 5e-15, "t5": 1e-7}.get(family, 1e-4 if single else 1e-6)
    assert error(gradient(model, found), gradient(model, expected)) < bound
    runs.clear()
    log_probs(model, inputs, labels)
    assert runs == {7}  # nothing stays


def test_adapters_share_too():
    model = get_peft_model(
        tiny_seq2seq("t5"),
        LoraConfig(task_type="SEQ_2_SEQ_LM", r=2, target_modules=["q", "v"], init_lora_weights=False),
    ).double()
    inputs, labels = candidates("t5")
    expected = log_probs(model, inputs, labels)
    runs = encoded_rows(model.get_encoder())
    with encoded_once(model, ROWS):
        found = log_probs(model, inputs, labels)
    assert runs == {3}
    assert error(gradient(model, found), gradient(model, expected)) < 1e-7


@pytest.mark.parametrize(("family", "keys"), [("bart", "encoder_attn.k_proj"), ("t5", "EncDecAttention.v")])
@pytest.mark.parametrize("recomputed", [False, True])
def test_what_the_decoder_makes_of_a_source_alone_is_made_once_unless_recomputed(family, keys, recomputed):
    model = tiny_seq2seq(family)
    model.train()
    if recomputed:
        model.gradient_checkpointing_enable()
    inputs, labels = candidates(family)
    expected = gradient(model, log_probs(model, inputs, labels))
    seen = set()
    for name, module in model.named_modules():
        if name.endswith(keys):
            module.register_forward_hook(lambda module, args, output: seen.add((len(args[0]), len(output))))
    with encoded_once(model, ROWS):
        found = log_probs(model, inputs, labels)
    assert seen == ({(7, 7)} if recomputed else {(3, 3)})  # before our own hooks repeat it
    assert error(gradient(model, found), expected) < 1e-7


def test_a_source_has_one_dropout_mask():
    model = tiny_seq2seq("bart")
    model.train()
    for layer in model.get_encoder().layers:
        layer.dropout = 0.5
    inputs, labels = candidates("bart")
    same = labels[[0] * 7]
    torch.manual_seed(0)
    with encoded_once(model, ROWS):
        shared = log_probs(model, inputs, same)
    assert torch.equal(shared[0], shared[1]) and torch.equal(shared[3], shared[5]) and torch.equal(shared[2], shared[6])
    repeated = log_probs(model, inputs, same)
    assert repeated[0] != repeated[1]


def test_rows_that_are_not_alike_are_all_encoded():
    model = tiny_seq2seq("bart")
    inputs, labels = candidates("bart")
    inputs["input_ids"][5, 0] = 30
    runs = encoded_rows(model.get_encoder())
    with encoded_once(model, ROWS):
        found = log_probs(model, inputs, labels)
    assert runs == {7} and torch.equal(found, log_probs(model, inputs, labels))


class _Doubling(PreTrainedModel):
    """An encoder-decoder in one line."""

    config_class = PreTrainedConfig

    def __init__(self):
        super().__init__(PreTrainedConfig(is_encoder_decoder=True))
        self.encoder = nn.Linear(2, 2)

    def forward(self, source, target):
        return self.encoder(source) * target


def test_a_compiled_model_has_the_right_values():
    """Its encoder runs for every row, and hooks of an earlier call play no part."""
    model = _Doubling()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    sources, targets = torch.randn(3, 2), torch.randn(4, 2)
    for rows in ([0, 0, 1, 2], [2, 1, 1, 1], [0, 2, 2, 0]):
        with encoded_once(compiled, rows):
            found = compiled(sources[rows], targets)
        torch.testing.assert_close(found, model(sources[rows], targets))
        torch.testing.assert_close(compiled(sources[rows], targets), found)
