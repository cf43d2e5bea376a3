"""Memory stays bounded: neither the logits of a big vocabulary nor the activations of a whole text are ever held."""

import json
import resource

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, XLMRobertaConfig, XLMRobertaForMaskedLM

from hf_ebm import EnergyModel
from tests.processes import fresh

pytestmark = pytest.mark.slow


def grown(work) -> float:
    """GiB by which a function raises the greatest memory of this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert work().isfinite().all()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20


def measure() -> None:
    config = BertConfig(
        vocab_size=50, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128
    )
    small = EnergyModel(BertForMaskedLM(config), mask_token_id=3, special_token_ids=[0, 1, 2])
    text = torch.randint(5, 50, (1, 250))

    def gradient():
        small(text).energy.sum().backward()
        return small.mlm.bert.embeddings.word_embeddings.weight.grad

    found = [grown(gradient)]
    config = XLMRobertaConfig(
        vocab_size=250_002, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=514,
    )  # fmt: skip
    model = EnergyModel(XLMRobertaForMaskedLM(config).eval(), mask_token_id=250_001, special_token_ids=[0, 1, 2])
    ids = torch.randint(3, 250_000, (1, 350))
    found.append(grown(lambda: torch.cat([model.score_ids(ids, masking=name) for name in ("exact", "unmasked")])))
    print(json.dumps(found))


def test_a_long_text_takes_little_memory(tmp_path):
    """Of 250 tokens with a gradient the activations together would be 1.4 GiB; of 350 tokens and V = 250,002 all logits
    at once would be 114 GiB, a full row's 0.33 GiB."""
    (done,) = fresh(tmp_path, measure)
    gradient, logits = json.loads(done.stdout)
    assert gradient < 0.9 and logits < 2.0  # GiB above the model itself
