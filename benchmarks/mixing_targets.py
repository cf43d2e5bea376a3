"""The laws that `benchmarks.mixing` samples: `TARGETS`, an entry each."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from examples.reactions import save_checkpoint
from hf_ebm import EnergyModel, EnergyTarget
from hf_ebm.assets import load_embedded
from hf_ebm.exact import energies_from_contexts
from hf_ebm.lattices import Lattice, ising, potts
from hf_ebm.models.energy.chains import proposal_support


@dataclass(frozen=True)
class MaskedTarget:
    """`exp(-E)` over the masks of a prompt, E the energy of a masked language model at them.

    Args:
        model: its energy.
        prompt: (1, T) ids with a mask at each free position.
        token: the token whose share of the free positions is estimated.
        only: the tokens that free positions may hold, by default all that may be proposed.
        is_known: whether all sequences can be listed, so that means are known.
    """

    model: EnergyModel
    prompt: Tensor
    token: int
    only: tuple[int, ...] = ()
    is_known: bool = False

    @cached_property
    def columns(self) -> list[int]:
        """The free positions."""
        return (self.prompt[0] == self.model.config.mask_token_id).nonzero()[:, 0].tolist()

    @property
    def rows_each(self) -> int:
        """Rows of an energy."""
        return len(self.columns)

    @cached_property
    def settings(self) -> dict:
        """Those of `generate` that say what the law is."""
        others = set(range(self.model.vocab_size)) - set(self.only)
        return {"suppress_tokens": sorted(others)} if self.only else {}

    @cached_property
    def support(self) -> Tensor:
        """(V,) bool, the tokens that a free position may hold."""
        return proposal_support(self.model, self.settings.get("suppress_tokens"))

    def inputs(self, ids: Tensor) -> dict[str, Tensor]:
        """Of `generate`, for chains that start at `ids` (C, T)."""
        free = torch.zeros_like(ids)
        free[:, self.columns] = 1
        return {"input_ids": ids, "free_mask": free}

    def starts(self, chains: int, seed: int) -> Tensor:
        """(C, T) filled by the model and an epoch old, which no sampler pays for."""
        return self.model.generate(self.prompt, num_chains=chains, num_epochs=1, seed=seed, **self.settings).sequences

    @cached_property
    def words(self) -> Tensor:
        """(W,) the tokens that a free position may hold."""
        return self.support.nonzero()[:, 0]

    def energy_and_gradient(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Energies (n,) of words (n, L), given as numbers in `words`, and gradients (n, L, W) at their one-hot vectors.

        A one-hot vector stands in its own term, and through its embedding in those of the other positions. That is a
        masked row forward and one back for each position.
        """
        mlm, ids, length = self.model.mlm, self.prompt.repeat(len(numbers), 1), len(self.columns)
        ids[:, self.columns] = self.words[numbers]
        table = mlm.get_input_embeddings().weight.detach()
        position = torch.tensor(self.columns).repeat(len(ids))
        each = torch.arange(len(position))
        masked = torch.zeros(len(position), ids.shape[1], 1, dtype=torch.bool)
        masked[each, position] = True
        with torch.enable_grad():
            embedded = table[ids].requires_grad_()
            copies = torch.where(masked, table[self.model.config.mask_token_id], embedded.repeat_interleave(length, 0))
            terms = -mlm(inputs_embeds=copies).logits[each, position].log_softmax(-1)[:, self.words]
            energy = terms[each, numbers.flatten()].double().view(-1, length).sum(1)
            (through_others,) = torch.autograd.grad(energy.sum(), embedded)
        gradient = terms.view(-1, length, len(self.words)) + through_others[:, self.columns] @ table[self.words].T
        return energy.detach(), gradient.detach().double()

    def energies(self) -> Tensor:
        """Of all sequences, (W,) * L: a row for each context of each position, `L W^(L-1)`."""
        tables, length = [], len(self.columns)
        contexts = torch.cartesian_prod(*[self.words] * (length - 1))
        for column in self.columns:
            ids = self.prompt.repeat(len(contexts), 1)
            ids[:, [other for other in self.columns if other != column]] = contexts
            with torch.no_grad():
                found = [self.model.mlm(input_ids=part).logits[:, column] for part in ids.split(1024)]
            tables.append(torch.cat([part.log_softmax(-1)[:, self.words].double() for part in found]))
        return energies_from_contexts(tables)

    def known(self) -> tuple[float, float, str]:
        """Mean energy and the token's share, and how they are known."""
        energies, length = self.energies(), len(self.columns)
        law = (energies - energies.min()).neg().exp()
        law /= law.sum()
        marginals = [law.movedim(place, 0).flatten(1).sum(1) for place in range(length)]
        share = torch.stack(marginals).mean(0)[self.words == self.token]
        rows = length * len(self.words) ** (length - 1)
        return float((law * energies).sum()), float(share), f"enumeration, {rows:,} rows"

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """Counts the rows that go through the model, as `rows`."""
        count = Counter[str]()

        def add(module, args, kwargs):
            count["rows"] += len(kwargs["input_ids"] if "input_ids" in kwargs else kwargs["inputs_embeds"])

        hook = self.model.mlm.register_forward_pre_hook(add, with_kwargs=True)
        try:
            yield count
        finally:
            hook.remove()


