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

import torch
from torch import Tensor
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from examples.reactions import save_checkpoint
from hf_ebm import EnergyModel
from hf_ebm.assets import load_embedded
from hf_ebm.exact import ExactDistribution, enumerate_distribution
from hf_ebm.models.energy.chains import proposal_support


@dataclass(frozen=True)
class MaskedTarget:
    """`exp(-E)` over the masks of a prompt, E the energy of a masked language model at them.

    Args:
        model: its energy.
        prompt: (1, T) ids with a mask at each free position.
        token: the token whose share of the free positions is estimated.
        only: the tokens that free positions may hold, by default all that may be proposed.
        is_enumerable: whether `exact` is feasible.
    """

    model: EnergyModel
    prompt: Tensor
    token: int
    only: tuple[int, ...] = ()
    is_enumerable: bool = False

    @cached_property
    def columns(self) -> list[int]:
        """The free positions."""
        return (self.prompt[0] == self.model.config.mask_token_id).nonzero()[:, 0].tolist()

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

    def energy(self, ids: Tensor) -> Tensor:
        """(n,) energies of ids (n, T), float64."""
        with torch.no_grad():
            return self.model(**self.inputs(ids)).energy.double()

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

    def exact(self) -> ExactDistribution | None:
        """The law by enumeration of what stands at the free positions, where that is feasible."""
        if not self.is_enumerable:
            return None

        def energy(words: Tensor) -> Tensor:
            ids = self.prompt.repeat(len(words), 1)
            ids[:, self.columns] = words
            return self.energy(ids)

        return enumerate_distribution(energy, self.words.tolist(), len(self.columns), chunk_size=2048)

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
    return MaskedTarget(target.model, target.prompt, likely[0], tuple(likely), is_enumerable=True)


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
REACTANTS, CONDITIONS, PRODUCT = "O=C(Cl)c1ccccc1.NCc1ccccc1.", "CCN(CC)CC.ClCCl", ">>O=C(NCc1ccccc1)c1ccccc1"


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
    return MaskedTarget(model, torch.tensor([[1, 3, 3, 3, 3, 2]]), 5, is_enumerable=True)


# Every target there is, made when it is asked for. An entry is all that a new one needs.
TARGETS: dict[str, Callable[[], MaskedTarget]] = {
    "toy": lambda: toy(0.3),
    "sharp toy": lambda: toy(0.6),
    "embedded 4 of 16 words": lambda: embedded_of_few_words(4, 16),
    **{f"embedded {length}": lambda length=length: embedded(length) for length in (4, 8, 12, 32)},
    **{f"reaction {masked}": lambda masked=masked: reaction(masked) for masked in (4, 8, 12)},
}
