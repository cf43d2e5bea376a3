"""Thesis sections 6.5 to 6.8: a conditional masked language model as a generator, here of English pronunciations.

The embedded models of `hf_ebm.assets.load_embedded_pronunciation` stand in for mask-predict's translation models,
letters for the source sentence, phonemes for the target. What varies from run to run is the chain, as in the thesis.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.reproduction.report import Report
from benchmarks.reproduction.storage import digest, kept
from hf_ebm.assets import load_embedded_pronunciation
from hf_ebm.data.cmudict_tasks import load_g2p
from hf_ebm.data.metrics import transcription_scores
from hf_ebm.objectives.sequence_costs import nearest_reference


@dataclass(frozen=True)
class ConditionalScale:
    """Sizes of a run. `seeds` number the chains, all of one random seed."""

    words: int = 60
    test_words: int = 120
    num_epochs: int = 20
    burn_in: int = 5
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)


QUICK_CONDITIONAL = ConditionalScale(6, 10, 6, 2, (1, 2))
BY_EPOCH = ("energy", "novel", "accept", "PER", "words")
BLOCKS = (("block_size", 3), ("final_block_size", 1))
RANDOM_SEED = 0


@dataclass(frozen=True)
class Sampling:
    """How a split's words are transcribed; `options` are settings of the chains."""

    energy: str = "local"
    options: tuple[tuple[str, object], ...] = ()
    split: str = "validation"
    model: str = "masked"
    lengths: str = "given"

    def having(self, **options) -> Sampling:
        """The same with further settings."""
        return Sampling(self.energy, (*self.options, *options.items()), self.split, self.model, self.lengths)


def gibbs(**options) -> Sampling:
    """The degenerate Gibbs sampler, with nothing mixed into its proposal."""
    return Sampling(options=(("kernel", "gibbs"), ("proposal_epsilon", 0.0), *options.items()))


_splits = cache(load_g2p)


@cache
def embedded(kind: str, energy: str):
    """A model, its tokenizer and the model of lengths."""
    return load_embedded_pronunciation(kind, energy)


