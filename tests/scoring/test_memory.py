"""Memory stays bounded: the logits of a big vocabulary are never held for a whole text."""

import subprocess
import sys

PROGRAM = """
import resource, torch
from transformers import XLMRobertaConfig, XLMRobertaForMaskedLM
from hf_ebm import EnergyModel
torch.set_num_threads(1)
config = XLMRobertaConfig(vocab_size=250_002, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                          intermediate_size=64, max_position_embeddings=514)
model = EnergyModel(XLMRobertaForMaskedLM(config).eval(), mask_token_id=250_001, special_token_ids=[0, 1, 2])
ids = torch.randint(3, 250_000, (1, 350))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for variant in ("exact", "unmasked"):
    assert model.score_ids(ids, variant=variant).isfinite().all()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)
"""


def test_a_long_text_on_a_big_vocabulary_takes_little_memory():
    """350 tokens, V = 250,002. All logits at once would be 114 GiB; a full row's, 0.33 GiB."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 2.0  # GiB above the model itself
