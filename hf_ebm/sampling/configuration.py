"""`ChainGenerationConfig`: every setting of a chain, saved with the model as generation_config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_ebm.checks import as_truth
from hf_ebm.generation_settings import GenerationSettings
from hf_ebm.plain_values import number, whole, wholes
from hf_ebm.sampling.kernels import KERNELS, targets_energy
from hf_ebm.sampling.proposals import FILLS
from hf_ebm.sampling.warm_start import DECODERS, WARM_STARTS

_DEFAULTS: dict[str, Any] = {
    "kernel": "metropolis_hastings",
    "lengths": None,
    "num_chains": 1,
    "num_epochs": 10,
    "burn_in": 0,
    "thinning": 1,
    "seed": None,
    "block_size": 1,
    "final_block_size": None,
    "block_fill": "parallel",
    "block_layout": "scattered",
    "order": "random",
    "energy_temperature": 1.0,
    "energy_temperature_decay": 0.0,
    "min_energy_temperature": 0.05,
    "proposal_temperature": 1.0,
    "proposal_top_k": None,
    "proposal_top_p": None,
    "proposal_epsilon": 0.01,
    "exclude_current": False,
    "delayed_acceptance": None,
    "warm_start": "sample",
    "accept_all_epochs": 0,
    "suppress_tokens": None,
}


# What a chain reads and a decoder doesn't.
_OF_CHAINS = (
    "burn_in", "thinning", "block_size", "final_block_size", "block_fill", "block_layout", "order",
    "proposal_temperature", "proposal_top_k", "proposal_top_p", "proposal_epsilon",
)  # fmt: skip


def kernel_names() -> tuple[str, ...]:
    """What `kernel` may be: the kernels of chains, and the decoders."""
    return (*KERNELS, *DECODERS)


def settings_without_effect(kernel: str) -> list[str]:
    """The settings that a kernel or a decoder doesn't use; with it they may only have their defaults."""
    used = KERNELS[kernel].settings if kernel in KERNELS else ()
    of_others = dict.fromkeys(name for other in KERNELS.values() for name in other.settings if name not in used)
    return [*of_others, *([] if kernel in KERNELS else _OF_CHAINS)]


