"""Checkpoints with code of their own: a type that Transformers doesn't know, and BERT with scaled logits."""

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForMaskedLM

from tests.conftest import tiny_mlm
from tests.models.tokenizers_for_tests import small_tokenizer

CONFIGURATION = """
from transformers import PreTrainedConfig


class TowerConfig(PreTrainedConfig):
    model_type = "tests_tower"

    def __init__(self, vocab_size=50, hidden_size=8, sharpness=2.0, **kwargs):
        super().__init__(**kwargs)
        self.vocab_size, self.hidden_size, self.sharpness = vocab_size, hidden_size, sharpness
"""
MODELING = '''
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MaskedLMOutput

from .configuration_tower import TowerConfig


class Tower(PreTrainedModel):
    """Every position sees the mean of all, and its neighbours."""

    config_class = TowerConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.mix = nn.Conv1d(config.hidden_size, config.hidden_size, 3, padding=1)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids, labels=None, return_dict=True):
        hidden = self.embed(input_ids)
        hidden = hidden.mean(1, keepdim=True) + self.mix(hidden.transpose(1, 2)).transpose(1, 2)
        return MaskedLMOutput(logits=self.head(hidden.tanh()) * self.config.sharpness)
'''
SCALED = """
from transformers import BertForMaskedLM


class ScaledBert(BertForMaskedLM):
    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 3
        return output
"""


def write_code(folder: Path, kind: str) -> dict[str, str]:
    """The files of a checkpoint's code, and the `auto_map` that names them."""
    if kind == "tower":
        (folder / "configuration_tower.py").write_text(CONFIGURATION, encoding="utf-8")
        (folder / "modeling_tower.py").write_text(MODELING, encoding="utf-8")
        return {"AutoConfig": "configuration_tower.TowerConfig", "AutoModelForMaskedLM": "modeling_tower.Tower"}
    (folder / "modeling_scaled.py").write_text(SCALED, encoding="utf-8")
    return {"AutoModelForMaskedLM": "modeling_scaled.ScaledBert"}


def checkpoint_with_code(folder: Path, kind: str) -> Path:
    """A masked-LM checkpoint with its code and tokenizer, as Transformers reads it."""
    tokenizer = small_tokenizer("wordpiece")
    folder.mkdir()
    auto_map = write_code(folder, kind)
    tokenizer.save_pretrained(folder)
    if kind == "tower":
        values = {"model_type": "tests_tower", "vocab_size": len(tokenizer), "auto_map": auto_map}
        (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
        model = AutoModelForMaskedLM.from_config(config, trust_remote_code=True)
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.7)
        model.save_pretrained(folder)
    else:
        tiny_mlm(vocab_size=len(tokenizer)).save_pretrained(folder)
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(values | {"auto_map": auto_map}), encoding="utf-8")
    return folder
