"""`ChainGenerationConfig`: every setting of a chain, saved with the model as generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from hf_ebm.checks import listed, number, whole, wholes
from hf_ebm.generation_settings import GenerationSettings, Resolved, Setting, setting
from hf_ebm.renamed import warn_of_rename
from hf_ebm.sampling.blocks import LAYOUTS, ORDERS
from hf_ebm.sampling.kernels import KERNELS, targets_energy
from hf_ebm.sampling.proposals import FILLS
from hf_ebm.sampling.replicas import LEAST_TO_FIT
from hf_ebm.sampling.warm_start import DECODERS, WARM_STARTS

# What a chain reads and a decoder doesn't.
_OF_CHAINS = (
    "kernel", "burn_in", "thinning", "block_size", "final_block_size", "block_fill", "block_layout", "order",
    "proposal_temperature", "proposal_top_k", "proposal_top_p", "proposal_epsilon", "max_changes", "avoid",
    "min_distance",
)  # fmt: skip


def sampler_names() -> tuple[str, ...]:
    """The kernels, then the decoders."""
    return (*KERNELS, *DECODERS)


def settings_without_effect(sampler: str) -> list[str]:
    """The settings that a kernel or a decoder doesn't use; with it they may only have their defaults."""
    used = KERNELS[sampler].settings if sampler in KERNELS else ()
    of_others = dict.fromkeys(name for other in KERNELS.values() for name in other.settings if name not in used)
    return [*of_others, *([] if sampler in KERNELS else _OF_CHAINS)]


def _one_or_more(name: str, value: object) -> int | list[int]:
    one = whole(value)
    found = wholes([one] if one is not None else value, 1)
    if not found:
        raise ValueError(f"{name} must be a whole number from 1 up or a list of such, got {value!r}")
    return found if one is None else one


def _lengths(name: str, value: object) -> int | list[int] | dict[int, float]:
    """Lengths, or lengths, which JSON makes texts of, and their weights."""
    if not isinstance(value, dict):
        return _one_or_more(name, value)
    lengths = wholes([int(n) if isinstance(n, str) and n.isdecimal() else n for n in value], 1)
    if not lengths:
        raise ValueError(f"{name} must be whole numbers from 1 up, got {value!r}")
    weights = [number(weight) for weight in value.values()]
    found = [weight for weight in weights if weight is not None and 0 <= weight < float("inf")]
    if len(found) < len(weights) or sum(found) <= 0:
        raise ValueError(f"{name}: the weights must be from 0 up and not all 0, got {value!r}")
    return dict(zip(lengths, found, strict=True))


def _temperatures(name: str, value: object) -> int | list[float]:
    """A number of replicas, or their temperatures."""
    count, members = whole(value), [number(member) for member in listed(value) or []]
    if count is not None and count > 1:
        return count
    ladder = [member for member in members if member is not None and member < float("inf")]
    rises = len(ladder) > 1 and ladder[0] == 1 and all(one < next for one, next in pairwise(ladder))
    if not rises or len(ladder) < len(members):
        raise ValueError(
            f"{name} must be temperatures that rise from 1, at least two, or a whole number from 2 up of them, got "
            f"{value!r}"
        )
    return ladder


def _token_ids(name: str, value: object) -> list[int]:
    tokens = wholes(value)
    if tokens is None:
        raise ValueError(f"{name} must be a list of token ids, got {value!r}")
    return tokens


def _positions(name: str, value: object) -> list[int]:
    positions = wholes(value)
    if positions is None:
        raise ValueError(f"{name} must be a list of positions, whole numbers from 0 up, got {value!r}")
    return positions


def _allowed_tokens(name: str, value: object) -> dict[int, list[int]]:
    """Token ids by position, which JSON makes a text of."""
    if not isinstance(value, dict) or not value:
        raise ValueError(f"{name} must be lists of token ids by position, {{3: [5, 7]}}, got {value!r}")
    positions = wholes([int(n) if isinstance(n, str) and n.isdecimal() else n for n in value])
    if positions is None:
        raise ValueError(f"{name}: positions must be whole numbers from 0 up, got {list(value)!r}")
    if len(set(positions)) < len(positions):
        raise ValueError(f"{name}: a position is there twice, got {list(value)!r}")
    return {n: _some_token_ids(f"{name}: position {n}", own) for n, own in zip(positions, value.values(), strict=True)}


def _sequences(name: str, value: object) -> list[list[int]]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{name} must be a list of sequences of token ids, got {value!r}")
    return [_some_token_ids(f"{name}: entry {number}", own) for number, own in enumerate(value)]


def _some_token_ids(name: str, value: object) -> list[int]:
    tokens = _token_ids(name, value)
    if not tokens:
        raise ValueError(f"{name} must hold at least one token id")
    return tokens