@dataclass
class ConditionalCache:
    """Makes and keeps runs. Their folder has to be deleted when code or models change: neither is part of a digest."""

    scale: ConditionalScale
    folder: Path
    used: dict[str, float] = field(default_factory=dict)  # seconds that each run in use took

    def words(self, split: str) -> dict[str, list]:
        """The first words of a split."""
        return _splits()[split][: self.scale.test_words if split == "test" else self.scale.words]

    def run(self, sampling: Sampling) -> dict:
        """`BY_EPOCH`, each (chains, epochs); `final`, each (chains,); `samples`, see `_samples`."""
        path = self.folder / f"chains-{digest(sampling, self.scale, RANDOM_SEED)}.json"
        found = kept(path, lambda: self._timed(sampling))
        self.used[path.name] = found["seconds"]
        return found

    def _timed(self, sampling: Sampling) -> dict:
        started = time.perf_counter()
        found = self._sample(sampling)
        found |= {"seconds": time.perf_counter() - started, "sampling": asdict(sampling)}
        print(f"  {sampling}: {found['seconds']:.0f} s", flush=True)
        return found

    def mean(self, sampling: Sampling, name: str) -> list[float]:
        """Of each chain: the mean over the epochs after burn-in."""
        return torch.tensor(self.run(sampling)[name])[:, self.scale.burn_in :].mean(1).tolist()

    def _sample(self, sampling: Sampling) -> dict:
        model, tokenizer, length_model = embedded(sampling.model, sampling.energy)
        words, chains = self.words(sampling.split), len(self.scale.seeds)
        lengths = [len(target.split()) for target in words["target"]]
        if sampling.lengths != "given":
            lengths = sampling.lengths
        out = model.generate_from_sources(
            words["source"], tokenizer, lengths=lengths,
            length_model=None if sampling.lengths == "given" else length_model, num_chains=chains,
            **{"num_epochs": self.scale.num_epochs, "seed": RANDOM_SEED, **dict(sampling.options)},
        )  # fmt: skip
        final = [_metrics([own[chain] for own in out.texts], words["references"]) for chain in range(chains)]
        result = {"final": {name: [own[name] for own in final] for name in final[0]}}
        last = self._local_energies(sampling, words["source"], out.chains, out.chains.samples[:, -1:])
        result["final"]["energy"] = last[out.rows, 0].mean(0).tolist()
        if "decoder" in dict(sampling.options):
            return result
        kept, trace, rows = out.chains.samples, out.chains.trace, out.rows
        energies = self._local_energies(sampling, words["source"], out.chains, kept)[rows]  # (words, chains, epochs)
        texts = [[_decoded(tokenizer, out.chains, row, kept[row]) for row in own] for own in rows.tolist()]
        metrics = [
            [_metrics([own[chain][epoch] for own in texts], words["references"]) for epoch in range(kept.shape[1])]
            for chain in range(chains)
        ]
        result["energy"] = energies.mean(0).tolist()
        result["samples"] = _samples(texts, energies, words["references"])
        result["novel"] = trace.novel_rate[rows].mean(0).tolist()
        result["accept"] = trace.acceptance_rate[rows].mean(0).tolist()
        for name in ("PER", "words"):
            result[name] = [[epoch[name] for epoch in own] for own in metrics]
        return result

    def _local_energies(self, sampling: Sampling, sources: list[str], chains, samples: Tensor) -> Tensor:
        """(rows, epochs) local energies, which are reported for all samplers as in the thesis."""
        if sampling.energy == "local":
            return chains.energies[:, -samples.shape[1] :]
        model, tokenizer, _ = embedded(sampling.model, "local")
        flat = samples.flatten(0, 1)
        which = torch.arange(len(samples)).repeat_interleave(samples.shape[1])
        # One word's chains visit the same sequences again and again; contexts differ only by word.
        unique, back = torch.cat([flat, chains.prompt_indices[which, None]], 1).unique(dim=0, return_inverse=True)
        first = torch.full((len(unique),), len(flat)).scatter_reduce(0, back, torch.arange(len(flat)), "amin")
        context = {}
        if model.mlm.config.is_encoder_decoder:
            read = tokenizer([sources[i] for i in unique[:, -1].tolist()], padding=True, return_tensors="pt")
            context = {"encoder_input_ids": read["input_ids"], "encoder_attention_mask": read["attention_mask"]}
        chain = which[first]
        masks = {"attention_mask": chains.attention_mask[chain], "free_mask": chains.run.free[chain].cpu()}
        found = model.score_ids(flat[first], **masks, **context).sum(1).double()
        return found[back].view(samples.shape[:2])


def _samples(texts: list[list[list[str]]], energies: Tensor, references: list[list[str]]) -> dict[str, list]:
    """Every different sample of a word: number of the word, energy, phonemes, and edits to the nearest reference."""
    found: dict[str, list] = {"word": [], "energy": [], "length": [], "edits": []}
    for word, own in enumerate(texts):
        alternatives = [text.split() for text in references[word]]
        energy_of = {
            text: float(energies[word, chain, epoch]) for chain, row in enumerate(own) for epoch, text in enumerate(row)
        }
        for text, energy in sorted(energy_of.items()):
            symbols = text.split()
            values = (word, energy, len(symbols), nearest_reference(symbols, alternatives)[0])
            for name, value in zip(found, values, strict=True):
                found[name].append(value)
    return found


def _decoded(tokenizer, chains, row: int, samples: Tensor) -> list[str]:
    return tokenizer.batch_decode(samples[:, chains.run.free[row].cpu()])


def _metrics(texts: list[str], references: list[list[str]]) -> dict[str, float]:
    scores = transcription_scores(texts, references)
    return {"PER": 100 * scores["phoneme_error_rate"], "words": 100 * scores["word_accuracy"]}


def _compare(experiments, report: Report, row: str, samplings: dict[str, Sampling], names: tuple[str, ...]) -> None:
    """One row: each of `names`, a column for each sampler."""
    report.add(
        row,
        {
            f"{name} {sampler}": experiments.mean(sampling, name)
            for name in names
            for sampler, sampling in samplings.items()
        },
    )


