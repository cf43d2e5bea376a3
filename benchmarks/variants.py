"""Variants of a protein by each scheme: `EnergyModel.score_variants` against a loop over each variant's own rows, and
against whole sequences as minicons scores them: a masked copy for each position of each variant, in batches, the head
at every position.

The model has the shape of esm2_t6_8M (6 layers, 320 wide) and random weights. Singles are all substitutions at every
site, pairs all by ten letters at each two of four sites. The loop, and whole
energies, score some of them, and times are per variant.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from itertools import combinations, product
from pathlib import Path

import torch
from transformers import EsmConfig, EsmForMaskedLM, EsmTokenizer

from benchmarks.common import begin_timing, medians, print_table
from hf_ebm import EnergyModel
from hf_ebm.models.energy.configuration_energy import token_roles
from hf_ebm.scoring.mutations import SCHEMES

LETTERS = "LAGVSERTIDPKQNFYMHWC"
HEADER = [
    "scheme",
    "variants",
    "rows a variant, loop",
    "rows a variant",
    "variants/s, loop",
    "variants/s",
    "ratio",
    "whole sequences, variants/s",
    "ratio to them",
    "max |Δ| nats",
]
# Rows in a batch of whole sequences.
BATCH = 64


def esm(length: int) -> tuple[EnergyModel, EsmTokenizer]:
    """A model of the shape of esm2_t6_8M, with its tokenizer."""
    torch.manual_seed(0)
    vocabulary = ["<cls>", "<pad>", "<eos>", "<unk>", *LETTERS, *"XBUZO.-", "<null_1>", "<mask>"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "vocab.txt").write_text("\n".join(vocabulary))
        tokenizer = EsmTokenizer(str(Path(folder, "vocab.txt")))
    config = EsmConfig(
        vocab_size=len(vocabulary), mask_token_id=tokenizer.mask_token_id, pad_token_id=1, hidden_size=320,
        num_hidden_layers=6, num_attention_heads=20, intermediate_size=1280, max_position_embeddings=length + 2,
        position_embedding_type="rotary", token_dropout=True,
    )  # fmt: skip
    return EnergyModel(EsmForMaskedLM(config).eval(), **token_roles(tokenizer, len(tokenizer))), tokenizer


def plain_score(
    model: EnergyModel, tokenizer: EsmTokenizer, scheme: str, reference: str, changes: list
) -> tuple[float, int]:
    """A variant's score and the rows that were run, one at a time."""
    ids = tokenizer(reference, return_tensors="pt").input_ids
    wild, mutant, columns = ids[0], ids[0].clone(), [place + 1 for place, _ in changes]
    mutant[columns] = torch.tensor(tokenizer.convert_tokens_to_ids([letter for _, letter in changes]))
    rows = 0

    def log_probs(shown: torch.Tensor, masked: list[int]) -> torch.Tensor:
        nonlocal rows
        rows += 1
        shown = shown.clone()
        shown[masked] = tokenizer.mask_token_id
        return model.mlm(input_ids=shown[None]).logits[0].log_softmax(-1)

    def pseudo(shown: torch.Tensor, places: list[int]) -> float:
        return sum(float(log_probs(shown, [place])[place, shown[place]]) for place in places)

    if scheme == "pseudo_likelihood_ratio":
        every = list(range(1, len(wild) - 1))
        return pseudo(mutant, every) - pseudo(wild, every), rows
    if scheme == "joint":
        return pseudo(mutant, columns) - pseudo(wild, columns), rows
    if scheme == "masked_marginals":
        found = [log_probs(wild, [column])[column] for column in columns]
    else:
        shown = mutant if scheme == "mutant_marginals" else wild
        whole = log_probs(shown, columns if scheme == "masked_marginals_together" else [])
        found = [whole[column] for column in columns]
    return sum(float(own[mutant[c]] - own[wild[c]]) for own, c in zip(found, columns, strict=True)), rows