class ChainGenerationConfig(GenerationSettings):
    """Settings of `EnergyModel.generate`. A field left `None` takes the model's setting, else the default given here.

    Raises:
        ValueError: for unknown fields and for values that are out of range or contradict each other.
    """

    not_settings: ClassVar[Mapping[str, str]] = {
        "energy": "the energy is chosen when the model is made or loaded, EnergyModel.from_pretrained(…, energy=…)"
    }
    kernel: Setting[str] = setting("metropolis_hastings", choices=KERNELS)
    decoder: Setting[str | None] = setting(
        None,
        "What fills the free positions in place of chains; a kernel of a call clears a decoder of the model's:",
        choices=DECODERS,
    )
    lengths: Setting[int | list[int] | dict[int, float] | None] = setting(
        None,
        "Number of free tokens when no input is given. A list makes one prompt of each length; a dict gives the "
        "probabilities from which every chain draws its length.",
        check=_lengths,
    )
    num_chains: Setting[int] = setting(1, "Chains per prompt.", least=1)
    num_epochs: Setting[int] = setting(10, "Epochs; one epoch visits every free position once.", least=1)
    burn_in: Setting[int] = setting(0, "Epochs before the first sample is kept.", least=0)
    thinning: Setting[int] = setting(1, "Every how many epochs a sample is kept.", least=1)
    target_rhat: Setting[float | None] = setting(
        None,
        "The run goes on, `num_epochs` after `num_epochs`, until R-hat of the energies and of the tokens that were "
        "kept is at most this in every prompt, or `max_rows` are reached.",
        above=1,
    )
    max_rows: Setting[int | None] = setting(
        None,
        "With `target_rhat`: masked rows after which the run ends with the `num_epochs` it is in, those counted whose "
        "logits were kept from before. An `EnergyTarget` counts the sequences that it evaluates, and each visit of a "
        "chain as one at least.",
        least=1,
    )
    seed: Setting[int] = setting(
        None, "Seed of the chains' own random streams; drawn from torch's generator if `None`.", least=0
    )
    block_size: Setting[int | list[int]] = setting(
        1, "Positions updated together; a list is cycled through by epoch.", check=_one_or_more
    )
    final_block_size: Setting[int | None] = setting(
        None,
        "The block size goes linearly from `block_size` to this over the epochs. Sizes of such a schedule are clamped "
        "to a chain's number of free positions; other sizes above it are an error.",
        least=1,
    )
    block_fill: Setting[str] = setting("parallel", "How a block is filled:", choices=FILLS)
    block_layout: Setting[str] = setting("scattered", "Which free positions make a block:", choices=LAYOUTS)
    order: Setting[str] = setting("random", "In which order blocks are visited:", choices=ORDERS)
    energy_temperature: Setting[float] = setting(
        1.0, "Temperature τ of the target exp(-E/τ) in the first epoch.", above=0
    )
    energy_temperature_decay: Setting[float] = setting(0.0, "How much τ decreases an epoch.", least=0)
    min_energy_temperature: Setting[float] = setting(0.05, "Temperature below which τ doesn't fall.", above=0)
    replica_temperatures: Setting[int | list[float] | None] = setting(
        None,
        "Replicas of each chain beside it at these temperatures, as multiples of τ from 1 up, which neighbours swap "
        "after each epoch; a number fits the temperatures of so many, up to 2 at most, during burn_in.",
        check=_temperatures,
    )
    proposal_temperature: Setting[float] = setting(
        1.0,
        "Temperature of the proposal. It and the next two settings change how the chain moves, not what it samples.",
        least=1e-6,
    )
    proposal_top_k: Setting[int | None] = setting(
        None, "How many tokens, the likeliest, the proposal is narrowed to.", least=1
    )
    proposal_top_p: Setting[float | None] = setting(
        None, "The proposal is narrowed to the likeliest tokens of this mass.", above=0, most=1
    )
    proposal_epsilon: Setting[float] = setting(
        0.01, "Weight of the unwarped proposal mixed into a warped one.", least=0, below=1
    )
    exclude_current: Setting[bool] = setting(False, "Never propose the token that is there.")
    delayed_acceptance: Setting[int | None] = setting(
        None,
        "Decide first on the energy terms within this many positions of the block, then on the rest. The target stays "
        "the same.",
        least=0,
    )
    warm_start: Setting[str] = setting("sample", "How masks are filled before the first epoch:", choices=WARM_STARTS)
    accept_all_epochs: Setting[int] = setting(
        0,
        "For that many epochs every proposal is accepted; an initialiser, to be counted in `burn_in`.",
        least=0,
    )
    suppress_tokens: Setting[list[int] | None] = setting(None, "Further ids that are never proposed.", check=_token_ids)
    max_changes: Setting[int | None] = setting(
        None, "At most so many positions of a chain differ from where it starts, a prompt without masks.", least=1
    )
    protected_positions: Setting[list[int] | None] = setting(
        None,
        "Positions that stay as they are in every prompt, from 0 and special tokens counted; `free_mask` says it of "
        "each.",
        check=_positions,
    )
    allowed_tokens: Setting[dict[int, list[int]] | None] = setting(
        None, "Ids that some positions may hold, by position: `{3: [5, 7]}`.", check=_allowed_tokens
    )
    avoid: Setting[list[list[int]] | None] = setting(
        None, "Sequences, as the tokenizer gives them, that no chain is ever at.", check=_sequences
    )
    min_distance: Setting[int] = setting(
        1, "At how many positions, or more, a chain differs from each sequence of `avoid` that is as long.", least=1
    )

    if TYPE_CHECKING:

        def resolved(self, base: GenerationSettings, overrides: dict[str, Any]) -> ResolvedChainConfig: ...

    def check_combinations(self) -> None:
        epochs = self.num_epochs
        if epochs is not None and (self.burn_in or 0) >= epochs:
            raise ValueError(f"burn_in ({self.burn_in}) must be below num_epochs ({epochs}), else no sample is kept")
        if epochs is not None and (self.accept_all_epochs or 0) > epochs:
            raise ValueError(f"accept_all_epochs ({self.accept_all_epochs}) must not exceed num_epochs ({epochs})")
        if isinstance(self.block_size, list) and self.final_block_size is not None:
            raise ValueError(
                "block_size is a list, which is cycled through; final_block_size goes with a single number"
            )
        floor, start = self.min_energy_temperature, self.energy_temperature
        if self.energy_temperature_decay and floor is not None and start is not None and floor > start:
            raise ValueError(f"min_energy_temperature ({floor}) is above energy_temperature ({start}), which decays")
        to_fit = (self.accept_all_epochs or 0) + LEAST_TO_FIT
        if isinstance(self.replica_temperatures, int) and self.burn_in is not None and self.burn_in < to_fit:
            raise ValueError(
                f"replica_temperatures={self.replica_temperatures} is a number, for which burn_in must be at least "
                f"{to_fit} to fit them, got {self.burn_in}; or give the temperatures"
            )
        if self.target_rhat is not None:
            self._check_judged()
        for name in settings_without_effect(self.decoder or self.kernel or self.defaults["kernel"]):
            if getattr(self, name) not in (None, self.defaults[name]):
                raise ValueError(f"{name} has no effect with {self.sampler}; leave it unset")
        if self.proposal_top_k == 1 and self.proposal_epsilon == 0 and self.targets_energy:
            raise ValueError(
                "proposal_top_k=1 with proposal_epsilon=0 leaves one token to propose, so a chain could never move; "
                "raise proposal_top_k or proposal_epsilon"
            )

    def _check_judged(self) -> None:
        """Raises `ValueError` for settings by which chains don't sample one target all along."""
        if not self.targets_energy:
            raise ValueError(f"target_rhat needs chains that sample a target; {self.sampler} makes none")
        if self.final_block_size is not None:
            raise ValueError("final_block_size needs a number of epochs that is known; target_rhat has none")
        if self.energy_temperature_decay:
            raise ValueError("energy_temperature_decay changes what chains sample, so target_rhat can't judge them")
        if isinstance(self.lengths, dict) and len(self.lengths) > 1:
            raise ValueError("target_rhat compares chains of one length, and lengths has several for a prompt")

    @property
    def num_replicas(self) -> int:
        """How many replicas a chain has, itself counted; 0 without any."""
        given = self.replica_temperatures
        return given if isinstance(given, int) else len(given or [])

    @property
    def sampler(self) -> str:
        """What these settings run, for messages."""
        return f"decoder {self.decoder!r}" if self.decoder else f"kernel {self.kernel or self.defaults['kernel']!r}"

    @property
    def targets_energy(self) -> bool:
        """Whether there are chains and they sample `exp(-E/τ)`."""
        return targets_energy(self.decoder or self.kernel or self.defaults["kernel"])

    @classmethod
    def layered(cls, below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
        """Settings over others: a kernel clears a decoder below it, and a decoder a kernel."""
        if {"kernel", "decoder"} & above.keys():
            below = below | {name: cls.defaults[name] for name in ("kernel", "decoder")}
        return below | above

    def validate(self, strict: bool = False, user_set_attributes: set[str] | None = None) -> None:
        """As the base; a decoder under its old name `kernel` is put in its place."""
        if isinstance(self.kernel, str) and self.kernel == "mask_predict":
            warn_of_rename(f"kernel={self.kernel!r}", f"decoder={self.kernel!r}")
            self.kernel, self.decoder = self.defaults["kernel"], self.kernel
        super().validate(strict, user_set_attributes)


if TYPE_CHECKING:

    class ResolvedChainConfig(ChainGenerationConfig, Resolved):
        """What `resolved` gives, and the seed that is drawn then."""
