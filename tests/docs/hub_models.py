"""Tiny random models under the names of Hub models that the documentation uses, for a Hub on this machine."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from tokenizers import processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertTokenizer,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    EsmConfig,
    EsmForMaskedLM,
    EsmTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    RobertaConfig,
    RobertaForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.models.tokenizers_for_tests import small_tokenizer

_LETTERS = "LAGVSERTIDPKQNFYMHWCXBUZO"
_AMINO_ACIDS = ["<cls>", "<pad>", "<eos>", "<unk>", *_LETTERS, *".-", "<null_1>", "<mask>"]
_SIZE = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)


def _bert():
    tokenizer = small_tokenizer("wordpiece")
    return BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **_SIZE)), tokenizer


def _roberta():
    tokenizer = small_tokenizer("bytes")
    config = RobertaConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **_SIZE)
    return RobertaForMaskedLM(config), tokenizer


def _esm():
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "vocab.txt").write_text("\n".join(_AMINO_ACIDS))
        tokenizer = EsmTokenizer(str(Path(folder, "vocab.txt")))
    config = EsmConfig(
        vocab_size=len(_AMINO_ACIDS), mask_token_id=tokenizer.mask_token_id, pad_token_id=tokenizer.pad_token_id,
        position_embedding_type="rotary", token_dropout=True, **_SIZE,
    )  # fmt: skip
    return EsmForMaskedLM(config), tokenizer


def _prot_bert():
    """It reads letters with spaces between them."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_LETTERS]))
        tokenizer = BertTokenizer.from_pretrained(folder, do_lower_case=False)
    return BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **_SIZE)), tokenizer


def _gpt2():
    tokenizer = small_tokenizer("bytes")
    tokenizer._tokenizer.post_processor = processors.ByteLevel()  # nothing stands around a text
    tokenizer.eos_token = tokenizer.bos_token = tokenizer.unk_token = "</s>"
    ends = dict(bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id)
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, **ends)), tokenizer


def _sentiment():
    tokenizer = small_tokenizer("wordpiece")
    config = DistilBertConfig(
        vocab_size=len(tokenizer), dim=16, n_layers=1, n_heads=2, hidden_dim=32, id2label={0: "NEGATIVE", 1: "POSITIVE"}
    )
    return DistilBertForSequenceClassification(config), tokenizer


def _t5():
    tokenizer = small_tokenizer("unigram")
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 3)])
    tokenizer.eos_token = "</s>"
    ids = dict(vocab_size=len(tokenizer), pad_token_id=0, decoder_start_token_id=0, eos_token_id=3)
    config = T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, **ids)
    return T5ForConditionalGeneration(config), tokenizer


HUB_MODELS = {
    "bert-base-uncased": _bert,
    "roberta-base": _roberta,
    "facebook/esm2_t12_35M_UR50D": _esm,
    "Rostlab/prot_bert": _prot_bert,
    "gpt2": _gpt2,
    "google-t5/t5-small": _t5,
    "distilbert-base-uncased-finetuned-sst-2-english": _sentiment,
}


def repository(name: str) -> dict[str, bytes]:
    """The files of a stand-in for a Hub model."""
    torch.manual_seed(0)
    model, tokenizer = HUB_MODELS[name]()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}