class LatticeTarget:
    """`exp(-E)` of a lattice of which means are known; a row is a sequence whose energy is evaluated.

    Args:
        lattice: its energy.
        token: the state whose share of the sites is estimated.
    """

    rows_each, is_known = 1, True
    # There are no token terms to decide on first.
    settings: ClassVar[dict] = {"delayed_acceptance": None}

    def __init__(self, lattice: Lattice, token: int = 0):
        self.lattice, self.token = lattice, token
        self.columns, self.words = list(range(lattice.length)), torch.arange(lattice.states)
        self.count = Counter[str]()
        self.model = EnergyTarget(self.energy, self.words.tolist(), lattice.length)
        self.prompt = torch.full((1, lattice.length), self.model.mask_token_id)

    def inputs(self, ids: Tensor) -> dict[str, Tensor]:
        """Of `generate`, for chains that start at `ids` (C, T)."""
        return {"input_ids": ids}

    def starts(self, chains: int, seed: int) -> Tensor:
        """(C, T) states at random."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(self.lattice.states, (chains, self.lattice.length), generator=generator)

    def energy(self, ids: Tensor) -> Tensor:
        """(n,) energies of ids (n, T), float64, counted."""
        self.count["rows"] += len(ids)
        return self.lattice(ids)

    def energy_and_gradient(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Energies (n,) and their gradients (n, T, K) at one-hot states."""
        lattice = self.lattice
        with torch.enable_grad():
            grid = torch.nn.functional.one_hot(ids, lattice.states).double().unflatten(1, lattice.field.shape[:2])
            grid.requires_grad_()
            across, down = ((grid.roll(-1, axis) @ lattice.pair * grid).sum(-1) for axis in (2, 1))
            if not lattice.periodic:
                across, down = across[:, :, :-1], down[:, :-1]
            energy = -(across.sum((1, 2)) + down.sum((1, 2)) + (grid * lattice.field).sum((1, 2, 3)))
            (gradient,) = torch.autograd.grad(energy.sum(), grid)
        return energy.detach(), gradient.flatten(1, 2)

    def known(self) -> tuple[float, float, str]:
        """As for a masked model."""
        share = float(self.lattice.marginals()[:, self.token].mean())
        return float(self.lattice.mean_energy()), share, "transfer matrix"

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """Counts the sequences whose energy is evaluated, as `rows`."""
        self.count.clear()
        yield self.count


Target = MaskedTarget | LatticeTarget


@cache
def _embedded():
    return load_embedded()


def embedded(length: int) -> MaskedTarget:
    """The embedded model, so many free positions and nothing else."""
    model, tokenizer = _embedded()
    prompt = [*model.config.prefix_token_ids, *[model.config.mask_token_id] * length, *model.config.suffix_token_ids]
    return MaskedTarget(model, torch.tensor([prompt]), tokenizer.convert_tokens_to_ids("the"))


def embedded_of_few_words(length: int, words: int) -> MaskedTarget:
    """As `embedded`, of the words that stand most often in the model's own fills of that length: enumerable."""
    target = embedded(length)
    with torch.no_grad():
        logits = target.model.mlm(input_ids=target.prompt).logits[0, target.columns]
    likely = logits.masked_fill(~target.support, -torch.inf).softmax(-1).sum(0).topk(words).indices.tolist()
    return MaskedTarget(target.model, target.prompt, likely[0], tuple(likely), is_known=True)


@cache
def _reactions():
    """The third-party model of `examples/reactions.py`, which `make real` downloads."""
    wheel = Path(sys.prefix, "real", "rxnmapper-0.4.3-py3-none-any.whl")
    if not wheel.exists():
        raise FileNotFoundError(f"{wheel} isn't there: make real")
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(wheel, Path(folder))
        return EnergyModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


# An acylation; base and solvent, between its reactants and its product, may be many.
REACTANTS, CONDITIONS, PRODUCT = "CC(=O)Cl.CN.", "CCN(CC)CC.ClCCl", ">>CC(=O)NC"


def reaction(masked: int) -> MaskedTarget:
    """The third-party model of reactions: so many tokens of the conditions, from their left, are free."""
    model, tokenizer = _reactions()
    ids = tokenizer(REACTANTS + CONDITIONS + PRODUCT, return_tensors="pt").input_ids
    begin = 1 + len(tokenizer.tokenize(REACTANTS))
    ids[0, begin : begin + masked] = model.config.mask_token_id
    return MaskedTarget(model, ids, tokenizer.convert_tokens_to_ids("C"))


def toy(sharpness: float) -> MaskedTarget:
    """A random model, four positions of eight words; its energies are wider apart the sharper it is."""
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    mlm = BertForMaskedLM(BertConfig(vocab_size=13, initializer_range=sharpness, **shape)).eval()
    roles = {"mask_token_id": 3, "pad_token_id": 0, "special_token_ids": [0, 1, 2], "excluded_token_ids": [4]}
    model = EnergyModel(mlm, prefix_token_ids=[1], suffix_token_ids=[2], **roles)
    return MaskedTarget(model, torch.tensor([[1, 3, 3, 3, 3, 2]]), 5, is_known=True)


# Every target there is, made when it is asked for. An entry is all that a new one needs.
TARGETS: dict[str, Callable[[], Target]] = {
    "toy": lambda: toy(0.3),
    "sharp toy": lambda: toy(0.6),
    **{f"embedded 4 of {words} words": lambda words=words: embedded_of_few_words(4, words) for words in (16, 32)},
    **{f"embedded {length}": lambda length=length: embedded(length) for length in (4, 8, 12, 32)},
    **{f"reaction {masked}": lambda masked=masked: reaction(masked) for masked in (4, 8, 12)},
    "Ising 10x10": lambda: LatticeTarget(ising(10, 10, strength=0.2)),
    "Potts 10x10, 3 states": lambda: LatticeTarget(potts(10, 10, states=3, strength=0.4)),
}