def _notes(experiments, report: Report) -> None:
    scale = experiments.scale
    report.notes.append(
        f"Means over the epochs {scale.burn_in + 1} to {scale.num_epochs} of {scale.words} validation words, in "
        f"brackets the deviation over {len(scale.seeds)} chains. Energy: local, nats a word, whatever energy is "
        "sampled; novel and accept: rates; PER, words: phoneme error rate and word accuracy, per cent. The number of "
        "phonemes is given."
    )


ENTROPY_NAMES = ("energy", "novel", "PER", "words")
ENTROPY_COLUMNS = [f"{name} {sampler}" for name in ENTROPY_NAMES for sampler in ("norm", "deg")]


def table_6_2(experiments: ConditionalCache, report: Report) -> None:
    """Temperature of the proposal."""
    for temperature in (2.0, 1.5, 1.0, 0.8, 0.5):
        option = {} if temperature == 1 else {"proposal_temperature": temperature}
        samplings = {"norm": Sampling().having(**option), "deg": gibbs(**option)}
        _compare(experiments, report, f"T = {temperature}", samplings, ENTROPY_NAMES)
    _add_degeneration_findings(report, "T = 1.0")
    report.finding("a low temperature improves degenerate Gibbs", ("T = 1.0", "PER deg"), ("T = 0.5", "PER deg"))
    _notes(experiments, report)


def table_6_3(experiments: ConditionalCache, report: Report) -> None:
    """Nucleus of the proposal."""
    for nucleus in (1.0, 0.99, 0.95, 0.9, 0.8):
        option = {} if nucleus == 1 else {"proposal_top_p": nucleus}
        samplings = {"norm": Sampling().having(**option), "deg": gibbs(**option)}
        _compare(experiments, report, f"p = {nucleus}", samplings, ENTROPY_NAMES)
    _add_degeneration_findings(report, "p = 1.0")
    report.finding("a small nucleus improves degenerate Gibbs", ("p = 1.0", "PER deg"), ("p = 0.8", "PER deg"))
    _notes(experiments, report)


def _add_degeneration_findings(report: Report, row: str) -> None:
    for name in ("energy", "PER"):
        report.finding(
            f"{row}: degenerate Gibbs has a higher {name} than MH", (row, f"{name} deg"), (row, f"{name} norm")
        )


BLOCK_NAMES = ("energy", "novel", "accept", "PER", "words")


def table_6_4(experiments: ConditionalCache, report: Report) -> None:
    """Blocks, from three positions to one over the epochs."""
    for name, start in {"Deg": gibbs(), "Raw": Sampling("raw"), "Norm": Sampling()}.items():
        for label, sampling in {"single sites": start, "blocks": start.having(**dict(BLOCKS))}.items():
            report.add(f"{name}, {label}", {column: experiments.mean(sampling, column) for column in BLOCK_NAMES})
    for name in ("Raw", "Norm"):
        report.finding(f"{name}: blocks raise the novel rate", (f"{name}, blocks", "novel"),
                       (f"{name}, single sites", "novel"))  # fmt: skip
        report.finding(f"{name}: blocks lower the energy", (f"{name}, single sites", "energy"),
                       (f"{name}, blocks", "energy"))  # fmt: skip
        report.finding(f"{name}: blocks lower the error", (f"{name}, single sites", "PER"), (f"{name}, blocks", "PER"))
    _notes(experiments, report)
    report.notes.append("Single sites are the table's comparison with the one before; the thesis shows blocks alone.")


DECAYS = (0.02, 0.04, 0.06)
ANNEALED_COLUMNS = [f"{name} {decay}" for decay in DECAYS for name in ("energy", "accept", "PER", "words")]


def annealed(energy: str, decay: float) -> Sampling:
    """Blocks and a target temperature that falls by `decay` an epoch."""
    return Sampling(energy, (*BLOCKS, ("energy_temperature_decay", decay)))


