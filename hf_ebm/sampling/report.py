"""Reports on the convergence of chains, prompt by prompt, and what they advise to change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hf_ebm.sampling.convergence import (
    LEAST_CHAINS,
    LEAST_SAMPLES,
    Diagnostics,
    Modes,
    energy_and_tokens,
    has_nothing_to_mix,
    modes_of,
    worst_r_hat,
)

if TYPE_CHECKING:
    from hf_ebm.sampling.run import ChainGenerationOutput

# Above this R-hat chains are said to disagree, where no other is asked for.
WORST_R_HAT = 1.1
# So many chains, and effective samples of all of them together, are advised (Vehtari et al. 2021).
ENOUGH_CHAINS, ENOUGH_SAMPLES = 4, 400


@dataclass(frozen=True)
class PromptReport:
    """What is known about the chains of one prompt; `str` tells it.

    Attributes:
        prompt: its number.
        num_chains, num_samples: chains, and kept samples of each.
        acceptance_rate, novel_rate: means over the epochs that samples were kept after; NaN with a decoder.
        mean_energy: of the kept samples, in nats.
        energy: diagnostics of the energies.
        tokens: diagnostics of the number of positions at which samples differ from the sample of the least energy.
        modes: see `modes_of`.
        round_trips: how often replicas went from the coldest temperature to the hottest and back; `None` without any.
        r_hat: the larger R-hat of the two; NaN if there is none.
        missed_by: by how much it is above `target_rhat`, 0 where that was met or there is nothing to mix; `None` where
            there was none.
        advice: a sentence: which setting to change.
    """

    prompt: int
    num_chains: int
    num_samples: int
    acceptance_rate: float
    novel_rate: float
    mean_energy: float
    energy: Diagnostics
    tokens: Diagnostics
    modes: Modes
    round_trips: int | None
    r_hat: float
    missed_by: float | None
    advice: str

    def __str__(self) -> str:
        return "\n".join([f"prompt {self.prompt}: {self.counts}", *self.lines()])

    @property
    def counts(self) -> str:
        """Numbers of chains and samples, rates and the mean energy, in a line."""
        rates = (("acceptance", self.acceptance_rate), ("novel", self.novel_rate))
        parts = [f"{name} rate {rate:.3f}" for name, rate in rates if not math.isnan(rate)]
        parts = [f"{self.num_chains} chains of {self.num_samples} samples", *parts]
        return "; ".join([*parts, f"mean energy {self.mean_energy:.2f}"])

    def lines(self) -> Iterator[str]:
        """The table, the modes and the advice."""
        yield f"  {'':8}{'R-hat':>8}{'bulk ESS':>10}{'tail ESS':>10}"
        for name, own in (("energy", self.energy), ("tokens", self.tokens)):
            yield f"  {name:8}{_told(own.r_hat, 3):>8}{_told(own.ess_bulk):>10}{_told(own.ess_tail):>10}"
        yield f"  modes: {self.modes.shared} visited by several chains, {self.modes.alone} by one"
        if self.round_trips is not None:
            yield f"  round trips of replicas: {self.round_trips}"
        if self.missed_by is not None:
            yield f"  target_rhat was {f'missed by {self.missed_by:.3f}' if self.missed_by else 'met'}"
        yield f"  {self.advice}"


def _told(value: float, digits: int = 0) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


@dataclass(frozen=True)
class ChainSummary:
    """Reports of all prompts of a run, in order; `str` tells them."""

    prompts: tuple[PromptReport, ...]

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.prompts))


def summary(output: ChainGenerationOutput) -> ChainSummary:
    """What is known about the convergence of the chains, prompt by prompt: `print(out.summary())`.

    Example:
        >>> from hf_ebm.assets import load_embedded
        >>> model, _ = load_embedded()
        >>> report = model.generate(lengths=4, num_chains=2, num_epochs=2, seed=0).summary().prompts[0]
        >>> report.num_samples, report.r_hat, "num_epochs" in report.advice
        (2, nan, True)
    """
    settings, lengths = output.run.run_config["settings"], output.attention_mask.sum(1)
    kept = torch.tensor(output.kept_epochs, dtype=torch.long)
    found = []
    for prompt in output.prompt_indices.unique().tolist():
        own = output.prompt_indices == prompt
        chains = output.samples[own], output.energies[own]
        accepted, novel = (rate[own][:, kept] for rate in (output.trace.acceptance_rate, output.trace.novel_rate))
        one_length = len(lengths[own].unique()) == 1
        trips = None if output.replicas is None else int(output.replicas.round_trips[own].sum())
        found.append(report_of(prompt, *chains, accepted, novel, settings, one_length, trips))
    return ChainSummary(tuple(found))


def report_of(
    prompt: int, samples: Tensor, energies: Tensor, acceptance_rate: Tensor, novel_rate: Tensor,
    settings: Mapping[str, Any], one_length: bool = True, round_trips: int | None = None,
) -> PromptReport:  # fmt: skip
    """The report of the chains of one prompt.

    Args:
        samples: (C, N, T) what stands at each position of each kept sample; any numbers that name it.
        energies, acceptance_rate, novel_rate: (C, N) of each.
        settings: those of the run that advice looks at, by name.
        one_length: whether all chains have the same length.
        round_trips: of all replicas together.

    Example:
        >>> import torch
        >>> samples = torch.tensor([[[5, 6]] * 9, [[7, 8]] * 9])
        >>> energies, rates = torch.tensor([[1.0] * 9, [2.0] * 9]), torch.zeros(2, 9)
        >>> report_of(0, samples, energies, rates, rates, {"num_epochs": 9}).modes
        Modes(shared=0, alone=2)
    """
    energy, tokens = energy_and_tokens(samples, energies)
    worst, target = worst_r_hat([energy, tokens]), settings.get("target_rhat")
    modes = modes_of(samples, energies)
    facts = _facts(samples, energies, acceptance_rate, settings, one_length, [energy, tokens], round_trips)
    advice = next(text for holds, text in _ADVICE if holds(facts))
    chains, draws = energies.shape
    return PromptReport(
        prompt,
        chains,
        draws,
        float(acceptance_rate.nanmean()),
        float(novel_rate.nanmean()),
        float(energies.mean()),
        energy,
        tokens,
        modes,
        round_trips,
        worst,
        None if target is None else _missed_by(target, worst, facts.is_one),
        advice.format_map(facts._asdict()),
    )


def _missed_by(target: float, worst: float, is_one: bool) -> float:
    """By how much R-hat is above a target: 0 where there is nothing to mix, infinite where it can't be told."""
    if is_one:
        return 0.0
    return math.inf if math.isnan(worst) else max(0.0, worst - target)


