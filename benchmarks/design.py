"""Design within a budget of changes: `generate` with `max_changes` against EvoProtGrad (Emami et al. 2023).

EvoProtGrad 0.2 asks for an older Transformers, but runs with this one: `pip install --no-deps --target FOLDER
evo-prot-grad`.
Law: on a tiny random BERT whose spaces can be listed, the last states of many chains against the exact distribution of
what each program samples. Design: the loop H3 of trastuzumab's heavy chain, in a fragment of 33 letters, by the trained
AntiBERTy (`pip download --no-deps antiberty==0.1.3`, MIT licence; it is read and not installed), at equal numbers of
sequences that pass through the model; passes back for EvoProtGrad's gradients come on top. It has an expert of its own
(mutant marginals: changed letters under the logits of the sequence as it is, one pass) and, to sample what `generate`
does, one that is made here, of the masked energy.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import io
import itertools
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from benchmarks.common import begin_timing, print_table
from hf_ebm import EnergyModel
from hf_ebm.exact import enumerate_distribution
from hf_ebm.models.energy.configuration_energy import token_roles

LETTERS = "ACDEFGHIKLMNPQRSTVWY"
NAMES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS]
WEIGHTS = "antiberty/trained_models/AntiBERTy_md_smooth/pytorch_model.bin"
FRAGMENT = "AEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS"
LOOP = "WGGDGFYAMDY"


class Case(NamedTuple):
    """A sequence to change, the letters that may (from, to), how many of them, and by how many chains."""

    start: str
    first: int
    last: int
    most: int | None
    chains: int

    @property
    def free(self) -> Tensor:
        """Columns of the letters that may change, after [CLS]."""
        return torch.arange(self.first, self.last) + 1


class Found(NamedTuple):
    """What a program did.

    Attributes:
        last, seen: the last sequence of each chain, and all that were reported.
        best: the different ones, the best first by the score that was sampled.
        passes: sequences that passed through the model.
        seconds: wall clock.
        wrong_scores: share of what was seen whose score isn't that of the sequence.
    """

    last: list[str]
    seen: list[str]
    best: list[str]
    passes: int
    seconds: float
    wrong_scores: float = 0.0


def tokenizer_of_letters() -> PreTrainedTokenizerFast:
    """A token a letter, with or without spaces between them."""
    own = Tokenizer(models.WordLevel({name: i for i, name in enumerate(NAMES)}, unk_token="[UNK]"))
    letter = pre_tokenizers.Split("", "isolated")
    own.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), letter])
    own.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]",
    )  # fmt: skip


def tiny() -> BertForMaskedLM:
    """Random weights, so large that letters depend on each other."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    mlm = BertForMaskedLM(BertConfig(vocab_size=len(NAMES), **sizes)).eval()
    for parameter in mlm.parameters():
        parameter.data.normal_(0, 0.35) if parameter.dim() > 1 else None
    return mlm


def trained(wheel: Path) -> BertForMaskedLM:
    """AntiBERTy, of 26 million parameters."""
    with zipfile.ZipFile(wheel) as files:
        weights = torch.load(io.BytesIO(files.read(WEIGHTS)), map_location="cpu", weights_only=True)
    sizes = dict(hidden_size=512, num_hidden_layers=8, num_attention_heads=8, intermediate_size=2048)
    mlm = BertForMaskedLM(BertConfig(vocab_size=len(NAMES), **sizes)).eval()
    mlm.load_state_dict({name: weights[name] for name in mlm.state_dict()})
    return mlm


def letters(ids: Tensor) -> list[str]:
    """Sequences of ids (n, T) without their ends."""
    return ["".join(NAMES[i] for i in row[1:-1]) for row in ids.tolist()]


def ours(model: EnergyModel, case: Case, budget: int, epochs: int = 10_000, **settings: Any) -> Found:
    """`generate` from the start, until `budget` sequences have passed; what is seen are the states after each step."""
    ids = tokenizer_of_letters()(case.start, return_tensors="pt").input_ids
    free = torch.zeros_like(ids).index_fill(1, case.free, 1)
    seen: list[str] = []

    class Recorder:
        put = end = lambda self, *ids: seen.extend(letters(ids[0])) if ids else None

    counted, began = _Counted(model.mlm), time.perf_counter()
    spent = lambda ids, _: torch.full((len(ids),), counted.passes >= budget)  # noqa: E731
    out = model.generate(
        ids, free_mask=free, num_chains=case.chains, num_epochs=epochs, seed=0, streamer=Recorder(),
        stopping_criteria=[spent], max_changes=case.most, **settings,
    )  # fmt: skip
    seconds = time.perf_counter() - began
    counted.hook.remove()
    distinct = list(dict.fromkeys(seen))
    energies = dict(zip(distinct, energies_of(model, case, distinct).tolist(), strict=True))
    return Found(letters(out.sequences), seen, sorted(energies, key=energies.get), counted.passes, seconds)


