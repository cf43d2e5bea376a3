"""Small tokenizers of the three usual kinds, trained on a few lines, each with a tiny random model to go with it."""

import collections
import copy
import functools
import json

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, RobertaConfig, RobertaForMaskedLM

from hf_ebm import EnergyModel
from hf_ebm.models.energy.configuration_energy import token_roles

LINES = [
    "In the beginning God created the heaven and the earth.",
    "Donaudampfschifffahrt und Krankenversicherung sind zusammengesetzte Wörter.",
    "unbelievable, unthinkable; un-un-unforgettable... !!! ??? --- '' \"quoted\"",
    "天地玄黄 宇宙洪荒",
    "the cat sat on the mat and the dog sat on the log",
] * 4
KINDS = ("wordpiece", "bytes", "metaspace")


def small_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer with cls, sep, pad, unk and mask tokens, the same in every process."""
    return copy.deepcopy(_trained(kind))


@functools.cache
def _trained(kind: str) -> PreTrainedTokenizerFast:
    if kind == "wordpiece":
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        tokenizer.model = models.WordPiece(_frequent_pieces(tokenizer, special, 150), unk_token="[UNK]")
    else:
        special = ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]
        if kind == "bytes":
            tokenizer = Tokenizer(models.BPE())
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
            alphabet = pre_tokenizers.ByteLevel.alphabet()
            trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=special, initial_alphabet=alphabet)
            tokenizer.train_from_iterator(LINES, trainer)
        else:
            tokenizer = Tokenizer(models.Unigram())
            tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
            trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=special, unk_token="<unk>")
            tokenizer.train_from_iterator(LINES, trainer)
            tokenizer.model = _settled(json.loads(tokenizer.to_str())["model"])
    pad, unk, cls, sep, mask = special
    ends = [(name, tokenizer.token_to_id(name)) for name in (cls, sep)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}", pair=f"{cls} $A {sep} $B {sep}", special_tokens=ends
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, unk_token=unk, cls_token=cls, sep_token=sep, mask_token=mask
    )


def _frequent_pieces(tokenizer: Tokenizer, special: list[str], size: int) -> dict[str, int]:
    """Characters and the words' commonest beginnings and ends (`WordPieceTrainer` breaks ties anew in each process)."""
    counts, characters = collections.Counter(), set()
    for line in LINES:
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(line)):
            characters.update([word[0], *(f"##{character}" for character in word[1:])])
            counts.update(word[:end] for end in range(2, len(word) + 1))
            counts.update(f"##{word[start:]}" for start in range(1, len(word) - 1))
    pieces = sorted(counts, key=lambda piece: (-counts[piece], len(piece), piece))
    vocabulary = [*special, *sorted(characters), *pieces][:size]
    return {piece: number for number, piece in enumerate(vocabulary)}


def _settled(trained: dict) -> models.Unigram:
    """A trained unigram model, its pieces in an order that the last digits of their scores have no part in."""
    unk, pieces = trained["unk_id"], [(piece, round(score, 6)) for piece, score in trained["vocab"]]
    special = [pair for pair in pieces if pair[1] == 0]
    return models.Unigram(special + sorted(set(pieces) - set(special), key=lambda pair: (-pair[1], pair[0])), unk)


def small_model(tokenizer, energy: str = "local", positions: int = 130, **fields) -> EnergyModel:
    """A random RoBERTa (whose positions depend on padding, if anything pads) for a tokenizer."""
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=positions, pad_token_id=tokenizer.pad_token_id, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    mlm = RobertaForMaskedLM(config)
    for parameter in mlm.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
    return EnergyModel(mlm.eval(), energy=energy, **token_roles(tokenizer, len(tokenizer)), **fields)