class ChainGenerationConfig(GenerationSettings):
    """Settings of `EnergyModel.generate`. A field left `None` takes the model's setting, else the default given here.

    Args:
        kernel (`str`, default `"metropolis_hastings"`): `"metropolis_hastings"` samples the stated target; `"gibbs"`
            accepts every proposal and samples no stated target (Wang & Cho 2019); `"mask_predict"` is the deterministic
            iterative decoder of Ghazvininejad et al. (2019), with `num_epochs` iterations.
        lengths (`int`, `list[int]` or `dict[int, float]`): number of free tokens when no input is given. A list makes
            one prompt of each length; a dict gives the probabilities from which every chain draws its length.
        num_chains (`int`, default 1): chains per prompt.
        num_epochs (`int`, default 10): epochs; one epoch visits every free position once.
        burn_in (`int`, default 0): epochs before the first sample is kept.
        thinning (`int`, default 1): every how many epochs a sample is kept.
        seed (`int`): seed of the chains' own random streams; drawn from torch's generator if `None`.
        block_size (`int` or `list[int]`, default 1): positions updated together; a list is cycled through by epoch.
        final_block_size (`int`): the block size goes linearly from `block_size` to this over the epochs. Sizes of such
            a schedule are clamped to a chain's number of free positions; other sizes above it are an error.
        block_fill (`str`, default `"parallel"`): `"parallel"` draws a block from one row; `"sequential"` draws one
            position at a time, given those already drawn.
        block_layout (`str`, default `"scattered"`): `"scattered"` or `"contiguous"` blocks.
        order (`str`, default `"random"`): `"random"` or `"sequential"` (left to right) visits.
        energy_temperature (`float`, default 1.0): temperature τ of the target exp(-E/τ) in the first epoch.
        energy_temperature_decay (`float`, default 0.0): how much τ decreases an epoch.
        min_energy_temperature (`float`, default 0.05): temperature below which τ doesn't fall.
        proposal_temperature (`float`, default 1.0): temperature of the proposal. It and the next two settings change
            how the chain moves, not what it samples.
        proposal_top_k (`int`): how many tokens, the likeliest, the proposal is narrowed to.
        proposal_top_p (`float`): the proposal is narrowed to the likeliest tokens of this mass.
        proposal_epsilon (`float`, default 0.01): weight of the unwarped proposal mixed into a warped one.
        exclude_current (`bool`, default `False`): never propose the token that is there.
        delayed_acceptance (`int`): decide first on the energy terms within this many positions of the block.
        warm_start (`str`, default `"sample"`): how masks are filled before the first epoch: `"sample"` draws them one
            at a time in random order, `"greedy"` takes the most probable tokens in one pass, `"mask_predict"` iterates.
        accept_all_epochs (`int`, default 0): for that many epochs every proposal is accepted; an initialiser, to be
            counted in `burn_in`.
        suppress_tokens (`list[int]`): further ids that are never proposed.

    Raises:
        ValueError: for unknown fields and for values that are out of range or contradict each other.
    """

    defaults = _DEFAULTS
    kernel: str | None
    lengths: int | list[int] | dict[int, float] | None
    num_chains: int | None
    num_epochs: int | None
    burn_in: int | None
    thinning: int | None
    seed: int | None
    block_size: int | list[int] | None
    final_block_size: int | None
    block_fill: str | None
    block_layout: str | None
    order: str | None
    energy_temperature: float | None
    energy_temperature_decay: float | None
    min_energy_temperature: float | None
    proposal_temperature: float | None
    proposal_top_k: int | None
    proposal_top_p: float | None
    proposal_epsilon: float | None
    exclude_current: bool | None
    delayed_acceptance: int | None
    warm_start: str | None
    accept_all_epochs: int | None
    suppress_tokens: list[int] | None

    if TYPE_CHECKING:

        def resolved(self, base: GenerationSettings, overrides: dict[str, Any]) -> ResolvedChainConfig: ...

    def validate(self, strict: bool = False, user_set_attributes: set[str] | None = None) -> None:
        """Makes numbers plain. Raises `ValueError` for values out of range and for contradictory ones."""
        self._check_choice("kernel", kernel_names())
        self._check_choice("block_fill", tuple(FILLS))
        self._check_choice("block_layout", ("scattered", "contiguous"))
        self._check_choice("order", ("random", "sequential"))
        self._check_choice("warm_start", tuple(WARM_STARTS))
        for name in ("num_chains", "num_epochs", "thinning", "final_block_size", "proposal_top_k"):
            self._check_whole(name, 1)
        for name in ("burn_in", "seed", "delayed_acceptance", "accept_all_epochs"):
            self._check_whole(name, 0)
        for name in ("energy_temperature", "min_energy_temperature"):
            self._check_number(name, above=0)
        self._check_number("proposal_temperature", least=1e-6)
        self._check_number("energy_temperature_decay", least=0)
        self._check_number("proposal_top_p", above=0, most=1)
        self._check_number("proposal_epsilon", least=0, below=1)
        self._check_lists()
        self._check_combinations()

    def _check_lists(self) -> None:
        self.block_size = _one_or_more(
            self.block_size, f"block_size must be a whole number from 1 up or a list of such, got {self.block_size!r}"
        )
        wrong = f"lengths must be whole numbers from 1 up, got {self.lengths!r}"
        if isinstance(self.lengths, dict):
            self.lengths = _weighted_lengths(self.lengths, wrong)
        else:
            self.lengths = _one_or_more(self.lengths, wrong)
        if self.suppress_tokens is not None:
            tokens = wholes(self.suppress_tokens)
            if tokens is None:
                raise ValueError(f"suppress_tokens must be a list of token ids, got {self.suppress_tokens!r}")
            self.suppress_tokens = tokens
        if self.exclude_current is not None:
            self.exclude_current = as_truth("exclude_current", self.exclude_current)

    def _check_combinations(self) -> None:
        epochs = self.num_epochs
        if epochs is not None and (self.burn_in or 0) >= epochs:
            raise ValueError(f"burn_in ({self.burn_in}) must be below num_epochs ({epochs}), else no sample is kept")
        if epochs is not None and (self.accept_all_epochs or 0) > epochs:
            raise ValueError(f"accept_all_epochs ({self.accept_all_epochs}) must not exceed num_epochs ({epochs})")
        if isinstance(self.block_size, list) and self.final_block_size is not None:
            raise ValueError("block_size is a list, which is cycled through; final_block_size contradicts it")
        floor, start = self.min_energy_temperature, self.energy_temperature
        if self.energy_temperature_decay and floor is not None and start is not None and floor > start:
            raise ValueError(f"min_energy_temperature ({floor}) is above energy_temperature ({start}), which decays")
        for name in settings_without_effect(self.kernel) if self.kernel else ():
            if getattr(self, name) not in (None, _DEFAULTS[name]):
                raise ValueError(f"{name} has no effect with kernel {self.kernel!r}, so setting it contradicts it")
        if (
            self.proposal_top_k == 1
            and self.proposal_epsilon == 0
            and targets_energy(self.kernel or _DEFAULTS["kernel"])
        ):
            raise ValueError(
                "proposal_top_k=1 with proposal_epsilon=0 leaves one token to propose, so a chain could never move; "
                "raise proposal_top_k or proposal_epsilon"
            )


if TYPE_CHECKING:

    class ResolvedChainConfig(ChainGenerationConfig):
        """What `resolved` gives, for type checkers: what has a default is set, and so is the seed once it is drawn."""

        kernel: str
        num_chains: int
        num_epochs: int
        burn_in: int
        thinning: int
        seed: int
        block_size: int | list[int]
        block_fill: str
        block_layout: str
        order: str
        energy_temperature: float
        energy_temperature_decay: float
        min_energy_temperature: float
        proposal_temperature: float
        proposal_epsilon: float
        exclude_current: bool
        warm_start: str
        accept_all_epochs: int


def _one_or_more(value: object, error: str) -> int | list[int] | None:
    """A whole number from 1 up, or a list of such; `ValueError` with `error` for anything else but `None`."""
    if value is None:
        return None
    one = whole(value)
    found = wholes(value if one is None else [one], 1)
    if not found:
        raise ValueError(error)
    return found if one is None else one


def _weighted_lengths(given: dict, error: str) -> dict[int, float]:
    """Lengths, which JSON makes texts of, and their weights."""
    lengths = wholes([int(n) if isinstance(n, str) and n.isdecimal() else n for n in given], 1)
    if not lengths:
        raise ValueError(error)
    weights = [number(weight) for weight in given.values()]
    found = [weight for weight in weights if weight is not None and 0 <= weight < float("inf")]
    if len(found) < len(weights) or sum(found) <= 0:
        raise ValueError(f"lengths: the weights must be from 0 up and not all 0, got {given!r}")
    return dict(zip(lengths, found, strict=True))
