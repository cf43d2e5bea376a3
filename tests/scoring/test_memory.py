"""Memory stays bounded: neither the logits of a big vocabulary nor the activations of a whole text are ever held."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import resource, torch
from transformers import BertConfig, BertForMaskedLM, XLMRobertaConfig, XLMRobertaForMaskedLM
from hf_ebm import EnergyModel

def grown(work):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert work().isfinite().all()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20

torch.set_num_threads(1)
config = BertConfig(vocab_size=50, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128)
small = EnergyModel(BertForMaskedLM(config), mask_token_id=3, special_token_ids=[0, 1, 2])
text = torch.randint(5, 50, (1, 250))

def gradient():
    small(text).energy.sum().backward()
    return small.mlm.bert.embeddings.word_embeddings.weight.grad

print(grown(gradient))
config = XLMRobertaConfig(vocab_size=250_002, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                          intermediate_size=64, max_position_embeddings=514)
model = EnergyModel(XLMRobertaForMaskedLM(config).eval(), mask_token_id=250_001, special_token_ids=[0, 1, 2])
ids = torch.randint(3, 250_000, (1, 350))
print(grown(lambda: torch.cat([model.score_ids(ids, variant=variant) for variant in ("exact", "unmasked")])))
"""


def test_a_long_text_takes_little_memory():
    """Of 250 tokens with a gradient the activations together would be 1.4 GiB; of 350 tokens and V = 250,002 all logits
    at once would be 114 GiB, a full row's 0.33 GiB."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    gradient, logits = map(float, done.stdout.split())
    assert gradient < 0.9 and logits < 2.0  # GiB above the model itself