class _Facts(NamedTuple):
    """What advice depends on, and what it tells; `target` is the R-hat that is wanted."""

    decodes: bool
    chains: int
    samples: int
    one_length: bool
    forbidden: int  # chains with samples of infinite energy
    still: int  # chains whose samples are all one
    moves: bool  # whether there are two different samples
    is_one: bool  # whether there is nothing to mix
    worst: float
    later: float  # the larger R-hat of the later half of the samples
    target: float
    ess: float
    replicas: int  # two more than there are
    round_trips: int | None
    single: bool  # whether positions are updated one by one
    is_judged: bool  # whether target_rhat is set
    more_epochs: int
    later_burn_in: int
    max_rows: int


def _facts(
    samples: Tensor, energies: Tensor, acceptance_rate: Tensor, settings: Mapping[str, Any], one_length: bool,
    found: list[Diagnostics], round_trips: int | None,
) -> _Facts:  # fmt: skip
    chains, draws = energies.shape
    moved = (samples != samples[:, :1]).flatten(1).any(1) if draws else torch.zeros(chains, dtype=torch.bool)
    worst, asked = worst_r_hat(found), settings.get("target_rhat")
    target = WORST_R_HAT if asked is None else asked
    half, thinning = draws // 2, settings.get("thinning", 1)
    epochs = settings.get("burn_in", 0) + draws * thinning
    # R-hat - 1 falls about as one over the number of samples, once it is near 1.
    times = math.ceil((worst - 1) / (target - 1)) if worst < math.inf and target > 1 else 2
    sizes, replicas = settings.get("block_size", 1), settings.get("replica_temperatures", [])
    return _Facts(
        decodes=settings.get("decoder") is not None,
        chains=chains,
        samples=draws,
        one_length=one_length,
        forbidden=int((energies == torch.inf).any(1).sum()),
        still=int((~moved).sum()),
        moves=draws > 0 and bool((samples != samples[0, 0]).any()),
        is_one=has_nothing_to_mix(samples, energies, acceptance_rate),
        worst=worst,
        later=worst_r_hat(energy_and_tokens(samples[:, half:], energies[:, half:])),
        target=target,
        ess=min((size for own in found for size in own[1:] if not math.isnan(size)), default=math.nan),
        replicas=(replicas if isinstance(replicas, int) else len(replicas)) + 2,
        round_trips=round_trips,
        single=sizes in (1, [1]) and settings.get("final_block_size") is None,
        is_judged=asked is not None,
        more_epochs=min(max(2, times), 20) * epochs,
        later_burn_in=settings.get("burn_in", 0) + half * thinning,
        max_rows=settings.get("max_rows", 0),
    )