class _Counted:
    """Counts the sequences that pass through a model."""

    def __init__(self, mlm: BertForMaskedLM):
        self.passes = 0
        self.hook = mlm.bert.encoder.register_forward_pre_hook(self._add, with_kwargs=True)

    def _add(self, module: Any, given: tuple, named: dict) -> None:
        self.passes += len(given[0] if given else named["hidden_states"])


def masked_expert(mlm: BertForMaskedLM, case: Case) -> Any:
    """An expert whose score is minus the masked energy of the free letters, with gradients by one-hot letters."""
    base = importlib.import_module("evo_prot_grad.experts.base_experts")
    tokenizer = tokenizer_of_letters()

    class MaskedEnergyExpert(base.AttributeExpert):
        def __init__(self) -> None:
            base.Expert.__init__(self, 1.0, mlm, tokenizer.get_vocab(), "attribute_value")

        def get_model_output(self, inputs: list[str]) -> tuple[Tensor, Tensor]:
            ids = tokenizer(inputs, return_tensors="pt").input_ids
            one_hot = torch.nn.functional.one_hot(ids, len(NAMES)).float().requires_grad_()
            masked = one_hot.repeat_interleave(len(case.free), 0)
            rows, columns = torch.arange(len(masked)), case.free.repeat(len(ids))
            shown = masked.clone()
            shown[rows, columns] = torch.nn.functional.one_hot(torch.tensor(NAMES.index("[MASK]")), len(NAMES)).float()
            logits = mlm(inputs_embeds=shown @ mlm.get_input_embeddings().weight).logits[rows, columns]
            terms = (masked[rows, columns] * logits.log_softmax(-1)).sum(-1)
            return one_hot, terms.view(len(ids), -1).sum(1)

    return MaskedEnergyExpert()


def own_expert(mlm: BertForMaskedLM, case: Case) -> Any:
    """The expert that comes with EvoProtGrad."""
    experts = importlib.import_module("evo_prot_grad.experts.bert_expert")
    return experts.build(
        temperature=1.0, scoring_strategy="mutant_marginal", model=mlm, tokenizer=tokenizer_of_letters()
    )