def table_6_5(experiments: ConditionalCache, report: Report) -> None:
    """Strength of annealing: best epoch's energy and error, mean acceptance."""
    for name, energy in (("Norm", "local"), ("Raw", "raw")):
        for decay in DECAYS:
            sampling = annealed(energy, decay)
            run = {column: torch.tensor(experiments.run(sampling)[column]) for column in ("energy", "PER", "words")}
            report.add(name, {f"{column} {decay}": run[column].amin(1).tolist() for column in ("energy", "PER")})
            report.add(name, {f"words {decay}": run["words"].amax(1).tolist()})
            report.add(name, {f"accept {decay}": experiments.mean(sampling, "accept")})
    for name in ("Norm", "Raw"):
        report.finding(f"{name}: stronger annealing lowers the energy", (name, "energy 0.02"), (name, "energy 0.06"))
        report.finding(f"{name}: and accepts less", (name, "accept 0.02"), (name, "accept 0.06"))
        report.finding(f"{name}: weaker annealing has the lower error", (name, "PER 0.06"), (name, "PER 0.02"))
    report.finding("raw accepts more than norm at 0.06", ("Raw", "accept 0.06"), ("Norm", "accept 0.06"))
    _notes(experiments, report)
    report.notes.append("Energy, PER and words are those of each chain's best epoch, as in the thesis: optimistic.")


FINAL_NAMES = ("PER", "words", "energy")
DECODERS = (("masked, length given", "masked", "given"), ("masked, length drawn", "masked", "sample"),
            ("masked, length by energy", "masked", "energy"), ("encoder-decoder, length given", "encoder_decoder",
            "given"))  # fmt: skip
TEST_COLUMNS = [f"{name}: {label}" for label, _, _ in DECODERS for name in FINAL_NAMES]


def decoders(decays: tuple[float, float]) -> dict[str, tuple[str, dict]]:
    """Rows of table 6.6: energy and settings; the paper's strength of annealing, and the one best on validation."""
    mode = {
        **dict(BLOCKS), "energy_temperature_decay": decays[0], "proposal_temperature": 0.8, "warm_start": "greedy",
        "accept_all_epochs": 2,
    }  # fmt: skip
    stronger = {**mode, "energy_temperature_decay": decays[1]}
    return {
        "warm start": ("local", {"decoder": "mask_predict", "num_epochs": 1}),
        "degenerate Gibbs (T = 0.8)": ("local", {
            "kernel": "gibbs", "proposal_epsilon": 0.0, "proposal_temperature": 0.8, "warm_start": "greedy",
        }),
        "mask-predict (10 iterations)": ("local", {"decoder": "mask_predict", "num_epochs": 10}),
        "local energy": ("local", mode),
        "raw energy": ("raw", mode),
        f"local energy, annealed by {decays[1]}": ("local", stronger),
        f"raw energy, annealed by {decays[1]}": ("raw", stronger),
    }  # fmt: skip


def table_6_6(experiments: ConditionalCache, report: Report) -> None:
    """Sampling around the modes, test words, last epoch."""
    decays = 0.02, 0.06  # the thesis' best, and the best of table 6.5, on validation words
    rows = decoders(decays)
    for label, kind, lengths in DECODERS:
        for row, (energy, options) in rows.items():
            if lengths != "given" and (energy == "raw" or "annealed" in row):
                continue  # how a length is found is shown for one energy
            final = experiments.run(Sampling(energy, tuple(options.items()), "test", kind, lengths))["final"]
            report.add(row, {f"{name}: {label}": final[name] for name in FINAL_NAMES})
        predicted = "mask-predict (10 iterations)"
        for name in list(rows)[3:] if lengths == "given" else ("local energy",):
            column = f"PER: {label}"
            report.finding(f"{label}: {name} below the error of mask-predict", (predicted, column), (name, column))
    scale = experiments.scale
    report.notes.append(
        f"The last of {scale.num_epochs} epochs, {scale.test_words} test words, in brackets the deviation over "
        f"{len(scale.seeds)} chains; PER and words in per cent, local energy in nats a word. Blocks of 3 to 1, "
        "proposal temperature 0.8, greedy warm start, all proposals accepted in two epochs: as in the thesis. The "
        f"target temperature falls by {decays[0]} an epoch where nothing else is said; the stronger annealing is the "
        "best of table 6.5, on validation words. Warm start and mask-predict are deterministic."
    )