_NOT_MET = "The chains disagree (R-hat {worst:.2f}, above {target:g})"
# What is said: the first sentence whose condition holds.
_ADVICE: tuple[tuple[Callable[[_Facts], bool], str], ...] = (
    (lambda f: f.decodes, "A decoder makes no chains, so there is nothing to judge."),
    (lambda f: f.samples == 0, "No sample was kept: set num_epochs above burn_in."),
    (
        lambda f: not f.one_length,
        "The chains have different lengths, which R-hat can't compare: give lengths one number for each prompt.",
    ),
    (lambda f: f.chains < LEAST_CHAINS, "One chain can't show what it has missed: set num_chains to 4 or more."),
    (
        lambda f: f.samples < LEAST_SAMPLES,
        "R-hat needs at least 4 samples of each chain, which have {samples}: raise num_epochs.",
    ),
    (
        lambda f: f.forbidden > 0,
        "{forbidden} of {chains} chains have samples that extra_energies forbid: raise burn_in and num_epochs, or "
        "start where they are met.",
    ),
    (
        lambda f: f.is_one,
        "Every sample is the same text, and no proposal of another was rejected: there is nothing to mix, and R-hat is "
        "undefined.",
    ),
    (
        lambda f: not f.moves,
        "Every sample is the same text, of which R-hat says nothing: start from other texts, or update more positions "
        "together (block_size=2, block_fill='sequential').",
    ),
    (
        lambda f: f.worst > f.target and f.later <= f.target,
        _NOT_MET + " on the first half of the samples, not on the second: set burn_in={later_burn_in}.",
    ),
    (
        lambda f: f.worst > f.target and f.single and f.still > 0,
        _NOT_MET + ", and {still} of {chains} never moved: update neighbours together (block_size=2, "
        "block_fill='sequential', block_layout='contiguous').",
    ),
    (
        lambda f: f.worst > f.target and f.round_trips == 0,
        _NOT_MET + ", and no replica went to the hottest temperature and back: set replica_temperatures={replicas}, "
        "two more, to be fitted in a burn_in of 30 epochs or more, or run longer.",
    ),
    (
        lambda f: f.worst > f.target and f.is_judged,
        _NOT_MET + ": raise max_rows above {max_rows}.",
    ),
    (
        lambda f: f.worst > f.target and f.single,
        _NOT_MET + ": update neighbours together (block_size=2, block_fill='sequential', block_layout='contiguous'), "
        "or set num_epochs={more_epochs}.",
    ),
    (lambda f: f.worst > f.target, _NOT_MET + ": set num_epochs={more_epochs}."),
    (
        lambda f: f.chains < ENOUGH_CHAINS,
        "The chains agree, but {chains} can do so by chance: set num_chains to 4 or more.",
    ),
    (
        lambda f: f.ess < ENOUGH_SAMPLES,
        "The chains agree. For quantiles 400 effective samples are advised, the fewest here are {ess:.0f}: raise "
        "num_epochs or num_chains.",
    ),
    (lambda f: True, "The chains agree, as far as R-hat can tell: nothing needs to be changed."),
)