@torch.no_grad()
def whole_sequences(model: EnergyModel, tokenizer: EsmTokenizer, texts: list[str]) -> torch.Tensor:
    """Energies, every position of every text masked in a row of its own."""
    ids = tokenizer(texts, return_tensors="pt").input_ids
    length = ids.shape[1] - 2
    rows, at = ids.repeat_interleave(length, 0), torch.arange(1, length + 1).repeat(len(ids))
    masked = rows.scatter(1, at[:, None], tokenizer.mask_token_id)
    energies = torch.zeros(len(rows), dtype=torch.float64)
    for part in torch.arange(len(rows)).split(BATCH):
        log_probs = model.mlm(input_ids=masked[part]).logits.log_softmax(-1)
        energies[part] = -log_probs[torch.arange(len(part)), at[part], rows[part, at[part]]].double()
    return energies.view(len(ids), length).sum(1)


def compare(
    model: EnergyModel, tokenizer: EsmTokenizer, scheme: str, reference: str, kind: str, sample: int, repeats: int
) -> list:
    """A row of the table."""
    sites = range(len(reference)) if kind == "singles" else (5, 20, 33, 50)
    letters = LETTERS if kind == "singles" else LETTERS[:10]
    options = {site: [(site, letter) for letter in letters if letter != reference[site]] for site in sites}
    if kind == "singles":
        changes = [[change] for own in options.values() for change in own]
    else:
        changes = [list(pair) for one, two in combinations(options, 2) for pair in product(options[one], options[two])]
    random.Random(0).shuffle(changes)
    if scheme == "pseudo_likelihood_ratio":
        changes = changes[:sample]
    texts = [":".join(f"{reference[site]}{site + 1}{letter}" for site, letter in own) for own in changes]
    found, plain, whole_found = [], [], []

    def loop() -> None:
        plain[:] = [plain_score(model, tokenizer, scheme, reference, own) for own in changes[:sample]]

    mutants = []
    for own in changes[:sample]:
        letters = list(reference)
        for site, letter in own:
            letters[site] = letter
        mutants.append("".join(letters))

    def whole() -> None:
        whole_found[:] = whole_sequences(model, tokenizer, mutants)

    def ours() -> None:
        found[:] = [model.score_variants(reference, texts, tokenizer, scheme=scheme)]

    with torch.no_grad():
        times = medians({"loop": loop, "ours": ours, "whole": whole}, repeats)
    rate, own_rate, whole_rate = sample / times["loop"], len(texts) / times["ours"], sample / times["whole"]
    if scheme == "pseudo_likelihood_ratio":
        ratios = whole_sequences(model, tokenizer, [reference]) - torch.stack(whole_found)
        assert torch.allclose(ratios, found[0].scores[:sample], atol=1e-3)
    values = torch.tensor([score for score, _ in plain], dtype=torch.float64)
    rows = sum(number for _, number in plain) / sample
    difference = float((values - found[0].scores[:sample]).abs().max())
    name = f"{scheme}, {kind}"
    return [
        name,
        len(texts),
        rows,
        found[0].num_rows / len(texts),
        rate,
        own_rate,
        own_rate / rate,
        whole_rate,
        own_rate / whole_rate,
        f"{difference:.1e}",
    ]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--sample", type=int, default=4, help="variants that the loop scores")
    arguments = begin_timing(parser, repeats=3)
    model, tokenizer = esm(arguments.length)
    reference = "".join(random.Random(1).choices(LETTERS, k=arguments.length))
    schemes = [scheme for scheme in SCHEMES if "log_prob" not in scheme]
    print_table(
        HEADER,
        (
            compare(model, tokenizer, scheme, reference, kind, arguments.sample, arguments.repeats)
            for scheme in schemes
            for kind in ("singles", "pairs")
            if kind == "pairs" or scheme in ("masked_marginals", "wild_type_marginals")
        ),
    )


if __name__ == "__main__":
    main()
