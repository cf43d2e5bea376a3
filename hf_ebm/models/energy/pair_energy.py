"""`EnergyModel.pair_joints`: joint distributions of a text's two blanks, a thin layer over `scoring.pair_joints`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_ebm.checks import as_string, check_tokenizer, shown
from hf_ebm.model_modes import evaluation_mode
from hf_ebm.models.energy.blanks import BlankRow, as_rules, blank_rows
from hf_ebm.models.energy.encoding import check_same_mask
from hf_ebm.models.energy.inputs import mask_id_of
from hf_ebm.runtime import check_fits
from hf_ebm.sampling.target import EnergyFunction, ExtraEnergy, as_extra_energies
from hf_ebm.scoring.joint_fills import further_of_fills, independent_log_probs, slot_terms
from hf_ebm.scoring.pair_joints import (
    PairConditionals,
    PairDivergence,
    arnold_gokhale_joint,
    besag_joint,
    pair_divergence,
    random_field_joint,
)

if TYPE_CHECKING:
    from hf_ebm.models.energy.modeling_energy import EnergyModel

# Tables that are held at once.
_TABLES = 10


class PairJoints(NamedTuple):
    """Joint distributions of two blanks of a text, with K and L words.

    Attributes:
        tokens: of each blank the ids that may stand there, (K,) and (L,).
        conditionals: what the model says of each blank given the other, over these words.
        joints: by name, (K, L) log probabilities, float64: `"independent"`, `"random_field"` (that of `exp(-E)`),
            `"arnold_gokhale"` and `"besag"`; see `hf_ebm.scoring.pair_joints`. The pivot of the last is the first
            blank's likeliest word, both masked, that may stand beside every word of the second; none, no such joint.
        divergences: how far the conditionals of each are from the model's, in nats.
        num_masked_rows: masked rows run through the masked language model.
    """

    tokens: tuple[Tensor, Tensor]
    conditionals: PairConditionals
    joints: dict[str, Tensor]
    divergences: dict[str, PairDivergence]
    num_masked_rows: int


@torch.no_grad()
def pair_joints(
    model: EnergyModel,
    text: str | Tensor,
    tokenizer: PreTrainedTokenizerBase,
    *,
    words: Sequence[str] | Sequence[Sequence[str] | None] | None = None,
    extra_energies: Sequence[ExtraEnergy | EnergyFunction] | ExtraEnergy | EnergyFunction | None = None,
    encoder_text: str | None = None,
    token_budget: int | None = None,
    further_inputs: Mapping[str, Any] | None = None,
) -> PairJoints:
    """Joint distributions of a text's two blanks that its masked conditionals give, and how far each is from them.

    A masked language model says what stands in each blank given the other one; that need not be what any joint
    distribution says (Torroba Hennigen & Kim 2023). K + L + 2 masked rows are run.

    Args:
        text: with two masks, or its token ids (1, T).
        tokenizer: the model's tokenizer.
        words: as for `fill`, each of one token; by default all tokens that may be proposed, where K L tables fit. Some
            hundred are done in seconds; the nearest joint solves systems of as many unknowns as the blank of fewer has,
            4,000 words a blank took two minutes and 2.8 GiB.
        extra_energies: as for `generate`, added to E; the conditionals are those of the model times `exp(-extra)`,
            normalized. Every word must be possible with one of the others.
        encoder_text: what an encoder-decoder model conditions on (required there).
        token_budget: tokens per forward pass; by default from free memory.
        further_inputs: what else the model reads, by name.

    Raises:
        ValueError: before any work, for a text of another number of blanks, and words of several tokens; for a word
            that extra energies forbid.

    Example:
        >>> from hf_ebm.assets import load_embedded
        >>> model, tokenizer = load_embedded()
        >>> found = model.pair_joints("the king of [MASK] and the king of [MASK]", tokenizer, words=["israel", "judah"])
        >>> found.joints["arnold_gokhale"].shape, found.num_masked_rows
        (torch.Size([2, 2]), 6)
    """
    check_tokenizer("tokenizer", tokenizer)
    check_same_mask(tokenizer, mask_id_of(model))
    rules, extra = as_rules(words, None, None, None, None), as_extra_energies(extra_energies)
    texts = text if isinstance(text, Tensor) else [as_string("text", text)]
    sources = None if encoder_text is None else [as_string("encoder_text", encoder_text)]
    runner = model.masked_batch_runner(token_budget)
    with evaluation_mode(model):
        rows = blank_rows(model, texts, tokenizer, rules, None, sources, further_inputs, "warn")
        layout = _checked(rows).layouts[0]
        space = layout.space
        check_fits(_TABLES * 8 * math.prod(space.sizes), f"words: tables of {shown(math.prod(space.sizes))} pairs take")
        first, second = (slot_terms(runner, space, number, model.config.energy) for number in (0, 1))
        row, column = independent_log_probs(runner, space)
    independent = row[:, None] + column
    further = layout.further(runner, model.config.energy, extra)
    added = torch.zeros_like(first)
    if further is not None:
        added = further_of_fills(further, space, 0, added.numel()).view_as(added)
        for name, axis in (("first", 1), ("second", 0)):
            if bool((added == torch.inf).all(axis).any()):
                raise ValueError(f"extra_energies forbid a word of the {name} blank whatever the other one holds")
    conditionals = PairConditionals((-first - added).log_softmax(0), (-second - added).log_softmax(1))
    joints = {
        "independent": _normalized(independent - added),
        "random_field": random_field_joint(first, second + added),
        "arnold_gokhale": arnold_gokhale_joint(conditionals).log_probs,
    }
    pivots = conditionals.first.isfinite().all(1)
    if bool(pivots.any()):
        joints["besag"] = besag_joint(conditionals, int(row.masked_fill(~pivots, -torch.inf).argmax()))
    divergences = {name: pair_divergence(conditionals, joint) for name, joint in joints.items()}
    tokens = tuple(slot.candidates[:, 0] for slot in space.slots)
    return PairJoints((tokens[0], tokens[1]), conditionals, joints, divergences, runner.num_rows)


def _checked(rows: list[BlankRow]) -> BlankRow:
    """The only row, whose two blanks take one token each."""
    if len(rows) != 1:
        raise ValueError(f"text must be one text, got {len(rows)} rows")
    slots = rows[0].layouts[0].space.slots
    if len(slots) != 2:
        raise ValueError(f"text must hold two masks, got {len(slots)}")
    if len(rows[0].layouts) > 1 or any(len(slot.positions) > 1 for slot in slots):
        raise ValueError("words must be of one token each")
    return rows[0]


def _normalized(log_joint: Tensor) -> Tensor:
    return log_joint - log_joint.flatten().logsumexp(0)
