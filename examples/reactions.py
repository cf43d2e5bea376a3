"""Fills atoms of a chemical reaction with a trained model, several together: `python examples/reactions.py WHEEL`.

The model (Schwaller et al. 2021, MIT licence) comes with the PyPI package rxnmapper. That wants an older Transformers,
so it is read from the wheel, not installed: `make real`, or `pip download --no-deps rxnmapper==0.4.3`.
"""

import io
import json
import zipfile
from argparse import ArgumentParser
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AlbertConfig, AlbertForMaskedLM, AutoTokenizer, PreTrainedTokenizerFast

from hf_ebm import EnergyModel

INSIDE = "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/"
# Tokens of SMILES: atoms in brackets, atoms of two letters, the arrow, rings of two digits, else a character each.
TOKENS = r"\[[^\]]+\]|Br|Cl|>>|%[0-9]{2}|."


def tokenizer_of(vocabulary: list[str], special_tokens: dict[str, str]) -> PreTrainedTokenizerFast:
    """A tokenizer of reaction SMILES, whose tokens are joined without spaces."""
    tokenizer = Tokenizer(models.WordLevel({token: n for n, token in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(TOKENS), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    ends = [(name, vocabulary.index(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_tokens)


def save_checkpoint(wheel: Path, folder: Path) -> None:
    """Writes the wheel's model as a folder that `from_pretrained` and `hf-ebm --model` load: safetensors, no pickle."""
    with zipfile.ZipFile(wheel) as files:
        read = {Path(name).name: files.read(name) for name in files.namelist() if name.startswith(INSIDE)}
    settings = json.loads(read["config.json"])
    names = ("vocab_size", "embedding_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "hidden_act",
             "intermediate_size", "max_position_embeddings", "type_vocab_size", "layer_norm_eps")  # fmt: skip
    mlm = AlbertForMaskedLM(AlbertConfig(**{name: settings[name] for name in names}))
    weights = torch.load(io.BytesIO(read["pytorch_model.bin"]), map_location="cpu", weights_only=True)
    own = mlm.state_dict()
    mlm.load_state_dict({name: weights[name] for name in own})  # the wheel's has a pooler, too
    mlm.save_pretrained(folder)
    vocabulary = read["vocab.txt"].decode().splitlines()
    tokenizer_of(vocabulary, json.loads(read["special_tokens_map.json"])).save_pretrained(folder)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path, help="rxnmapper-0.4.3-py3-none-any.whl")
    parser.add_argument("--folder", type=Path, default=Path("reaction_model"), help="where the checkpoint is written")
    parser.add_argument("--reaction", default="CC(=O)Cl.[MASK]Cc1ccccc1>>CC(=O)[MASK]Cc1ccccc1", help="[MASK]: an atom")
    parser.add_argument("--atoms", nargs="+", default=["C", "N", "O", "S", "F", "Cl", "Br"], help="what may fill it")
    parser.add_argument("--top_k", type=int, default=4)
    args = parser.parse_args()

    save_checkpoint(args.wheel, args.folder)
    model, tokenizer = EnergyModel.from_pretrained(args.folder), AutoTokenizer.from_pretrained(args.folder)
    for reading in ("joint", "independent"):  # the independent one doesn't know that an atom stays what it is
        out = model.fill(args.reaction, tokenizer, args.top_k, reading=reading, words=args.atoms)
        print(f"{reading}, {out.num_masked_rows} masked rows")
        for fill in out.fills[0]:
            print(f"{fill.probability:8.3f}  {fill.sequence}")


if __name__ == "__main__":
    main()