def evo_prot_grad(make: Callable[..., Any], mlm: BertForMaskedLM, case: Case, budget: int) -> Found:
    """EvoProtGrad's chains, until `budget` sequences have passed through the model; what is seen is what it reports."""
    sampler = importlib.import_module("evo_prot_grad.common.sampler")
    mlm = copy.deepcopy(mlm)
    counted, expert = _Counted(mlm), make(mlm, case)
    kept = [(0, case.first - 1), (case.last, len(case.start) - 1)]
    chains = sampler.DirectedEvolution(
        [expert], case.chains, 1, case.most or -1, "all", [own for own in kept if own[0] <= own[1]] or None, case.start,
        random_seed=0,
    )  # fmt: skip
    counted.passes = 0
    chains()  # one step, to learn what a step costs
    chains.n_steps = max(1, budget // counted.passes)
    chains.reset()
    counted.passes, began = 0, time.perf_counter()
    reported, scores = chains()
    seconds = time.perf_counter() - began
    reported = [[text.replace(" ", "") for text in step] for step in reported]
    seen = list(itertools.chain(*reported))
    distinct, passes = list(dict.fromkeys(seen)), counted.passes
    with torch.no_grad():
        found = torch.cat([expert(list(map(" ".join, distinct[i : i + 64])))[1] for i in range(0, len(distinct), 64)])
    true = dict(zip(distinct, found.tolist(), strict=True))
    wrong = [abs(true[text] - score) > 1e-3 for text, score in zip(seen, scores.ravel().tolist(), strict=True)]
    best = sorted(
        (text for text in distinct if changes(case, text) <= (case.most or len(text))), key=lambda t: -true[t]
    )
    return Found(reported[-1], seen, best, passes, seconds, sum(wrong) / len(wrong))


def energies_of(model: EnergyModel, case: Case, texts: list[str]) -> Tensor:
    """(n,) masked energies of the free letters, float64."""
    ids = tokenizer_of_letters()(texts, return_tensors="pt").input_ids
    free = torch.zeros_like(ids).index_fill(1, case.free, 1)
    return model.score_ids(ids, free_mask=free).double().sum(1)


def changes(case: Case, text: str) -> int:
    """Letters that differ from the start."""
    return sum(one != other for one, other in zip(text, case.start, strict=True))


def law(model: EnergyModel, name: str, case: Case, found: Found, score: Callable[[list[str]], Tensor]) -> list:
    """A row: the distance of the last states from the exact distribution, and of as many exact draws."""

    def energy(words: Tensor) -> Tensor:
        texts = ["".join(NAMES[i] for i in row) for row in words.tolist()]
        allowed = torch.tensor([case.most is None or changes(case, text) <= case.most for text in texts])
        return torch.where(allowed, -score(texts), torch.inf)

    words = range(NAMES.index("A"), len(NAMES))
    exact = enumerate_distribution(energy, list(words), len(case.start))
    ids = torch.tensor([[NAMES.index(letter) for letter in text] for text in found.last])
    generator = torch.Generator().manual_seed(0)
    draws = [exact.total_variation(exact.sample(len(ids), generator)) for _ in range(50)]
    outside = sum(changes(case, text) > (case.most or len(text)) for text in found.seen) / len(found.seen)
    return [
        name, "none" if case.most is None else f"{case.most} change", len(ids), exact.total_variation(ids),
        sum(draws) / len(draws), f"{found.wrong_scores:.1%}", f"{outside:.1%}",
    ]  # fmt: skip


def laws(chains: int) -> Iterator[list]:
    """The rows of the table of laws."""
    mlm = tiny()
    model = EnergyModel(mlm, **token_roles(tokenizer_of_letters(), len(NAMES)))
    for case in (Case("AW", 0, 2, None, chains), Case("AWG", 0, 3, 1, chains)):
        masked = lambda texts, case=case: -energies_of(model, case, texts)  # noqa: E731
        yield law(model, "`generate`", case, ours(model, case, sys.maxsize, 100, block_size=[1, 2]), masked)
        for name, make in (("its own score", own_expert), ("masked energy", masked_expert)):
            found = evo_prot_grad(make, mlm, case, 200 * chains * (2 if make is own_expert else 4))
            expert = make(copy.deepcopy(mlm), case)
            expert.init_wildtype(case.start)
            scored = lambda texts, expert=expert: expert(texts)[1].detach().double()  # noqa: E731
            yield law(model, f"EvoProtGrad, {name}", case, found, scored)


def designs(mlm: BertForMaskedLM, budget: int, chains: int) -> Iterator[list]:
    """The rows of the table of designs."""
    first = FRAGMENT.index(LOOP)
    case = Case(FRAGMENT, first, first + len(LOOP), 5, chains)
    model = EnergyModel(mlm, **token_roles(tokenizer_of_letters(), len(NAMES)))
    programs = {
        "`generate`, single sites": lambda: ours(model, case, budget),
        "`generate`, `block_size=[1, 2]`": lambda: ours(model, case, budget, block_size=[1, 2]),
        "EvoProtGrad, masked energy": lambda: evo_prot_grad(masked_expert, mlm, case, budget),
        "EvoProtGrad, its own score": lambda: evo_prot_grad(own_expert, mlm, case, budget),
    }
    yield ["the start", 0, 0.0, float(energies_of(model, case, [FRAGMENT])[0]), "", 1, "", 0]
    for name, program in programs.items():
        found = program()
        best, last = (energies_of(model, case, texts) for texts in (found.best[:20], found.last))
        yield [
            name, found.passes, found.seconds, float(best.min()), float(last.mean()), len(set(found.seen)),
            f"{found.wrong_scores:.0%}", max(changes(case, text) for text in found.seen),
        ]  # fmt: skip


def main() -> None:
    """Prints both tables, or why one is left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--evo_prot_grad", type=Path, help="folder that EvoProtGrad is installed into")
    parser.add_argument("--antiberty", type=Path, help="antiberty-0.1.3-py3-none-any.whl")
    parser.add_argument("--passes", type=int, default=1000, help="sequences through the model for each program")
    parser.add_argument("--chains", type=int, default=2)
    parser.add_argument("--law_chains", type=int, default=2000, help="0 leaves the law out")
    arguments = begin_timing(parser)
    if arguments.evo_prot_grad is not None:
        sys.path.append(str(arguments.evo_prot_grad))
    if find_spec("evo_prot_grad") is None:
        print("left out: EvoProtGrad isn't installed, see --help")
        return
    if arguments.law_chains:
        header = ["program", "limit", "chains", "total variation", "exact draws", "wrong scores", "outside"]
        print_table(header, laws(arguments.law_chains))
    if arguments.antiberty is None:
        print("left out: the design, as --antiberty isn't given")
        return
    header = ["program", "passes", "seconds", "best energy", "mean energy at the end", "distinct", "wrong scores",
              "most changes"]  # fmt: skip
    print_table(header, designs(trained(arguments.antiberty), arguments.passes, arguments.chains))


if __name__ == "__main__":
    main()
